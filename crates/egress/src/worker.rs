//! The process that enforces: opens the kernel's rules closed, then puts everything together, then says that it is ready.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};

use crate::audit::output::Output;
use crate::control::answer::Answer;
use crate::control::{Control, Health, Request, VaultRoutes, server};
use crate::diagnostics::{set_level, tell};
use crate::enforcer::{Enforcer, Flow, Plan};
use crate::plane::{Dependent, Parts, Plane};
use crate::policy::Rules;
use crate::settings::{Level, Refused, Settings};
use crate::state::State;
use crate::supervisor;

/// How often files of the operator are looked at, and repeated events are summed up.
const ROUND: Duration = Duration::from_secs(10);

/// Why a worker ends.
#[derive(Debug, Error)]
enum Failed {
    #[error(transparent)]
    Settings(#[from] Refused),
    #[error("the policy or the rules in files make no sense: {0}")]
    Policy(io::Error),
    #[error("cannot {0}: {1}")]
    Start(&'static str, #[source] io::Error),
}

/// Works until it is asked to end. Returns the exit code.
pub fn run() -> i32 {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(Level::Error, format_args!("cannot start: {error}"));
            return 1;
        }
    };
    match runtime.block_on(work()) {
        Ok(()) => 0,
        Err(problem) => {
            tell(Level::Error, &problem);
            match problem {
                Failed::Settings(_) | Failed::Policy(_) => supervisor::REFUSED,
                Failed::Start(..) => 1,
            }
        }
    }
}

async fn work() -> Result<(), Failed> {
    let mut terminated = signal(SignalKind::terminate()).map_err(|e| Failed::Start("wait for signals", e))?;
    let mut interrupted =
        signal(SignalKind::interrupt()).map_err(|e| Failed::Start("wait for signals", e))?;
    let (settings, warnings) = Settings::read(&|name| std::env::var(name).ok())?;
    set_level(settings.log_level);
    for warning in warnings {
        tell(Level::Warn, warning);
    }
    let state = State::inherited(supervisor::STATE).or_else(|_| State::create());
    let state = state.map_err(|e| Failed::Start("keep the state", e))?;
    let audit = Arc::new(Output::start(None).map_err(|e| Failed::Start("write events", e))?);
    let parts =
        Parts { state, enforcer: Box::new(Nobody), audit: audit.clone(), dependent: Box::new(Nobody) };
    let plane = Plane::open(&settings, parts).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Failed::Policy(error),
        _ => Failed::Start("enforce the policy", error),
    })?;
    audit.set_quiet(plane.always());
    let plane = Arc::new(Mutex::new(plane));
    let health = Arc::new(Health::default());
    let control = Arc::new(Control {
        token: settings.token.clone(),
        plane: plane.clone(),
        vault: Box::new(Nobody),
        health: health.clone(),
    });
    let listener = server::listen(settings.api).await;
    let listener = listener.map_err(|e| Failed::Start("listen for the control API", e))?;
    health.set_ready();
    audit.ready();
    tokio::select! {
        () = server::serve(listener, control) => {}
        () = rounds(plane, audit) => {}
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
    }
    Ok(())
}

async fn rounds(plane: Arc<Mutex<Plane>>, audit: Arc<Output>) {
    let mut every = tokio::time::interval(ROUND);
    loop {
        every.tick().await;
        audit.settle();
        let changed = plane.lock().unwrap_or_else(PoisonError::into_inner).refresh();
        match changed {
            Ok(None) => {}
            Ok(Some(always)) => audit.set_quiet(always),
            Err(error) => {
                tell(Level::Error, format_args!("rules that always apply are not read again: {error}"));
            }
        }
    }
}

struct Nobody;

impl Enforcer for Nobody {
    fn apply(&mut self, _: &Plan) -> io::Result<()> {
        Ok(())
    }
    fn admit(&mut self, _: &[(std::net::IpAddr, Duration)]) -> io::Result<()> {
        Ok(())
    }
    fn cut(&mut self, _: &dyn Fn(&Flow) -> bool) -> io::Result<usize> {
        Ok(0)
    }
}

impl Dependent for Nobody {
    fn accepts(&self, _: &dyn Rules) -> Result<(), String> {
        Ok(())
    }
}

impl VaultRoutes for Nobody {
    fn answer(&self, _: &Request) -> Answer {
        Answer::text(http::StatusCode::NOT_FOUND, "404 page not found")
    }
}
