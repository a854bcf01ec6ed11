//! A server on a loopback port with a folder of keys, and the clients that know it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use sandglass_sshd::{
    Access, Account, AuthorizedKey, Event, Forwarding, HostKey, Launch, Limits, LiteralNames, LocalLaunch,
    Program, PublicKey, Server, Settings, SftpProgram, Started,
};
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Runtime;
use tokio::sync::watch;

pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Host {
    pub server: Server,
    pub port: u16,
    pub folder: TempDir,
    pub access: watch::Sender<Arc<Access>>,
    pub refusals: Arc<Mutex<Vec<String>>>,
    pub runtime: Runtime,
}

/// `tester` is who runs the tests; `nobody` is somebody else, where that is possible. Both live in the host's folder.
struct Accounts {
    home: PathBuf,
    processes: LocalLaunch,
}

impl Launch for Accounts {
    fn account(&self, login: &str) -> Option<Account> {
        let id = match login {
            "tester" => rustix::process::geteuid().as_raw(),
            "nobody" => 65534,
            _ => return None,
        };
        Some(Account {
            name: login.to_owned(),
            uid: id,
            gid: if login == "tester" { rustix::process::getegid().as_raw() } else { 65534 },
            groups: vec![],
            home: self.home.clone(),
            shell: "/bin/bash".into(),
            env: BTreeMap::from([("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())]),
        })
    }

    fn start(&self, program: Program) -> io::Result<Started> {
        self.processes.start(program)
    }
}

pub struct Options {
    pub forwarding: Forwarding,
    pub limits: Limits,
    pub clock: fn() -> SystemTime,
}

impl Default for Options {
    fn default() -> Self {
        Options { forwarding: Forwarding::Off, limits: Limits::default(), clock: SystemTime::now }
    }
}

impl Host {
    /// With one key, `user`, that may do everything.
    pub fn start() -> Self {
        Self::with(Options::default())
    }

    pub fn with(options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home");
        std::fs::create_dir(&home).unwrap();
        for path in [folder.path(), &home] {
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            std::fs::set_permissions(path, open).unwrap();
        }
        let (access, receiver) = watch::channel(Arc::default());
        let refusals: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = Arc::clone(&refusals);
        let settings = Settings {
            host_key: HostKey::load_or_create(&folder.path().join("host_key")).unwrap(),
            access: receiver,
            launch: Arc::new(Accounts { home, processes: LocalLaunch::default() }),
            resolve: Arc::new(LiteralNames),
            clock: Arc::new(options.clock),
            observe: Arc::new(move |event| {
                if let Event::Refused { reason, .. } = event {
                    log.lock().unwrap().push(reason.to_string());
                }
            }),
            sftp: Some(SftpProgram {
                path: env!("CARGO_BIN_EXE_sandglass-sftp-server").into(),
                argv: vec!["sftp-server".into()],
            }),
            forwarding: options.forwarding,
            limits: options.limits,
        };
        let host_key = settings.host_key.public_key().to_openssh().unwrap();
        let server = Server::new(settings);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = server.clone();
        runtime.spawn(async move { serving.serve_tcp(listener).await });
        let known = format!("[127.0.0.1]:{port} {host_key}\nbox {host_key}\n");
        std::fs::write(folder.path().join("known_hosts"), known).unwrap();
        let host = Host { server, port, folder, access, refusals, runtime };
        host.make_key("user");
        host.authorize(&[&host.public_line("user", "")]);
        host
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn home(&self, name: &str) -> PathBuf {
        self.path("home").join(name)
    }

    pub fn make_key(&self, name: &str) {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(self.path(name));
        run(keygen.stdin(Stdio::null()));
    }

    /// A line of an authorized keys file.
    pub fn public_line(&self, name: &str, options: &str) -> String {
        let key = std::fs::read_to_string(self.path(&format!("{name}.pub"))).unwrap();
        format!("{options}{}", key.trim())
    }

    /// These lines are the only way in.
    pub fn authorize(&self, lines: &[&str]) {
        let keys = lines.iter().map(|line| line.parse::<AuthorizedKey>().unwrap()).collect();
        self.access.send_replace(Arc::new(Access { keys, ..Access::default() }));
    }

    /// A user certificate of this authority, for sandbox `sb-1`, is the only way in.
    pub fn trust(&self, authority: &str) {
        let key: PublicKey = self.public_line(authority, "").parse().unwrap();
        let authorities = vec![key];
        self.access.send_replace(Arc::new(Access { keys: vec![], authorities, sandbox: "sb-1".into() }));
    }

    /// Listens on a Unix socket of the folder too.
    pub fn serve_unix(&self, name: &str) {
        let _inside = self.runtime.enter();
        let listener = UnixListener::bind(self.path(name)).unwrap();
        let serving = self.server.clone();
        self.runtime.spawn(async move { serving.serve_unix(listener).await });
    }

    fn common(&self, command: &mut Command, key: &str) {
        let option = |name: &str, value: &str| format!("-o{name}={value}");
        let known = self.path("known_hosts").display().to_string();
        command.arg("-F/dev/null").args([
            option("UserKnownHostsFile", &known),
            option("GlobalKnownHostsFile", "/dev/null"),
            option("StrictHostKeyChecking", "yes"),
            option("BatchMode", "yes"),
            option("IdentitiesOnly", "yes"),
            option("IdentityAgent", "none"),
            option("LogLevel", "INFO"),
            option("Port", &self.port.to_string()),
            option("IdentityFile", &self.path(key).display().to_string()),
        ]);
    }

    /// `ssh` as `tester` with the first key; what comes after the arguments here is the remote command.
    pub fn ssh(&self, arguments: &[&str]) -> Command {
        self.ssh_as("tester", "user", arguments)
    }

    pub fn ssh_as(&self, login: &str, key: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("ssh");
        self.common(&mut command, key);
        command.args(["-l", login]).args(arguments).arg("127.0.0.1").stdin(Stdio::null());
        command
    }

    /// `sftp`, `scp` or another program of the same options.
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        self.common(&mut command, "user");
        command.stdin(Stdio::null());
        command
    }

    /// What `rsync -e` takes.
    pub fn remote_shell(&self) -> String {
        let command = self.ssh(&[]);
        let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        format!("ssh {}", words[..words.len() - 1].join(" "))
    }

    pub fn wait_for(&self, what: &str, condition: impl FnMut() -> bool) {
        wait_for(what, condition);
    }
}

pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < limit, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs to the end and has to succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The standard output of a program that has to succeed, trimmed.
pub fn text(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).unwrap().trim().to_owned()
}

pub fn run_with_input(command: &mut Command, input: &[u8]) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // A program that ends early has no use for the rest.
            let _ = stdin.write_all(input);
        });
        child.wait_with_output().unwrap()
    })
}

pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: becoming somebody else needs root");
    }
    root
}

/// Whether a process is there and not merely waiting to be collected.
pub fn lives(pid: &str) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    status.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// Bytes that do not compress or repeat.
pub fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}
