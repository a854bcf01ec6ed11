//! File work as somebody else, checked by the kernel: each piece on a thread of its own that gives up everything it may
//! do beyond that user and group, and ends afterwards.
//!
//! A thread's credentials are its own in the kernel; only libc would spread a change to all of them, so the calls here
//! go past it. Bounded by [`MAX_THREADS`] threads; more work waits. Nothing these threads do blocks on a FIFO or a
//! device, so a client that leaves holds none of them for longer than one piece of work.
//! Invariant: no thread that has changed its identity is ever used for anything else.

use rustix::process::{Gid, Uid, getegid, geteuid, getgroups};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use tokio::sync::{Semaphore, oneshot};

use crate::http::reply::{Code, Failure};

const MAX_THREADS: usize = 16;
const STACK: usize = 512 << 10;
static SLOTS: Semaphore = Semaphore::const_new(MAX_THREADS);

/// A user and a group without any other groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ids {
    uid: u32,
    gid: u32,
}

impl Ids {
    /// From two path segments.
    pub(super) fn parse(uid: &str, gid: &str) -> Result<Self, Failure> {
        let number = |name: &str, text: &str| {
            let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            // The last number means "no change" to the kernel.
            text.parse::<u32>().ok().filter(|id| plain && *id != u32::MAX).ok_or_else(|| {
                Failure::invalid(format!("{name} must be an integer from 0 to 4294967294, not {text:?}"))
            })
        };
        Ok(Ids { uid: number("uid", uid)?, gid: number("gid", gid)? })
    }
}

/// Runs blocking work as `ids`; the work is not started when that is not possible.
pub(super) async fn run<T: Send + 'static>(
    ids: Ids,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let aborted = || Failure::runtime("file operation was aborted");
    let slot = SLOTS.acquire().await.map_err(|_| aborted())?;
    let (tx, rx) = oneshot::channel();
    let thread = std::thread::Builder::new().name("execd-identity".into()).stack_size(STACK);
    thread
        .spawn(move || {
            // Nobody may be waiting any more; the result then ends here, still as the one it belongs to.
            let _ = tx.send(become_identity(ids).and_then(|()| work()));
            drop(slot);
        })
        .map_err(|error| unavailable(ids, &error))?;
    rx.await.unwrap_or_else(|_| Err(aborted()))
}

fn become_identity(ids: Ids) -> Result<(), Failure> {
    let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
    let switch = || -> rustix::io::Result<()> {
        drop_groups(gid)?;
        if getegid() != gid {
            set_thread_res_gid(gid, gid, gid)?;
        }
        if geteuid() != uid {
            set_thread_res_uid(uid, uid, uid)?;
        }
        // The kernel does this for a thread that was root; one that merely had capabilities would keep them.
        if !uid.is_root() && !capabilities(None)?.permitted.is_empty() {
            let none = CapabilitySet::empty();
            set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
        }
        Ok(())
    };
    switch().map_err(|error| unavailable(ids, &error.into()))
}

/// Where the groups cannot be changed they may be right already: an agent that is not root, asked for its own identity.
fn drop_groups(gid: Gid) -> rustix::io::Result<()> {
    match set_thread_groups(&[]) {
        Err(error) if !getgroups()?.iter().all(|group| *group == gid) => Err(error),
        _ => Ok(()),
    }
}

fn unavailable(ids: Ids, error: &std::io::Error) -> Failure {
    let reason = match error.raw_os_error() {
        Some(libc::EINVAL) => "no such number in the user namespace of this sandbox".to_owned(),
        _ => crate::http::reply::plain(error),
    };
    Failure::new(
        http::StatusCode::SERVICE_UNAVAILABLE,
        Code::FilesystemIdentityUnavailable,
        format!("cannot act as user {} and group {}: {reason}", ids.uid, ids.gid),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_32_bit_and_not_the_last_number() {
        assert_eq!(Ids::parse("0", "4294967294"), Ok(Ids { uid: 0, gid: u32::MAX - 1 }));
        for bad in ["4294967295", "4294967296", "-1", "+1", "", "x", "1 ", "99999999999999999999"] {
            assert!(Ids::parse(bad, "1").is_err() && Ids::parse("1", bad).is_err(), "{bad}");
        }
    }
}
