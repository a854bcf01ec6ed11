//! From a listening agent to a running entrypoint: the proxy's certificate, the hook before it, itself.
//!
//! Invariant: whoever waits for the status line gets one within moments, and a second one if the first was too hopeful.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sandglass_sandbox::hooks::Hooks;
use serde_json::json;

use super::supervise::Entrypoint;
use crate::hooks::{periodic, run};
use crate::http::router::Agent;
use crate::journal::{self, Level};
use crate::standby::Waiting;
use crate::trust::Trust;
use crate::workspace::Begun;

/// The entrypoint could not be started: what a shell answers for a missing program.
pub const NOT_STARTED: i32 = 127;

/// Why the box ends before its entrypoint has run.
#[derive(Debug)]
pub struct NotStarted {
    pub phase: &'static str,
    pub message: String,
    /// The exit code of the box.
    pub code: i32,
}

impl NotStarted {
    pub fn entrypoint(message: impl ToString) -> Self {
        NotStarted { phase: "entrypoint", message: message.to_string(), code: NOT_STARTED }
    }

    pub fn agent(message: impl ToString) -> Self {
        NotStarted { phase: "agent", message: message.to_string(), code: 1 }
    }
}

/// Everything that happens once, in its order.
pub struct Begin<'a> {
    pub agent: &'a Arc<Agent>,
    pub argv: &'a [String],
    pub hooks: &'a Hooks,
    pub trust: Option<&'a Trust>,
    /// Where a start script reads how the hook before the entrypoint goes.
    pub report: Option<&'a Path>,
    pub status: &'a mut Status,
    /// Where it is waited for what to start, in a box of a pool.
    pub waiting: Option<Waiting>,
}

impl Begin<'_> {
    pub async fn run(mut self) -> Result<Option<Entrypoint>, NotStarted> {
        let Some(mut waiting) = self.waiting.take() else { return self.begin().await };
        self.status.accepting();
        let begun = match waiting.assigned(self.agent).await {
            Ok(assigned) => {
                if self.agent.workspace.get().is_some() {
                    // What its boot comes to is told over the channel of the workspace, however long it takes.
                    waiting.say(Ok(()));
                }
                let (argv, hooks) = (&assigned.entrypoint[..], &assigned.hooks);
                Begin { argv, hooks, status: &mut *self.status, ..self }.begin().await
            }
            Err(why) => Err(why),
        };
        waiting.say(begun.as_ref().map(drop));
        begun
    }

    async fn begin(self) -> Result<Option<Entrypoint>, NotStarted> {
        if let Some(trust) = self.trust {
            trust.ahead();
        }
        let workspace = self.agent.workspace.get();
        if self.trust.is_some() || self.hooks.pre_start.is_some() || workspace.is_some() {
            self.status.accepting();
        }
        if let Some(trust) = self.trust {
            trust.arrive(self.agent).await;
            tokio::spawn(trust.clone().watch(Arc::clone(self.agent)));
        }
        let entrypoint = match workspace {
            Some(workspace) => match workspace.boot(self.agent, self.argv, self.hooks).await {
                Begun::Ready(entrypoint) => entrypoint,
                Begun::Failed(why) => return Err(why),
                // Whoever ends the box does not wait for an entrypoint.
                Begun::Cancelled => return Ok(None),
            },
            None => {
                self.pre_start().await?;
                Entrypoint::start(self.agent, self.argv).map_err(NotStarted::entrypoint)?
            }
        };
        self.status.started();
        self.agent.binding.started();
        periodic::begin(self.agent, &self.hooks.periodic);
        Ok(entrypoint)
    }

    async fn pre_start(&self) -> Result<(), NotStarted> {
        let Some(hook) = &self.hooks.pre_start else { return Ok(()) };
        let report = Report(self.report.map(Path::to_owned));
        report.say(&format!("running {}", hook.timeout().as_secs()));
        let ran = run::run(self.agent, &hook.command, hook.timeout()).await;
        report.say(if ran.is_ok() { "done 0" } else { "done 1" });
        ran.map(drop).map_err(|failed| NotStarted { phase: "preStart", message: failed.to_string(), code: 1 })
    }
}

struct Report(Option<PathBuf>);

impl Report {
    fn say(&self, line: &str) {
        let Some(path) = &self.0 else { return };
        let written = OpenOptions::new().append(true).create(true).open(path);
        if let Err(error) = written.and_then(|mut file| writeln!(file, "{line}")) {
            journal::note(Level::Warning, &format!("cannot write {}: {error}", path.display()));
        }
    }
}

/// The lines that the parent waits for: one that the box runs, or why it does not; at most both.
pub struct Status {
    pipe: Option<File>,
    hopeful: bool,
}

impl Status {
    pub fn new(pipe: Option<File>) -> Self {
        Status { pipe, hopeful: false }
    }

    /// The agent answers, and something that may take long comes before the entrypoint.
    fn accepting(&mut self) {
        if !self.hopeful {
            self.send(STARTED);
        }
        self.hopeful = true;
    }

    fn started(&mut self) {
        if !self.hopeful {
            self.send(STARTED);
        }
        // Taken, so that the parent sees the end of the pipe right after the line.
        self.pipe = None;
    }

    /// Tells why, to everybody who may want to know, and returns the exit code.
    pub fn failed(&mut self, why: &NotStarted) -> i32 {
        // The entrypoint's own errors are known by themselves; of the others the phase is the better half.
        let complaint = match why.phase {
            "preStart" => format!("preStart: {}", why.message),
            _ => why.message.clone(),
        };
        journal::note(Level::Fatal, &complaint);
        self.send(&json!({ "status": "failed", "phase": why.phase, "message": why.message }).to_string());
        self.pipe = None;
        why.code
    }

    fn send(&mut self, line: &str) {
        if let Some(pipe) = &mut self.pipe {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}

const STARTED: &str = r#"{"status":"started"}"#;
