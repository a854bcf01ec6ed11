//! `/pty`: the messages of a terminal, what is replayed, who may connect, and how shells end and begin again.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message, WebSocket, client};

use crate::support::{Agent, BINARY, until};

struct Socket(WebSocket<TcpStream>);

/// What a terminal sent, one thing of each kind.
#[derive(Debug, PartialEq)]
enum Seen {
    Out(Vec<u8>),
    Err(Vec<u8>),
    Replay(u64, Vec<u8>),
    Text(Value),
    Closed(u16, String),
}

/// With a terminal type that makes a prompt plain text.
fn start() -> Agent {
    Agent::start_with(&[], &[("TERM", "dumb")])
}

fn open(agent: &Agent, body: &Value) -> String {
    let answer = agent.post("/pty", body);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["session_id"].as_str().unwrap().to_owned()
}

fn dial(agent: &Agent, target: &str, headers: &[(&'static str, &str)]) -> Result<Socket, (u16, Value)> {
    let mut request = format!("ws://127.0.0.1:{}{target}", agent.port).into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().unwrap());
    }
    match client(request, agent.connect()) {
        Ok((socket, _)) => Ok(Socket(socket)),
        Err(tokio_tungstenite::tungstenite::HandshakeError::Failure(Error::Http(answer))) => {
            let body = answer.body().clone().unwrap_or_default();
            Err((answer.status().as_u16(), serde_json::from_slice(&body).unwrap_or_default()))
        }
        Err(error) => panic!("{error}"),
    }
}

fn connect(agent: &Agent, id: &str, query: &str) -> Socket {
    dial(agent, &format!("/pty/{id}/ws?{query}"), &[]).map_err(|refused| panic!("{refused:?}")).unwrap()
}

impl Socket {
    fn see(&mut self) -> Seen {
        loop {
            match self.0.read().unwrap() {
                Message::Binary(bytes) => {
                    let rest = &bytes[1..];
                    return match bytes[0] {
                        1 => Seen::Out(rest.to_vec()),
                        2 => Seen::Err(rest.to_vec()),
                        3 => Seen::Replay(
                            u64::from_be_bytes(rest[..8].try_into().unwrap()),
                            rest[8..].to_vec(),
                        ),
                        other => panic!("frame {other}"),
                    };
                }
                Message::Text(text) => return Seen::Text(serde_json::from_str(&text).unwrap()),
                Message::Close(Some(close)) => {
                    return Seen::Closed(close.code.into(), close.reason.to_string());
                }
                Message::Close(None) => return Seen::Closed(1005, String::new()),
                _ => {}
            }
        }
    }

    fn text(&mut self) -> Value {
        match self.see() {
            Seen::Text(value) => value,
            other => panic!("{other:?}"),
        }
    }

    fn connected(&mut self, id: &str, mode: &str, role: &str) {
        assert_eq!(self.text(), json!({ "type": "connected", "session_id": id, "mode": mode, "role": role }));
    }

    /// Output, also in replays, until it holds the text; all of it.
    fn wait_for(&mut self, text: &str) -> String {
        let mut all = Vec::new();
        loop {
            // Only what is new: a reader that searches megabytes again and again is too slow to be kept.
            let searched = all.len().saturating_sub(text.len());
            match self.see() {
                Seen::Out(bytes) | Seen::Err(bytes) | Seen::Replay(_, bytes) => all.extend(bytes),
                other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&all)),
            }
            if all[searched..].windows(text.len()).any(|piece| piece == text.as_bytes()) {
                return String::from_utf8_lossy(&all).into_owned();
            }
        }
    }

    fn kind(&mut self, text: &str) {
        self.0.send(Message::Binary([b"\0", text.as_bytes()].concat().into())).unwrap();
    }

    fn say(&mut self, value: &Value) {
        self.0.send(Message::Text(value.to_string().into())).unwrap();
    }

    /// Everything until the exit; its code, and that the connection is closed as it should be.
    fn exit(&mut self) -> i64 {
        loop {
            if let Seen::Text(value) = self.see() {
                assert_eq!(value["type"], "exit", "{value}");
                assert_eq!(self.see(), Seen::Closed(1000, "process exited".into()));
                return value["exit_code"].as_i64().unwrap();
            }
        }
    }
}

