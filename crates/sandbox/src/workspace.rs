//! What a server hands to the agent of a workspace: how it is reached, what is to be checked out, run and kept running.
//!
//! A file of its own beside the boot configuration, because it is there on every runtime, also where the agent is started by a
//! command line. The agent becomes the supervisor of a workspace when the file exists.
//!
//! Holds no secret: the token of the channel is in a file that is named here, credentials of repositories are asked for over the
//! channel. Times are whole seconds unless they say otherwise. What is not known is left out when read, so that a box may be
//! older or newer than its server; bounds are checked by the agent.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::SandboxId;

/// Where the document is in a box: of root, mode 0600, on a file system in memory.
pub const FILE: &str = "/run/.execd/workspace.json";
/// Where the token of the channel is, likewise. One line; white space around it does not count.
pub const TOKEN_FILE: &str = "/run/.execd/workspace.token";
/// The authorities that git believes, where the server brings its own.
pub const AUTHORITIES_FILE: &str = "/run/.execd/git-authorities.pem";
/// Where the folder with the server's socket is bound to.
pub const BRIDGE_SOCKET: &str = "/run/.execd/bridge/agent.sock";
/// What the agent keeps over pause and snapshot (the key of the SSH server, logs, undelivered events): in the box's root file system.
pub const STATE_DIR: &str = "/var/lib/execd";

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Workspace {
    pub sandbox_id: SandboxId,
    /// Rises with every start of the box from its image or a snapshot; an agent of an older one is refused.
    pub generation: u64,
    pub bridge: Bridge,
    #[serde(default)]
    pub source: Source,
    /// The primary repository first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<Repository>,
    #[serde(default)]
    pub git: Git,
    /// Who works in the repositories and owns their files: `user` or `user:group`, names or numbers. The user of the box when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default)]
    pub boot: Boot,
    /// In the order in which they are started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    #[serde(default = "state_dir")]
    pub state_dir: PathBuf,
}

/// The channel between the agent and its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bridge {
    pub way: Way,
    #[serde(default = "token_file")]
    pub token_file: PathBuf,
    /// Until the server says otherwise, which it does when the agent attaches.
    #[serde(default = "fifteen")]
    pub heartbeat_interval_seconds: u64,
    #[serde(default = "forty_five")]
    pub lease_timeout_seconds: u64,
    /// Without a server for so long, the boot tells in the agent's log that it goes on alone. Nothing ever waits for the server but
    /// what needs a credential.
    #[serde(default = "sixty")]
    pub attach_grace_seconds: u64,
    /// Whether the box ends when the server wants nothing of this agent any more.
    #[serde(default = "yes")]
    pub exit_on_revoke: bool,
}

/// How the two reach each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Way {
    /// A Unix socket of the server, by its path in the box.
    Socket(PathBuf),
    /// `http://host:port` of the server's listener for agents.
    Url(String),
    /// The server asks the agent's own API. Git gets no credentials then.
    Pull,
}

/// What the files of the box are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// Nothing of the repositories is there.
    #[default]
    Fresh,
    /// An image in which setup has run: repositories are fetched and checked out, setup is left out.
    Image,
    /// The state of an earlier box: work trees stay as they are, setup is left out.
    Snapshot,
}

/// A repository to bring to its commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Repository {
    /// As the server checked and normalised it, without user information.
    pub url: String,
    /// The full name of the ref that the server resolved, `refs/heads/main` for one: the branch that is checked out. Absent for a commit,
    /// which is checked out by itself.
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// The full hash that the server resolved the ref to.
    pub commit: String,
    /// Absolute.
    pub path: PathBuf,
    /// Commits of history; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    #[serde(default)]
    pub submodules: bool,
    #[serde(default)]
    pub lfs: bool,
    /// Whether the server has a credential for it. Without one, git asks nobody. For an address with ssh, the password that the server
    /// gives is the private key.
    #[serde(default)]
    pub credential: bool,
}

/// What git may do in the box on behalf of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Git {
    /// Every repository lies below it.
    pub root: PathBuf,
    /// Hosts of repositories and their submodules: names, and `*.` before a name for all below it. Empty for any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    pub allow_file: bool,
    pub allow_http: bool,
    /// Bytes that may be downloaded for one repository.
    pub repository_bytes: u64,
    /// Lines of `known_hosts`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub known_hosts: Option<String>,
    /// A file of authorities in the box, instead of the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authorities: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
}

