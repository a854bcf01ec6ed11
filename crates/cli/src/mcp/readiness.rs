//! Waiting until a sandbox can be used.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::{call::Call, failure::Failure, report::Reporter};
use crate::client::Sandbox;

const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How waiting ended.
#[derive(Debug)]
pub enum Readiness {
    /// It runs and its agent answers.
    Ready(Sandbox),
    /// Time is up; it may still become ready.
    NotYet(Sandbox),
    /// It will never be.
    Over(Sandbox),
}

/// Waits until the agent of a sandbox answers, the sandbox is over, or the time is up.
pub async fn wait(
    call: &Call,
    sandbox: Sandbox,
    patience: Duration,
    reporter: &mut Reporter,
) -> Result<Readiness, Failure> {
    let deadline = Instant::now() + patience;
    let id = sandbox.id().to_owned();
    let (mut sandbox, mut pause, mut told) = (sandbox, SHORTEST_PAUSE, String::new());
    loop {
        if sandbox.is_over() {
            return Ok(Readiness::Over(sandbox));
        }
        let state = describe(&sandbox);
        if state != told {
            reporter.step(&state).await;
            told = state;
        }
        if sandbox.state() == "Running" && timeout_at(deadline, answers(call, &id)).await.unwrap_or(false) {
            return Ok(Readiness::Ready(sandbox));
        }
        if Instant::now() + pause > deadline {
            return Ok(Readiness::NotYet(sandbox));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        match call.client().get(&id).await.map_err(Failure::from) {
            Ok(seen) => sandbox = seen,
            // The server may be starting again; the deadline ends this.
            Err(failure) if failure.may_pass() => {}
            Err(failure) => return Err(failure),
        }
    }
}

/// Waits until a sandbox is in a state, or in none that leads there.
pub async fn settle(call: &Call, id: &str, wanted: &str, patience: Duration) -> Result<Sandbox, Failure> {
    let deadline = Instant::now() + patience;
    let mut pause = SHORTEST_PAUSE;
    loop {
        let sandbox = call.client().get(id).await?;
        if sandbox.state() == wanted || sandbox.is_over() || Instant::now() + pause > deadline {
            return Ok(sandbox);
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// State, and what the server says about it.
pub fn describe(sandbox: &Sandbox) -> String {
    match (sandbox.message(), sandbox.reason()) {
        ("", "") => sandbox.state().to_owned(),
        ("", text) | (text, _) => format!("{}: {text}", sandbox.state()),
    }
}

async fn answers(call: &Call, id: &str) -> bool {
    match call.agent(id).await {
        Ok(agent) => agent.ping().await.is_ok(),
        Err(_) => false,
    }
}
