//! Starts the agent: settings, process setup, HTTP, entrypoint; then whatever ends it decides the exit code.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use sandglass_agent::accounts::{Accounts, Identity};
use sandglass_agent::activity::Gauge;
use sandglass_agent::binding::{Binding, Gate, Restart};
use sandglass_agent::bootstrap;
use sandglass_agent::code::{Contexts, readiness};
use sandglass_agent::command::{Commands, Output};
use sandglass_agent::envs::{Env, LiveEnv};
use sandglass_agent::hardening::{self, Floor, Surroundings};
use sandglass_agent::http::router::Agent;
use sandglass_agent::http::serve::{self, Serving};
use sandglass_agent::init::begin::{Begin, NotStarted, Status};
use sandglass_agent::init::reap::Reaper;
use sandglass_agent::init::supervise::{self, Ended};
use sandglass_agent::init::{FOREVER, become_subreaper, is_pid_one, prepare_process};
use sandglass_agent::isolated::{self, inside};
use sandglass_agent::journal::{self, Level};
use sandglass_agent::metrics::Meter;
use sandglass_agent::pty::Terminals;
use sandglass_agent::sealing;
use sandglass_agent::session::Sessions;
use sandglass_agent::settings::{Settings, Start};
use sandglass_agent::standby::{self, Waiting};
use sandglass_agent::telemetry::{self, Telemetry};
use sandglass_agent::trust::Trust;
use sandglass_agent::workspace::{self, Document, Workspace};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    if args.get(1).is_some_and(|word| word == inside::WORD) {
        return inside::run();
    }
    if let Some(code) = args.get(1..).and_then(workspace::inside::run) {
        return code;
    }
    if let Some(code) = args.get(1..).and_then(sealing::run) {
        return code;
    }
    let settings = match Settings::load(&args) {
        Ok(Start::Serve(settings)) => *settings,
        Ok(Start::Print(text)) => {
            let _ = writeln!(io::stdout(), "{text}");
            return ExitCode::SUCCESS;
        }
        Ok(Start::Dump) => {
            return bootstrap::dump(&mut io::stdout()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        Err(error) => {
            journal::note(Level::Fatal, &error.to_string());
            return ExitCode::from(2);
        }
    };
    journal::open(settings.log_level, settings.log_file.as_deref());
    if let Err(error) = settings.clone3.apply() {
        journal::note(Level::Fatal, &format!("EXECD_CLONE3_COMPAT: {error}"));
        return ExitCode::FAILURE;
    }
    prepare_process();
    // One thread runs everything that cannot block: it is all a box needs, and it keeps the agent small. What may
    // hang on a dead mount or a stopped process (file work, starting programs) has threads of its own. They stay once
    // they are there: a box at its process limit gives no new ones, and without any the runtime would panic.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(16)
        .thread_stack_size(512 << 10)
        .thread_keep_alive(FOREVER)
        .thread_name("execd-files")
        .build();
    let code = match runtime {
        Ok(runtime) => {
            // Nobody waits for it: this is the first of the threads that are kept.
            drop(runtime.spawn_blocking(|| ()));
            let code = runtime.block_on(run(settings));
            // File work may hang on a dead mount; nothing waits for it.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            journal::note(Level::Fatal, &format!("cannot start: {error}"));
            1
        }
    };
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
}

async fn run(mut settings: Settings) -> i32 {
    if settings.init && !is_pid_one() {
        become_subreaper();
    }
    let mut status = Status::new(settings.status.take());
    let prepared = match prepare(&mut settings).await {
        Ok(prepared) => prepared,
        Err(why) => return status.failed(&why),
    };
    let Prepared { agent, listener, trust, restarts, waiting, exporter, document } = prepared;
    if let Some(document) = document {
        let _ = agent.workspace.set(Workspace::open(document, &agent));
    }
    let serving = Serving::start(listener, Arc::clone(&agent));
    let ready = tokio::spawn(readiness::answer(readiness::port(&agent.env)));
    let code = live(&agent, &settings, trust.as_ref(), &mut status, (restarts, waiting)).await;
    if let Some(workspace) = agent.workspace.get() {
        workspace.take_leave().await;
    }
    serving.stop(settings.grace).await;
    if let Some(exporter) = exporter {
        exporter.abort();
    }
    ready.abort();
    code
}

fn start_telemetry(env: &Env, meter: &Meter) -> (Telemetry, Option<JoinHandle<()>>) {
    match telemetry::Settings::from_env(env) {
        Ok(Some(wanted)) => {
            let (telemetry, exporter) = wanted.start(meter.clone());
            (telemetry, Some(exporter))
        }
        Ok(None) => (Telemetry::default(), None),
        Err(error) => {
            journal::note(Level::Warning, &error.to_string());
            (Telemetry::default(), None)
        }
    }
}

/// What there is when the agent can be asked.
struct Prepared {
    agent: Arc<Agent>,
    listener: TcpListener,
    trust: Option<Trust>,
    restarts: mpsc::Receiver<Restart>,
    /// In a box of a pool.
    waiting: Option<Waiting>,
    exporter: Option<JoinHandle<()>>,
    document: Option<Document>,
}

async fn prepare(settings: &mut Settings) -> Result<Prepared, NotStarted> {
    let identity = match Accounts::load().resolve(&settings.user) {
        Ok(identity) if settings.booted || !settings.user.is_empty() => identity,
        Ok(_) => own_identity(),
        Err(error) => return Err(NotStarted::entrypoint(error)),
    };
    let mut env = std::mem::take(&mut settings.env);
    if !settings.booted && !settings.user.is_empty() {
        forget_own_home(&mut env);
    }
    let home = complete_home(&mut env, &identity);
    let mut cwd = enter_cwd(settings.cwd.as_deref(), &identity).map_err(|error| {
        let cwd = settings.cwd.as_deref().unwrap_or_default();
        NotStarted::entrypoint(format!("working directory {cwd} cannot be used: {error}"))
    })?;
    create_env_file(&settings.env_file, &identity);
    let document = find_document(settings, &env)?;
    if let Some(document) = &document {
        workspace::export(document, &mut env);
    }
    let listener = match settings.listener.take() {
        Some(listener) => listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener)),
        None => serve::bind(settings.port),
    };
    let bound = listener.and_then(|l| l.local_addr().map(|a| (l, a.port())));
    let (listener, port) =
        bound.map_err(|error| NotStarted::agent(format!("listen on port {}: {error}", settings.port)))?;
    let reaper = Reaper::start().map_err(|e| NotStarted::agent(format!("signal handling: {e}")))?;
    let isolated = Arc::new(harden(settings, &home, &cwd).map_err(NotStarted::agent)?);
    let trust = Trust::wanted(&env);
    if let Some(trust) = &trust {
        trust.export(&mut env);
    }
    if let Some(script) = bootstrap::pre_script(&env) {
        let place = bootstrap::Place { env: &env, cwd: &cwd, identity: &identity };
        match bootstrap::source(&script, place, &reaper).await {
            Ok(left) => {
                cwd = moved(&left, cwd);
                env = left;
                sandglass_agent::envs::strip_secrets(&mut env);
            }
            // A start script goes on without it.
            Err(error) => journal::note(Level::Warning, &format!("pre-script: {error}")),
        }
    }
    if settings.init {
        let argv = std::mem::take(&mut settings.entrypoint);
        settings.entrypoint = bootstrap::command(argv, &env).map_err(NotStarted::entrypoint)?;
    }
    let (mut binding, restarts) = Binding::new(settings.gate, settings.hooks_file.take());
    let mut waiting = None;
    if settings.gate == Gate::Standby {
        let (standby, for_it) = standby::standby(settings.workspace.clone());
        binding = binding.in_pool(standby);
        waiting = Some(for_it);
    }
    let meter = Meter::new(settings.limits);
    let (telemetry, exporter) = start_telemetry(&env, &meter);
    let agent = Agent {
        token: std::mem::take(&mut settings.token),
        port,
        binding,
        env: LiveEnv::new(env),
        env_file: settings.env_file.clone(),
        home,
        cwd,
        identity,
        reaper,
        commands: Arc::new(Commands::default()),
        output: Arc::new(Output::default()),
        sessions: Sessions::default(),
        terminals: Terminals::default(),
        meter,
        telemetry,
        contexts: Contexts::default(),
        isolated,
        confined_to: Vec::new(),
        runs: Gauge::default(),
        proxied: Gauge::default(),
        workspace: OnceLock::new(),
    };
    Ok(Prepared { agent: Arc::new(agent), listener, trust, restarts, waiting, exporter, document })
}

