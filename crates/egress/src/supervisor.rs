//! The parent process: holds what must survive the worker, the sockets among it, and starts the worker again when it dies.
//!
//! Does nothing else but tell those who ask after our health that there is no worker, so that there is little in it to fail. The kernel's rules are not its business: they stay whatever dies.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};

use crate::absence::{TURN, Waiting};
use crate::diagnostics::tell;
use crate::handed::{Handed, call};
use crate::settings::{Level, Settings};

/// Exit code of a worker that cannot work with its settings; there is no use in starting it again.
pub const REFUSED: i32 = 78;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A worker that has lived this long was not broken from the start.
const SETTLED: Duration = Duration::from_secs(60);

const TIME_TO_END: Duration = Duration::from_secs(5);

/// Runs workers until a signal ends it or a worker refuses its settings. Returns the exit code.
pub fn run() -> i32 {
    match supervise() {
        Ok(code) => code,
        Err(error) => {
            tell(Level::Error, format_args!("cannot supervise: {error}"));
            1
        }
    }
}

fn supervise() -> io::Result<i32> {
    let signals = Signals::block()?;
    let (settings, _) = match Settings::read(&|name| std::env::var(name).ok()) {
        Ok(read) => read,
        Err(refused) => {
            tell(Level::Error, refused);
            return Ok(REFUSED);
        }
    };
    let handed = Handed::make(&settings)?;
    let mut waiting = Waiting::default();
    let mut pause = Duration::ZERO;
    loop {
        if pause > Duration::ZERO && signals.ends_within(pause, || waiting.turn(handed.control())) {
            return Ok(0);
        }
        let started = Instant::now();
        match start(&handed, &waiting, &signals) {
            Ok(worker) => {
                waiting.clear();
                match watch(&worker, &signals)? {
                    Ended::Asked => return Ok(0),
                    Ended::Code(REFUSED) => return Ok(REFUSED),
                    Ended::Code(code) => {
                        tell(Level::Error, format_args!("the worker ended with code {code}"));
                    }
                    Ended::Signal(number) => {
                        tell(Level::Error, format_args!("the worker was ended by signal {number}"));
                    }
                }
            }
            Err(error) => tell(Level::Error, format_args!("the worker did not start: {error}")),
        }
        pause = next_pause(pause, started.elapsed());
    }
}

/// 0.1, 1, 2, 4 .. 30 seconds, from the start again once a worker has lived.
fn next_pause(last: Duration, lived: Duration) -> Duration {
    match last {
        _ if lived >= SETTLED => FIRST_PAUSE,
        Duration::ZERO => FIRST_PAUSE,
        FIRST_PAUSE => Duration::from_secs(1),
        longer => (longer * 2).min(LONGEST_PAUSE),
    }
}

fn start(handed: &Handed, waiting: &Waiting, signals: &Signals) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("sandglass-egress").arg("worker").args(handed.words()).args(waiting.numbers().map(call));
    let (mut numbers, mask) = (handed.numbers(), signals.before);
    numbers.extend(waiting.numbers());
    let prepare = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        for number in &numbers {
            // SAFETY: only a flag of a descriptor of this process is changed.
            if unsafe { libc::fcntl(*number, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: the mask is a value of its own; only this thread exists in the child.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    };
    // SAFETY: between fork and exec only system calls are made, nothing is allocated.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

enum Ended {
    Asked,
    Code(i32),
    Signal(i32),
}

/// Waits until the worker has ended, by itself or because we were asked to end.
fn watch(worker: &Child, signals: &Signals) -> io::Result<Ended> {
    let worker = Pid::from_child(worker);
    loop {
        if let Some(ended) = reap(worker) {
            return Ok(ended);
        }
        if signals.wait(None) != Some(libc::SIGCHLD) {
            break;
        }
    }
    let _ = rustix::process::kill_process(worker, Signal::TERM);
    let deadline = Instant::now() + TIME_TO_END;
    while reap(worker).is_none() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let _ = rustix::process::kill_process(worker, Signal::KILL);
            signals.wait(Some(Duration::from_secs(1)));
        } else {
            signals.wait(Some(left));
        }
    }
    Ok(Ended::Asked)
}

/// Collects every child that has ended: as the first process of a container we inherit others'.
fn reap(worker: Pid) -> Option<Ended> {
    while let Ok(Some((child, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        if child == worker {
            return Some(match status.exit_status() {
                Some(code) => Ended::Code(code),
                None => Ended::Signal(status.terminating_signal().unwrap_or_default()),
            });
        }
    }
    None
}

/// The signals that we wait for instead of being interrupted by them.
struct Signals {
    set: libc::sigset_t,
    before: libc::sigset_t,
}

impl Signals {
    fn block() -> io::Result<Self> {
        // SAFETY: both sets are initialised before they are used; the calls only write to them.
        unsafe {
            let mut set = std::mem::zeroed();
            let mut before = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT] {
                libc::sigaddset(&raw mut set, signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) {
                0 => Ok(Self { set, before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The next signal, or none if time is over.
    fn wait(&self, within: Option<Duration>) -> Option<i32> {
        let until = within.map(|time| Instant::now() + time);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let time = left.map(|left| libc::timespec {
                tv_sec: left.as_secs() as libc::time_t,
                tv_nsec: left.subsec_nanos().into(),
            });
            let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: the set is initialised, the time is either null or lives until the call returns.
            let signal = unsafe { libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), limit) };
            if signal > 0 {
                return Some(signal);
            }
            if io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN) {
                return None;
            }
        }
    }

    /// Whether a signal to end came within this time, in which something else is done now and then.
    fn ends_within(&self, time: Duration, mut meanwhile: impl FnMut()) -> bool {
        let until = Instant::now() + time;
        loop {
            meanwhile();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            match self.wait(Some(left.min(TURN))) {
                None | Some(libc::SIGCHLD) => {}
                Some(_) => return true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit_and_start_again() {
        let short = Duration::from_secs(1);
        let mut pause = Duration::ZERO;
        let mut seen = Vec::new();
        for _ in 0..8 {
            pause = next_pause(pause, short);
            seen.push(pause.as_millis());
        }
        assert_eq!(seen, [100, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(next_pause(pause, SETTLED), FIRST_PAUSE);
    }
}
