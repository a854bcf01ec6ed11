//! `/v1/isolated`: sessions with namespaces of their own. Needs root, as boxes that have such sessions do.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};

use serde_json::{Value, json};

use crate::support::{Agent, Answer, form, root, until};

/// An agent with a directory that sessions may have: `space`.
pub struct Host {
    pub agent: Agent,
    dir: tempfile::TempDir,
}

impl std::ops::Deref for Host {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.agent
    }
}

impl Host {
    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

pub fn agent(more: &str) -> Host {
    agent_with(more, &[])
}

pub fn agent_with(more: &str, args: &[&str]) -> Host {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("isolation.toml");
    let space = dir.path().join("space");
    fs::create_dir(&space).unwrap();
    let upper = dir.path().join("upper");
    let text = format!("allowed_writable = [{space:?}]\nupper_root = {upper:?}\n{more}");
    fs::write(&config, text).unwrap();
    let agent = Agent::start_with(
        args,
        &[("EXECD_ISOLATION_CONFIG", config.to_str().unwrap()), ("SERVICE_TOKEN", "s"), ("PLAIN", "p")],
    );
    Host { agent, dir }
}

pub fn create(agent: &Agent, body: &Value) -> String {
    let answer = agent.post("/v1/isolated/session", body);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["session_id"].as_str().unwrap().to_owned()
}

pub fn space(agent: &Host, mode: &str) -> Value {
    json!({ "workspace": { "path": agent.path("space"), "mode": mode } })
}

pub fn run(agent: &Agent, id: &str, code: &str) -> Answer {
    run_with(agent, id, &json!({ "code": code }))
}

fn run_with(agent: &Agent, id: &str, body: &Value) -> Answer {
    let answer = agent.post(&format!("/v1/isolated/session/{id}/run"), body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// The output lines of a stream.
pub fn lines(answer: &Answer) -> Vec<String> {
    events(answer)
        .iter()
        .filter(|e| e["type"] == "stdout")
        .map(|e| e["text"].as_str().unwrap().into())
        .collect()
}

fn events(answer: &Answer) -> Vec<Value> {
    answer.text().split("\n\n").filter(|f| !f.is_empty()).map(|f| serde_json::from_str(f).unwrap()).collect()
}

fn last(answer: &Answer) -> Value {
    events(answer).pop().unwrap()
}

#[test]
fn capabilities_tell_what_there_is() {
    let agent = Agent::start();
    let answer = agent.get("/v1/isolated/capabilities");
    assert_eq!(answer.status, 200);
    let shape = answer.json();
    assert_eq!(shape["available"], root(), "{shape}");
    assert_eq!((&shape["commit_supported"], &shape["diff_supported"]), (&json!(false), &json!(false)));
    assert_eq!(shape["isolator"], "bwrap");
    let hardening = &shape["hardening"];
    assert_eq!((&hardening["init_mode"], &hardening["signal_shield"]), (&json!("none"), &json!(false)));
    for layer in ["cap_drop", "seccomp", "landlock", "ebpf"] {
        assert_eq!(hardening[layer]["state"], "disabled", "{layer}");
        assert!(!hardening[layer]["message"].as_str().unwrap().is_empty());
    }
}

#[test]
fn a_shell_keeps_its_state_from_run_to_run() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "rw"));
    assert_eq!(uuid::Uuid::parse_str(&id).unwrap().hyphenated().to_string(), id);
    let first = run(
        &agent,
        &id,
        "echo $$; hostname; pwd; echo $PLAIN-$SERVICE_TOKEN-$EXECD_ENVS\n\nprintf 'a\\n\\nb'",
    );
    let place = agent.path("space");
    let head = [place.to_str().unwrap(), "p--", "a", "b"];
    assert_eq!(lines(&first)[1], "sandbox");
    assert_eq!(lines(&first)[2..], head);
    assert!(lines(&first)[0].parse::<u32>().unwrap() <= 2);
    assert_eq!(last(&first)["type"], "execution_complete");
    let state = "v='1\n2'; declare -A map=([k]=x); f() { echo in-$1; }; cd /tmp; umask 077; shopt -s expand_aliases; alias hi='echo aliased'";
    assert_eq!(last(&run(&agent, &id, state))["type"], "execution_complete");
    let seen = lines(&run(&agent, &id, "echo \"$v\"; echo ${map[k]}; f g; pwd; umask; hi"));
    assert_eq!(seen, ["1", "2", "x", "in-g", "/tmp", "0077", "aliased"]);
    // A copy of the shell has the variables of the request, and takes them along.
    let with = run_with(&agent, &id, &json!({ "code": "echo $E-$v2; v2=set", "envs": { "E": "it's" } }));
    assert_eq!(lines(&with), ["it's-"]);
    assert_eq!(lines(&run(&agent, &id, "echo [$E][$v2]")), ["[][]"]);
    let state = agent.get(&format!("/v1/isolated/session/{id}")).json();
    assert_eq!((&state["status"], &state["workspace"]["mode"]), (&json!("active"), &json!("rw")));
}

