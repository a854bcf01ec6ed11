//! Boxes that wait in a pool until they are assigned.

use serde_json::{Value, json};

use crate::support::{Agent, Answer, until};

const TOKEN: &str = "X-EXECD-ACCESS-TOKEN";
const WAITING: [&str; 2] = ["--standby", "--init"];

fn waiting() -> Agent {
    Agent::start_with(&WAITING, &[("EXECD_ACCESS_TOKEN", "pool"), ("IMAGE", "yes")])
}

fn assign(agent: &Agent, token: &str, body: &Value) -> Answer {
    agent.send("POST", "/internal/assign", &[(TOKEN, token)], body.to_string().as_bytes())
}

fn body(entrypoint: &[&str]) -> Value {
    json!({"sandboxId": "box-7", "accessToken": "own", "entrypoint": entrypoint, "env": [["WHO", "ann"]]})
}

fn started(agent: &Agent) -> String {
    std::fs::read_to_string(agent.path("starts")).unwrap_or_default()
}

#[test]
fn it_answers_nobody_and_starts_nothing_until_it_is_assigned() {
    let agent = waiting();
    let script = "echo \"$WHO $IMAGE $OPENSANDBOX_ID\" >> starts; exec sleep 1000";
    let asked = body(&["sh", "-c", script]);
    for path in ["/ping", "/metrics", "/proxy/80/x"] {
        assert_eq!(agent.get(path).status, 503, "{path}");
    }
    assert_eq!(agent.get("/ready").status, 503);
    for refused in ["", "own", "other"] {
        assert_eq!(assign(&agent, refused, &asked).status, 401, "{refused}");
    }
    for wrong in [json!([]), json!({"sandboxId": "", "accessToken": "x"}), json!({"sandboxId": "x"})] {
        assert_eq!(assign(&agent, "pool", &wrong).status, 400, "{wrong}");
    }
    assert_eq!(agent.post("/internal/init", &json!({"sandboxId": "a", "generation": 1})).status, 409);

    let answer = assign(&agent, "pool", &asked);
    assert_eq!((answer.status, answer.json()), (200, json!({"status": "assigned", "sandboxId": "box-7"})));
    until(|| (started(&agent) == "ann yes box-7\n").then_some(()));
    // The server died before it could write down that it was told.
    assert_eq!(assign(&agent, "pool", &asked).status, 200);
    let mut other = asked.clone();
    other["sandboxId"] = "box-8".into();
    assert_eq!(assign(&agent, "pool", &other).status, 409);
    assert_eq!(started(&agent), "ann yes box-7\n", "it was started once");

    let ready = agent.get("/ready");
    assert_eq!((ready.status, ready.json()["sandboxId"].as_str()), (200, Some("box-7")));
    let run = |token: &str| {
        let body = json!({"command": "echo $WHO"}).to_string();
        agent.send("POST", "/command", &[(TOKEN, token)], body.as_bytes())
    };
    assert_eq!((run("pool").status, run("").status), (401, 401));
    assert!(run("own").text().contains("\"text\":\"ann\""));
}

#[test]
fn hooks_come_with_the_assignment() {
    let agent = waiting();
    let mut asked = body(&["sh", "-c", "echo main >> starts; exec sleep 1000"]);
    asked["lifecycle"] = json!({"preStart": {"command": ["sh", "-c", "echo hook-$WHO >> starts"]}});
    assert_eq!(assign(&agent, "pool", &asked).status, 200);
    until(|| (started(&agent) == "hook-ann\nmain\n").then_some(()));
}

#[test]
fn what_cannot_be_started_is_told_and_ends_the_box() {
    let mut agent = waiting();
    let answer = assign(&agent, "pool", &body(&["/no/such/program"]));
    assert_eq!(answer.status, 500, "{}", answer.text());
    assert!(answer.text().contains("entrypoint") && answer.text().contains("/no/such/program"));
    let ended = until(|| agent.child.try_wait().unwrap());
    assert_eq!(ended.code(), Some(127));
}
