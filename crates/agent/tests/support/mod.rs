//! A running agent and the plainest possible HTTP client: what the tests compare are the bytes on the wire.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

pub const BINARY: &str = env!("CARGO_BIN_EXE_sandglass-agent");

pub const PING: &str = "{\"type\":\"ping\",";
/// How the stream of every run begins.
pub const HEAD: &str = "{\"type\":\"init\",\"text\":\"ID\",\"timestamp\":T}\n{\"type\":\"ping\",\"text\":\"pong\",\"timestamp\":T}\n";
/// How the stream of a run that succeeded ends.
pub const DONE: &str = "{\"type\":\"execution_complete\",\"timestamp\":T}\n";

/// An output line's event.
pub fn out(text: &str) -> String {
    format!("{{\"type\":\"stdout\",\"text\":\"{text}\",\"timestamp\":T}}\n")
}

/// The end of a run that did not succeed.
pub fn failed(value: &str, trace: &str) -> String {
    format!(
        "{{\"type\":\"error\",\"timestamp\":T,\"error\":{{\"ename\":\"CommandExecError\",\"evalue\":\"{value}\",\"traceback\":[\"{trace}\"]}}}}\n"
    )
}

/// Whether this is root; says so where it is not, and fails where nothing may be left out.
pub fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        assert!(std::env::var_os("CI").is_none(), "these tests need root");
        eprintln!("SKIPPED in part: not root");
    }
    root
}

pub struct Agent {
    pub child: Child,
    pub port: u16,
    pub dir: tempfile::TempDir,
}

pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The stream with every number after `timestamp` and `execution_time`, and the id, made constant. Without the pings that tell
    /// every three seconds that a run goes on: how many come is a matter of how busy the machine is.
    pub fn golden(&self) -> String {
        let mut out = String::new();
        for (place, frame) in self.text().split("\n\n").enumerate() {
            if frame.is_empty() || place > 1 && frame.starts_with(PING) {
                continue;
            }
            let mut frame = redact(frame, "\"timestamp\":");
            if let Some(at) = frame.find(",\"execution_time\":") {
                let rest = &frame[at + 18..];
                let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap();
                frame = format!("{}{}", &frame[..at], &rest[end..]);
            }
            if frame.contains("\"init\"") {
                let value: serde_json::Value = serde_json::from_str(&frame.replace(":T", ":0")).unwrap();
                frame = frame.replace(value["text"].as_str().unwrap(), "ID");
            }
            out.push_str(&frame);
            out.push('\n');
        }
        out
    }

    pub fn init_id(&self) -> String {
        let text = self.text();
        let first: serde_json::Value = serde_json::from_str(text.split("\n\n").next().unwrap()).unwrap();
        assert_eq!(first["type"], "init");
        first["text"].as_str().unwrap().to_owned()
    }
}

fn redact(frame: &str, key: &str) -> String {
    let at = frame.find(key).unwrap_or_else(|| panic!("no {key} in {frame}")) + key.len();
    let end = frame[at..].find(|c: char| !c.is_ascii_digit()).unwrap();
    assert_eq!(end, 13, "milliseconds");
    format!("{}T{}", &frame[..at], &frame[at + end..])
}

/// Against hanging; nothing is measured by it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Below those that the kernel gives away by itself, so that nobody gets it in between. Not found out by listening: a closed socket
/// lives on for a moment in a child that another test starts just then.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = u32::from(NEXT.fetch_add(1, Ordering::Relaxed)) + std::process::id() * 500;
        let port = u16::try_from(10_000 + number % 20_000).unwrap();
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