#[test]
fn a_run_ends_with_its_code_and_exit_leaves_the_session_as_it_was() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "rw"));
    run(&agent, &id, "kept=1; g() { echo still; }");
    let failed = last(&run(&agent, &id, "false"));
    assert_eq!((&failed["error"]["ename"], &failed["error"]["evalue"]), (&json!("ExitError"), &json!("1")));
    assert!(failed["text"].is_string() && failed["timestamp"].is_u64());
    for code in ["kept=2; exit 7", "set -e; kept=3; (exit 7)", "return 7", "kept=4 exec sh -c 'exit 7'"] {
        let end = last(&run(&agent, &id, code));
        assert_eq!(end["error"]["evalue"], "7", "{code}");
    }
    assert_eq!(lines(&run(&agent, &id, "echo $kept; g; echo $$")), ["1", "still", "2"]);
    let killed = last(&run(&agent, &id, "kept=5; kill -9 $BASHPID"));
    assert_eq!(killed["error"]["ename"], "RuntimeError", "{killed}");
    assert_eq!(lines(&run(&agent, &id, "echo $kept; g")), ["1", "still"]);
    // Nor can a run read what is meant for the shell, or hold it up by closing what it has.
    assert_eq!(lines(&run(&agent, &id, "cat; read x; exec 3<&- 4>&- 10>&-; echo read-$?")), ["read-0"]);
    let text = lines(&run(&agent, &id, "sleep 1000 & bg=$!; jobs | wc -l; echo x"));
    assert_eq!(text, ["1", "x"]);
    assert_eq!(
        lines(&run(&agent, &id, "kill $bg; wait $bg 2>/dev/null; echo $?; wait; echo waited")),
        ["143", "waited"]
    );
}

#[test]
fn a_run_that_takes_too_long_or_loses_its_reader_is_stopped() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "rw"));
    let late = |code: &str| {
        let end = last(&run_with(&agent, &id, &json!({ "code": code, "timeout_seconds": 2 })));
        assert_eq!(end["error"]["ename"], "RuntimeError", "{code}: {end}");
        assert_eq!(end["error"]["evalue"], "context deadline exceeded", "{code}");
    };
    late("asked=1; sleep 1000");
    assert_eq!(
        lines(&run(&agent, &id, "echo [$asked]")),
        ["[1]"],
        "what could be interrupted keeps its state"
    );
    late("forced=1; while :; do :; done");
    late("trap '' INT; sh -c 'trap \"\" INT; while :; do sleep 1; done'");
    let after = run(&agent, &id, "echo [$asked][$forced]; trap -p");
    assert_eq!(lines(&after), ["[1][]"], "{}", after.text());
    let mut stream = agent.connect();
    let body = json!({ "code": "echo begun; while :; do sleep 0.1; done" }).to_string();
    write!(
        stream,
        "POST /v1/isolated/session/{id}/run HTTP/1.1\r\nHost: b\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut seen = Vec::new();
    let mut buffer = [0; 512];
    while !String::from_utf8_lossy(&seen).contains("begun") {
        let count = stream.read(&mut buffer).unwrap();
        seen.extend_from_slice(&buffer[..count]);
    }
    drop(stream);
    assert_eq!(lines(&run(&agent, &id, "echo next")), ["next"]);
}

