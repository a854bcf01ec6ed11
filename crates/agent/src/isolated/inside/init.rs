//! PID 1 of a session: reaps, feeds the shell, sets a copy of it aside before each run, and stops runs by force.
//!
//! Trusts the agent's orders. What the shell says is untrusted: lines are bounded and only name runs and processes of
//! this very session.
//! Invariant: every run that was ordered is reported as ended exactly once, whatever becomes of the shell.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::shell::{DRIVER, LOOP};
use crate::accounts::Identity;
use crate::hardening::{self, Floor};
use crate::init::reap::{Exit, Reaper};
use crate::init::spawn::Launch;
use crate::isolated::plan::{PIPES, Plan};
use crate::isolated::wire::{Channel, How, Order, Report};
use crate::kernel;

/// How long a run that was asked to end may take.
const GRACE: Duration = Duration::from_secs(1);
/// Of what the shell says; longer is not from our loop.
const MAX_SAID: usize = 4096;
/// Shells that end without having been asked to run anything are not replaced for ever.
const MAX_FRESH: usize = 16;
const OUTPUT: usize = 256 << 10;

pub(super) fn run(control: &OwnedFd, plan: &Plan) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let control = Channel::new(control.try_clone()?)?;
        if plan.probe {
            return control.send(&Report::Ready, None).await;
        }
        let keep = if plan.uid == 0 { plan.capabilities } else { 0 };
        hardening::set_floor(Floor::for_session(keep, plan.deny.as_deref())?);
        hardening::keep_for_init(plan.capabilities)?;
        Init::start(control, plan)?.live().await
    })
}

/// A run that the shell is busy with.
struct Current {
    id: String,
    how: How,
    /// Held so that the reader sees no end before the shell has opened its own.
    output: File,
    spare: File,
    spare_pid: Option<i32>,
}

struct Shell {
    pid: i32,
    exit: oneshot::Receiver<Exit>,
}

struct Init<'a> {
    plan: &'a Plan,
    control: Channel,
    reaper: Reaper,
    shell: Shell,
    next: File,
    said: pipe::Receiver,
    unread: Vec<u8>,
    current: Option<Current>,
    /// The pipe of the copy that has become the shell, and its path: a copy may be told to go on before it has opened it.
    told: Option<(PathBuf, File)>,
    /// Background runs, with their outputs held for as long as they run.
    away: HashMap<String, File>,
    gone: mpsc::UnboundedSender<String>,
    leaving: mpsc::UnboundedReceiver<String>,
    force_at: Option<Instant>,
    fresh: usize,
}

impl<'a> Init<'a> {
    fn start(control: Channel, plan: &'a Plan) -> io::Result<Self> {
        let reaper = Reaper::start()?;
        let next = both_ends(plan, &path("next"))?;
        let said = pipe::Receiver::from_file(both_ends(plan, &path("said"))?)?;
        let shell = start_shell(&reaper, plan)?;
        let (gone, leaving) = mpsc::unbounded_channel();
        Ok(Init {
            plan,
            control,
            reaper,
            shell,
            next,
            said,
            unread: Vec::new(),
            current: None,
            told: None,
            away: HashMap::new(),
            gone,
            leaving,
            force_at: None,
            fresh: 0,
        })
    }

    async fn live(mut self) -> io::Result<()> {
        self.control.send(&Report::Ready, None).await?;
        loop {
            let force = self.force_at;
            tokio::select! {
                order = self.control.receive::<Order>() => match order? {
                    Some((Order::Run { id, how }, Some(script))) => self.start_run(id, how, script).await?,
                    Some((Order::Stop { id }, _)) => self.ask(&id),
                    Some(_) => {}
                    None => return Ok(()),
                },
                said = self.said.readable() => {
                    said?;
                    self.listen().await?;
                }
                exit = &mut self.shell.exit => {
                    self.listen().await?;
                    let exit = exit.unwrap_or(Exit::Code(255));
                    if !self.replace_shell(exit).await? {
                        let reason = "the session's shell cannot be kept running".to_owned();
                        return self.control.send(&Report::Over { reason }, None).await;
                    }
                }
                Some(id) = self.leaving.recv() => {
                    self.listen().await?;
                    if self.away.contains_key(&id) {
                        self.ended(&id, 137, Some("killed")).await?;
                    }
                }
                () = sleep_until(force), if force.is_some() => self.force(),
            }
        }
    }

