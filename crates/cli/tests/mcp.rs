//! `mcp` against a stub, message by message: what is on the streams, what a cancellation and an end of input do.

#![expect(clippy::unwrap_used, reason = "a stub or helper that fails is a test that fails")]

mod stub;

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stub::{ID, KEY, Stub, program, stderr, stdout};

struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    heard: String,
}

impl Client {
    fn start(stub: &Stub, arguments: &[&str]) -> Self {
        let mut command = stub.command(&[&["mcp"], arguments].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut client = Self { input: child.stdin.take(), output, child, heard: String::new() };
        client.send(&json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": { "name": "t", "version": "1" },
        } }));
        assert_eq!(client.receive()["result"]["serverInfo"]["name"], "sandglass");
        client.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }));
        client
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    /// The next message; everything on standard output has to be one.
    fn receive(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.output.read_line(&mut line).unwrap() > 0, "the program ended");
        self.heard.push_str(&line);
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, id: u32, tool: &str, arguments: Value) {
        self.send(&json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {
            "name": tool, "arguments": arguments, "_meta": { "progressToken": format!("p-{id}") },
        } }));
    }

    /// The answer to a request, and the texts of the progress before it.
    fn answer(&mut self, id: u32) -> (Value, Vec<String>) {
        let mut progress = Vec::new();
        loop {
            let message = self.receive();
            if message["method"] == "notifications/progress" {
                progress.push(message["params"]["message"].as_str().unwrap().to_owned());
            } else if message["id"] == id {
                return (message, progress);
            }
        }
    }

    fn call(&mut self, id: u32, tool: &str, arguments: Value) -> Value {
        self.ask(id, tool, arguments);
        self.answer(id).0["result"].clone()
    }

    /// Closes our end; exit code, and everything that was said.
    fn leave(mut self) -> (Option<i32>, String) {
        drop(self.input.take());
        self.end()
    }

    fn end(mut self) -> (Option<i32>, String) {
        let mut said = self.heard;
        self.output.read_to_string(&mut said).unwrap();
        let code = self.child.wait().unwrap().code();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (code, said)
    }
}

fn eventually(claim: impl Fn() -> bool) {
    let start = Instant::now();
    while !claim() {
        assert!(start.elapsed() < Duration::from_secs(60), "it did not become true");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_command_is_answered_with_both_streams_and_reported_on_the_way() {
    let stub = Stub::start();
    let mut client = Client::start(&stub, &[]);
    client.ask(1, "command_run", json!({ "sandbox_id": ID, "command": "talk now", "timeout_seconds": 2 }));
    let (answer, progress) = client.answer(1);
    let told = &answer["result"]["structuredContent"];
    assert_eq!(told["stdout"]["text"], "h\u{e9}llo\n\n<end>\n");
    assert_eq!(
        (&told["stderr"]["text"], &told["exit_code"], &told["id"]),
        (&json!("oops\n"), &json!(0), &json!("c0ffee"))
    );
    assert!(progress.concat().contains("h\u{e9}llo"));
    assert_eq!(stub.seen(|seen| seen.bodies.pop()), Some(json!({ "command": "talk now", "timeout": 2000 })));
    let seven = client.call(2, "command_run", json!({ "sandbox_id": ID, "command": "seven" }));
    assert_eq!((&seven["isError"], &seven["structuredContent"]["exit_code"]), (&json!(false), &json!(7)));
    let cut = client.call(3, "command_run", json!({ "sandbox_id": ID, "command": "abort" }));
    assert_eq!(
        (&cut["isError"], &cut["_meta"]["sandglass/error"]["code"]),
        (&json!(true), &json!("STREAM_CUT"))
    );
    let (code, said) = client.leave();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains(KEY), "{said}");
}

#[test]
fn a_cancelled_command_is_interrupted_and_not_answered() {
    let stub = Stub::start();
    let mut client = Client::start(&stub, &[]);
    client.ask(1, "command_run", json!({ "sandbox_id": ID, "command": "wait" }));
    eventually(|| stub.was_asked(&format!("POST /v1/sandboxes/{ID}/proxy/44772/command")));
    client.send(
        &json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 1 } }),
    );
    eventually(|| stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}/proxy/44772/command?id=c0ffee")));
    let after = client.call(2, "sandbox_get_info", json!({ "sandbox_id": ID }));
    assert_eq!(after["structuredContent"]["id"], ID);
    let (code, said) = client.leave();
    assert_eq!(code, Some(0));
    assert!(!said.contains("\"id\":1,"), "{said}");
}

#[test]
fn a_command_is_interrupted_when_a_signal_ends_the_server() {
    let stub = Stub::start();
    let mut client = Client::start(&stub, &[]);
    client.ask(1, "command_run", json!({ "sandbox_id": ID, "command": "wait" }));
    eventually(|| stub.was_asked(&format!("POST /v1/sandboxes/{ID}/proxy/44772/command")));
    let pid = Pid::from_raw(i32::try_from(client.child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(client.end().0, Some(0));
    assert!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}/proxy/44772/command?id=c0ffee")));
}

#[test]
fn what_was_created_stays_and_is_named_or_is_cleaned_up() {
    for (arguments, cleaned) in [(&[][..], false), (&["--cleanup"][..], true)] {
        let stub = Stub::start();
        let mut client = Client::start(&stub, arguments);
        let made = client.call(1, "sandbox_create", json!({ "image": "tools:1" }));
        assert_eq!(made["structuredContent"]["ready"], true);
        let (code, said) = client.leave();
        assert_eq!(code, Some(0));
        assert_eq!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}")), cleaned);
        assert_eq!(said.contains("stay until they expire"), !cleaned, "{said}");
    }
}

#[test]
fn a_refusal_keeps_the_servers_code_message_and_request() {
    let stub = Stub::start();
    let mut client = Client::start(&stub, &[]);
    let answer = client.call(1, "sandbox_create", json!({ "image": "nosuch" }));
    assert_eq!(answer["isError"], true);
    let text = answer["content"][0]["text"].as_str().unwrap();
    assert_eq!(text, "there is no image nosuch (IMAGE::NOT_FOUND, HTTP 404, request req-42)");
    assert_eq!(client.leave().0, Some(0));
}

#[test]
fn a_client_that_asks_nothing_is_no_error() {
    let output = program(&["mcp"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0), "{}", stderr(&output));
}

#[test]
fn what_the_command_line_cannot_mean_is_refused_without_a_word_on_the_protocols_stream() {
    let output = Stub::start().run(&["mcp", "--transport", "pigeon"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), String::new()), "{}", stderr(&output));
}
