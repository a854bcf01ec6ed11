//! Ending what a run of a shell started, or all that sessions of the kernel hold.
//!
//! Members of the shell's session are told by `/proc`, with their start times: what earlier runs left running is not
//! touched by the end of a later one. Without `/proc` the whole group ends.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::kin::{self, Member};
use super::signal_group;

/// How long processes have to end by themselves.
const GRACE: Duration = Duration::from_millis(1500);
/// Killing races with forking; after this many rounds whoever still forks is left to the limits of the box.
const ROUNDS: u32 = 20;

async fn members(sessions: &[i32]) -> Option<Vec<Member>> {
    let sessions = sessions.to_vec();
    tokio::task::spawn_blocking(move || kin::members(&sessions)).await.ok().flatten()
}

/// Ends a shell and what it started since then: asked first, killed after the grace.
pub async fn end_run(shell: i32, since: u64) {
    let victims = async || {
        let mut found = members(&[shell]).await?;
        found.retain(|member| member.started >= since || member.pid == shell);
        Some(found)
    };
    let Some(found) = victims().await else {
        signal_group(shell, libc::SIGKILL);
        return;
    };
    kin::signal(&found, Signal::TERM);
    kin::signal(&found, Signal::CONT);
    let deadline = Instant::now() + GRACE;
    let mut step = Duration::from_millis(2);
    while Instant::now() < deadline {
        tokio::time::sleep(step).await;
        if victims().await.unwrap_or_default().is_empty() {
            return;
        }
        step = (step * 2).min(Duration::from_millis(100));
    }
    for _ in 0..ROUNDS {
        let found = victims().await.unwrap_or_default();
        if found.is_empty() {
            return;
        }
        kin::signal(&found, Signal::KILL);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Kills all members of the sessions.
pub async fn kill_all(sessions: &[i32]) {
    for session in sessions {
        signal_group(*session, libc::SIGKILL);
    }
    for _ in 0..ROUNDS {
        let found = members(sessions).await.unwrap_or_default();
        if found.is_empty() {
            return;
        }
        kin::signal(&found, Signal::KILL);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Those of the sessions that still have members.
pub async fn inhabited(sessions: &[i32]) -> Vec<i32> {
    let Some(found) = members(sessions).await else { return sessions.to_vec() };
    let mut left: Vec<i32> = found.iter().map(|member| member.session).collect();
    left.sort_unstable();
    left.dedup();
    left
}
