//! One turn of the shim's loop: wait for whatever comes first, then handle all that came.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::connections::ConnectionId;
use super::{Failure, Next, Shim};

/// What a descriptor in the poll set belongs to.
#[derive(Clone, Copy, Debug)]
enum Source {
    Listener,
    Connection(ConnectionId),
    Init,
    Status,
    Expiry,
    Mishap,
    Console,
    EnforcerEnd,
    EnforcerWords,
}

impl Shim {
    /// Runs until the directory is gone, or the create has failed.
    pub(super) fn serve(&mut self) -> i32 {
        loop {
            let ready = match self.wait() {
                Ok(ready) => ready,
                // Nothing can be waited for any more; ending takes the box along, and the server notices both.
                Err(_) => return 2,
            };
            for (source, flags) in ready {
                if let Next::Exit(code) = self.handle(source, flags) {
                    self.farewell();
                    return code;
                }
            }
            if let Next::Exit(code) = self.due() {
                self.farewell();
                return code;
            }
            self.connections.retain(|connection| !connection.finished());
        }
    }

    fn wait(&self) -> Result<Vec<(Source, PollFlags)>, Errno> {
        let mut sources = vec![Source::Listener, Source::Expiry];
        let mut fds = vec![
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::from_borrowed_fd(self.expiry.as_fd(), PollFlags::IN),
        ];
        for connection in &self.connections {
            sources.push(Source::Connection(connection.id));
            fds.push(PollFd::from_borrowed_fd(connection.as_fd(), connection.interest()));
        }
        if let Some(init) = &self.remains.init {
            sources.push(Source::Init);
            fds.push(PollFd::new(&init.pidfd, PollFlags::IN));
        }
        if let Some(words) = self.starting.as_ref().map(|starting| &starting.words).or(self.words.as_ref()) {
            sources.push(Source::Status);
            fds.push(PollFd::new(words, PollFlags::IN));
        }
        if let Some(console) = &self.console {
            for fd in console.readable() {
                sources.push(Source::Console);
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        if let Some(program) = &self.remains.egress_program {
            sources.push(Source::EnforcerEnd);
            fds.push(PollFd::new(&program.pidfd, PollFlags::IN));
        }
        if let Some(enforcer) = &self.enforcer {
            for fd in [enforcer.words.readable(), enforcer.log.readable()].into_iter().flatten() {
                sources.push(Source::EnforcerWords);
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        if let Some(watch) = &self.watch {
            for (fd, flags) in watch.interest() {
                sources.push(Source::Mishap);
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
        let timeout = self.next_due().map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let flagged = sources.into_iter().zip(fds.iter().map(PollFd::revents));
        Ok(flagged.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn handle(&mut self, source: Source, flags: PollFlags) -> Next {
        match source {
            Source::Listener => self.accept(),
            Source::Connection(id) => return self.serve_connection(id, flags),
            Source::Init => return self.init_exited(),
            Source::Status => return self.status_readable(),
            Source::Expiry => {
                if self.expiry.fired() {
                    return self.expire();
                }
                // The wall clock was set: the absolute time is still right, but the timer was cancelled.
                self.arm_expiry();
            }
            Source::Mishap => self.report_mishaps(),
            Source::EnforcerEnd => self.enforcer_ended(),
            Source::EnforcerWords => self.enforcer_said(),
            Source::Console => {
                if let Some(console) = &mut self.console {
                    console.pump();
                }
            }
        }
        Next::Continue
    }

    fn next_due(&self) -> Option<Instant> {
        [
            self.starting.as_ref().map(|starting| starting.deadline),
            self.removing.as_ref().map(|removing| removing.kill_at),
            self.console.as_ref().and_then(super::Console::retry_at),
            self.watch.as_ref().and_then(super::Watch::retry_at),
            self.enforcer.as_ref().and_then(|enforcer| enforcer.restart_at),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Handles whatever has become due without a descriptor saying so.
    fn due(&mut self) -> Next {
        let now = Instant::now();
        let passed = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if passed(self.starting.as_ref().map(|starting| starting.deadline)) {
            let failure = Failure::new("process", "the agent did not start in time");
            return self.start_failed(failure);
        }
        if passed(self.removing.as_ref().map(|removing| removing.kill_at)) {
            return self.finish_removal();
        }
        if passed(self.console.as_ref().and_then(super::Console::retry_at))
            && let Some(console) = &mut self.console
        {
            console.pump();
        }
        if passed(self.watch.as_ref().and_then(super::Watch::retry_at)) {
            self.report_mishaps();
        }
        if passed(self.enforcer.as_ref().and_then(|enforcer| enforcer.restart_at)) {
            self.restart_enforcer();
        }
        Next::Continue
    }

    /// Gives the last answers a moment to leave.
    fn farewell(&mut self) {
        for connection in &mut self.connections {
            connection.flush_before_exit();
        }
    }
}
