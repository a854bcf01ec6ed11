//! A private PostgreSQL server for the tests of the store.
//!
//! It lives in a temporary directory, listens on loopback and a socket there, and ends with the value. Durability is off:
//! what is in it is worth nothing.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{capture, succeeds};

/// The variable in which the tests look for the server.
pub(crate) const VARIABLE: &str = "SANDGLASS_TEST_POSTGRES";
const START_ATTEMPTS: u32 = 300;

/// The folder with `initdb` and `postgres`, which Debian keeps off the path.
pub(crate) fn programs() -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|versions| versions.flatten().map(|version| version.path().join("bin")).collect())
        .unwrap_or_default();
    // The newest of several; Debian's names are whole numbers of two digits.
    folders.sort();
    folders.reverse();
    folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    folders.into_iter().find(|folder| folder.join("initdb").is_file() && folder.join("postgres").is_file())
}

/// A folder nobody has: in a container every run has the same process id, and a killed one leaves its folder behind.
fn fresh_folder() -> std::io::Result<PathBuf> {
    let mut attempt = 0;
    loop {
        let name = format!("sandglass-postgres-{}-{attempt}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        match fs::DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && attempt < 1000 => attempt += 1,
            made => return made.map(|()| folder),
        }
    }
}

/// A running server.
pub(crate) struct Private {
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
}

impl Private {
    /// Makes and starts one, and waits until it answers.
    pub(crate) fn start(programs: &Path) -> Result<Self> {
        let folder = fresh_folder().context("failed to make a folder for PostgreSQL")?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        // From here on it is cleaned up.
        let mut private = Self { folder, port, server: None };
        let owner = Owner::find()?;
        if let Some(owner) = owner {
            chown(&private.folder, Some(owner.user), Some(owner.group))?;
        }
        let data = private.folder.join("data");
        let log = File::create(private.folder.join("log"))?;
        let made = command(&programs.join("initdb"), owner, &private.folder, &log)?
            .args([
                "--auth=trust",
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
                "--pgdata",
            ])
            .arg(&data)
            .status()?;
        if !made.success() {
            bail!("initdb ended with {made}\n{}", private.log());
        }
        let mut sockets = OsString::from("unix_socket_directories=");
        sockets.push(&private.folder);
        let server = command(&programs.join("postgres"), owner, &private.folder, &log)?
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=127.0.0.1", "-c", &format!("port={port}"), "-c"])
            .arg(sockets)
            .args(["-c", "fsync=off", "-c", "max_connections=200"])
            .spawn()
            .context("failed to start PostgreSQL")?;
        private.server = Some(server);
        private.wait(programs)?;
        println!("PostgreSQL for the tests listens on port {port}");
        Ok(private)
    }

    /// How the tests reach it.
    pub(crate) fn address(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    fn wait(&mut self, programs: &Path) -> Result<()> {
        for _ in 0..START_ATTEMPTS {
            if let Some(server) = &mut self.server
                && let Some(status) = server.try_wait()?
            {
                bail!("PostgreSQL ended with {status}\n{}", self.log());
            }
            let mut ask = Command::new(programs.join("pg_isready"));
            if succeeds(ask.args(["-q", "-h", "127.0.0.1", "-p", &self.port.to_string()])) {
                return Ok(());
            }
            sleep(Duration::from_millis(100));
        }
        bail!("PostgreSQL does not answer\n{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            // Interrupted it ends its sessions and cleans up; there is nobody to report to when it does not.
            succeeds(Command::new("kill").arg("-INT").arg(server.id().to_string()));
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Whom the server runs as: it refuses to be root.
#[derive(Clone, Copy)]
struct Owner {
    user: u32,
    group: u32,
}

impl Owner {
    fn find() -> Result<Option<Self>> {
        let id = |arguments: &[&str]| -> Result<u32> {
            Ok(capture(Command::new("id").args(arguments))?.trim().parse()?)
        };
        if id(&["-u"])? != 0 {
            return Ok(None);
        }
        let name = if succeeds(Command::new("id").arg("postgres")) { "postgres" } else { "nobody" };
        Ok(Some(Self { user: id(&["-u", name])?, group: id(&["-g", name])? }))
    }
}

fn command(program: &Path, owner: Option<Owner>, folder: &Path, log: &File) -> Result<Command> {
    let mut command = Command::new(program);
    command.current_dir(folder).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    if let Some(owner) = owner {
        command.uid(owner.user).gid(owner.group);
    }
    Ok(command)
}
