//! Git over ssh, against Debian's own server on loopback: keys, known hosts, and what happens without them.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::support::{Author, Bench, Running, git, until};
use sandglass_repository::git::{Checkout, FailureClass, Remote};
use sandglass_repository::{Credential, Reference, RepositoryUrl, Secret};
use tempfile::TempDir;

struct SshServer {
    folder: TempDir,
    port: u16,
    _running: Running,
}

/// Below those that the kernel gives away by itself, so that nobody gets it in between. Not found out by listening: a closed socket
/// lives on for a moment in a child that another test starts just then.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = u32::from(NEXT.fetch_add(1, Ordering::Relaxed)) + std::process::id() * 500;
        let port = u16::try_from(10_000 + number % 20_000).unwrap();
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

impl SshServer {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for name in ["host", "right", "wrong"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f", &path(name)])
                .status();
            assert!(made.unwrap().success());
        }
        fs::copy(path("right.pub"), path("authorized")).unwrap();
        let port = free_port();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\nLogLevel ERROR\n",
            path("host"),
            path("authorized"),
        );
        fs::write(path("config"), config).unwrap();
        // Where the server, as root, shuts its unprivileged half in; the package's service makes it.
        let _ = fs::create_dir_all("/run/sshd");
        let child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-e", "-f", &path("config")])
            .stderr(Stdio::null())
            .spawn();
        let running = Running(child.expect("the package openssh-server is installed"));
        until("sshd listens", || TcpStream::connect(("127.0.0.1", port)).is_ok()).await;
        Self { folder, port, _running: running }
    }

    fn url(&self, repository: &Path) -> RepositoryUrl {
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
        RepositoryUrl::parse(&format!(
            "ssh://{}@127.0.0.1:{}{}",
            user.trim(),
            self.port,
            repository.display()
        ))
        .unwrap()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    fn known_hosts(&self, key: &str) -> String {
        format!("[127.0.0.1]:{} {}", self.port, self.read(key))
    }
}

#[tokio::test]
async fn a_private_repository_is_read_with_a_key_and_a_known_host() {
    let server = SshServer::start().await;
    let author = Author::new();
    let commit = author.commit("a", "1");
    let bare = server.folder.path().join("web.git");
    author.push(&bare);
    let url = server.url(&bare);
    let key = |name: &str, hosts: Option<String>| Credential::SshKey {
        private_key: Secret::new(server.read(name)),
        known_hosts: hosts,
    };
    let known = server.known_hosts("host.pub");

    let bench = Bench::new();
    let right = key("right", Some(known.clone()));
    let remote = Remote { url: &url, credential: Some(&right) };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    assert_eq!(resolved.commit(), commit);
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let checkout = Checkout {
        remote,
        resolved: &resolved,
        mirror: Some(&mirror),
        folder: &folder,
        depth: None,
        submodules: false,
        lfs: false,
    };
    bench.git.checkout(&checkout, bench.control()).await.unwrap();
    assert_eq!(git(&folder, &["rev-parse", "HEAD"]), commit);
    assert_eq!(fs::read_dir(bench.scratch()).unwrap().count(), 0, "the key is gone");

    let other_host = server.known_hosts("wrong.pub");
    for (name, credential) in [
        ("another key", Some(key("wrong", Some(known.clone())))),
        ("another host key", Some(key("right", Some(other_host)))),
        ("no known host", Some(key("right", None))),
        ("no credential", None),
    ] {
        let remote = Remote { url: &url, credential: credential.as_ref() };
        let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
        assert_eq!(error.class, FailureClass::AuthFailed, "{name}: {error:?}");
    }
    // A deployment's own known hosts serve where the credential brings none.
    let deployed = Bench::with(|settings| settings.known_hosts = Some(known));
    let without = key("right", None);
    let remote = Remote { url: &url, credential: Some(&without) };
    assert!(deployed.git.resolve(remote, &Reference::Head, deployed.control()).await.is_ok());
    let missing = server.url(&server.folder.path().join("nothing.git"));
    let remote = Remote { url: &missing, credential: Some(&right) };
    let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Unreachable, "{error:?}");
}