#[test]
fn runs_of_a_session_take_turns() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "rw"));
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (agent, id) = (&*agent, &id);
            scope.spawn(move || {
                let code =
                    format!("n=$((n+1)); echo {number} >> log; sleep 0.02; echo {number} >> log; seq 2000");
                assert_eq!(lines(&run(agent, id, &code)).len(), 2000);
            });
        }
    });
    let log = lines(&run(&agent, &id, "cat log; echo $n"));
    assert_eq!(log.last().unwrap(), "8");
    assert!(log[..16].chunks(2).all(|pair| pair[0] == pair[1]), "{log:?}");
}

#[test]
fn a_background_run_is_followed_by_status_and_logs() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "ro"));
    run(&agent, &id, "word=known");
    let body = json!({ "code": "echo $word; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo err >&2; exit 3", "background": true });
    let answer = agent.post(&format!("/v1/isolated/session/{id}/run"), &body);
    assert_eq!(answer.status, 202, "{}", answer.text());
    let run_id = answer.json()["run_id"].as_str().unwrap().to_owned();
    let base = format!("/v1/isolated/session/{id}/runs/{run_id}");
    let logs = |cursor: u64| agent.get(&format!("{base}/logs?cursor={cursor}"));
    until(|| (logs(0).text() == "known\n").then_some(()));
    assert_eq!(logs(0).header("execd-isolated-tail-cursor").unwrap(), "6");
    let status = agent.get(&base).json();
    assert_eq!((&status["running"], status.get("exit_code")), (&json!(true), None));
    // The shell is free meanwhile.
    assert_eq!(lines(&run(&agent, &id, "touch /tmp/go; echo free")), ["free"]);
    let status = until(|| {
        let status = agent.get(&base).json();
        (status["running"] == false).then_some(status)
    });
    assert_eq!(status["exit_code"], 3);
    assert!(status["finished_at"].is_string() && status.get("error").is_none());
    let rest = logs(6);
    assert_eq!((rest.text().as_str(), rest.header("execd-isolated-tail-cursor").unwrap()), ("err\n", "10"));
    assert_eq!(logs(99).header("execd-isolated-tail-cursor").unwrap(), "99");
    assert_eq!(agent.get(&format!("{base}/logs?cursor=-1")).status, 400);
    let unknown = agent.get(&format!("/v1/isolated/session/{id}/runs/nope"));
    assert_eq!((unknown.status, unknown.json()["code"].clone()), (404, json!("SESSION_NOT_FOUND")));
    let killed = agent.post(
        &format!("/v1/isolated/session/{id}/run"),
        &json!({ "code": "kill -9 $BASHPID $PPID; sleep 9", "background": true }),
    );
    let base = format!("/v1/isolated/session/{id}/runs/{}", killed.json()["run_id"].as_str().unwrap());
    until(|| (agent.get(&base).json()["running"] == false).then_some(()));
    assert!(
        fs::read_dir(agent.path("space")).unwrap().next().is_none(),
        "nothing is written to the workspace"
    );
}