/// From "accepting" to the end of the box.
async fn live(
    agent: &Arc<Agent>,
    settings: &Settings,
    trust: Option<&Trust>,
    status: &mut Status,
    (restarts, waiting): (mpsc::Receiver<Restart>, Option<Waiting>),
) -> i32 {
    let argv = if settings.init { &settings.entrypoint[..] } else { &[] };
    let hooks = &settings.hooks;
    let report = settings.startup_report.as_deref();
    let starting = Begin { agent, argv, hooks, trust, report, status, waiting }.run();
    let ended = if settings.init {
        supervise::run_init(agent, argv, starting, restarts).await
    } else {
        // Whoever asks for a restart is told that there is nothing to restart.
        drop(restarts);
        match starting.await {
            Ok(_) => supervise::run_classic(agent).await.map(Ended::Code),
            Err(why) => Ok(Ended::NotStarted(why)),
        }
    };
    match ended {
        Ok(Ended::Code(code)) => code,
        Ok(Ended::NotStarted(why)) => status.failed(&why),
        Err(error) => {
            journal::note(Level::Fatal, &format!("signal handling: {error}"));
            1
        }
    }
}

/// What makes the box a workspace. Its boot ends with an entrypoint, so an agent that is no init takes no notice.
fn find_document(settings: &Settings, env: &Env) -> Result<Option<Document>, NotStarted> {
    // One that comes with an assignment is looked for then.
    if !settings.init || settings.gate == Gate::Standby {
        return Ok(None);
    }
    let own = env.get("OPENSANDBOX_ID").map(String::as_str).filter(|id| !id.is_empty());
    Document::find(settings.workspace.as_deref(), own).map_err(NotStarted::agent)
}

