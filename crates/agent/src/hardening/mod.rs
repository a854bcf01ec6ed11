//! What user processes may not do, whoever starts them: capabilities, system calls, writable places.
//!
//! Owns the floor that every start in this process applies, and what `capabilities` says about it. Not here: the
//! namespaces of isolated sessions, which have a floor of their own in their own processes.
//! Invariant: a layer that is said to be active was applied to every user process since the start; a process whose
//! floor cannot be applied does not start.

mod capabilities;
mod config;
mod landlock;
mod report;
mod seccomp;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use seccompiler::BpfProgram;

use capabilities::Capabilities;
pub use capabilities::{SESSION, keep_for_init, keep_only};
pub use config::{Config, ConfigError};
pub use report::{Init, Status};

static FLOOR: OnceLock<Floor> = OnceLock::new();

/// Applied to every process that this one starts, between fork and exec.
#[derive(Debug, Default)]
pub struct Floor {
    capabilities: Capabilities,
    filters: Vec<BpfProgram>,
    landlock: Option<File>,
    no_new_privileges: bool,
}

/// What the agent's own place adds to the configuration.
#[derive(Debug, Default)]
pub struct Surroundings {
    /// The agent was given a right for isolated sessions that user processes must not have.
    pub box_for_sessions: bool,
    /// Files and directories that the box's user writes without being told so: home, working directory, env file.
    pub own_places: Vec<PathBuf>,
}

impl Floor {
    /// The floor of a box, and whether the kernel can do what is configured.
    pub fn of_box(config: &Config, around: &Surroundings) -> Result<(Floor, Status), ConfigError> {
        let mut floor = Floor::default();
        let mut status = Status::disabled();
        if around.box_for_sessions {
            floor.capabilities = Capabilities::Without(capabilities::SYS_ADMIN);
        }
        if config.hardening.enabled {
            let keep = config.kept()?;
            status.cap_drop = capabilities::state(keep);
            floor.capabilities = Capabilities::Only(keep);
            floor.filters = seccomp::compile(config.denied())?;
            status.seccomp = seccomp::state(config.denied());
            floor.no_new_privileges = true;
        }
        if config.landlock.enabled {
            let places = config.landlock.extra_writable.iter().chain(&around.own_places);
            let (ruleset, state) = landlock::prepare(places.chain(&config.allowed_writable));
            floor.landlock = ruleset;
            status.landlock = state;
            floor.no_new_privileges = true;
        }
        if config.ebpf.enabled {
            status.ebpf = report::Layer::unsupported("this agent has no eBPF observer; use the host's");
        }
        Ok((floor, status))
    }

    /// The floor of an isolated session.
    pub fn for_session(keep: u64, deny: Option<&[String]>) -> io::Result<Floor> {
        let filters = seccomp::compile(deny).map_err(io::Error::other)?;
        Ok(Floor { capabilities: Capabilities::Only(keep), filters, landlock: None, no_new_privileges: true })
    }

    fn is_bare(&self) -> bool {
        matches!(self.capabilities, Capabilities::Untouched)
            && self.filters.is_empty()
            && self.landlock.is_none()
            && !self.no_new_privileges
    }

    /// What needs rights that a change of user takes away.
    fn before_switch(&self) -> io::Result<()> {
        if self.no_new_privileges {
            rustix::thread::set_no_new_privs(true)?;
        }
        if let Some(ruleset) = &self.landlock {
            landlock::restrict(ruleset.as_fd())?;
        }
        self.capabilities.bound()
    }

    fn after_switch(&self) -> io::Result<()> {
        self.capabilities.apply()?;
        self.filters.iter().try_for_each(|filter| {
            // Not the error's own text: composing it would allocate.
            seccompiler::apply_filter(filter).map_err(|_| io::Error::from(io::ErrorKind::PermissionDenied))
        })
    }
}

/// Sets the floor of this process, once.
pub fn set_floor(floor: Floor) {
    let _ = FLOOR.set(floor);
}

/// To be called before the user of a new process is switched.
pub fn before_switch(command: &mut Command) {
    add(command, Floor::before_switch);
}

/// To be called when everything else about a new process is arranged.
pub fn after_switch(command: &mut Command) {
    add(command, Floor::after_switch);
}

fn add(command: &mut Command, step: fn(&Floor) -> io::Result<()>) {
    if let Some(floor) = FLOOR.get().filter(|floor| !floor.is_bare()) {
        // SAFETY: the steps only make system calls on memory that was prepared before the fork and never changes.
        unsafe { command.pre_exec(move || step(floor)) };
    }
}