#[test]
fn each_mode_of_a_workspace_keeps_its_promise() {
    if !root() {
        return;
    }
    let agent = agent("");
    let file = agent.path("space/f");
    fs::write(&file, "below").unwrap();
    let rw = create(&agent, &space(&agent, "rw"));
    let ro = create(&agent, &space(&agent, "ro"));
    let overlay = create(&agent, &space(&agent, "overlay"));
    let scratch = create(
        &agent,
        &json!({ "overlays": [{ "path": agent.path("space"), "mode": "overlay", "persist": false }] }),
    );
    assert_eq!(
        last(&run(&agent, &rw, "echo -n new > made; touch /tmp/private"))["type"],
        "execution_complete"
    );
    assert_eq!(fs::read_to_string(agent.path("space/made")).unwrap(), "new");
    assert!(!std::path::Path::new("/tmp/private").exists());
    assert_eq!(last(&run(&agent, &ro, "echo x > denied"))["error"]["evalue"], "1");
    for id in [&overlay, &scratch] {
        let seen =
            run(&agent, id, "cat f; echo; echo -n above > f; rm made; mkdir d; echo x > d/y; ls; cat f");
        assert_eq!(lines(&seen), ["below", "d", "f", "above"]);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "below");
    assert!(agent.path("space/made").exists() && !agent.path("space/d").exists());
    let mut shared = space(&agent, "overlay");
    shared["profile"] = json!("balanced");
    let balanced = create(&agent, &shared);
    let upper = agent.path("upper").display().to_string();
    let seen = lines(&run(&agent, &balanced, &format!("ls {upper} | wc -l; touch {upper}/x /usr/x")));
    assert!(
        seen[0] == "0" && seen.len() == 3 && seen[1..].iter().all(|l| l.contains("ead-only")),
        "{seen:?}"
    );
    assert_eq!(fs::read_dir(&upper).unwrap().count(), 2, "overlays are on disk where that can be");
    for id in [rw, ro, overlay, scratch, balanced] {
        assert_eq!(agent.delete(&format!("/v1/isolated/session/{id}")).status, 200);
    }
    assert!(fs::read_dir(agent.path("upper")).map_or(true, |mut left| left.next().is_none()));
}

#[test]
fn user_code_cannot_get_out() {
    if !root() {
        return;
    }
    let agent = agent("");
    let id = create(&agent, &space(&agent, "rw"));
    let tries = "mount -t tmpfs t /mnt; mount -o remount,rw /; unshare -m true; unshare -U true; echo x > /proc/sys/kernel/core_pattern; \
                 mknod /tmp/sda b 8 0; kill -9 1; cat /proc/1/environ; ls /proc/1/root; ls /run/.execd; chroot /tmp true";
    let end = run(
        &agent,
        &id,
        &format!(
            "{tries}; ps -e -o pid= | sort -n | head -1; grep -h ^Cap /proc/self/status; grep -E '^(NoNew|Seccomp:)' /proc/self/status"
        ),
    );
    let text = lines(&end).join("\n");
    assert_eq!(
        text.matches("denied").count()
            + text.matches("not permitted").count()
            + text.matches("ead-only").count(),
        9,
        "{text}"
    );
    assert!(
        text.contains("CapEff:\t00000000000004fb") && text.contains("CapBnd:\t00000000000004fb"),
        "{text}"
    );
    assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
    let user = json!({ "workspace": { "path": agent.path("space"), "mode": "rw" }, "uid": 4321, "share_net": false });
    let id = create(&agent, &user);
    let seen = lines(&run(
        &agent,
        &id,
        "id -u; id -g; id -G; grep CapPrm /proc/self/status; cat /etc/shadow; tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '",
    ));
    assert_eq!(seen[..4], ["4321", "4321", "4321", "CapPrm:\t0000000000000000"]);
    assert!(seen[4].contains("denied") && seen[5..] == ["lo"], "{seen:?}");
}

