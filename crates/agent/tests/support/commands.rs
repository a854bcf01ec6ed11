//! `/command`: streams, status, logs, interrupt, timeout.

use std::io::Read;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Agent, DONE, HEAD, PING, failed, out, root, runs, until};

#[test]
fn golden_streams() {
    let agent = Agent::start();
    for (command, expected) in [
        ("true", DONE.to_owned()),
        ("printf 'a\\n\\nb\\n\\n\\nc\\n'", ["a", "\\n", "b", "\\n", "\\n", "c"].map(out).concat() + DONE),
        (
            "printf 'a\\r\\nb\\rc\\r\\r\\n'; printf 'end'",
            ["a", "b", "c", "\\n", "end"].map(out).concat() + DONE,
        ),
        (
            "printf '<a>&\"\\\\\\t\\302\\205\\342\\200\\250\\377\\303\\251\\n'",
            out("\\u003ca\\u003e\\u0026\\\"\\\\\\t\\u0085\\u2028\\ufffdé") + DONE,
        ),
        ("printf '\\303'; sleep 0.1; printf '\\251\\n'", out("é") + DONE),
        ("printf 'x\\r'; sleep 0.1; printf '\\ny\\n'", out("x") + &out("y") + DONE),
        ("exit 7", failed("7", "exit status 7")),
        ("kill -9 $$", failed("-1", "signal: killed")),
        ("kill -TERM $$", failed("-1", "signal: terminated")),
        (
            "echo out; sleep 0.05; echo err >&2",
            out("out") + "{\"type\":\"stderr\",\"text\":\"err\",\"timestamp\":T}\n" + DONE,
        ),
    ] {
        let answer = agent.shell(command);
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        assert!(answer.text().ends_with("}\n\n"));
        assert_eq!(answer.golden(), HEAD.to_owned() + &expected, "{command}");
    }
}

#[test]
fn start_failures_are_events() {
    let agent = Agent::start();
    std::fs::write(agent.path("noexec"), "x").unwrap();
    std::fs::write(agent.path("script"), "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(agent.path("script"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    for (argv, reason) in [
        ("no-such-program", "executable file not found in $PATH"),
        ("./missing", "no such file or directory"),
        ("./noexec", "permission denied"),
        ("./script", "interpreter or dynamic loader is missing"),
    ] {
        let answer = agent.post("/command", &json!({ "argv": [argv] }));
        assert_eq!(answer.status, 200);
        let golden = answer.golden();
        assert!(
            golden.starts_with(HEAD) && golden.contains(reason) && golden.lines().count() == 3,
            "{golden}"
        );
        let status = agent.get(&format!("/command/status/{}", answer.init_id())).json();
        assert_eq!(status["running"], false);
    }
}

#[test]
fn argv_env_cwd_and_identity() {
    let agent = Agent::start_with(&[], &[("X", "daemon"), ("EXECD_ACCESS_TOKEN", "")]);
    let argv = agent.post("/command", &json!({ "argv": ["printf", "%s|", "a b", "$X"] }));
    assert_eq!(argv.golden(), HEAD.to_owned() + &out("a b|$X|") + DONE);
    std::fs::write(agent.path("env"), "Y='lit $X'\nZ=\"q$X\"\nX=file\n").unwrap();
    let body = json!({ "command": "echo $X,$Y,$Z,$W; pwd; echo $PWD; test -n \"$EXECD_ENVS\"", "envs": { "W": "req" }, "cwd": "/$W/../tmp" });
    let answer = agent.post("/command", &body);
    let golden = answer.golden();
    assert_eq!(
        golden,
        HEAD.to_owned() + &out("file,lit $X,qdaemon,req") + &out("/tmp") + &out("/tmp") + DONE
    );
    assert!(agent.shell("env").text().contains("EXECD_ENVS="));
    assert!(!agent.shell("env").text().contains("EXECD_ACCESS_TOKEN"));
    if rustix::process::geteuid().is_root() {
        let answer =
            agent.post("/command", &json!({ "command": "id -u; id -g; id -G", "uid": 12345, "gid": 54321 }));
        assert_eq!(answer.golden(), HEAD.to_owned() + &["12345", "54321", "54321"].map(out).concat() + DONE);
    }
    for (body, status) in [
        (json!({ "command": "x", "cwd": "/no/such" }), 400),
        (json!({ "command": "x", "cwd": "$NOPE/x" }), 400),
        (json!({ "command": "x", "gid": 1 }), 400),
        (json!({}), 400),
    ] {
        let answer = agent.post("/command", &body);
        assert_eq!(answer.status, status, "{body}");
        assert_eq!(answer.json()["code"], "INVALID_REQUEST_BODY");
        assert!(!answer.json()["message"].as_str().unwrap().is_empty());
    }
}

