//! The process that enforces: closes the kernel's rules, puts everything together, opens what the policy allows, and says that it is ready.
//!
//! Invariant: if any part ends, the process ends. The kernel's rules stay, and the next worker takes over.

mod gates;
mod lending;

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use thiserror::Error;
use tokio::net::{TcpListener, UdpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::audit::output::Output;
use crate::audit::webhook::{Denials, Webhook};
use crate::audit::{Audit, Event};
use crate::control::{Control, Health, server};
use crate::diagnostics::{set_level, tell};
use crate::dns::gate::{Families, NameGate};
use crate::dns::probing;
use crate::dns::server::Sockets;
use crate::dns::upstream::Upstreams;
use crate::enforcer::Kernel;
use crate::firewall::{Firewall, Placement};
use crate::handed::{Taken, ports};
use crate::inspect::Inspector;
use crate::intercept::{self, Trust};
use crate::outbound::{Mark, Outbound};
use crate::plane::{Parts, Plane};
use crate::settings::{Level, Refused, Settings, Switch};
use crate::state::{Section, State};
use crate::supervisor;

use gates::{Asked, Means, OwnWay};
use lending::{Routes, Shared};

/// How often files of the operator are looked at, and repeated events are summed up.
const ROUND: Duration = Duration::from_secs(10);

/// Why a worker ends.
#[derive(Debug, Error)]
enum Failed {
    #[error("{0}")]
    Settings(String),
    #[error("cannot {0}: {1}")]
    Step(&'static str, #[source] io::Error),
    #[error("{0} ended")]
    Part(String),
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Self::Settings(refused.to_string())
    }
}

fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Failed {
    move |error| Failed::Step(what, error.into())
}

fn other<E: std::error::Error + Send + Sync + 'static>(what: &'static str) -> impl FnOnce(E) -> Failed {
    move |error| Failed::Step(what, io::Error::other(error))
}

/// Works with what the supervisor has handed down, until it is asked to end. Returns the exit code.
pub fn run(handed: &[&str]) -> i32 {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(Level::Error, format_args!("cannot start: {error}"));
            return 1;
        }
    };
    match runtime.block_on(work(handed)) {
        Ok(()) => 0,
        Err(problem) => {
            tell(Level::Error, &problem);
            match problem {
                Failed::Settings(_) => supervisor::REFUSED,
                Failed::Step(..) | Failed::Part(_) => 1,
            }
        }
    }
}

async fn work(handed: &[&str]) -> Result<(), Failed> {
    let mut terminated = signal(SignalKind::terminate()).map_err(step("wait for signals"))?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(step("wait for signals"))?;
    let (settings, warnings) = Settings::read(&|name| std::env::var(name).ok())?;
    set_level(settings.log_level);
    for warning in warnings {
        tell(Level::Warn, warning);
    }
    raise_descriptors();
    let taken = Taken::from_words(handed.iter().copied()).map_err(step("take over from the supervisor"))?;
    let mut tasks = Tasks::default();
    start(&settings, taken, &mut tasks)?;
    tokio::select! {
        ended = tasks.0.join_next() => Err(match ended {
            Some(Ok(problem)) => Failed::Part(problem),
            Some(Err(error)) => Failed::Part(error.to_string()),
            None => Failed::Part("everything".into()),
        }),
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
    }
}

/// Each connection that is looked into takes two; a container's usual limit is for programs that hold none.
fn raise_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tell(Level::Warn, format_args!("the number of connections stays small: {error}"));
    }
}

/// Everything that runs for as long as the worker does. None of them is meant to end.
#[derive(Default)]
struct Tasks(JoinSet<String>);

impl Tasks {
    fn add(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async move {
            part.await;
            name.to_owned()
        });
    }

    fn add_fallible(
        &mut self,
        name: &'static str,
        part: impl Future<Output = io::Result<()>> + Send + 'static,
    ) {
        self.0.spawn(async move {
            match part.await {
                Ok(()) => name.to_owned(),
                Err(error) => format!("{name}: {error}"),
            }
        });
    }
}

/// What several parts use.
struct Ground {
    state: State,
    mark: Mark,
    upstreams: Arc<Upstreams>,
    trust: Trust,
    audit: Arc<Output>,
    vault: Shared,
    /// An earlier worker has died.
    had_predecessor: bool,
}

