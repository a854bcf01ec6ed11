//! One process and whatever it starts in its group: begun with its output captured, ended for good.
//!
//! Invariant: after [`Child::stop`] nobody of the group is left, unless the kernel itself cannot end them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::capture::{Capture, Outputs, Writers};
use crate::clock::{Clock, Moment};
use crate::ports::{Exit, Ports, Program, Running, Signal, Spawn, SpawnError};

/// What a killed group gets to be gone.
const AFTER_KILL: Duration = Duration::from_secs(2);
/// Between looks whether a group without its leader is gone.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(50);

/// A started process.
pub struct Child {
    group: i32,
    exit: Pin<Box<dyn Future<Output = Exit> + Send>>,
    ended: Option<Exit>,
    capture: Capture,
    spawn: Arc<dyn Spawn>,
    clock: Arc<dyn Clock>,
}

impl Child {
    /// Starts a program. With a source, its output is kept in that log.
    pub fn start(
        ports: &Ports,
        program: &Program,
        source: Option<&str>,
        outputs: Outputs,
    ) -> Result<Child, SpawnError> {
        let (capture, Writers { stdout, stderr }) =
            Capture::start(ports, source, outputs).map_err(|error| SpawnError {
                message: format!("no pipe for the output: {error}"),
                source: Some(error),
            })?;
        let Running { group, exit } = ports.spawn.spawn(program, stdout, stderr)?;
        let (spawn, clock) = (Arc::clone(&ports.spawn), Arc::clone(&ports.clock));
        Ok(Child { group, exit, ended: None, capture, spawn, clock })
    }

    pub fn group(&self) -> i32 {
        self.group
    }

    pub fn capture(&self) -> &Capture {
        &self.capture
    }

    /// Waits for the leader; may be asked again, and may be given up.
    pub async fn exited(&mut self) -> Exit {
        if let Some(exit) = self.ended {
            return exit;
        }
        let exit = self.exit.as_mut().await;
        self.ended = Some(exit);
        exit
    }

    /// Whether the leader has been waited for.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether anybody of the group is left.
    pub fn is_alive(&self) -> bool {
        self.spawn.signal(self.group, Signal::Probe)
    }

    /// Ends the group: asked first, killed after the grace. Returns how the leader ended.
    pub async fn stop(&mut self, grace: Duration) -> Exit {
        let deadline = self.clock.now() + grace;
        self.spawn.signal(self.group, Signal::Term);
        if !self.gone_by(deadline).await {
            self.kill().await;
        }
        self.ended.unwrap_or(Exit::Signal(KILL))
    }

    /// Kills the group.
    pub async fn kill(&mut self) {
        self.spawn.signal(self.group, Signal::Kill);
        let deadline = self.clock.now() + AFTER_KILL;
        self.gone_by(deadline).await;
    }

    async fn gone_by(&mut self, deadline: Moment) -> bool {
        let clock = Arc::clone(&self.clock);
        tokio::select! {
            // An exit that has happened counts even when the time is over as well.
            biased;
            _ = self.exited() => {}
            () = clock.sleep_until(deadline) => return false,
        }
        let mut look = FIRST_LOOK;
        while self.is_alive() {
            let now = clock.now();
            if now >= deadline {
                return false;
            }
            clock.sleep_until((now + look).min(deadline)).await;
            look = (look * 2).min(LONGEST_LOOK);
        }
        true
    }
}

/// The number of the signal that cannot be refused, the same on every Linux.
const KILL: i32 = 9;
