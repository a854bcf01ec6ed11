//! Starting one process: program lookup, identity, descriptors, and errors a person can act on.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::accounts::Identity;
use crate::envs::{self, Env};
use crate::hardening;

/// What a new process leads, and so what a signal to it reaches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lead {
    #[default]
    Group,
    /// A session without a terminal: whatever it starts can be told by the session's id.
    Session,
    /// A session whose terminal is the standard input.
    Terminal,
}

/// What few processes need beyond a [`Launch`].
#[derive(Default)]
pub struct Extras {
    pub lead: Lead,
    /// Descriptors and the numbers they get, which must be among [`super::RESERVED`].
    pub fds: Vec<(OwnedFd, RawFd)>,
    pub orphan: Orphan,
}

/// Everything a new process gets. Descriptors left out are inherited.
pub struct Launch<'a> {
    pub argv: &'a [String],
    pub env: &'a Env,
    pub cwd: Option<&'a Path>,
    pub identity: Option<&'a Identity>,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
}

#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("no program given")]
    Empty,
    #[error("exec: \"{0}\": executable file not found in $PATH")]
    NotFound(String),
    #[error("exec {0}: no such file or directory")]
    NoSuchFile(String),
    #[error("exec {0}: is a directory")]
    Directory(String),
    #[error("exec {0}: permission denied")]
    Denied(String),
    #[error(
        "exec {0}: no such file or directory: its interpreter or dynamic loader is missing from the image"
    )]
    NoInterpreter(String),
    #[error("exec {0}: exec format error: not a program for this machine, or a script without #!")]
    Format(String),
    #[error("exec {program}: argument list or environment too long")]
    TooLong { program: String },
    #[error("chdir {0}: no such directory")]
    NoDirectory(String),
    #[error("exec {program}: operation not permitted: switching user needs CAP_SETUID and CAP_SETGID")]
    Identity { program: String },
    #[error("exec {program}: {source}")]
    Other { program: String, source: io::Error },
}

/// What becomes of a process whose agent is killed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Orphan {
    #[default]
    LivesOn,
    Dies,
}

/// A process to start elsewhere: everything of [`Launch`], owned.
pub struct Program {
    /// The file to execute; without it, the first word is looked up in the process's own PATH.
    pub path: Option<PathBuf>,
    pub argv: Vec<String>,
    pub env: Env,
    pub cwd: PathBuf,
    pub identity: Identity,
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

impl Program {
    /// As [`Launch::start`]. Blocks until the program runs, which a dead mount may put off for ever.
    pub fn start(self) -> Result<i32, LaunchError> {
        let launch = Launch {
            argv: &self.argv,
            env: &self.env,
            cwd: Some(&self.cwd),
            identity: Some(&self.identity),
            stdin: Some(self.stdin),
            stdout: Some(self.stdout),
            stderr: Some(self.stderr),
        };
        match self.path {
            Some(path) => launch.start_file(path, &Extras::default()),
            None => launch.start(),
        }
    }
}

impl Launch<'_> {
    /// Starts the process as leader of its own group and returns its pid.
    pub fn start(self) -> Result<i32, LaunchError> {
        self.start_with(Extras::default())
    }

    pub fn start_with(self, extras: Extras) -> Result<i32, LaunchError> {
        let name = self.argv.first().filter(|n| !n.is_empty()).ok_or(LaunchError::Empty)?;
        let program = find_program(name, envs::search_path(self.env), self.cwd)?;
        self.start_file(program, &extras)
    }

    fn start_file(self, program: PathBuf, extras: &Extras) -> Result<i32, LaunchError> {
        let name = self.argv.first().ok_or(LaunchError::Empty)?;
        let mut command = Command::new(&program);
        command.arg0(name).args(&self.argv[1..]).env_clear().envs(self.env);
        if let Some(cwd) = self.cwd {
            command.current_dir(cwd);
        }
        let stdio = |fd: Option<OwnedFd>| fd.map_or_else(Stdio::inherit, Stdio::from);
        command.stdin(stdio(self.stdin)).stdout(stdio(self.stdout)).stderr(stdio(self.stderr));
        let switching = self.identity.filter(|id| !is_own(id));
        // Before the rights go that it takes.
        restore_defaults(&mut command);
        hardening::before_switch(&mut command);
        if let Some(identity) = switching {
            switch_identity(&mut command, identity);
        }
        if extras.orphan == Orphan::Dies {
            // After the switch, which would undo it.
            die_with_parent(&mut command);
        }
        if extras.lead == Lead::Group {
            command.process_group(0);
        }
        attach(&mut command, extras)
            .map_err(|source| LaunchError::Other { program: display(program.as_os_str()), source })?;
        hardening::after_switch(&mut command);
        // The handle is dropped without a wait: the reaper collects the child.
        match command.spawn() {
            Ok(child) => Ok(i32::try_from(child.id()).unwrap_or(i32::MAX)),
            Err(error) => Err(explain(&program, self.cwd, switching.is_some(), error)),
        }
    }
}

fn is_own(identity: &Identity) -> bool {
    // Root keeps whatever groups it has: they add nothing to it.
    rustix::process::geteuid().as_raw() == identity.uid
        && rustix::process::getegid().as_raw() == identity.gid
        && (identity.uid == 0 || identity.groups.is_empty())
}

fn switch_identity(command: &mut Command, identity: &Identity) {
    let (uid, gid) = (identity.uid, identity.gid);
    let mut groups = identity.groups.clone();
    if !groups.contains(&gid) {
        groups.insert(0, gid);
    }
    let switch = move || {
        // Raw system calls: the libc wrappers would try to tell threads that do not exist in a fresh child.
        // SAFETY: `groups` outlives the call and its length is passed with it; the other calls take numbers.
        let failed = unsafe {
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) != 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) != 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure only makes system calls on memory prepared before the fork; it does not allocate.
    unsafe { command.pre_exec(switch) };
}