#[test]
fn a_left_behind_child_does_not_hold_the_stream_and_survives() {
    let agent = Agent::start();
    // It ends when it is told to, so the stream cannot have waited for it.
    let answer =
        agent.shell("(until test -e go; do sleep 0.05; done; echo late; echo late; touch alive) & echo now");
    assert_eq!(answer.golden(), HEAD.to_owned() + &out("now") + DONE);
    agent.shell("touch go");
    until(|| agent.path("alive").exists().then_some(()));
    assert!(agent.shell("yes & echo $! > pid").text().contains("execution_complete"));
    agent.shell("kill $(cat pid)");
}

#[test]
fn plain_commands_are_quick_and_much_output_is_whole() {
    let agent = Agent::start();
    let started = Instant::now();
    for _ in 0..10 {
        agent.post("/command", &json!({ "argv": ["true"] }));
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    let answer = agent.shell("seq 1 200000; head -c 3000000 /dev/zero | tr '\\0' x");
    let text = answer.text();
    let mut next = 1;
    let mut xs = 0;
    for frame in text.split("\n\n").filter(|f| f.contains("\"stdout\"")) {
        let event: serde_json::Value = serde_json::from_str(frame).unwrap();
        let line = event["text"].as_str().unwrap();
        if line.starts_with('x') {
            assert!(frame.len() < 4 << 20);
            xs += line.len();
        } else {
            assert_eq!(line, next.to_string());
            next += 1;
        }
    }
    assert_eq!((next, xs), (200_001, 3_000_000));
}

#[test]
fn status_of_foreground_and_unknown_commands() {
    let agent = Agent::start();
    let id = agent.shell("exit 7").init_id();
    let status = agent.get(&format!("/command/status/{id}")).json();
    assert_eq!(status["content"], "exit 7");
    assert_eq!((&status["running"], &status["exit_code"]), (&json!(false), &json!(7)));
    assert_eq!(status["error"], "exit status 7");
    assert!(status["started_at"].is_string() && status["finished_at"].is_string());
    let unknown = agent.get("/command/status/nope");
    assert_eq!((unknown.status, &unknown.json()["code"]), (404, &json!("INVALID_REQUEST_BODY")));
    let logs = agent.get(&format!("/command/{id}/logs"));
    assert_eq!((logs.status, &logs.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")));
}

#[test]
fn background_logs_by_cursor() {
    let agent = Agent::start();
    let command = "printf one; while [ ! -e go ]; do sleep 0.02; done; echo two >&2; exit 3";
    let body = json!({ "command": command, "background": true });
    let answer = agent.post("/command", &body);
    assert_eq!(answer.golden(), HEAD.lines().next().unwrap().to_owned() + "\n" + DONE);
    let id = answer.init_id();
    let logs = |cursor: &str| agent.get(&format!("/command/{id}/logs{cursor}"));
    let partial = until(|| Some(logs("")).filter(|l| l.body == b"one"));
    assert_eq!(partial.header("execd-commands-tail-cursor"), Some("3"));
    assert_eq!(partial.header("content-type"), Some("text/plain; charset=utf-8"));
    let nothing = logs("?cursor=3");
    assert_eq!((nothing.text().as_str(), nothing.header("execd-commands-tail-cursor")), ("", Some("3")));
    std::fs::write(agent.path("go"), "").unwrap();
    let status = agent.wait_ended(&id);
    assert_eq!(status["exit_code"], 3);
    let rest = logs("?cursor=3");
    assert_eq!((rest.text().as_str(), rest.header("execd-commands-tail-cursor")), ("two\n", Some("7")));
    assert_eq!(logs("?cursor=x").text(), "onetwo\n");
    assert_eq!(logs("?cursor=99").header("execd-commands-tail-cursor"), Some("99"));
}

#[test]
fn a_large_background_log_comes_back_whole() {
    let agent = Agent::start();
    let id = agent.post("/command", &json!({ "command": "seq 1 300000", "background": true })).init_id();
    agent.wait_ended(&id);
    let expected: String = (1..=300_000).map(|n| format!("{n}\n")).collect();
    let logs =
        until(|| Some(agent.get(&format!("/command/{id}/logs"))).filter(|l| l.body.len() == expected.len()));
    assert!(logs.text() == expected);
}

#[test]
fn interrupt_ends_the_whole_group() {
    let agent = Agent::start();
    let (mut stream, id) = agent.open_stream(&json!({ "command": "sleep 1000 & echo $! > pid; wait" }));
    let pid = until(|| std::fs::read_to_string(agent.path("pid")).ok().filter(|p| p.ends_with('\n')));
    let answer = agent.delete(&format!("/command?id={id}"));
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("0")));
    let mut rest = String::new();
    let mut buffer = [0; 1024];
    while !rest.ends_with("0\r\n\r\n") {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{rest}");
        rest.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    assert!(rest.contains("signal: terminated") && rest.contains("\"evalue\":\"-1\""), "{rest}");
    assert!(!runs(pid.trim()));
    let again = agent.delete(&format!("/command?id={id}"));
    assert_eq!((again.status, &again.json()["code"]), (500, &json!("RUNTIME_ERROR")));
    assert_eq!(agent.delete("/command?id=nope").status, 500);
    assert_eq!(agent.delete("/command").json()["code"], "MISSING_QUERY");
}

#[test]
fn a_command_that_ignores_the_interrupt_is_killed() {
    let agent = Agent::start();
    let (_stream, id) =
        agent.open_stream(&json!({ "command": "trap '' TERM; echo > ready; while :; do sleep 0.2; done" }));
    until(|| agent.path("ready").exists().then_some(()));
    let started = Instant::now();
    assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
    assert!(started.elapsed() >= Duration::from_millis(2500));
    assert_eq!(agent.wait_ended(&id)["error"], "signal: killed");
}

#[test]
fn the_timeout_kills() {
    let agent = Agent::start();
    let started = Instant::now();
    let answer = agent.post("/command", &json!({ "command": "echo hi; sleep 1000", "timeout": 3000 }));
    assert_eq!(answer.golden(), HEAD.to_owned() + &out("hi") + &failed("-1", "signal: killed"));
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_client_that_leaves_does_not_stop_the_process() {
    let agent = Agent::start();
    let (stream, id) = agent.open_stream(&json!({
        "command": "sleep 0.2; seq 1 200000; touch finished"
    }));
    drop(stream);
    until(|| agent.path("finished").exists().then_some(()));
    assert_eq!(agent.wait_ended(&id)["exit_code"], 0);
}

#[test]
fn a_client_that_does_not_read_holds_the_process_back_and_not_the_agent() {
    let agent = Agent::start();
    let (stream, id) = agent.open_stream(&json!({ "command": "yes" }));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(agent.get("/ping").status, 200);
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.child.id())).unwrap();
    let rss = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = rss.split_whitespace().next().unwrap().parse().unwrap();
    assert!(kib < 60_000, "{kib} KiB");
    assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
    drop(stream);
}

#[test]
fn the_bytes_of_a_whole_answer() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    let body = "{\"COMMAND\":\"echo hi\",\"unknown\":[1],\"background\":null} trailing";
    std::io::Write::write_all(
        &mut stream,
        format!("POST /command HTTP/1.1\r\nHost: b\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .as_bytes(),
    )
    .unwrap();
    let (mut raw, mut buffer) = (Vec::new(), [0; 4096]);
    // The connection stays open: the end of the stream is the last chunk, and it comes at once.
    while !raw.ends_with(b"\r\n0\r\n\r\n") {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0);
        raw.extend_from_slice(&buffer[..count]);
    }
    let answer = crate::support::parse(&raw);
    let mut head: Vec<String> = answer.head.lines().map(str::to_ascii_lowercase).collect();
    head.retain(|line| !line.starts_with("date: "));
    head[1..].sort();
    assert_eq!(
        head,
        [
            "http/1.1 200 ok",
            "cache-control: no-cache",
            "connection: keep-alive",
            "content-type: text/event-stream",
            "transfer-encoding: chunked",
            "x-accel-buffering: no",
        ]
    );
    assert_eq!(answer.golden(), HEAD.to_owned() + &out("hi") + DONE);
    // Every chunk holds whole events.
    let text = answer.text();
    assert_eq!(text.matches("}\n\n").count(), 4);
    assert!(!text.contains("\n\n\n") && !text.contains("data:"));
}

