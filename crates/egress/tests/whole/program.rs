//! The program as an operator starts it, and the API as the control plane calls it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::stage::{BOX, Place, Stage};
use super::world::RESOLVER;

const PATIENCE: Duration = Duration::from_secs(60);

pub const TOKEN: &str = "a-token";

/// A running program.
pub struct Program {
    child: Child,
    lines: Receiver<Value>,
    /// Everything that it said so far.
    pub told: Vec<Value>,
}

/// Folders that outlive it.
pub struct Home {
    pub folder: TempDir,
    pub environment: Vec<(String, String)>,
}

impl Home {
    pub fn new(policy: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let environment = [
            ("OPENSANDBOX_EGRESS_RULES", policy.to_owned()),
            ("OPENSANDBOX_EGRESS_TOKEN", TOKEN.to_owned()),
            ("OPENSANDBOX_EGRESS_POLICY_FILE", path("policy.json")),
            ("OPENSANDBOX_EGRESS_DNS_UPSTREAM", RESOLVER.to_owned()),
            ("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_TRUST_DIR", path("trust")),
            ("SANDGLASS_EGRESS_CA_DIR", path("shown")),
            ("SANDGLASS_EGRESS_ALWAYS_DIR", path("always")),
        ];
        std::fs::create_dir(folder.path().join("trust")).unwrap();
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
        Self { folder, environment }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn trust(self, authority: &str) -> Self {
        std::fs::write(self.folder.path().join("trust/world.pem"), authority).unwrap();
        self
    }
}

impl Program {
    /// Starts it, or one of another build that the variable `SANDGLASS_TEST_EGRESS` names, and waits until it says that
    /// it enforces.
    pub fn start(stage: &Stage, home: &Home) -> Self {
        let program = std::env::var_os("SANDGLASS_TEST_EGRESS");
        let mut command =
            Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_sandglass-egress").into()));
        command
            .env_clear()
            .envs(home.environment.iter().cloned())
            .stdout(Stdio::piped())
            .stdin(Stdio::null());
        match stage.place {
            Place::Shared => command.env("SANDGLASS_EGRESS_PLACEMENT", "shared"),
            Place::Gateway => {
                command.env("SANDGLASS_EGRESS_PLACEMENT", "gateway").env("SANDGLASS_EGRESS_BOX", BOX)
            }
        };
        let mut child = stage.ground().within(|| command.spawn().unwrap());
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut program = Self { child, lines, told: Vec::new() };
        program.await_line(|line| line["ready"] == true);
        program
    }

    /// The first line that was not looked at yet and fits.
    pub fn await_line(&mut self, fits: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self
                .lines
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("it never said so: {:#?}", self.told));
            self.told.push(line.clone());
            if fits(&line) {
                return line;
            }
        }
    }

    pub fn supervisor(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn worker(&self) -> Pid {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let end = Instant::now() + PATIENCE;
        loop {
            let children = std::fs::read_to_string(&path).unwrap();
            if let Some(child) = children.split_whitespace().next() {
                return Pid::from_raw(child.parse().unwrap()).unwrap();
            }
            assert!(Instant::now() < end, "there is no worker");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends the supervisor with a signal and waits until both processes are gone.
    pub fn end(&mut self, signal: Signal) {
        let worker = format!("/proc/{}", self.worker().as_raw_nonzero());
        kill_process(self.supervisor(), signal).unwrap();
        self.child.wait().unwrap();
        let end = Instant::now() + PATIENCE;
        // A process lets go of its memory, and with it of `exe`, before it lets go of its sockets.
        let runs = || {
            let threads = std::fs::read_dir(format!("{worker}/task")).ok()?;
            let stats = threads.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("stat")).ok());
            Some(stats.into_iter().any(|stat| !stat.contains(") Z ")))
        };
        while runs() == Some(true) {
            assert!(Instant::now() < end, "the worker lives on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls the control API from where the control plane is. Returns status and body.
pub fn call(stage: &Stage, method: &str, path: &str, body: &str) -> (u16, String) {
    stage.world.within(|| {
        let address: SocketAddr = format!("{BOX}:18080").parse().unwrap();
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nOPENSANDBOX-EGRESS-AUTH: {TOKEN}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    })
}

/// A change of the policy that has to succeed.
pub fn change(stage: &Stage, method: &str, body: &str) {
    let (status, told) = call(stage, method, "/policy", body);
    assert_eq!(status, 200, "{told}");
}
