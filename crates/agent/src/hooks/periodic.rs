//! Keeps the schedules: one task a hook, which runs it and waits for its next time.

use std::sync::Arc;
use std::time::Instant;

use sandglass_sandbox::hooks::PeriodicHook;
use sandglass_sandbox::{Clock, SystemClock};

use super::run;
use super::timetable::{Look, Moment, Timetable};
use crate::http::router::Agent;
use crate::journal::{self, Level};

/// Starts keeping the schedules of hooks that were checked. They end with the agent.
pub fn begin(agent: &Arc<Agent>, hooks: &[PeriodicHook]) {
    for hook in hooks {
        tokio::spawn(keep(Arc::clone(agent), hook.clone()));
    }
}

async fn keep(agent: Arc<Agent>, hook: PeriodicHook) {
    let start = Instant::now();
    let now = || Moment { wall: SystemClock.now(), elapsed: start.elapsed() };
    let name = hook.name.trim();
    let schedule = match hook.schedule() {
        Ok(schedule) => schedule,
        Err(error) => {
            return journal::note(Level::Error, &format!("periodic hook {name}: its schedule {error}"));
        }
    };
    let mut table = Timetable::new(schedule, now());
    loop {
        match table.look(now()) {
            Look::Wait(time) => tokio::time::sleep(time).await,
            Look::Due => {
                match run::run(&agent, &hook.command, hook.timeout()).await {
                    Ok(_) => journal::note(Level::Debug, &format!("periodic hook {name}: done")),
                    Err(failed) => journal::note(Level::Warning, &format!("periodic hook {name}: {failed}")),
                }
                table.plan(now());
            }
        }
    }
}
