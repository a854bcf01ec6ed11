//! One run of a service: from its start until everything of it is gone.
//!
//! Invariant: [`Happened::Gone`] comes once and last, and then nothing of the run is left.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::definition::{Run, ServiceDefinition};
use super::machine::Outlook;
use super::probe::Target;
use crate::capture::{Outputs, SharedTail};
use crate::clock::{Clock, Moment};
use crate::ports::{BuiltinRun, Exit, Ports};
use crate::process::Child;

/// How long a service without a probe has to stay alive until it counts as ready.
const SETTLED: Duration = Duration::from_millis(500);
/// Between questions before the first answer: quick ones first, because somebody waits.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// What a service that ended by itself left running is in the way of the next one.
const LEFTOVERS: Duration = Duration::from_secs(2);

/// What a run tells.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Happened {
    Answered,
    NotYet(String),
    Unanswered(String),
    Gone { exit: Exit, message: Option<String> },
}

/// A run that goes on.
pub(super) struct Instance {
    end: watch::Sender<Option<Moment>>,
    happened: mpsc::Receiver<Happened>,
    tail: Option<SharedTail>,
}

/// A run that did not begin.
pub(super) struct NotStarted {
    pub(super) message: String,
    pub(super) outlook: Outlook,
}

enum Body {
    Process(Child),
    Builtin(BuiltinRun),
}

impl Instance {
    pub(super) fn start(ports: &Ports, definition: &Arc<ServiceDefinition>) -> Result<Instance, NotStarted> {
        let body = begin(ports, definition)?;
        let tail = match &body {
            Body::Process(child) => Some(child.capture().shared_tail()),
            Body::Builtin(_) => None,
        };
        let (end, ended) = watch::channel(None);
        let (tell, happened) = mpsc::channel(8);
        let run = Going { ports: ports.clone(), definition: Arc::clone(definition), end: ended, tell };
        tokio::spawn(run.live(body));
        Ok(Instance { end, happened, tail })
    }

    /// Asks it to end, and kills it at that moment. A later call may make the moment another.
    pub(super) fn end(&self, kill_at: Moment) {
        self.end.send_replace(Some(kill_at));
    }

    /// The end of its output.
    pub(super) fn tail(&self) -> Option<SharedTail> {
        self.tail.clone()
    }

    /// What happens next; may be given up and asked again.
    pub(super) async fn next(&mut self) -> Happened {
        let lost = || Happened::Gone { exit: Exit::Code(255), message: Some("its watcher is gone".into()) };
        self.happened.recv().await.unwrap_or_else(lost)
    }
}

fn begin(ports: &Ports, definition: &ServiceDefinition) -> Result<Body, NotStarted> {
    let may_pass = |error: crate::ports::SpawnError| NotStarted {
        message: error.to_string(),
        outlook: Outlook::MayPass,
    };
    let argv = match &definition.run {
        Run::Builtin(name) => {
            return ports.builtins.start(name, definition).map(Body::Builtin).map_err(may_pass);
        }
        Run::Command(argv) => argv.clone(),
        Run::CodeServer(editor) => {
            let variable =
                |name: &str| definition.env.get(name).cloned().or_else(|| ports.spawn.variable(name));
            let program = editor
                .find(variable("PATH").as_deref(), variable("HOME").as_deref())
                .map_err(|error| NotStarted { message: error.to_string(), outlook: Outlook::Hopeless })?;
            editor.command(&program, definition.port.unwrap_or_default())
        }
    };
    let program = definition.program(argv);
    Child::start(ports, &program, Some(&definition.log_source()), Outputs::Apart)
        .map(Body::Process)
        .map_err(may_pass)
}

struct Going {
    ports: Ports,
    definition: Arc<ServiceDefinition>,
    end: watch::Receiver<Option<Moment>>,
    tell: mpsc::Sender<Happened>,
}

impl Going {
    async fn live(mut self, body: Body) {
        let (exit, message) = match body {
            Body::Process(child) => (self.process(child).await, None),
            Body::Builtin(run) => self.builtin(run).await,
        };
        let _ = self.tell.send(Happened::Gone { exit, message }).await;
    }