/// Above every reserved number, so that placing one descriptor cannot overwrite another.
const LIFTED: RawFd = 64;

fn attach(command: &mut Command, extras: &Extras) -> io::Result<()> {
    let lead = extras.lead;
    if lead == Lead::Group && extras.fds.is_empty() {
        return Ok(());
    }
    let mut placed = Vec::with_capacity(extras.fds.len());
    for (fd, number) in &extras.fds {
        debug_assert!(super::RESERVED.contains(number));
        placed.push((rustix::io::fcntl_dupfd_cloexec(fd, LIFTED)?, *number));
    }
    let place = move || {
        // SAFETY: system calls on numbers only; `placed` keeps its descriptors open until the program is executed.
        let failed = unsafe {
            (lead != Lead::Group && libc::setsid() < 0)
                || (lead == Lead::Terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0)
                || placed.iter().any(|(fd, number)| libc::dup2(fd.as_raw_fd(), *number) < 0)
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure only makes system calls on memory prepared before the fork; it does not allocate.
    unsafe { command.pre_exec(place) };
    Ok(())
}

fn die_with_parent(command: &mut Command) {
    let tie = || {
        // SAFETY: prctl with these arguments only sets a number of the calling process.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        Ok(())
    };
    // SAFETY: the closure makes one system call and does not allocate.
    unsafe { command.pre_exec(tie) };
}

/// Gives a program the limits the agent was started with and the signals as they are by default, and makes it what the kernel kills first when memory is
/// short: a box of many small processes must not lose its agent, which is then the largest of them.
fn restore_defaults(command: &mut Command) {
    const MORE_LIKELY: &[u8] = b"200";
    let nofile = super::nofile_of_programs();
    let restore = move || {
        // Signals that whoever started the agent ignored would be ignored by every program, Ctrl-C in terminals for one.
        for signal in 1..32 {
            // SAFETY: a plain call; those that cannot be changed stay.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        if let Some(limit) = &nofile {
            // SAFETY: reads one struct that lives in the closure.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
        }
        // SAFETY: opens a constant path; nothing is written to memory.
        let fd =
            unsafe { libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
        if fd >= 0 {
            // A box without /proc, or with one of another kind, keeps its scores.
            // SAFETY: writes from a constant of the length that is passed with it.
            unsafe { libc::write(fd, MORE_LIKELY.as_ptr().cast(), MORE_LIKELY.len()) };
            // SAFETY: the descriptor was opened above and is used nowhere else.
            unsafe { libc::close(fd) };
        }
        Ok(())
    };
    // SAFETY: the closure only makes system calls on constants and its own copy; it does not allocate.
    unsafe { command.pre_exec(restore) };
}

/// The shell of an image: bash when it has it, else sh.
pub fn find_shell(path: &str) -> Option<&'static str> {
    locate_shell(path).map(|(name, _)| name)
}

/// The same with its place, for shells whose own PATH must not decide which one they are.
pub fn locate_shell(path: &str) -> Option<(&'static str, PathBuf)> {
    ["bash", "sh"].into_iter().find_map(|shell| Some((shell, search(shell, path).ok()?)))
}

fn find_program(name: &str, path: &str, cwd: Option<&Path>) -> Result<PathBuf, LaunchError> {
    if name.contains('/') {
        return Ok(match cwd {
            Some(cwd) if !name.starts_with('/') => cwd.join(name),
            _ => PathBuf::from(name),
        });
    }
    search(name, path)
}

/// Whether the search path has that program.
pub fn is_there(name: &str, path: &str) -> bool {
    search(name, path).is_ok()
}

/// Where the search path has that program.
pub fn search(name: &str, path: &str) -> Result<PathBuf, LaunchError> {
    let mut denied = None;
    // Relative entries would make the lookup depend on where a request runs.
    for dir in path.split(':').filter(|d| d.starts_with('/')) {
        let candidate = Path::new(dir).join(name);
        match candidate.metadata() {
            Ok(meta) if meta.is_file() && meta.permissions().mode() & 0o111 != 0 => return Ok(candidate),
            Ok(meta) if meta.is_file() => denied = Some(candidate),
            _ => {}
        }
    }
    Err(match denied {
        Some(found) => LaunchError::Denied(found.display().to_string()),
        None => LaunchError::NotFound(name.to_owned()),
    })
}

fn explain(program: &Path, cwd: Option<&Path>, switching: bool, error: io::Error) -> LaunchError {
    let shown = display(program.as_os_str());
    if let Some(cwd) = cwd.filter(|c| !c.is_dir()) {
        return LaunchError::NoDirectory(display(cwd.as_os_str()));
    }
    match error.raw_os_error() {
        Some(libc::ENOENT) if program.exists() => LaunchError::NoInterpreter(shown),
        Some(libc::ENOENT | libc::ENOTDIR) => LaunchError::NoSuchFile(shown),
        Some(libc::EACCES) if program.is_dir() => LaunchError::Directory(shown),
        Some(libc::EACCES) => LaunchError::Denied(shown),
        Some(libc::ENOEXEC) => LaunchError::Format(shown),
        Some(libc::E2BIG) => LaunchError::TooLong { program: shown },
        Some(libc::EPERM | libc::EINVAL) if switching => LaunchError::Identity { program: shown },
        _ => LaunchError::Other { program: shown, source: error },
    }
}

fn display(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}