#[test]
fn a_terminal_echoes_resizes_and_is_a_terminal() {
    let agent = Agent::start_with(&[], &[("JUPYTER_TOKEN", "secret"), ("TERM", "dumb")]);
    std::fs::write(agent.path("env"), "FROM_FILE=yes\n").unwrap();
    let id = open(&agent, &json!({ "cwd": "made/$FROM_FILE" }));
    assert_eq!(
        agent.get(&format!("/pty/{id}")).json(),
        json!({ "session_id": id, "running": false, "output_offset": 0 })
    );
    let mut socket = connect(&agent, &id, "");
    socket.connected(&id, "pty", "holder");
    socket.kind("PS1=; stty size; tty | grep -c /dev/pts; echo [$FROM_FILE$JUPYTER_TOKEN$EXECD_ENVS] \"${PWD##*/}\"\n");
    let shown = socket.wait_for("[yes] yes");
    assert!(shown.contains("24 80\r\n1\r\n"), "{shown:?}");
    socket.say(&json!({ "type": "resize", "cols": 132, "rows": 43 }));
    socket.say(&json!({ "type": "stdin", "data": "stty size\n" }));
    socket.wait_for("43 132\r\n");
    socket.say(&json!({ "type": "ping" }));
    assert_eq!(socket.text(), json!({ "type": "pong" }));
    socket.say(&json!({ "type": "dance" }));
    assert_eq!(socket.text()["code"], "INVALID_FRAME");
    // Ctrl-C reaches the program in front, and so does the signal frame.
    for interrupt in [true, false] {
        socket.kind("sleep 300; echo over$?\n");
        // By its own name, which it has once it is the terminal's foreground.
        until(|| family(&agent).iter().any(|name| name == "sleep").then_some(()));
        if interrupt {
            socket.kind("\x03");
        } else {
            socket.say(&json!({ "type": "signal", "signal": "SIGINT" }));
        }
        until(|| (children(&agent) == 1).then_some(()));
    }
    let info = agent.get(&format!("/pty/{id}")).json();
    assert!(info["running"] == true && info["output_offset"].as_u64() > Some(40), "{info}");
    socket.kind("exit 5\n");
    assert_eq!(socket.exit(), 5);
}

/// How many descendants the agent has.
fn children(agent: &Agent) -> usize {
    family(agent).len()
}