impl Default for Git {
    fn default() -> Self {
        Git {
            root: PathBuf::from("/workspace"),
            hosts: Vec::new(),
            allow_file: false,
            allow_http: false,
            repository_bytes: 10 << 30,
            known_hosts: None,
            authorities: None,
            proxy: None,
        }
    }
}

/// What a failure of a step means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnFailure {
    /// The boot has failed.
    Fail,
    /// The boot goes on, with a warning.
    Warn,
}

/// Steps of the boot and their bounds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Boot {
    /// Without progress of git for so long, the sync has failed.
    pub sync_seconds: u64,
    /// By default a fresh box fails, and any other only warns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_sync_failure: Option<OnFailure>,
    /// Run in a fresh box alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub setup: Vec<Hook>,
    /// Run at every boot, after the services.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub start: Vec<Hook>,
    /// The boot is over by then, however much progress there is.
    pub deadline_seconds: u64,
    /// Without progress for so long, waiting for required services fails.
    pub services_seconds: u64,
    /// What a step has to end when it is cancelled, and everything together when the box is stopped.
    pub grace_seconds: u64,
    pub restarts: Restarts,
}

impl Default for Boot {
    fn default() -> Self {
        Boot {
            sync_seconds: 300,
            on_sync_failure: None,
            setup: Vec::new(),
            start: Vec::new(),
            deadline_seconds: 2700,
            services_seconds: 120,
            grace_seconds: 10,
            restarts: Restarts::default(),
        }
    }
}

/// A command of a repository's recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// Whose hook it is, as events and logs call it; unique in its list.
    pub label: String,
    #[serde(flatten)]
    pub command: Command,
    /// Without output for so long, it has failed; 300 for setup and 120 for start when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// With all its output; the boot's deadline when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_seconds: Option<u64>,
    #[serde(default = "fail")]
    pub on_failure: OnFailure,
}

/// An argument vector that no shell reads, and where it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Command {
    pub command: Vec<String>,
    /// On top of the environment of the box.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// The box's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathBuf>,
    /// The box's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// How services that were lost are started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Restarts {
    /// Restarts before a service is given up.
    pub budget: u32,
    /// Before the first; each further one waits twice as long, up to the cap.
    pub base_millis: u64,
    pub cap_seconds: u64,
    /// Ready for so long, the budget is whole again.
    pub healthy_seconds: u64,
}

impl Default for Restarts {
    fn default() -> Self {
        Restarts { budget: 5, base_millis: 1000, cap_seconds: 60, healthy_seconds: 300 }
    }
}

/// Something that is kept running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// Lower-case letters, digits and inner hyphens; unique.
    pub name: String,
    #[serde(flatten)]
    pub kind: Kind,
    /// Where it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// With a port and no probe, a connection to it; with neither, staying alive for a moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
    #[serde(default)]
    pub restart: RestartPolicy,
    /// Without it the box is not ready, and has failed when it is given up.
    #[serde(default)]
    pub required: bool,
    #[serde(default = "yes")]
    pub enabled: bool,
    /// From its start until its probe succeeds.
    #[serde(default = "sixty")]
    pub ready_seconds: u64,
    /// From being asked to end until it is killed.
    #[serde(default = "ten")]
    pub grace_seconds: u64,
}

/// What a service is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Kind {
    /// A program in the foreground.
    Custom(Command),
    CodeServer(CodeServer),
    Ssh(Ssh),
    /// The terminals of the agent's API; listed so that its state is seen, runs nothing.
    Terminal,
}

/// The editor in the browser, on the service's port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CodeServer {
    /// The folder that it opens: the primary repository's, or the workspace's root, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<PathBuf>,
    /// The program, when it is in no folder where it is looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
}

/// The SSH server of the agent, on the service's port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Ssh {
    /// Lines as in `authorized_keys`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub authorized_keys: Vec<String>,
    /// Public keys of those whose user certificates count, as OpenSSH writes them. The sandbox's id is a principal that every login accepts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub certificate_authorities: Vec<String>,
    pub forwarding: Forwarding,
}

/// Where ports that are forwarded through SSH may lead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Forwarding {
    Off,
    /// To and from the box's own loopback.
    #[default]
    Loopback,
    /// Wherever the box itself may connect.
    Any,
}

