//! Processes of the machine that the server runs on: the port for tests and for whoever has no init of its own.
//!
//! Accounts come from `/etc/passwd` and `/etc/group` themselves: a static binary has no other way.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Stdio as StdStdio;

use crate::launch::{Account, Exit, Launch, Program, Started, Stdio};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts processes directly. Needs a Tokio runtime that is told of signals, and root to become somebody else.
#[derive(Debug, Clone)]
pub struct LocalLaunch {
    env: BTreeMap<OsString, OsString>,
}

impl Default for LocalLaunch {
    fn default() -> Self {
        LocalLaunch { env: BTreeMap::from([("PATH".into(), PATH.into())]) }
    }
}

impl LocalLaunch {
    /// With this environment for every program instead of a `PATH` alone.
    pub fn with_env(env: BTreeMap<OsString, OsString>) -> Self {
        LocalLaunch { env }
    }
}

impl Launch for LocalLaunch {
    fn account(&self, login: &str) -> Option<Account> {
        let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
        let group = std::fs::read_to_string("/etc/group").unwrap_or_default();
        let mut account = parse_account(&passwd, &group, login)?;
        account.env = self.env.clone();
        Some(account)
    }

    fn start(&self, program: Program) -> io::Result<Started> {
        let Program { path, argv, env, cwd, account, stdio } = program;
        let mut command = std::process::Command::new(path);
        let name = argv.first().ok_or(io::ErrorKind::InvalidInput)?;
        command.arg0(name).args(&argv[1..]).env_clear().envs(env);
        command.current_dir(if cwd.is_dir() { cwd.as_path() } else { Path::new("/") });
        let terminal = matches!(stdio, Stdio::Terminal(_));
        let (stdin, stdout, stderr) = descriptors(stdio)?;
        command.stdin(StdStdio::from(stdin)).stdout(StdStdio::from(stdout)).stderr(StdStdio::from(stderr));
        become_leader(&mut command, &account, terminal);
        let mut child = tokio::process::Command::from(command).spawn()?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or(-1);
        let exit = Box::pin(async move {
            match child.wait().await {
                Ok(status) => match status.signal() {
                    Some(number) => Exit::Signal { number, core_dumped: status.core_dumped() },
                    None => Exit::Code(status.code().unwrap_or(255)),
                },
                Err(_) => Exit::Code(255),
            }
        });
        Ok(Started { pid, exit })
    }
}

fn descriptors(stdio: Stdio) -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    Ok(match stdio {
        Stdio::Pipes { stdin, stdout, stderr } => (stdin, stdout, stderr),
        Stdio::Terminal(terminal) => (terminal.try_clone()?, terminal.try_clone()?, terminal),
    })
}

fn become_leader(command: &mut std::process::Command, account: &Account, terminal: bool) {
    let (uid, gid) = (account.uid, account.gid);
    let mut groups = account.groups.clone();
    if !groups.contains(&gid) {
        groups.insert(0, gid);
    }
    let switching = rustix::process::geteuid().is_root();
    let prepare = move || {
        // SAFETY: system calls on numbers and on `groups`, whose length goes with it; nothing allocates. The raw calls
        // leave out what libc would do to tell threads that a fresh child has not got.
        let failed = unsafe {
            // What whoever started the server ignored, a person's Ctrl-C for one, is for the program to decide.
            for signal in 1..32 {
                libc::signal(signal, libc::SIG_DFL);
            }
            libc::setsid() < 0
                || (terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0)
                || (switching
                    && (libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) != 0
                        || libc::syscall(libc::SYS_setresgid, gid, gid, gid) != 0
                        || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0))
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure only makes system calls on memory prepared before the fork.
    unsafe { command.pre_exec(prepare) };
}

fn parse_account(passwd: &str, group: &str, login: &str) -> Option<Account> {
    let line = passwd.lines().find(|line| line.split(':').next() == Some(login))?;
    let mut fields = line.split(':').skip(2);
    let uid = fields.next()?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let _gecos = fields.next();
    let home = fields.next().filter(|home| !home.is_empty()).unwrap_or("/");
    let shell = fields.next().filter(|shell| !shell.is_empty()).unwrap_or("/bin/sh");
    let groups = group.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let member = fields.get(3)?.split(',').any(|member| member == login);
        if member { fields.get(2)?.parse().ok() } else { None }
    });
    Some(Account {
        name: login.to_owned(),
        uid,
        gid,
        groups: groups.collect(),
        home: PathBuf::from(home),
        shell: PathBuf::from(shell),
        env: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_has_its_groups_and_a_default_shell() {
        let account = parse_account(
            "root:x:0:0::/root:/bin/bash\nann:x:1000:1001:Ann,,,:/home/ann:\n",
            "wheel:x:10:root,ann\nann:x:1001:\nother:x:9:annabel\n",
            "ann",
        )
        .unwrap();
        assert_eq!((account.uid, account.gid, account.groups.as_slice()), (1000, 1001, &[10][..]));
        assert_eq!(
            (account.home.as_path(), account.shell.as_path()),
            (Path::new("/home/ann"), Path::new("/bin/sh"))
        );
        assert_eq!(parse_account("ann:x:1:1::/:/bin/sh", "", "an"), None);
    }
}