    async fn start_run(&mut self, id: String, how: How, script: OwnedFd) -> io::Result<()> {
        let prepared = self.prepare_run(&id, how, script);
        let (reader, current) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                let reason = format!("no place for the run in /run: {error}");
                self.remove_files(&id);
                return self.control.send(&Report::Ended { id, code: -1, reason: Some(reason) }, None).await;
            }
        };
        self.current = Some(current);
        self.control.send(&Report::Output { id: id.clone() }, Some(reader.as_fd())).await?;
        let word = match how {
            How::Shell => "shell",
            How::Copy => "copy",
            How::Background => "background",
        };
        self.next.write_all(format!("{id} {word}\n").as_bytes())
    }

    fn prepare_run(&self, id: &str, how: How, script: OwnedFd) -> io::Result<(OwnedFd, Current)> {
        let file = path(id);
        let mut copy = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file)?;
        io::copy(&mut File::from(script), &mut copy)?;
        give(self.plan, &copy)?;
        let spare = both_ends(self.plan, &path(&format!("{id}.spare")))?;
        let out = path(&format!("{id}.out"));
        make_pipe(&out)?;
        let flags = OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let reader = open(&out, OFlags::RDONLY | flags, Mode::empty())?;
        let output = File::from(open(&out, OFlags::WRONLY | flags, Mode::empty())?);
        give(self.plan, &output)?;
        // Refused beyond the user's pipe budget; the default size works too.
        let _ = rustix::pipe::fcntl_setpipe_size(&output, OUTPUT);
        Ok((reader, Current { id: id.to_owned(), how, output, spare, spare_pid: None }))
    }

    /// Reads everything that the shell has said so far.
    async fn listen(&mut self) -> io::Result<()> {
        let mut buffer = [0; 1024];
        loop {
            let read = match self.said.try_read(&mut buffer) {
                // The runtime only knows of bytes that had come when it last looked; the kernel knows of all.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    rustix::io::read(&self.said, &mut buffer[..]).map_err(io::Error::from)
                }
                read => read,
            };
            match read {
                Ok(0) => return Ok(()),
                Ok(count) => self.unread.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                self.heard(String::from_utf8_lossy(&line).trim_end()).await?;
            }
            if self.unread.len() > MAX_SAID {
                self.unread.clear();
            }
        }
    }

    async fn heard(&mut self, line: &str) -> io::Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let [word, id, number] = words[..] else { return Ok(()) };
        let Ok(number) = number.parse::<i32>() else { return Ok(()) };
        let shell = self.shell.pid;
        let running = self.current.as_mut().filter(|current| current.id == id);
        match (word, running) {
            // The loop says these two before user code of the run exists; what user code says later counts for nothing.
            ("spare", Some(current)) if current.spare_pid.is_none() && number > 1 => {
                current.spare_pid = Some(number);
                self.forget_told();
                Ok(())
            }
            ("away", Some(current)) if current.how == How::Background && number != shell => {
                self.forget_told();
                self.went_away(number).await
            }
            ("ended", Some(_)) => self.ended(id, number, None).await,
            ("ended", None) if self.away.contains_key(id) => self.ended(id, number, None).await,
            _ => Ok(()),
        }
    }

    async fn went_away(&mut self, pid: i32) -> io::Result<()> {
        let Some(current) = self.current.take() else { return Ok(()) };
        let id = current.id;
        self.away.insert(id.clone(), current.output);
        let (exit, gone) = (self.reaper.adopt(pid), self.gone.clone());
        let alive = kernel::signal(pid, 0);
        let about = id.clone();
        tokio::spawn(async move {
            if alive {
                let _ = exit.await;
            }
            let _ = gone.send(about);
        });
        self.control.send(&Report::Away { id }, None).await
    }

    async fn ended(&mut self, id: &str, code: i32, reason: Option<&str>) -> io::Result<()> {
        if let Some(mut current) = self.current.take_if(|current| current.id == id) {
            self.force_at = None;
            self.fresh = 0;
            // The copy is not needed: it ends by itself.
            let _ = current.spare.write_all(b"no\n");
            // Before the pipe closes: who finds it by then would wait for a writer for ever.
            self.remove_files(id);
        }
        self.away.remove(id);
        self.remove_files(id);
        let reason = reason.map(str::to_owned);
        self.control.send(&Report::Ended { id: id.to_owned(), code, reason }, None).await
    }

    /// Called when the shell begins a run: the copy that it was has read what it was told.
    fn forget_told(&mut self) {
        if let Some((path, pipe)) = self.told.take() {
            let _ = fs::remove_file(path);
            drop(pipe);
        }
    }

    fn remove_files(&self, id: &str) {
        for name in [id.to_owned(), format!("{id}.out"), format!("{id}.spare")] {
            let _ = fs::remove_file(path(&name));
        }
    }

    /// The shell has ended: its copy takes over, or a fresh one starts. False when that is hopeless.
    async fn replace_shell(&mut self, exit: Exit) -> io::Result<bool> {
        let copy = self.current.as_ref().and_then(|current| current.spare_pid);
        let mut taken_over = false;
        if let (Some(pid), Some(current)) = (copy, &mut self.current) {
            let exit = self.reaper.adopt(pid);
            if kernel::signal(pid, 0) && current.spare.write_all(b"go\n").is_ok() {
                self.shell = Shell { pid, exit };
                taken_over = true;
            }
        }
        if let Some(current) = self.current.take() {
            let reason = match exit {
                Exit::Code(_) => None,
                Exit::Signal { .. } => Some("killed".to_owned()),
            };
            self.force_at = None;
            for name in [current.id.clone(), format!("{}.out", current.id)] {
                let _ = fs::remove_file(path(&name));
            }
            self.forget_told();
            self.told = Some((path(&format!("{}.spare", current.id)), current.spare));
            if !taken_over {
                self.forget_told();
            }
            let report = Report::Ended { id: current.id, code: exit.shell_code(), reason };
            self.control.send(&report, None).await?;
        }
        if taken_over {
            return Ok(true);
        }
        self.fresh += 1;
        if self.fresh > MAX_FRESH {
            return Ok(false);
        }
        match start_shell(&self.reaper, self.plan) {
            Ok(shell) => self.shell = shell,
            Err(_) => return Ok(false),
        }
        Ok(true)
    }

    /// Interrupts what the run has started, but not the shell, so that its state stays when that is enough.
    fn ask(&mut self, id: &str) {
        if self.current.as_ref().is_none_or(|current| current.id != id) || self.force_at.is_some() {
            return;
        }
        for pid in self.of_this_run() {
            kernel::signal(pid, libc::SIGINT);
        }
        self.force_at = Some(Instant::now() + GRACE);
    }

    fn force(&mut self) {
        self.force_at = None;
        if self.current.is_none() {
            return;
        }
        let started = self.of_this_run();
        kernel::signal(self.shell.pid, libc::SIGKILL);
        for pid in started {
            kernel::signal(pid, libc::SIGKILL);
        }
    }

    /// What descends from the shell and is younger than its copy: jobs of earlier runs are not.
    fn of_this_run(&self) -> Vec<i32> {
        let table = processes();
        let spare = self.current.as_ref().and_then(|current| current.spare_pid);
        let since = spare.and_then(|pid| table.get(&pid)).map_or(0, |(_, start)| *start);
        let mut found = vec![self.shell.pid];
        let mut at = 0;
        while at < found.len() {
            let parent = found[at];
            found.extend(table.iter().filter(|(_, (of, _))| *of == parent).map(|(pid, _)| *pid));
            at += 1;
        }
        found
            .retain(|pid| *pid != self.shell.pid && table.get(pid).is_some_and(|(_, start)| *start >= since));
        found
    }
}