/// When a service that ended is started again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

/// How to tell that a service answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Probe {
    #[serde(flatten)]
    pub check: Check,
    #[serde(default = "ten")]
    pub interval_seconds: u64,
    #[serde(default = "five")]
    pub timeout_seconds: u64,
    /// Failures in a row after which a service that was ready is started again.
    #[serde(default = "three")]
    pub threshold: u32,
}

/// What a probe does, on the loopback of the box. The port is the service's own when absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum Check {
    /// A connection is accepted.
    Tcp {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
    },
    /// The answer to a GET has a status below 400.
    Http {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
        #[serde(default = "slash")]
        path: String,
    },
    /// A command ends with 0.
    Exec { command: Vec<String> },
}

fn state_dir() -> PathBuf {
    STATE_DIR.into()
}

fn token_file() -> PathBuf {
    TOKEN_FILE.into()
}

fn slash() -> String {
    "/".into()
}

fn fail() -> OnFailure {
    OnFailure::Fail
}

fn yes() -> bool {
    true
}

fn three() -> u32 {
    3
}

fn five() -> u64 {
    5
}

fn ten() -> u64 {
    10
}

fn fifteen() -> u64 {
    15
}

fn forty_five() -> u64 {
    45
}

fn sixty() -> u64 {
    60
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10";

    #[test]
    fn a_document_says_little_when_it_wants_little() {
        let least: Workspace = serde_json::from_value(json!({
            "sandboxId": ID, "generation": 1, "bridge": { "way": { "socket": BRIDGE_SOCKET } }, "fromTheFuture": {},
        }))
        .unwrap();
        assert_eq!(least.bridge.token_file, PathBuf::from(TOKEN_FILE));
        assert_eq!((least.bridge.heartbeat_interval_seconds, least.bridge.lease_timeout_seconds), (15, 45));
        assert!(least.bridge.exit_on_revoke);
        assert_eq!(least.boot, Boot::default());
        assert_eq!(least.source, Source::Fresh);
        assert_eq!(least.state_dir, PathBuf::from(STATE_DIR));
    }

    #[test]
    fn a_document_is_read_as_it_is_written() {
        let value = json!({
            "sandboxId": ID,
            "generation": 3,
            "bridge": { "way": { "url": "http://10.0.0.1:8090" }, "exitOnRevoke": false },
            "source": "image",
            "repositories": [{ "url": "https://example.com/acme/web.git", "ref": "refs/heads/main", "commit": "0".repeat(40),
                "path": "/workspace/web", "depth": 1, "submodules": true, "credential": true }],
            "git": { "hosts": ["*.example.com"] },
            "boot": {
                "setup": [{ "label": "web", "command": ["bash", "setup.sh"], "cwd": "/workspace/web", "onFailure": "warn" }],
                "start": [{ "label": "web", "command": ["bash", "start.sh"], "timeoutSeconds": 5 }],
                "restarts": { "budget": 2 },
            },
            "services": [
                { "name": "app", "kind": "custom", "command": ["npm", "start"], "port": 3000, "required": true,
                  "probe": { "type": "http", "path": "/ok" }, "restart": "onFailure" },
                { "name": "code-server", "kind": "code-server", "port": 8080 },
                { "name": "ssh", "kind": "ssh", "port": 2222, "authorizedKeys": ["ssh-ed25519 AAAA"], "forwarding": "off" },
                { "name": "terminal", "kind": "terminal" },
            ],
        });
        let read: Workspace = serde_json::from_value(value).unwrap();
        assert_eq!(read.boot.setup[0].on_failure, OnFailure::Warn);
        assert_eq!(read.boot.setup[0].command.cwd, Some("/workspace/web".into()));
        assert_eq!(read.boot.restarts.healthy_seconds, 300);
        let app = &read.services[0];
        assert!(matches!(&app.kind, Kind::Custom(run) if run.command == ["npm", "start"]));
        assert_eq!(app.probe.as_ref().unwrap().check, Check::Http { port: None, path: "/ok".into() });
        assert!(matches!(&read.services[2].kind, Kind::Ssh(ssh) if ssh.forwarding == Forwarding::Off));
        assert_eq!(read.services[3].kind, Kind::Terminal);
        let again: Workspace = serde_json::from_value(serde_json::to_value(&read).unwrap()).unwrap();
        assert_eq!(again, read);
    }
}