#[test]
fn only_what_is_allowed_can_be_mounted() {
    if !root() {
        return;
    }
    let agent = agent("");
    fs::create_dir(agent.path("space/data")).unwrap();
    fs::write(agent.path("space/data/f"), "x").unwrap();
    symlink("/etc", agent.path("space/link")).unwrap();
    let post = |body: &Value| agent.post("/v1/isolated/session", body);
    for (body, code) in [
        (json!({ "workspace": { "path": "/etc" } }), "RUNTIME_ERROR"),
        (json!({ "workspace": { "path": agent.path("space/link") } }), "RUNTIME_ERROR"),
        (
            json!({ "workspace": { "path": agent.path("space") }, "binds": [{ "source": "/etc" }] }),
            "RUNTIME_ERROR",
        ),
        (
            json!({ "workspace": { "path": agent.path("space") }, "binds": [{ "source": agent.path("space/no") }] }),
            "RUNTIME_ERROR",
        ),
        (json!({ "workspace": { "path": agent.path("space") }, "profile": "x" }), "RUNTIME_ERROR"),
        (json!({ "workspace": { "path": "" } }), "INVALID_REQUEST_BODY"),
    ] {
        let answer = post(&body);
        assert_eq!((answer.status, answer.json()["code"].as_str().unwrap()), (400, code), "{body}");
    }
    // Over what is the session's own, also by a link of the box.
    symlink("/proc", agent.path("to-proc")).unwrap();
    for dest in
        ["/run".into(), "/run/.execd".into(), "/proc".into(), "/proc/x".into(), agent.path("to-proc/x")]
    {
        let bind: std::path::PathBuf = dest;
        let answer = post(&json!({ "workspace": { "path": agent.path("space") },
            "binds": [{ "source": agent.path("space/data"), "dest": bind }] }));
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("RUNTIME_ERROR")), "{bind:?}");
    }
    let (data, target) = (agent.path("space/data"), agent.path("mounted"));
    let body = json!({ "workspace": { "path": agent.path("space/w"), "mode": "rw" }, "profile": "balanced",
        "binds": [{ "source": data, "dest": target, "readonly": true }, { "source": data, "dest": "/run/rw" }],
        "extra_writable": [data] });
    let id = create(&agent, &body);
    let code =
        format!("cat {0}/f; echo; touch {0}/no; touch /run/rw/yes {1}/too", target.display(), data.display());
    let seen = lines(&run(&agent, &id, &code));
    assert!(seen[0] == "x" && seen[1].contains("ead-only") && seen.len() == 2, "{seen:?}");
    assert!(data.join("yes").exists() && data.join("too").exists());
}

#[test]
fn the_file_routes_show_what_the_session_sees() {
    if !root() {
        return;
    }
    let agent = agent("");
    fs::write(agent.path("space/below"), "one\ntwo\n").unwrap();
    symlink("/etc/passwd", agent.path("space/out")).unwrap();
    let body =
        json!({ "workspace": { "path": agent.path("space"), "mode": "overlay" }, "uid": 4321, "gid": 4322 });
    std::os::unix::fs::chown(agent.path("space"), Some(4321), Some(4322)).unwrap();
    let id = create(&agent, &body);
    let at = |name: &str| agent.path("space").join(name).display().to_string();
    let base = format!("/v1/isolated/session/{id}");
    let metadata = json!({ "path": at("new/dir/f"), "owner": null, "group": null }).to_string();
    let (kind, content) =
        form(&[("metadata", Some("metadata"), metadata.as_bytes()), ("file", Some("f"), b"hello")]);
    let sent = agent.send("POST", &format!("{base}/files/upload"), &[("Content-Type", &kind)], &content);
    assert_eq!(sent.status, 200, "{}", sent.text());
    assert_eq!(sent.header("content-length").unwrap(), "0");
    assert_eq!(
        lines(&run(&agent, &id, "stat -c '%u %g %a' new/dir/f; cat new/dir/f below")),
        ["4321 4322 644", "helloone", "two"]
    );
    assert!(!agent.path("space/new").exists());
    let got = agent.send(
        "GET",
        &format!("{base}/files/download?path={}", at("below")),
        &[("Range", "bytes=4-6")],
        b"",
    );
    assert_eq!((got.status, got.text().as_str()), (206, "two"));
    let info = agent.get(&format!("{base}/files/info?path={}", at("new/dir/f"))).json();
    assert_eq!((&info[at("new/dir/f")]["mode"], &info[at("new/dir/f")]["size"]), (&json!(644), &json!(5)));
    assert_eq!(
        agent.post(&format!("{base}/files/mv"), &json!([{ "src": at("new/dir/f"), "dest": at("g") }])).status,
        200
    );
    let replaced = agent
        .post(&format!("{base}/files/replace?verbose=true"), &json!({ at("g"): { "old": "l", "new": "L" } }));
    assert_eq!(replaced.json()[at("g")]["replacedCount"], 2);
    assert_eq!(
        agent.post(&format!("{base}/files/permissions"), &json!({ at("g"): { "mode": 600 } })).status,
        200
    );
    assert_eq!(
        agent.post(&format!("{base}/directories"), &json!({ at("a/b"): { "mode": 755 } })).status,
        200
    );
    let found = agent.get(&format!("{base}/files/search?path={}&pattern=g*", at(""))).json();
    assert_eq!((found.as_array().unwrap().len(), &found[0]["path"]), (1, &json!(at("g"))));
    let listed = agent.get(&format!("{base}/directories/list?path={}&depth=2", at(""))).json();
    assert!(listed.as_array().unwrap().iter().any(|entry| entry["path"] == at("a/b")));
    assert_eq!(agent.delete(&format!("{base}/files?path={}", at("g"))).status, 200);
    assert_eq!(agent.delete(&format!("{base}/directories?path={}", at("a"))).status, 200);
    assert_eq!(agent.get(&format!("{base}/files/info?path={}", at("g"))).status, 404);
    for path in ["/etc/passwd".to_owned(), at("../space2"), at("out")] {
        assert_eq!(agent.get(&format!("{base}/files/download?path={path}")).status, 400, "{path}");
    }
    assert_eq!(agent.get("/v1/isolated/session/none/files/info").status, 404);
    let reader = create(&agent, &space(&agent, "ro"));
    let answer = agent.delete(&format!("/v1/isolated/session/{reader}/files?path={}", at("below")));
    assert_eq!(answer.status, 500);
    assert!(agent.path("space/below").exists());
    assert!(fs::metadata(agent.path("space")).unwrap().uid() == 4321);
}