#[test]
fn pings_come_while_nothing_else_does() {
    let agent = Agent::start();
    let answer = agent.shell("sleep 3.5; echo late");
    let text = answer.text();
    let (before, _) = text.split_once("\"late\"").unwrap();
    let pings = before.matches(PING).count();
    assert!(pings >= 2, "one at the beginning, and one for every three seconds: {text}");
    assert_eq!(answer.golden(), HEAD.to_owned() + &out("late") + DONE);
}

#[test]
fn the_standard_input_is_at_its_end() {
    let agent = Agent::start();
    assert_eq!(agent.shell("cat; echo $?").golden(), HEAD.to_owned() + &out("0") + DONE);
    let body = json!({ "command": "read x; echo $?:$x", "background": true });
    let id = agent.post("/command", &body).init_id();
    agent.wait_ended(&id);
    assert_eq!(
        until(|| Some(agent.get(&format!("/command/{id}/logs")).text()).filter(|t| !t.is_empty())),
        "1:\n"
    );
}

#[test]
fn the_shell_is_the_images_and_argv_is_found_in_the_requests_path() {
    let agent = Agent::start();
    let bin = agent.path("bin");
    std::fs::create_dir(&bin).unwrap();
    for (name, text) in [
        ("sh", "#!/bin/sh\necho swapped\n"),
        ("bash", "#!/bin/sh\necho swapped\n"),
        ("mine", "#!/bin/sh\necho mine\n"),
    ] {
        std::fs::write(bin.join(name), text).unwrap();
        std::fs::set_permissions(bin.join(name), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
    }
    let path = bin.display().to_string();
    let swapped = json!({ "command": "echo ok $0; mine", "envs": { "PATH": path } });
    assert!(agent.post("/command", &swapped).golden().contains(&(out("ok bash") + &out("mine"))));
    let argv = json!({ "argv": ["mine"], "envs": { "PATH": format!("relative:{path}") } });
    assert_eq!(agent.post("/command", &argv).golden(), HEAD.to_owned() + &out("mine") + DONE);
    let relative = json!({ "argv": ["./mine"], "cwd": path });
    assert_eq!(agent.post("/command", &relative).golden(), HEAD.to_owned() + &out("mine") + DONE);
    let blank = agent.shell(" \n");
    assert_eq!(blank.golden(), HEAD.to_owned() + DONE);
}

#[test]
fn a_text_longer_than_any_argument_is_an_outcome_and_status_repeats_a_part_of_it() {
    let agent = Agent::start();
    let answer = agent.shell(&"é".repeat(100_000));
    assert!(answer.golden().contains("argument list or environment too long"), "{}", answer.golden());
    let status = agent.get(&format!("/command/status/{}", answer.init_id())).json();
    assert_eq!(
        (status["exit_code"].as_i64(), status["content"].as_str().unwrap().len()),
        (Some(255), 128 << 10)
    );
}

#[test]
fn an_identity_that_may_not_be_taken_says_which_right_is_missing() {
    if !root() {
        return;
    }
    let mut plain = std::process::Command::new("setpriv");
    plain.args(["--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid", crate::support::BINARY]);
    let agent = Agent::launch(plain, &[], &[]);
    let answer = agent.post("/command", &json!({ "command": "id", "uid": 12345 })).golden();
    assert!(answer.contains("CAP_SETUID and CAP_SETGID") && answer.lines().count() == 3, "{answer}");
    // The own identity needs no switch.
    let own = agent.post("/command", &json!({ "command": "id -u", "uid": 0, "gid": 0 }));
    assert_eq!(own.golden(), HEAD.to_owned() + &out("0") + DONE);
    // Without an entry among the accounts: the group of root, and no others.
    let agent = Agent::start();
    let unknown =
        agent.post("/command", &json!({ "command": "id -u; id -g; id -G; echo $HOME", "uid": 54321 }));
    let home = agent.path(".").display().to_string().trim_end_matches("/.").to_owned();
    assert_eq!(unknown.golden(), HEAD.to_owned() + &["54321", "0", "0", &home].map(out).concat() + DONE);
}
