//! What the tests need from the operating system.
//!
//! Idempotent and quiet when nothing is missing. It installs packages only on Debian-like systems and as root; elsewhere it
//! names what is missing and lets the tests that need it say so themselves. No service is left running by an installation.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::postgres;
use crate::process::{self, capture, succeeds};
use crate::python;

/// What is missing is decided by the program, not by the package: another way of installing it is as good.
const PROGRAMS: &[(&str, &str)] = &[
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("busybox", "busybox-static"),
    ("runc", "runc"),
    ("dockerd", "docker.io"),
    ("runsc", "runsc"),
    ("docker-registry", "docker-registry"),
    ("redis-server", "redis-server"),
    ("mmdebstrap", "mmdebstrap"),
    ("htpasswd", "apache2-utils"),
    ("gcc", "gcc"),
    ("nginx", "nginx-light"),
    ("g++", "g++"),
    ("make", "make"),
    ("openssl", "openssl"),
    ("git", "git"),
    ("git-lfs", "git-lfs"),
    ("ssh", "openssh-client"),
    ("sshd", "openssh-server"),
    ("chromium", "chromium"),
    ("node", "nodejs"),
    ("npm", "npm"),
    ("python3", "python3"),
    ("rsync", "rsync"),
    ("wrk", "wrk"),
];

const SERVICE_POLICY: &str = "/usr/sbin/policy-rc.d";

fn can_install() -> bool {
    succeeds(Command::new("apt-get").arg("--version")) && is_root()
}

pub(crate) fn run() -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        println!("setup: nothing to install");
        return Ok(());
    }
    if !can_install() {
        println!("setup: not installing (needs root and apt-get); missing: {}", missing.join(" "));
        return Ok(());
    }
    println!("setup: installing {}", missing.join(" "));
    let _policy = ServicePolicy::forbid_starts()?;
    process::run(apt().arg("update").arg("-qq"))?;
    process::run(apt().args(["install", "-y", "-qq", "--no-install-recommends"]).args(&missing))
}

fn missing() -> Vec<&'static str> {
    let mut missing: Vec<&str> =
        PROGRAMS.iter().filter(|(program, _)| !on_path(program)).map(|(_, package)| *package).collect();
    if python::with_venv().is_none() {
        missing.push("python3-venv");
    }
    if !node_headers() {
        missing.push("libnode-dev");
    }
    if postgres::programs().is_none() {
        missing.push("postgresql");
    }
    missing
}

fn on_path(program: &str) -> bool {
    found(program).is_some()
}

fn found(program: &str) -> Option<PathBuf> {
    // Tools of root are not on every user's path.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/sbin", "/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(also).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// What native modules are built with; some packages of Node.js bring it, Debian's does not.
fn node_headers() -> bool {
    let Some(node) = found("node").and_then(|node| node.canonicalize().ok()) else {
        // Debian's is going to be installed.
        return Path::new("/usr/include/node/node.h").is_file();
    };
    node.ancestors().nth(2).is_some_and(|prefix| prefix.join("include/node/node.h").is_file())
}

fn is_root() -> bool {
    capture(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Keeps installed packages from starting their services: the tests start private ones.
struct ServicePolicy {
    ours: bool,
}

impl ServicePolicy {
    fn forbid_starts() -> Result<Self> {
        let path = Path::new(SERVICE_POLICY);
        if path.exists() {
            return Ok(Self { ours: false });
        }
        fs::write(path, "#!/bin/sh\nexit 101\n").context("failed to write the service policy")?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        Ok(Self { ours: true })
    }
}

impl Drop for ServicePolicy {
    fn drop(&mut self) {
        if self.ours {
            // Left behind it would keep other packages from starting; there is nobody to report to here.
            let _ = fs::remove_file(SERVICE_POLICY);
        }
    }
}