/// A program at another place. Copied by another process: a child of this one that is just being started could hold the copy open
/// for writing, and then it could not be run.
pub fn copy_program(from: &str, to: &std::path::Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

/// Whether a process runs; one that nobody has waited for does not.
pub fn runs(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

impl Agent {
    pub fn start() -> Self {
        Self::start_with(&[], &[])
    }

    pub fn start_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        Self::launch(Command::new(BINARY), args, env)
    }

    /// `command` is the agent, or a program that ends up running it.
    pub fn launch(mut command: Command, args: &[&str], env: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let child = command
            .args(["--port", &port.to_string()])
            .args(args)
            .current_dir(dir.path())
            .env("EXECD_ENVS", dir.path().join("env"))
            .env("EXECD_ACCESS_TOKEN", "")
            // Agents keep hooks there.
            .env("HOME", dir.path())
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Agent { child, port, dir };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "the agent does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        agent
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub fn send(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        let mut request = format!("{method} {target} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n");
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        if !headers.iter().any(|(n, _)| *n == "Transfer-Encoding") {
            request.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        // An early refusal may close the connection before the body is out.
        let _ = stream.write_all(body);
        let mut raw = Vec::new();
        let _ = stream.read_to_end(&mut raw);
        parse(&raw)
    }

    pub fn get(&self, target: &str) -> Answer {
        self.send("GET", target, &[], b"")
    }

    pub fn delete(&self, target: &str) -> Answer {
        self.send("DELETE", target, &[], b"")
    }

    pub fn post(&self, target: &str, body: &serde_json::Value) -> Answer {
        self.send("POST", target, &[], body.to_string().as_bytes())
    }

    pub fn shell(&self, command: &str) -> Answer {
        self.post("/command", &serde_json::json!({ "command": command }))
    }

    /// Starts a foreground command and returns its stream once the id has arrived.
    pub fn open_stream(&self, body: &serde_json::Value) -> (TcpStream, String) {
        let mut stream = self.connect();
        let body = body.to_string();
        write!(stream, "POST /command HTTP/1.1\r\nHost: b\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .unwrap();
        let mut seen = String::new();
        let mut buffer = [0; 4096];
        loop {
            let count = stream.read(&mut buffer).unwrap();
            assert!(count > 0, "closed after {seen}");
            seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
            if let Some(at) = seen.find("\"init\",\"text\":\"") {
                let id = &seen[at + 15..];
                if let Some(end) = id.find('"') {
                    return (stream, id[..end].to_owned());
                }
            }
        }
    }

    /// Waits until a status request says the command has ended.
    pub fn wait_ended(&self, id: &str) -> serde_json::Value {
        until(|| {
            let status = self.get(&format!("/command/status/{id}")).json();
            (status["running"] == false).then_some(status)
        })
    }
}

impl Agent {
    /// Ends what the agent started, which would go on without it.
    fn end_commands(&self) {
        let own = self.child.id().to_string();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
            let group = fields.get(2).and_then(|group| group.parse::<i32>().ok());
            if fields.get(1) == Some(&own.as_str())
                && let Some(group) = group.and_then(rustix::process::Pid::from_raw)
                && entry.file_name().to_string_lossy() == group.as_raw_nonzero().to_string()
            {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.end_commands();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls for a condition that other processes bring about.
pub fn until<T>(mut check: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < deadline, "condition not met in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn parse(raw: &[u8]) -> Answer {
    let split = raw.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| {
        panic!("no answer head in {:?}", String::from_utf8_lossy(&raw[..raw.len().min(300)]))
    });
    let head = String::from_utf8(raw[..split].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let rest = &raw[split + 4..];
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(rest) } else { rest.to_vec() };
    Answer { status, head, body }
}

fn unchunk(mut raw: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = raw.windows(2).position(|w| w == b"\r\n").expect("a chunk size");
        let size = usize::from_str_radix(std::str::from_utf8(&raw[..line]).unwrap(), 16).unwrap();
        raw = &raw[line + 2..];
        if size == 0 {
            return body;
        }
        body.extend_from_slice(&raw[..size]);
        raw = &raw[size + 2..];
    }
}

/// Of a multipart form: name, file name, content.
pub type Part<'a> = (&'a str, Option<&'a str>, &'a [u8]);

pub fn form(parts: &[Part<'_>]) -> (String, Vec<u8>) {
    let boundary = "opensandbox_0123_456";
    let mut body = Vec::new();
    for (name, file, content) in parts {
        body.extend_from_slice(
            format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"").as_bytes(),
        );
        if let Some(file) = file {
            body.extend_from_slice(format!("; filename=\"{file}\"").as_bytes());
        }
        body.extend_from_slice(b"\r\nContent-Type: application/octet-stream\r\n\r\n");
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    (format!("multipart/form-data; boundary={boundary}"), body)
}

pub fn chunked(body: &[u8], size: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in body.chunks(size) {
        out.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        out.extend_from_slice(piece);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}
