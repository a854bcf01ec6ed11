//! The processes that belong to a session of the kernel: who is left of what a shell started.
//!
//! Reads `/proc`; where that is not mounted, callers fall back to the process group.
//! Invariant: only members of the session that was asked for are ever signalled.

use rustix::process::{Pid, Signal, kill_process};

/// A member of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub pid: i32,
    pub session: i32,
    /// Clock ticks since boot.
    pub started: u64,
}

/// The time as processes' start times count it.
pub fn ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let per_second = rustix::param::clock_ticks_per_second();
    let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds * per_second + nanos * per_second / 1_000_000_000
}

/// The members of some sessions that still run; `None` where there is no telling. Walks the whole process table: not for the runtime thread.
pub fn members(sessions: &[i32]) -> Option<Vec<Member>> {
    std::fs::metadata("/proc/self/stat").ok()?;
    let table = std::fs::read_dir("/proc").ok()?;
    let pids = table.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let found = pids.filter_map(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (session, started) = parse(&stat)?;
        sessions.contains(&session).then_some(Member { pid, session, started })
    });
    Some(found.collect())
}

/// Session and start time; none for a process that has ended.
fn parse(stat: &str) -> Option<(i32, u64)> {
    // The name is in parentheses and may hold anything, more of them too.
    let fields: Vec<&str> = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    Some((fields.get(3)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

pub fn signal(members: &[Member], signal: Signal) {
    for pid in members.iter().filter_map(|member| Pid::from_raw(member.pid)) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_forge_the_fields() {
        let tail = "S 1 7 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 999 1 1";
        assert_eq!(parse(&format!("5 (a) R 1 1 1) {tail}")), Some((42, 999)));
        assert_eq!(parse(&format!("5 (a) {}", tail.replacen('S', "Z", 1))), None);
        assert_eq!(parse("5 (a"), None);
    }

    #[test]
    fn this_process_is_a_member_of_its_session() {
        // Not `getsid`: the session may be one from outside this PID namespace, which is 0 here.
        let (session, _) = parse(&std::fs::read_to_string("/proc/self/stat").unwrap()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let found = members(&[session]).unwrap();
        let me = found.iter().find(|member| member.pid == own).unwrap();
        assert!(me.started <= ticks());
    }
}
