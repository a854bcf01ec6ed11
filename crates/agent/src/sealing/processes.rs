//! Ending what a build left running: it could go on to write when nobody looks any more.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, getppid, kill_process};

use crate::kernel;

/// A process that hangs in the kernel ends when it comes back from there.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(2);

/// Ends every process of the box but PID 1, which is the agent, and this one.
///
/// # Errors
/// When this is no box with the agent as its first process, or something does not end.
pub(super) fn end_others() -> io::Result<()> {
    if !is_in_box() {
        return Err(io::Error::other("the agent is not the first process here, so nothing is ended"));
    }
    let until = Instant::now() + PATIENCE;
    loop {
        // One call meets all of them, so that none escapes by multiplying.
        kernel::kill_all_others();
        let left = others()?;
        let Some(first) = left.first() else { return Ok(()) };
        if Instant::now() >= until {
            let message = format!("{} processes of the build do not end, among them {first:?}", left.len());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        for pid in left {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether the agent started this, as the first process of its box. Anywhere else it would be a disaster.
fn is_in_box() -> bool {
    let first = fs::read("/proc/1/cmdline").unwrap_or_default();
    let program = first.split(|byte| *byte == 0).next().unwrap_or_default();
    getppid().is_some_and(|parent| parent.as_raw_pid() == 1) && program.ends_with(b"execd")
}

/// What runs beside the agent and this process.
fn others() -> io::Result<Vec<Pid>> {
    let mut others = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        let spared = pid.as_raw_pid() == 1 || pid == getpid();
        if !spared
            && lives(&fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default())
        {
            others.push(pid);
        }
    }
    Ok(others)
}

/// By the state after the name, which may hold anything. One that is only waited for does nothing any more.
fn lives(stat: &str) -> bool {
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_ended_outside_of_a_box() {
        assert!(!is_in_box());
        assert!(end_others().unwrap_err().to_string().contains("not the first process"));
    }

    #[test]
    fn a_process_is_judged_by_its_state_whatever_its_name_is() {
        assert!(lives("7 (a) Z (b) S 1 7"));
        assert!(!lives("7 (a) S (b) Z 1 7") && !lives("7 (x) X 1") && !lives(""));
    }
}
