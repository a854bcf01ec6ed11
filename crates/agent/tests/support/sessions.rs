//! `/session`: what stays from run to run, what a run may do to its shell, and how runs end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Agent, Answer, BINARY, DONE, HEAD, PATIENCE, failed, out, runs, until};

struct Session<'a> {
    agent: &'a Agent,
    id: String,
}

impl Session<'_> {
    fn open(agent: &Agent, body: &Value) -> String {
        let answer = agent.post("/session", body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["session_id"].as_str().unwrap().to_owned()
    }

    fn post(&self, body: &Value) -> Answer {
        self.agent.post(&format!("/session/{}/run", self.id), body)
    }

    /// The events of a run after the first two, and that these are as they should be.
    fn events(&self, body: &Value) -> String {
        let answer = self.post(body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.init_id(), self.id);
        let golden = answer.golden();
        golden.strip_prefix(HEAD).unwrap_or_else(|| panic!("{golden}")).to_owned()
    }

    fn run(&self, command: &str) -> String {
        self.events(&json!({ "command": command }))
    }

    /// Runs and compares with lines of output and success.
    fn prints(&self, command: &str, lines: &[&str]) {
        assert_eq!(
            self.run(command),
            lines.iter().map(|line| out(line)).collect::<String>() + DONE,
            "{command}"
        );
    }

    /// Begins a run without waiting for its end.
    fn begin(&self, body: &Value) -> TcpStream {
        let mut stream = self.agent.connect();
        let body = body.to_string();
        let head = format!(
            "POST /session/{}/run HTTP/1.1\r\nHost: b\r\nContent-Length: {}\r\n\r\n",
            self.id,
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        stream
    }
}

/// Reads until the run is one of its session's, whose stream begins before its turn comes.
fn is_accepted(stream: &mut TcpStream) -> String {
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.contains("\"init\"") {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    seen
}

fn session(agent: &Agent) -> Session<'_> {
    Session { agent, id: Session::open(agent, &json!({})) }
}

#[test]
fn everything_a_shell_knows_survives_from_run_to_run() {
    let agent = Agent::start();
    let s = session(&agent);
    s.prints("export A=1; b='x\n y'; f() { echo \"f:$b\"; }; alias say='echo said'; shopt -s nullglob; umask 027; cd /tmp; arr=(p 'q r'); exec 5>&1; sleep 300 & job=$!", &[]);
    s.prints("echo $A; f; say it; shopt -q nullglob && echo on; umask; pwd; echo \"${arr[1]}\"; echo five >&5; kill -0 $job && echo alive; jobs -p | wc -l", &[
        "1", "f:x", " y", "said it", "on", "0027", "/tmp", "q r", "five", "alive", "1",
    ]);
    s.prints("kill $job; wait $job; echo $?", &["143"]);
    // The shell is the same one; one of another session is not.
    s.prints("echo $$ > /proc/self/fd/5; [[ $$ == $PPID ]] || me=$$", &[&until(|| pid_of(&s))]);
    session(&agent).prints(
        "echo \"[$A$b]\"; pwd -P",
        &["[]", &agent.dir.path().canonicalize().unwrap().to_string_lossy()],
    );
}

fn pid_of(s: &Session<'_>) -> Option<String> {
    let text = s.post(&json!({ "command": "echo $$" })).text();
    let line = text.lines().find(|line| line.contains("stdout"))?.to_owned();
    Some(serde_json::from_str::<Value>(&line).ok()?["text"].as_str()?.to_owned())
}

#[test]
fn golden_streams() {
    let agent = Agent::start();
    let s = session(&agent);
    for (command, expected) in [
        ("true", DONE.to_owned()),
        (
            "printf 'a\\n\\nb\\n\\n'; echo err >&2; printf tail",
            ["a", "b", "err", "tail"].map(out).concat() + DONE,
        ),
        ("(exit 7)", failed("7", "exit status 7")),
        ("nosuch", out("bash: line 1: nosuch: command not found") + &failed("127", "exit status 127")),
        ("\n\nnosuch", out("bash: line 3: nosuch: command not found") + &failed("127", "exit status 127")),
        ("cat; read x; echo \"$?\"", out("1") + DONE),
        ("readlink /proc/$BASHPID/fd/[2-9]* | grep -c memfd", out("0") + &failed("1", "exit status 1")),
        ("exit 3", failed("3", "exit status 3")),
        ("kill -9 $$", failed("-1", "signal: killed")),
        ("exec sh -c 'echo taken; exit 4'", out("taken") + &failed("4", "exit status 4")),
        ("exit", DONE.to_owned()),
    ] {
        assert_eq!(s.run(command), expected, "{command}");
    }
    let unclosed = s.run("echo 'unclosed");
    assert!(
        unclosed.contains("unexpected EOF") && unclosed.ends_with(&failed("2", "exit status 2")),
        "{unclosed}"
    );
    s.prints("cat <<END\nin a document\nEND", &["in a document"]);
}

#[test]
fn nothing_a_user_does_confuses_the_frame() {
    let agent = Agent::start();
    let s = session(&agent);
    s.prints("set -x", &[]);
    s.prints("true; set +x", &["+++ true", "+++ set +x"]);
    s.prints("trap 'echo \"D:$BASH_COMMAND\"' DEBUG", &[]);
    s.prints("true; trap - DEBUG", &["D:true", "D:trap - DEBUG"]);
    s.prints("exec > gone; echo lost", &[]);
    s.prints("cat gone; exec 2>&- <gone", &["lost"]);
    s.prints("echo seen >&2; cat", &["seen"]);
    s.prints("set -v", &[]);
    s.prints("set +v", &["set +v"]);
    s.prints("echo 0 >&23 2>/dev/null; printf '0\\0/etc\\0' 2>/dev/null >&23; exec 23>&- 22<&- 21<&-; pwd >/dev/null", &[
        "bash: line 1: 23: Bad file descriptor",
    ]);
    s.prints("IFS=,; set -u; shopt -s extglob; set -o noglob; echo", &[]);
    s.prints("x=a,b; printf '%s;' $x; set -f; IFS=$' \\t\\n'; set +u", &["a;b;"]);
    s.prints("set -e; (exit 0) && true", &[]);
    assert_eq!(s.run("echo before; false; echo after"), out("before") + &failed("1", "exit status 1"));
    // The shell was replaced, with the options of the last complete run.
    assert_eq!(s.run("false"), failed("1", "exit status 1"));
    s.prints("echo \"$-\" | grep -c e; set +e", &["1"]);
    s.prints("(until test -e go; do sleep 0.02; done; echo late; echo > said) & disown", &[]);
    s.prints("echo > go; until test -e said; do sleep 0.02; done; echo now", &["late", "now"]);
    s.prints("(until test -e go2; do sleep 0.02; done; echo late; echo > said2) & disown", &[]);
    std::fs::write(agent.path("go2"), "").unwrap();
    until(|| agent.path("said2").exists().then_some(()));
    s.prints("echo now", &["now"]);
}

#[test]
fn a_new_shell_continues_where_the_last_complete_run_ended() {
    let agent = Agent::start_with(&[], &[("FROM_DAEMON", "d")]);
    let s = session(&agent);
    s.prints("export A=$'two\\nlines'; b=\"q'\\\"\\$x\"; f() { echo \"f $1\"; }; alias say='echo said'; declare -A m=([k v]=w); mkdir -p \"it's here\"; cd \"it's here\"; umask 077; unset FROM_DAEMON; sleep 300 & echo $! > ../job", &[]);
    assert_eq!(s.run("A=changed; cd /; f() { echo other; }; exit 5"), failed("5", "exit status 5"));
    s.prints("echo \"$A\"; echo \"$b\"; f 1; say it; echo \"${m[k v]}\"; basename \"$PWD\"; umask; echo \"[$FROM_DAEMON]\"; kill -0 $(cat ../job) && echo alive", &[
        "two", "lines", "q'\\\"$x", "f 1", "said it", "w", "it's here", "0077", "[]", "alive",
    ]);
    // Functions and aliases are no reason to lose a second shell.
    s.run("kill -9 $$");
    s.prints("f 2; say more", &["f 2", "said more"]);
    let job = std::fs::read_to_string(agent.path("job")).unwrap();
    assert_eq!(agent.delete(&format!("/session/{}", s.id)).status, 200);
    until(|| (!runs(job.trim())).then_some(()));
}

#[test]
fn state_beyond_its_bound_costs_the_rest_and_not_the_session() {
    let agent = Agent::start();
    let s = session(&agent);
    s.prints("export small=1; big=$(head -c 400000 /dev/zero | tr '\\0' x); cd /tmp", &[]);
    s.run("exit 1");
    s.prints("echo \"$small ${#big}\"; pwd", &["1 0", "/tmp"]);
    // A command of any size, too.
    let long = format!("x={}; echo ${{#x}}", "y".repeat(1_000_000));
    s.prints(&long, &["1000000"]);
}

#[test]
fn directories_are_made_expanded_and_checked() {
    let agent = Agent::start_with(
        &[],
        &[("BASE", "made"), ("JUPYTER_TOKEN", "secret"), ("OPENSANDBOX_LIFECYCLE", "{}")],
    );
    std::fs::write(agent.path("env"), "FROM_FILE='file value'\nDEEP=deep\n").unwrap();
    let s = Session { agent: &agent, id: Session::open(&agent, &json!({ "cwd": "$BASE/${DEEP}" })) };
    s.prints(
        "basename $PWD; echo $FROM_FILE; env | grep -ciE '^(EXECD_|JUPYTER|OPENSANDBOX_LIFE)' || :",
        &["deep", "file value", "0"],
    );
    s.prints("unexported=\"a b\"; mkdir -p \"$unexported/c\"", &[]);
    let cwd = |cwd: &str| s.events(&json!({ "command": "basename \"$PWD\"", "cwd": cwd }));
    assert_eq!(cwd("$unexported/c"), out("c") + DONE);
    assert_eq!(cwd(".."), out("a b") + DONE);
    s.prints("basename \"$PWD\"", &["a b"]);
    for (body, reason) in [
        (json!({ "command": "x", "cwd": "/no/such" }), "cwd /no/such does not exist"),
        (json!({ "command": "x", "cwd": "/dev/null" }), "is not a directory"),
        (json!({ "command": "x", "cwd": "$NOPE/${a:-b}" }), "undefined environment variables: NOPE,a:-b"),
        (json!({ "command": "x", "timeout": -1 }), "timeout"),
        (json!({ "command": "a\0b" }), "NUL"),
        (json!({ "cwd": "/" }), "command is required"),
    ] {
        let answer = s.post(&body);
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")), "{body}");
        assert!(answer.json()["message"].as_str().unwrap().contains(reason), "{}", answer.text());
    }
    assert_eq!(agent.send("POST", "/session", &[], b"").status, 200);
    assert_eq!(agent.post("/session", &json!({ "cwd": "/dev/null/x" })).status, 500);
    assert_eq!(agent.post("/session", &json!({ "cwd": "$NOPE" })).status, 400);
}

#[test]
fn runs_of_one_session_wait_for_each_other() {
    let agent = Agent::start();
    let s = session(&agent);
    let mut first =
        s.begin(&json!({ "command": "until test -e go; do sleep 0.02; done; echo first >> order; n=1" }));
    is_accepted(&mut first);
    let second = s.begin(&json!({ "command": "echo second$n >> order", "cwd": agent.dir.path() }));
    // What its directory means depends on the runs before, so it has no answer yet; but who came after it has.
    assert_eq!(agent.get("/ping").status, 200);
    let mut third = s.begin(&json!({ "command": "echo third >> order; echo told" }));
    assert!(!is_accepted(&mut third).contains("told"));
    std::fs::write(agent.path("go"), "").unwrap();
    until(|| std::fs::read_to_string(agent.path("order")).ok().filter(|text| text.lines().count() == 3));
    assert_eq!(std::fs::read_to_string(agent.path("order")).unwrap(), "first\nsecond1\nthird\n");
    drop((first, second));
}

#[test]
fn a_timeout_ends_what_its_run_started_and_nothing_else() {
    let agent = Agent::start();
    let s = session(&agent);
    s.prints("kept=1; sleep 300 & echo $! > earlier; sleep 0.05", &[]);
    for command in [
        "echo on; lost=1; sleep 301 & echo $! > later; while :; do :; done",
        "trap '' TERM INT; echo on; sh -c 'trap \"\" TERM; echo $$ > later; sleep 302; :'",
    ] {
        let begun = Instant::now();
        assert_eq!(
            s.events(&json!({ "command": command, "timeout": 3000 })),
            out("on") + &failed("-1", "signal: killed")
        );
        assert!(begun.elapsed() < PATIENCE);
        let later = std::fs::read_to_string(agent.path("later")).unwrap();
        until(|| (!runs(later.trim())).then_some(()));
        s.prints("echo \"$kept[$lost]\"; kill -0 $(cat earlier) && echo alive", &["1[]", "alive"]);
    }
    // One that is over in time is not late.
    assert_eq!(s.events(&json!({ "command": "echo quick", "timeout": 60_000 })), out("quick") + DONE);
    let earlier = std::fs::read_to_string(agent.path("earlier")).unwrap();
    agent.delete(&format!("/session/{}", s.id));
    until(|| (!runs(earlier.trim())).then_some(()));
}

#[test]
fn a_client_that_leaves_takes_its_run_along() {
    let agent = Agent::start();
    let s = session(&agent);
    s.prints("kept=1", &[]);
    let stream = s.begin(&json!({ "command": "echo $$ > pid; kept=2; sleep 300" }));
    let pid = until(|| std::fs::read_to_string(agent.path("pid")).ok().filter(|pid| pid.ends_with('\n')));
    drop(stream);
    until(|| (!runs(pid.trim())).then_some(()));
    s.prints("echo $kept", &["1"]);
}

#[test]
fn deleting_and_interrupting_end_the_session() {
    let agent = Agent::start();
    for target in ["/session/", "/command?id=", "/code?id="] {
        let s = session(&agent);
        let mut running =
            s.begin(&json!({ "command": "echo $$ > pid; trap '' TERM INT HUP; while :; do sleep 1; done" }));
        let mut waiting = s.begin(&json!({ "command": "echo never" }));
        is_accepted(&mut waiting);
        let pid = until(|| std::fs::read_to_string(agent.path("pid")).ok().filter(|pid| pid.ends_with('\n')));
        let answer = agent.delete(&format!("{target}{}", s.id));
        assert_eq!((answer.status, answer.header("content-length")), (200, Some("0")), "{target}");
        assert!(!runs(pid.trim()));
        for stream in [&mut running, &mut waiting] {
            let mut text = String::new();
            let mut buffer = [0; 4096];
            while !text.contains("0\r\n\r\n") {
                let count = stream.read(&mut buffer).unwrap();
                assert!(count > 0, "{text}");
                text.push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
            assert!(text.contains("\"type\":\"error\"") && !text.contains("never"), "{text}");
        }
        let gone = s.post(&json!({ "command": "true" }));
        assert_eq!((gone.status, &gone.json()["code"]), (404, &json!("CONTEXT_NOT_FOUND")));
        assert_eq!(agent.delete(&format!("/session/{}", s.id)).status, 404);
        std::fs::remove_file(agent.path("pid")).unwrap();
    }
    assert_eq!(agent.delete("/session/nope").json()["code"], "CONTEXT_NOT_FOUND");
}

#[test]
fn sessions_are_bounded() {
    let agent = Agent::start();
    let mut answer = agent.post("/session", &json!({}));
    let first = answer.json()["session_id"].as_str().unwrap().to_owned();
    for _ in 0..1000 {
        answer = agent.post("/session", &json!({}));
        if answer.status != 200 {
            break;
        }
    }
    assert_eq!((answer.status, &answer.json()["code"]), (503, &json!("SERVICE_UNAVAILABLE")));
    assert_eq!(agent.delete(&format!("/session/{first}")).status, 200);
    assert_eq!(agent.post("/session", &json!({})).status, 200);
}

#[test]
fn much_output_arrives_whole_and_a_slow_reader_slows_the_run() {
    let agent = Agent::start();
    let s = session(&agent);
    let answer = s.post(&json!({ "command": "seq 1 200000; echo \"$(( 1 + 1 ))\"" }));
    let text = answer.text();
    let lines = text.split("\n\n").filter(|frame| frame.contains("stdout")).count();
    assert_eq!(lines, 200_001);
    let mut slow = s.begin(&json!({ "command": "seq 1 3000000; touch over" }));
    slow.read_exact(&mut [0; 1000]).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    assert!(!agent.path("over").exists());
    drop(slow);
    s.prints("echo usable", &["usable"]);
}

#[test]
fn a_plain_sh_keeps_what_it_can() {
    let bin = tempfile::tempdir().unwrap();
    for name in ["sleep", "cat", "mkdir", "grep"] {
        let found = ["/bin", "/usr/bin"].map(|dir| format!("{dir}/{name}"));
        let found = found.iter().find(|path| std::path::Path::new(path).exists()).unwrap();
        std::os::unix::fs::symlink(found, bin.path().join(name)).unwrap();
    }
    for shell in ["/usr/bin/dash", "/bin/busybox"] {
        if !std::path::Path::new(shell).exists() {
            continue;
        }
        let sh = bin.path().join("sh");
        let _ = std::fs::remove_file(&sh);
        std::os::unix::fs::symlink(shell, &sh).unwrap();
        let mut command = Command::new(BINARY);
        command.env("PATH", bin.path());
        let agent = Agent::launch(command, &[], &[]);
        let s = session(&agent);
        s.prints("export A='two\nlines'; b=\"it's\"; f() { echo \"f $1\"; }; alias say='echo said'; mkdir -p d; cd d; umask 027; echo $0", &["sh"]);
        s.prints(
            "f 1; say it; echo \"$A $b\"; umask; cat; echo err >&2",
            &["f 1", "said it", "two", "lines it's", "0027", "err"],
        );
        let unclosed = s.run("echo 'unclosed");
        assert!(unclosed.ends_with(&failed("2", "exit status 2")), "{unclosed}");
        s.prints("f 2; set -x", &["f 2"]);
        let traced = s.run("set +x");
        assert!(traced.lines().count() == 2 && traced.contains("set +x"), "{traced}");
        assert_eq!(s.run("(exit 7)"), failed("7", "exit status 7"));
        assert_eq!(s.run("A=other; exit 3"), failed("3", "exit status 3"));
        s.prints("echo \"$A $b ${PWD##*/}\"; umask", &["two", "lines it's d", "0027"]);
        assert_eq!(
            s.events(&json!({ "command": "echo ${PWD##*/}", "cwd": "$b/../.." })),
            out(&agent.dir.path().file_name().unwrap().to_string_lossy()) + DONE
        );
    }
}

#[test]
fn without_a_shell_a_session_says_so() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command.env("PATH", empty.path());
    let agent = Agent::launch(command, &[], &[]);
    let s = session(&agent);
    let told = "no shell (bash or sh) in this image";
    assert_eq!(s.run("true"), failed(told, told));
}

#[test]
fn blank_lines_without_end_keep_nobody_from_anything() {
    let agent = Agent::start();
    let id = agent.post("/session", &json!({})).json()["session_id"].as_str().unwrap().to_owned();
    let run = |body: Value| agent.post(&format!("/session/{id}/run"), &body).golden();
    let killed = failed("-1", "signal: killed");
    assert!(run(json!({ "command": "yes ''", "timeout": 500 })).ends_with(&killed));
    // What stays behind writes on while nobody runs anything.
    assert!(run(json!({ "command": "yes '' & yes '' & echo $! > left; jobs -p > jobs" })).ends_with(DONE));
    for _ in 0..20 {
        assert_eq!(agent.get("/ping").status, 200);
    }
    assert!(run(json!({ "command": "kill $(cat jobs); echo over" })).contains(&out("over")));
}