async fn sleep_until(at: Option<Instant>) {
    if let Some(at) = at {
        tokio::time::sleep_until(at).await;
    }
}

/// Parent and start of every process of the session.
fn processes() -> HashMap<i32, (i32, u64)> {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name may hold anything, also parentheses.
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            Some((pid, (fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?)))
        })
        .collect()
}

fn start_shell(reaper: &Reaper, plan: &Plan) -> io::Result<Shell> {
    let file = plan.shell.to_string_lossy().into_owned();
    let mut argv = vec![file.clone()];
    if plan.bash {
        argv.extend(["--noprofile".into(), "--norc".into()]);
    }
    argv.extend(["-c".into(), DRIVER.into(), file, PIPES.into(), LOOP.into()]);
    let identity = Identity { uid: plan.uid, gid: plan.gid, ..Identity::default() };
    let launch = Launch {
        argv: &argv,
        env: &plan.env,
        cwd: Some(&plan.cwd),
        identity: Some(&identity),
        stdin: None,
        stdout: None,
        stderr: None,
    };
    let (pid, exit) = reaper.spawn(launch).map_err(|error| io::Error::other(format!("shell: {error}")))?;
    Ok(Shell { pid, exit })
}

fn path(name: &str) -> PathBuf {
    Path::new(PIPES).join(name)
}

/// A named pipe that its maker holds at both ends, so that neither opening it nor its end depends on anybody else.
fn both_ends(plan: &Plan, place: &Path) -> io::Result<File> {
    make_pipe(place)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let pipe = File::from(open(place, flags, Mode::empty())?);
    give(plan, &pipe)?;
    Ok(pipe)
}

fn make_pipe(place: &Path) -> io::Result<()> {
    Ok(mknodat(CWD, place, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?)
}

/// By descriptor: the directory is the user's, who may put a link in the file's place.
fn give(plan: &Plan, file: &File) -> io::Result<()> {
    fchown(file, Some(plan.uid), Some(plan.gid))
}