#[test]
fn sessions_are_listed_deleted_and_expire() {
    if !root() {
        return;
    }
    let agent = agent("");
    let busy = create(&agent, &space(&agent, "rw"));
    let mut idle = space(&agent, "rw");
    // Enough to look at it, and less than its run takes.
    idle["idle_timeout_seconds"] = json!(4);
    let idle = create(&agent, &idle);
    let listed = || -> Vec<String> {
        let all = agent.get("/v1/isolated/sessions").json();
        all["sessions"].as_array().unwrap().iter().map(|s| s["session_id"].as_str().unwrap().into()).collect()
    };
    assert_eq!(listed(), [busy.clone(), idle.clone()]);
    assert!(
        agent.get(&format!("/v1/isolated/session/{idle}")).json()["idle_remaining_seconds"].as_u64().unwrap()
            <= 4
    );
    run(&agent, &idle, "sleep 4.5");
    until(|| (listed() == [busy.clone()]).then_some(()));
    assert_eq!(agent.get(&format!("/v1/isolated/session/{idle}")).status, 404);
    let diff = agent.get(&format!("/v1/isolated/session/{busy}/diff"));
    assert_eq!((diff.status, diff.json()["code"].clone()), (503, json!("NOT_SUPPORTED")));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| last(&run(&agent, &busy, "touch here; sleep 1000")));
        until(|| agent.path("space/here").exists().then_some(()));
        assert_eq!(agent.delete(&format!("/v1/isolated/session/{busy}")).status, 200);
        assert_eq!(running.join().unwrap()["error"]["evalue"], "session terminated");
    });
    let again = agent.delete(&format!("/v1/isolated/session/{busy}"));
    assert_eq!((again.status, again.json()["code"].clone()), (404, json!("SESSION_NOT_FOUND")));
    assert!(listed().is_empty());
}

#[test]
fn a_user_namespace_knows_only_the_sessions_user() {
    if !root() || agent("").get("/v1/isolated/capabilities").json()["userns_available"] == false {
        return;
    }
    let agent = agent("");
    let body = json!({ "workspace": { "path": agent.path("space"), "mode": "rw" }, "uid": 1234, "gid": 1235, "uid_mode": "userns" });
    let id = create(&agent, &body);
    let seen =
        lines(&run(&agent, &id, "id -u; id -g; cat /proc/self/uid_map | tr -s ' '; touch f; stat -c %u f"));
    assert_eq!(seen, ["1234", "1235", " 1234 0 1", "1234"]);
    assert_eq!(fs::metadata(agent.path("space/f")).unwrap().uid(), 0);
}