/// Where a script left the working directory.
fn moved(left: &Env, cwd: PathBuf) -> PathBuf {
    let to = left.get("PWD").map(PathBuf::from).filter(|to| to.is_absolute() && *to != cwd);
    match to {
        Some(to) if std::env::set_current_dir(&to).is_ok() => to,
        _ => cwd,
    }
}

/// Sets the floor of user processes, before there is any.
fn harden(settings: &Settings, home: &str, cwd: &Path) -> Result<isolated::Sessions, hardening::ConfigError> {
    let config = hardening::Config::load(settings.isolation_config.as_deref())?;
    let own_places = vec![home.into(), cwd.to_owned(), settings.env_file.clone()];
    let around = Surroundings { box_for_sessions: settings.isolation, own_places };
    let (floor, status) = Floor::of_box(&config, &around)?;
    hardening::set_floor(floor);
    let init = match (settings.init, is_pid_one()) {
        (false, _) => hardening::Init::None,
        (true, true) => hardening::Init::Pid1,
        (true, false) => hardening::Init::Subreaper,
    };
    Ok(isolated::Sessions::new(config, status.under(init)))
}

fn own_identity() -> Identity {
    Identity {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        ..Identity::default()
    }
}

/// An engine sets the home of the user that it starts, who is not the one that everything runs as.
fn forget_own_home(env: &mut Env) {
    let accounts = Accounts::load();
    let own = accounts.user_by_uid(rustix::process::geteuid().as_raw()).map(|user| user.home.as_str());
    if env.get("HOME").is_some_and(|home| own.unwrap_or("/root") == home.as_str()) {
        env.remove("HOME");
    }
}

/// HOME as Docker sets it: what the image says, else the account's, else the root.
fn complete_home(env: &mut Env, identity: &Identity) -> String {
    let home = env.entry("HOME".into()).or_default();
    if home.is_empty() {
        *home = identity.home.clone().unwrap_or_else(|| "/".into());
    }
    home.clone()
}

/// The working directory, created when the image lacks it, becomes the agent's own.
fn enter_cwd(cwd: Option<&str>, identity: &Identity) -> io::Result<PathBuf> {
    let Some(cwd) = cwd else { return std::env::current_dir().or_else(|_| Ok(PathBuf::from("/"))) };
    let cwd = sandglass_agent::envs::clean(Path::new("/"), cwd);
    if !cwd.exists() {
        std::fs::create_dir_all(&cwd)?;
        std::os::unix::fs::chown(&cwd, Some(identity.uid), Some(identity.gid))?;
    }
    std::env::set_current_dir(&cwd)?;
    Ok(cwd)
}

/// Commands append to this file; where it cannot be made, they get to know when they try.
fn create_env_file(path: &Path, identity: &Identity) {
    if path.exists() {
        return;
    }
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    if made.and_then(|()| File::create_new(path)).is_ok() {
        let _ = std::os::unix::fs::chown(path, Some(identity.uid), Some(identity.gid));
    }
}
