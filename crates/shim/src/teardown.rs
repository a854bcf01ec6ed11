//! What the server does when a box's shim is gone: end what is left of the box.
//!
//! The mounts went with the shim's namespace and the processes were killed with it, so what may be left is control
//! groups, the host's end of the veth pair, and for a moment processes: the box's, and its egress enforcer.
//! Also, by [`end_by_id`], what it does when the directory is gone and a shim may still run.
//! Invariant: safe to call again and again; [`teardown`] at any time when no shim runs, and it keeps the records.

use std::fs;
use std::io;
use std::path::Path;

use crate::cgroup::{Cgroup, Layout};
use crate::client::SOCKET;
use crate::directory::{BoxDir, boot_id, is_possible_id, now_ms};
use crate::egress;
use crate::remains::{Init, Remains};
use crate::spec::{BoxEvent, BoxState, ExitCause, ExitRecord, Phase};

/// Why a teardown is not complete; calling again is always safe.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} of box {id}: {source}")]
pub struct TeardownError {
    pub id: String,
    pub step: &'static str,
    #[source]
    pub source: io::Error,
}

/// Ends leftovers of the box in `dir`: processes, control groups, the network interface.
///
/// Keeps spec, facts, events and console, and records in `state.json` that the box ended, as
/// [`ExitCause::ShimLost`] unless an exit was recorded already. Refuses while a shim runs: ask that one instead.
pub fn teardown(dir: &Path) -> Result<(), TeardownError> {
    let id = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let failed = |step| {
        let id = id.clone();
        move |source| TeardownError { id, step, source }
    };
    let files = BoxDir::new(dir);
    if files.is_locked().map_err(failed("look for the shim"))? {
        let source = io::Error::new(io::ErrorKind::ResourceBusy, "its shim runs");
        return Err(failed("take over the remains")(source));
    }
    // A spec that cannot be read must not keep us from removing what is known by the directory's name.
    let spec = files.spec().ok();
    let state = files.state().ok().flatten();
    let layout = Layout::detect().map_err(failed("find the control groups"))?;
    let same_boot = state.as_ref().filter(|state| state.boot_id == boot_id());
    let mut remains = Remains {
        cgroup: Some(Cgroup::locate(&layout, spec.as_ref().map_or(&id, |spec| &spec.id))),
        init: same_boot.and_then(|state| Init::find(state.init_pid?, state.init_start_ticks?)),
        host_interface: spec.as_ref().and_then(|spec| Some(spec.network.as_ref()?.host_interface.clone())),
        egress_program: same_boot
            .and_then(|state| state.enforcer)
            .and_then(|mark| Init::find(mark.pid, mark.start_ticks)),
        egress_cgroup: Some(egress_group(&layout, spec.as_ref().map_or(&id, |spec| &spec.id))),
        ..Remains::default()
    };
    remains.clear().map_err(|(step, source)| TeardownError { id: id.clone(), step, source })?;
    let _ = fs::remove_file(dir.join(SOCKET));
    record(&files, state).map_err(failed("record the end"))
}

/// Ends the box `id` when its directory is gone, for example removed by hand: kills its shim, everything in its control
/// groups, and removes those and the host's end of its network. Keeps and writes no records.
///
/// The shim is killed only if process `shim_pid` started at `shim_start_ticks`; both must come from this boot of
/// the machine. Safe to call again and again. Blocks until the processes are gone, which may take seconds.
///
/// # Errors
/// The first step that failed; the others were tried nevertheless.
pub fn end_by_id(
    id: &str,
    host_interface: Option<&str>,
    shim_pid: i32,
    shim_start_ticks: u64,
) -> Result<(), TeardownError> {
    let failed = |step| move |source| TeardownError { id: id.to_owned(), step, source };
    if !is_possible_id(id) {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "no box can have this id");
        return Err(failed("find the control groups")(source));
    }
    let layout = Layout::detect().map_err(failed("find the control groups"))?;
    let mut remains = Remains {
        cgroup: Some(Cgroup::locate(&layout, id)),
        // The box's first process dies with the shim, and the rest of the box with that.
        init: (shim_pid > 1).then(|| Init::find(shim_pid, shim_start_ticks)).flatten(),
        host_interface: host_interface.map(str::to_owned),
        // The enforcer dies with the shim, too; this takes what is left of it.
        egress_cgroup: Some(egress_group(&layout, id)),
        ..Remains::default()
    };
    remains.clear().map_err(|(step, source)| failed(step)(source))
}

/// Also of boxes that never had an enforcer: removing what is absent is success.
fn egress_group(layout: &Layout, id: &str) -> Cgroup {
    Cgroup::locate(layout, &egress::group_of(id))
}

fn record(files: &BoxDir, state: Option<BoxState>) -> io::Result<()> {
    let ended = state.as_ref().is_some_and(|state| state.exit.is_some());
    if ended || !files.path().exists() {
        return Ok(());
    }
    let message = "the shim ended unexpectedly and the box with it";
    let exit = ExitRecord {
        code: None,
        signal: None,
        cause: ExitCause::ShimLost,
        message: message.into(),
        at_ms: now_ms(),
    };
    files.append_event(&BoxEvent {
        at_ms: exit.at_ms,
        kind: "exited".into(),
        message: message.into(),
        data: serde_json::json!({ "cause": exit.cause }),
    })?;
    let before = state.unwrap_or(BoxState {
        phase: Phase::Creating,
        paused: false,
        init_pid: None,
        init_start_ticks: None,
        shim_pid: 0,
        shim_start_ticks: 0,
        boot_id: boot_id(),
        started_at_ms: None,
        exit: None,
        enforcer: None,
    });
    files.write_state(&BoxState {
        phase: Phase::Exited,
        paused: false,
        init_pid: None,
        init_start_ticks: None,
        exit: Some(exit),
        enforcer: None,
        ..before
    })
}

/// Removes the directory with everything in it; call after [`teardown`]. Absent is fine.
pub fn remove_dir(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether a shim runs for `dir`. Asks for the lock that the shim holds, which the kernel releases with the
/// process: no number that could be used again is compared.
pub fn shim_alive(dir: &Path) -> io::Result<bool> {
    BoxDir::new(dir).is_locked()
}