fn start(settings: &Settings, taken: Taken, tasks: &mut Tasks) -> Result<(), Failed> {
    // Before anything else: from here on nothing leaves that was not let through.
    let firewall =
        Firewall::open(settings.placement.clone(), ports(settings)).map_err(step("close the firewall"))?;
    let Taken { state, control, questions, question_streams, gate, calls } = taken;
    let ground = ground(settings, state, tasks)?;
    let interceptor = Arc::new(OnceLock::new());
    let plane = open_plane(settings, &ground, Kernel { firewall, interceptor: interceptor.clone() }, tasks)?;
    let name_gate = Arc::new(NameGate {
        plane: plane.clone(),
        upstreams: ground.upstreams.clone(),
        audit: ground.audit.clone(),
        families: match settings.placement {
            Placement::Gateway { .. } => Families::Four,
            Placement::Shared { .. } => Families::Both,
        },
    });
    let packets = questions.into_iter().map(UdpSocket::from_std).collect::<io::Result<_>>();
    let packets = packets.map_err(step("take questions by UDP"))?;
    let streams = listeners(question_streams).map_err(step("take questions by TCP"))?;
    tasks.add("the name gate", Sockets { packets, streams }.serve(name_gate));
    let probing =
        probing::probe(ground.upstreams.clone(), settings.dns.probe.clone(), settings.dns.probe_interval);
    tasks.add("the probing of resolvers", probing);
    make_interceptor(settings, &ground, &plane, &interceptor)?;
    for listener in listeners(gate).map_err(step("take redirected connections"))? {
        let Some(interceptor) = interceptor.get().cloned() else { continue };
        tasks.add("the interceptor", async move { interceptor.serve(listener).await });
    }

    let health = Arc::new(Health::default());
    let rules = plane.lock().unwrap_or_else(PoisonError::into_inner).rules();
    let kept = ground.state.section(Section::Vault);
    let recheck = Box::new(move || _ = interceptor.get().map(intercept::Interceptor::recheck));
    let routes = Routes { vault: ground.vault.clone(), kept, rules, audit: ground.audit.clone(), recheck };
    let answers = Arc::new(Control {
        token: settings.token.clone(),
        plane: plane.clone(),
        vault: Box::new(routes),
        health: health.clone(),
    });
    for call in calls {
        server::take_over(call, answers.clone());
    }
    for listener in listeners(control).map_err(step("take calls of the control API"))? {
        tasks.add("the control API", server::serve(listener, answers.clone()));
    }

    plane
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .start()
        .map_err(step("put the policy into the kernel"))?;
    ground.vault.lock().intercepting();
    tasks.add("the rounds", rounds(plane, ground.audit.clone()));
    health.set_ready();
    ground.audit.ready();
    if ground.had_predecessor {
        let detail = "everything is enforced again".to_owned();
        ground.audit.tell(Event::Noted { what: "restarted".to_owned(), detail });
    }
    Ok(())
}

fn listeners(handed: Vec<std::net::TcpListener>) -> io::Result<Vec<TcpListener>> {
    handed.into_iter().map(TcpListener::from_std).collect()
}

fn ground(settings: &Settings, state: State, tasks: &mut Tasks) -> Result<Ground, Failed> {
    let mark = match settings.placement {
        Placement::Shared { mark } => Mark::Set(mark),
        Placement::Gateway { .. } => Mark::None,
    };
    let upstreams = Arc::new(Upstreams::new(&settings.dns, mark));
    if settings.intercept.verification == Switch::Off {
        tell(Level::Warn, "the certificates of servers are verified nevertheless");
    }
    let trust = Trust::load(&settings.intercept.trust, settings.intercept.extra_authority.as_deref());
    let trust = trust.map_err(other("read the trusted authorities"))?;
    let denials = settings.deny_webhook.clone().map(|address| {
        let (denials, queue) = Denials::queue();
        let outbound = Outbound { mark, upstreams: upstreams.clone() };
        let webhook = Webhook { address, sandbox: settings.sandbox.clone(), outbound, trust: trust.clone() };
        tasks.add("the deny webhook", webhook.deliver(queue));
        denials
    });
    let audit = Arc::new(Output::start(denials).map_err(step("write events"))?);
    let vault = Shared::restore(settings, &state.section(Section::Vault));
    let policy = state.section(Section::Policy).read().map_err(step("read the state"))?;
    let had_predecessor = !policy.is_empty();
    Ok(Ground { state, mark, upstreams, trust, audit, vault, had_predecessor })
}

/// The rules, and those who see the packets that the kernel asks about.
fn open_plane(
    settings: &Settings,
    ground: &Ground,
    kernel: Kernel,
    tasks: &mut Tasks,
) -> Result<Arc<Mutex<Plane>>, Failed> {
    let denials = kernel.firewall.denials().map_err(step("read the kernel's denials"))?;
    let audit = ground.audit.clone();
    let inspect = |rules| Inspector::open(&kernel.firewall, rules, audit);
    let rules = Plane::first_rules(settings, &ground.state).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Failed::Settings(format!("the policy makes no sense: {error}")),
        _ => Failed::Step("read the policy", error),
    })?;
    let inspector = inspect(rules.rules()).map_err(step("look into connections"))?;
    tasks.add_fallible("the inspector", inspector.run());
    tasks.add_fallible("the report of denials", denials.run(rules.rules(), ground.audit.clone()));
    let parts = Parts {
        state: ground.state.clone(),
        enforcer: Box::new(kernel),
        audit: ground.audit.clone(),
        dependent: Box::new(ground.vault.clone()),
    };
    let plane = Plane::open(settings, rules, parts).map_err(step("restore what is known"))?;
    ground.audit.set_quiet(plane.always());
    Ok(Arc::new(Mutex::new(plane)))
}

fn make_interceptor(
    settings: &Settings,
    ground: &Ground,
    plane: &Arc<Mutex<Plane>>,
    place: &OnceLock<intercept::Interceptor>,
) -> Result<(), Failed> {
    let kept = ground.state.section(Section::Authority);
    let authority = gates::authority(&kept).map_err(other("make an authority"))?;
    gates::publish(&authority, &kept, &settings.intercept)
        .map_err(step("show the authority's certificate"))?;
    let proxy = gates::proxy(&settings.intercept).map_err(|error| Failed::Settings(error.to_string()))?;
    let mark = match ground.mark {
        Mark::Set(mark) => Some(mark),
        Mark::None => None,
    };
    let way = OwnWay { kernel: intercept::Kernel { mark }, upstreams: ground.upstreams.clone() };
    let lent = ground.vault.lock().lent();
    let asked = Asked { plane: plane.clone(), audit: ground.audit.clone(), lent };
    let means = Means { authority: Arc::new(authority), trust: ground.trust.clone(), proxy, way };
    place.get_or_init(|| gates::interceptor(asked, means));
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
