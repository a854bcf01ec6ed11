//! `execd sshd`: the SSH server of the box, in a process of its own: it may end without harm, PID 1 may not.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use sandglass_sandbox::workspace::Ssh;
use sandglass_sshd::{
    Access, Account, AuthorizedKey, Event, HostKey, Launch, Limits, LocalLaunch, Peer, Program, PublicKey,
    Resolve, ResolveFuture, Server, Settings, SftpProgram, Started,
};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::super::plan;
use super::say;
use crate::accounts::Accounts;
use crate::envs::{self, Env};
use crate::init::spawn::locate_shell;
use crate::resolver;

/// What there is to serve.
#[derive(Serialize, Deserialize)]
pub struct Task {
    pub port: u16,
    pub host_key: PathBuf,
    pub ssh: Ssh,
    /// A principal that every login accepts.
    pub sandbox: String,
    /// What every program of the box gets.
    pub env: Env,
}

/// A line of the output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Said {
    #[serde(rename_all = "camelCase")]
    Listening {
        fingerprint: String,
        public_key: String,
    },
    /// How many sessions there are now.
    Sessions(usize),
    /// For the log.
    Note(String),
    Failed(String),
}

pub(super) async fn run(task: Task) -> ExitCode {
    match serve(task).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            say(&Said::Failed(reason));
            ExitCode::FAILURE
        }
    }
}

async fn serve(task: Task) -> Result<(), String> {
    let host_key = HostKey::load_or_create(&task.host_key).map_err(|error| error.to_string())?;
    let mut term = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let listener = listen(task.port).await.map_err(|error| format!("port {}: {error}", task.port))?;
    let public_key = host_key.public_key().to_openssh().unwrap_or_default();
    let (_access, access) = watch::channel(Arc::new(access(&task)));
    let env = task.env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect();
    let server = Server::new(Settings {
        host_key,
        access,
        launch: Arc::new(BoxLaunch::new(env, &task.env)),
        resolve: Arc::new(BoxNames),
        clock: Arc::new(SystemTime::now),
        observe: Arc::new(observe),
        sftp: Some(SftpProgram {
            path: "/proc/self/exe".into(),
            argv: vec!["execd".into(), super::SFTP_SERVER.into()],
        }),
        forwarding: plan::forwarding(task.ssh.forwarding),
        limits: Limits::default(),
    });
    say(&Said::Listening { fingerprint: server.fingerprint(), public_key });
    let mut activity = server.activity();
    let counted = tokio::spawn(async move {
        loop {
            activity.changed().await;
            say(&Said::Sessions(activity.sessions()));
        }
    });
    tokio::select! {
        () = server.serve_tcp(listener) => {}
        _ = term.recv() => {}
    }
    server.shut_down().await;
    counted.abort();
    Ok(())
}

/// On every address of the box: which of them can be reached is its network's business.
async fn listen(port: u16) -> io::Result<TcpListener> {
    let on = |ip: IpAddr| TcpListener::bind(SocketAddr::new(ip, port));
    match on(Ipv6Addr::UNSPECIFIED.into()).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
        // A box without IPv6.
        Err(_) => on(Ipv4Addr::UNSPECIFIED.into()).await,
    }
}

/// What of the document can be used; the rest is named in the log.
fn access(task: &Task) -> Access {
    let mut access = Access { sandbox: task.sandbox.clone(), ..Access::default() };
    for line in &task.ssh.authorized_keys {
        match line.parse::<AuthorizedKey>() {
            Ok(key) => access.keys.push(key),
            Err(error) => say(&Said::Note(format!("a line of authorizedKeys is left out: {error}"))),
        }
    }
    for line in &task.ssh.certificate_authorities {
        match line.parse::<PublicKey>() {
            Ok(key) => access.authorities.push(key),
            Err(error) => say(&Said::Note(format!("a certificate authority is left out: {error}"))),
        }
    }
    access
}

fn observe(event: Event<'_>) {
    let from = |peer: &Peer| peer.remote.map_or_else(|| "unknown".into(), |address| address.to_string());
    say(&Said::Note(match event {
        Event::SignedIn { login, key, peer } => format!("{login} signed in from {} with {key}", from(peer)),
        Event::Refused { login, reason, peer } => format!("{login:?} from {} refused: {reason}", from(peer)),
        Event::TurnedAway { peer } => format!("{} turned away: too many connections", from(peer)),
    }));
}

/// Processes of sessions, as the accounts of the box.
struct BoxLaunch {
    local: LocalLaunch,
    env: BTreeMap<OsString, OsString>,
    path: String,
}

impl BoxLaunch {
    fn new(env: BTreeMap<OsString, OsString>, box_env: &Env) -> Self {
        let path = envs::search_path(box_env).to_owned();
        BoxLaunch { local: LocalLaunch::with_env(env.clone()), env, path }
    }

    /// The shell of the account, or one that the image has.
    fn shell(&self, wanted: PathBuf) -> PathBuf {
        if wanted.exists() { wanted } else { locate_shell(&self.path).map_or(wanted, |(_, shell)| shell) }
    }
}

impl Launch for BoxLaunch {
    fn account(&self, login: &str) -> Option<Account> {
        let mut account = match self.local.account(login) {
            Some(account) => account,
            // An image without accounts still has its root.
            None if login == "root" && Accounts::load().user_by_name("root").is_none() => Account {
                name: "root".into(),
                uid: 0,
                gid: 0,
                groups: Vec::new(),
                home: "/root".into(),
                shell: "/bin/sh".into(),
                env: self.env.clone(),
            },
            None => return None,
        };
        let own = rustix::process::geteuid();
        if !own.is_root() && own.as_raw() != account.uid {
            return None;
        }
        account.shell = self.shell(account.shell);
        Some(account)
    }

    fn start(&self, program: Program) -> io::Result<Started> {
        self.local.start(program)
    }
}

/// Names as the box knows them, by its own files and name servers.
struct BoxNames;

impl Resolve for BoxNames {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a> {
        Box::pin(async move {
            if host.eq_ignore_ascii_case("localhost") {
                let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
                return Ok(both.map(|ip| SocketAddr::new(ip, port)).to_vec());
            }
            let ip = resolver::resolve(host).await.ok_or(io::ErrorKind::NotFound)?;
            Ok(vec![SocketAddr::new(ip, port)])
        })
    }
}