    async fn process(&mut self, mut child: Child) -> Exit {
        let clock = Arc::clone(&self.ports.clock);
        let kill_at = tokio::select! {
            _ = child.exited() => clock.now() + LEFTOVERS,
            kill_at = asked(&mut self.end, &self.definition, &clock) => kill_at,
            () = watch_over(&self.ports, &self.definition, &self.tell) => clock.now(),
        };
        let exit = if child.has_ended() && !child.is_alive() {
            child.exited().await
        } else {
            self.stop(&mut child, kill_at).await
        };
        child.capture().catch_up().await;
        exit
    }

    /// Ends the group, sooner when the moment becomes an earlier one.
    async fn stop(&mut self, child: &mut Child, mut kill_at: Moment) -> Exit {
        loop {
            let grace = kill_at.since(self.ports.clock.now());
            tokio::select! {
                exit = child.stop(grace) => return exit,
                () = sooner(&mut self.end, &mut kill_at) => {}
            }
        }
    }

    async fn builtin(&mut self, run: BuiltinRun) -> (Exit, Option<String>) {
        let BuiltinRun { stop, mut ended } = run;
        let clock = Arc::clone(&self.ports.clock);
        let told = |result: Result<Result<(), String>, _>| match result {
            Ok(Ok(())) => (Exit::Code(0), None),
            Ok(Err(message)) => (Exit::Code(1), Some(message)),
            Err(_) => (Exit::Code(255), Some("it ended without a word".into())),
        };
        let mut kill_at = tokio::select! {
            result = &mut ended => return told(result),
            kill_at = asked(&mut self.end, &self.definition, &clock) => kill_at,
            () = watch_over(&self.ports, &self.definition, &self.tell) => clock.now(),
        };
        stop.cancel();
        loop {
            tokio::select! {
                result = &mut ended => return told(result),
                () = clock.sleep_until(kill_at) => {
                    return (Exit::Code(255), Some("it did not end in its time, and was let go".into()));
                }
                () = sooner(&mut self.end, &mut kill_at) => {}
            }
        }
    }
}

/// Completes when the moment has become an earlier one.
async fn sooner(end: &mut watch::Receiver<Option<Moment>>, kill_at: &mut Moment) {
    while end.changed().await.is_ok() {
        if let Some(asked) = *end.borrow_and_update()
            && asked < *kill_at
        {
            *kill_at = asked;
            return;
        }
    }
    // Nobody asks any more.
    pending().await
}

/// Waits until it shall end, and returns when it must have.
async fn asked(
    end: &mut watch::Receiver<Option<Moment>>,
    definition: &ServiceDefinition,
    clock: &Arc<dyn Clock>,
) -> Moment {
    loop {
        if let Some(kill_at) = *end.borrow_and_update() {
            return kill_at;
        }
        if end.changed().await.is_err() {
            // Whoever kept it is gone.
            return clock.now() + definition.grace();
        }
    }
}

/// Asks whether it answers, and tells. Never returns.
async fn watch_over(ports: &Ports, definition: &ServiceDefinition, tell: &mpsc::Sender<Happened>) {
    let clock = &ports.clock;
    let probe = definition.effective_probe();
    let Some((probe, target)) = probe.and_then(|probe| {
        let target = Target::of(definition, &probe.check)?;
        Some((probe, target))
    }) else {
        clock.sleep_until(clock.now() + SETTLED).await;
        let _ = tell.send(Happened::Answered).await;
        return pending().await;
    };
    let ask = async || {
        tokio::select! {
            answer = ports.prober.probe(&target) => answer,
            () = clock.sleep_until(clock.now() + probe.timeout()) => {
                Err(format!("no answer within {} s", probe.timeout_seconds))
            }
        }
    };
    let mut pause = FIRST_PAUSE;
    let mut told = None;
    while let Err(message) = ask().await {
        if told.as_ref() != Some(&message) {
            told = Some(message.clone());
            let _ = tell.send(Happened::NotYet(message)).await;
        }
        clock.sleep_until(clock.now() + pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE).min(probe.interval());
    }
    let _ = tell.send(Happened::Answered).await;
    let mut in_a_row = 0;
    loop {
        clock.sleep_until(clock.now() + probe.interval()).await;
        match ask().await {
            Ok(()) => in_a_row = 0,
            Err(_) if in_a_row + 1 < probe.threshold => in_a_row += 1,
            Err(message) => {
                let times = probe.threshold;
                let _ = tell.send(Happened::Unanswered(format!("{message} ({times} times in a row)"))).await;
                return pending().await;
            }
        }
    }
}