/// The names of the agent's descendants.
fn family(agent: &Agent) -> Vec<String> {
    let out = Command::new("ps").args(["-eo", "pid=,ppid=,comm="]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let all: Vec<(u32, u32, &str)> = text
        .lines()
        .map(|line| {
            let mut words = line.split_whitespace();
            let mut number = || words.next().unwrap().parse().unwrap();
            (number(), number(), words.next().unwrap_or_default())
        })
        .collect();
    let mut found = vec![(agent.child.id(), "")];
    let mut at = 0;
    while at < found.len() {
        let parent = found[at].0;
        found.extend(all.iter().filter(|one| one.1 == parent).map(|one| (one.0, one.2)));
        at += 1;
    }
    found[1..].iter().map(|one| one.1.to_owned()).collect()
}

#[test]
fn output_is_replayed_from_an_offset_and_a_shell_outlives_its_connection() {
    let agent = start();
    let id = open(&agent, &json!({}));
    let mut socket = connect(&agent, &id, "");
    socket.connected(&id, "pty", "holder");
    socket.kind("PS1=; stty -echo; kept=1; echo mark$kept\n");
    socket.wait_for("mark1\r\n");
    drop(socket);
    let before = until(|| {
        let info = agent.get(&format!("/pty/{id}")).json();
        assert_eq!(info["running"], true);
        dial(&agent, &format!("/pty/{id}/ws"), &[]).ok()
    });
    let mut socket = before;
    let Seen::Replay(0, all) = socket.see() else { panic!() };
    assert!(String::from_utf8_lossy(&all).ends_with("mark1\r\n"));
    socket.connected(&id, "pty", "holder");
    socket.kind("echo again$kept\n");
    assert_eq!(socket.wait_for("again1\r\n"), "again1\r\n");
    let end = agent.get(&format!("/pty/{id}")).json()["output_offset"].as_u64().unwrap();
    drop(socket);
    let at = |since: u64| until(|| dial(&agent, &format!("/pty/{id}/ws?since={since}"), &[]).ok());
    let mut socket = at(end - 4);
    assert_eq!(socket.see(), Seen::Replay(end - 4, b"n1\r\n".to_vec()));
    drop(socket);
    for since in [end, end + 100] {
        at(since).connected(&id, "pty", "holder");
    }
}

#[test]
fn a_replay_is_at_most_a_mebibyte_and_tells_where_it_begins() {
    let agent = start();
    let id = open(&agent, &json!({ "command": "head -c 3000000 /dev/zero | tr '\\0' x; sleep 300" }));
    drop(connect(&agent, &id, "pty=0"));
    until(|| (agent.get(&format!("/pty/{id}")).json()["output_offset"] == 3_000_000).then_some(()));
    let mut socket = until(|| dial(&agent, &format!("/pty/{id}/ws"), &[]).ok());
    let Seen::Replay(from, first) = socket.see() else { panic!() };
    let Seen::Replay(next, rest) = socket.see() else { panic!() };
    assert_eq!((from, next), (3_000_000 - (1 << 20), from + first.len() as u64));
    assert_eq!((first.len(), first.len() + rest.len()), ((1 << 20) - 9, 1 << 20));
    socket.connected(&id, "pipe", "holder");
}

#[test]
fn pipes_tell_their_streams_apart() {
    let agent = start();
    let id = open(&agent, &json!({}));
    let mut socket = connect(&agent, &id, "pty=0");
    socket.connected(&id, "pipe", "holder");
    socket.kind("echo out\n");
    assert_eq!(socket.see(), Seen::Out(b"out\n".to_vec()));
    socket.kind("echo err >&2\n");
    assert_eq!(socket.see(), Seen::Err(b"err\n".to_vec()));
    // Not before: what is in both pipes is read in any order.
    socket.kind("test -t 0 || echo none\n");
    assert_eq!(socket.see(), Seen::Out(b"none\n".to_vec()));
    socket.say(&json!({ "type": "signal", "signal": "SIGKILL" }));
    assert_eq!(socket.exit(), -1);
    // The same terminal, another shell; what the first one wrote comes before.
    assert_eq!(agent.get(&format!("/pty/{id}")).json()["running"], false);
    let mut socket = connect(&agent, &id, "pty=1&since=4");
    assert_eq!(socket.see(), Seen::Replay(4, b"err\nnone\n".to_vec()));
    socket.connected(&id, "pty", "holder");
    socket.kind("exit\n");
    assert_eq!(socket.exit(), 0);
}

#[test]
fn everything_written_before_the_exit_arrives_before_it() {
    let agent = start();
    for query in ["", "pty=0"] {
        let id = open(&agent, &json!({ "command": "seq 1 100000; exit 3" }));
        let mut socket = connect(&agent, &id, query);
        let mut all = Vec::new();
        let code = loop {
            match socket.see() {
                Seen::Out(bytes) | Seen::Replay(_, bytes) => all.extend(bytes),
                Seen::Text(value) if value["type"] == "exit" => break value["exit_code"].as_i64(),
                Seen::Text(_) => {}
                other => panic!("{other:?}"),
            }
        };
        let lines: Vec<String> = String::from_utf8(all).unwrap().lines().map(str::to_owned).collect();
        assert_eq!((lines.len(), lines[99_999].as_str(), code), (100_000, "100000", Some(3)));
    }
}

#[test]
fn one_may_type_and_another_may_take_over() {
    let agent = start();
    assert_eq!(agent.get("/pty/nope/ws").json()["code"], "CONTEXT_NOT_FOUND");
    assert_eq!(dial(&agent, "/pty/nope/ws", &[]).err().unwrap().0, 404);
    let id = open(&agent, &json!({}));
    let plain = agent.get(&format!("/pty/{id}/ws"));
    assert_eq!((plain.status, &plain.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")));
    let mut first = connect(&agent, &id, "");
    first.connected(&id, "pty", "holder");
    let (status, body) = dial(&agent, &format!("/pty/{id}/ws"), &[]).err().unwrap();
    assert_eq!((status, &body["code"]), (409, &json!("ALREADY_CONNECTED")));
    let plain = agent.get(&format!("/pty/{id}/ws?takeover=1"));
    assert_eq!((plain.status, &plain.json()["code"]), (409, &json!("ALREADY_CONNECTED")));
    first.kind("PS1=; stty -echo; echo first\n");
    first.wait_for("first\r\n");
    let mut second = connect(&agent, &id, "takeover=1");
    let closed = loop {
        if let closed @ Seen::Closed(..) = first.see() {
            break closed;
        }
    };
    assert_eq!(closed, Seen::Closed(4001, "TAKEN_OVER".into()));
    assert!(matches!(second.see(), Seen::Replay(0, _)));
    second.connected(&id, "pty", "holder");
    second.kind("echo second\n");
    second.wait_for("second\r\n");
    // One that does not read at all is evicted, too.
    second.kind("yes | head -c 20000000; echo; echo end\n");
    std::thread::sleep(Duration::from_millis(300));
    connect(&agent, &id, "takeover=1").wait_for("y\r\n");
}

#[test]
fn viewers_watch() {
    let agent = start();
    let command = "stty -echo; echo ready; read a; echo $a; read b; yes | head -c 8000000; echo all seen; read c; exit 9";
    let id = open(&agent, &json!({ "command": command }));
    let (status, body) = dial(&agent, &format!("/pty/{id}/ws?mode=viewer"), &[]).err().unwrap();
    assert_eq!((status, &body["code"]), (409, &json!("VIEWER_NOT_RUNNING")));
    let mut holder = connect(&agent, &id, "");
    holder.connected(&id, "pty", "holder");
    holder.wait_for("ready\r\n");
    let end = agent.get(&format!("/pty/{id}")).json()["output_offset"].as_u64().unwrap();
    let mut viewers: Vec<Socket> =
        (0..3).map(|_| connect(&agent, &id, &format!("mode=viewer&since={end}"))).collect();
    for viewer in &mut viewers {
        viewer.connected(&id, "pty", "viewer");
    }
    holder.kind("shown\n");
    for viewer in &mut viewers {
        assert_eq!(viewer.see(), Seen::Replay(end, b"shown\r\n".to_vec()));
    }
    viewers[0].say(&json!({ "type": "ping" }));
    assert_eq!(viewers[0].text(), json!({ "type": "pong" }));
    for _ in 0..5 {
        viewers[0].kind("exit\n");
    }
    for _ in 0..5 {
        assert_eq!(viewers[0].text()["code"], "READ_ONLY");
    }
    assert_eq!(viewers[0].see(), Seen::Closed(1008, "READ_ONLY".into()));
    // A holder that stops reading does not stop those that read.
    holder.kind("go\n");
    viewers[1].wait_for("all seen");
    holder.kind("end\n");
    assert_eq!(viewers[1].exit(), 9);
}

#[test]
fn the_only_reader_misses_nothing_however_slow() {
    let agent = start();
    let id = open(&agent, &json!({ "command": "seq 1 1000000; touch over; sleep 300" }));
    let mut socket = connect(&agent, &id, "pty=0");
    std::thread::sleep(Duration::from_millis(500));
    assert!(!agent.path("over").exists());
    let mut all = Vec::new();
    while !all.ends_with(b"\n1000000\n") {
        match socket.see() {
            Seen::Out(bytes) | Seen::Replay(_, bytes) => all.extend(bytes),
            Seen::Text(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(all.len(), 6_888_896);
}

#[test]
fn input_that_nobody_takes_does_not_stop_signals() {
    let agent = start();
    let id = open(&agent, &json!({ "command": "sleep 300" }));
    let mut socket = connect(&agent, &id, "pty=0");
    socket.connected(&id, "pipe", "holder");
    let block = "x".repeat(60_000);
    for _ in 0..10 {
        socket.kind(&block);
    }
    socket.say(&json!({ "type": "signal", "signal": "SIGTERM" }));
    assert_eq!(socket.exit(), -1);
}

#[test]
fn deleting_kills_the_shell_and_its_jobs() {
    let agent = start();
    let id = open(&agent, &json!({}));
    let mut socket = connect(&agent, &id, "");
    socket.connected(&id, "pty", "holder");
    socket.kind("sleep 301 & nohup sleep 302 & trap '' HUP TERM; sleep 303\n");
    until(|| (children(&agent) == 4).then_some(()));
    let answer = agent.delete(&format!("/pty/{id}"));
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("0")));
    until(|| (children(&agent) == 0).then_some(()));
    assert_eq!(socket.exit(), -1);
    for answer in [agent.get(&format!("/pty/{id}")), agent.delete(&format!("/pty/{id}"))] {
        assert_eq!((answer.status, &answer.json()["code"]), (404, &json!("CONTEXT_NOT_FOUND")));
    }
}

#[test]
fn tokens_and_the_own_port_apply_to_upgrades() {
    let agent = Agent::start_with(&["--access-token", "tok"], &[]);
    let token = [("X-EXECD-ACCESS-TOKEN", "tok")];
    let id = agent.send("POST", "/pty", &token, b"").json()["session_id"].as_str().unwrap().to_owned();
    let target = format!("/proxy/{}/pty/{id}/ws", agent.port);
    assert_eq!(dial(&agent, &target, &[]).err().unwrap().0, 401);
    let mut socket = dial(&agent, &target, &[("x-execd-access-token", "tok")]).ok().unwrap();
    socket.connected(&id, "pty", "holder");
    socket.kind("exit 2\n");
    assert_eq!(socket.exit(), 2);
    assert_eq!(agent.send("POST", "/pty", &token, br#"{"cwd":"/dev/null/x"}"#).status, 500);
    assert_eq!(agent.send("POST", "/pty", &token, b"{").status, 400);
}

#[test]
fn where_no_shell_can_start_the_connection_says_why() {
    let empty = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command.env("PATH", empty.path());
    let agent = Agent::launch(command, &[], &[]);
    let id = open(&agent, &json!({}));
    for query in ["", "pty=0"] {
        let mut socket = until(|| dial(&agent, &format!("/pty/{id}/ws?{query}"), &[]).ok());
        let told = socket.text();
        assert_eq!((&told["type"], &told["code"]), (&json!("error"), &json!("START_FAILED")));
        assert!(told["error"].as_str().unwrap().contains("no shell"), "{told}");
        assert!(matches!(socket.see(), Seen::Closed(1011, _)));
    }
    assert_eq!(agent.get("/ping").status, 200);
}
