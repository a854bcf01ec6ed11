//! Boxes that are started ahead and become somebody's later.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{Agent, until};

const TOKEN: &str = "X-EXECD-ACCESS-TOKEN";

fn hash(token: &str) -> String {
    let digest = Sha256::digest(token);
    digest.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

fn entrypoint() -> [&'static str; 6] {
    ["--runtime-init", "--init", "--", "sh", "-c", "echo \"$WHO\" >> starts; exec sleep 1000"]
}

fn starts(agent: &Agent) -> Vec<String> {
    let text = std::fs::read_to_string(agent.path("starts")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn nothing_but_the_initialisation_is_answered_before_it() {
    let agent = Agent::start_with(&entrypoint(), &[("EXECD_ACCESS_TOKEN", "old")]);
    for path in ["/ping", "/metrics", "/files/info", "/proxy/80/x", "/nope"] {
        let refused = agent.get(path);
        assert_eq!(refused.status, 503, "{path}");
        assert!(refused.json()["error"].as_str().unwrap().starts_with("execd is not initialized yet: "));
    }
    let ready = agent.get("/ready");
    assert_eq!((ready.status, ready.text().as_str()), (503, "{\"initialized\":false}"));

    for wrong in [json!({}), json!({"sandboxId": "a"}), json!({"sandboxId": "a", "generation": 0}), json!([])]
    {
        let refused = agent.post("/internal/init", &wrong);
        assert_eq!(
            (refused.status, refused.json()["code"].as_str()),
            (400, Some("INVALID_REQUEST_BODY")),
            "{wrong}"
        );
    }
    let body = json!({"sandboxId": "box-7", "generation": 3, "entrypointPolicy": "keep", "accessTokenHash": hash("new"),
        "envs": {"WHO": "ann"}, "telemetry": {"attributes": {"a": "b"}}});
    let answer = agent.post("/internal/init", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let expected = json!({"status": "initialized", "sandboxId": "box-7", "generation": 3,
        "warning": ["telemetry attributes are not used: measurements keep those of the start"]});
    assert_eq!(answer.json(), expected);
    let again = agent.post("/internal/init", &body);
    assert_eq!((again.status, again.json()["code"].as_str()), (409, Some("ALREADY_INITIALIZED")));
    let ready = agent.get("/ready");
    assert_eq!(
        (ready.status, ready.json()),
        (200, json!({"initialized": true, "sandboxId": "box-7", "generation": 3}))
    );

    let run = |token: &str| {
        let body = json!({"command": "echo $WHO $OPENSANDBOX_ID"}).to_string();
        agent.send("POST", "/command", &[(TOKEN, token)], body.as_bytes())
    };
    for refused in ["", "old", &hash("new")] {
        assert_eq!(run(refused).status, 401, "{refused}");
    }
    assert!(run("new").text().contains("\"text\":\"ann box-7\""));
    assert_eq!(starts(&agent), [""], "the entrypoint was kept");
}

#[test]
fn hooks_and_a_new_entrypoint_come_with_it() {
    let agent = Agent::start_with(&entrypoint(), &[("HOME", "/dev/null")]);
    until(|| (starts(&agent).len() == 1).then_some(()));
    let hooks = json!({"preStart": {"command": ["sh", "-c", "echo hook-$WHO >> starts"]},
        "periodic": [{"name": "n", "schedule": "@every 1s", "command": ["touch", "ticked"]}]});
    let body = json!({"sandboxId": "b", "generation": 1, "entrypointPolicy": "restart", "envs": {"WHO": "ann"}, "lifecycle": hooks});
    let answer = agent.post("/internal/init", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    until(|| (starts(&agent).len() == 3).then_some(()));
    assert_eq!(starts(&agent), ["", "hook-ann", "ann"]);
    until(|| agent.path("ticked").exists().then_some(()));
    assert!(agent.shell("echo up").text().contains("\"text\":\"up\""), "without a hash the old rule holds");
}

#[test]
fn a_hook_that_fails_uses_the_one_attempt_up() {
    let agent = Agent::start_with(&entrypoint(), &[]);
    let body = json!({"sandboxId": "b", "generation": 1, "lifecycle": {"preStart": {"command": ["sh", "-c", "echo why; exit 4"]}}});
    let failed = agent.post("/internal/init", &body);
    assert_eq!(failed.status, 500);
    let message = failed.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("preStart: exit status 4; its output ended with \"why\""), "{message}");
    assert_eq!(agent.post("/internal/init", &body).status, 409);
    assert_eq!(agent.get("/ready").status, 503);
    assert_eq!(agent.get("/ping").status, 503);
}

#[test]
fn hooks_that_came_with_it_are_there_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let env = [("HOME", home.path().to_str().unwrap())];
    let agent = Agent::start_with(&entrypoint(), &env);
    let body = json!({"sandboxId": "b", "generation": 1, "lifecycle": {"preStart": {"command": ["sh", "-c", "echo > hooked"]}}});
    assert_eq!(agent.post("/internal/init", &body).status, 200);
    drop(agent);
    let kept = std::fs::read_to_string(home.path().join(".execd/lifecycle.toml")).unwrap();
    assert!(kept.contains("[preStart]"), "{kept}");
    let agent = Agent::start_with(&["--init", "--", "sleep", "1000"], &env);
    until(|| agent.path("hooked").exists().then_some(()));
}

#[test]
fn an_agent_that_waits_for_nobody_says_so() {
    let agent = Agent::start();
    let refused: Value = agent.post("/internal/init", &json!({"sandboxId": "b", "generation": 1})).json();
    assert_eq!(refused["code"], "ALREADY_INITIALIZED");
    assert_eq!(agent.get("/ready").status, 200);
    assert_eq!(agent.get("/internal/init").status, 404);
}
