//! Starts the agent: settings, process setup, HTTP, entrypoint; then whatever ends it decides the exit code.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use sandglass_agent::accounts::{Accounts, Identity};
use sandglass_agent::code::{Contexts, readiness};
use sandglass_agent::command::Commands;
use sandglass_agent::envs::Env;
use sandglass_agent::hardening::{self, Floor, Surroundings};
use sandglass_agent::http::{router::Agent, serve};
use sandglass_agent::init::reap::Reaper;
use sandglass_agent::init::spawn::Launch;
use sandglass_agent::init::supervise::{self, Entrypoint};
use sandglass_agent::init::{become_subreaper, is_pid_one, prepare_process};
use sandglass_agent::isolated::{self, inside};
use sandglass_agent::metrics::Meter;
use sandglass_agent::pty::Terminals;
use sandglass_agent::session::Sessions;
use sandglass_agent::settings::{Settings, Start};
use sandglass_agent::telemetry::{self, Telemetry};
use serde_json::json;
use tokio::task::JoinHandle;

/// A box at its limit of processes lets no thread be started. As long as there is one already, file work only waits for it;
/// with none the runtime would panic, and PID 1 would be gone.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// The entrypoint could not be started: what a shell answers for a missing program.
const NOT_STARTED: i32 = 127;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned()).collect();
    if args.first().is_some_and(|word| word == inside::WORD) {
        return inside::run();
    }
    let settings = match Settings::load(&args) {
        Ok(Start::Serve(settings)) => *settings,
        Ok(Start::Print(text)) => {
            let _ = writeln!(io::stdout(), "{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            complain(&error.to_string());
            return ExitCode::from(2);
        }
    };
    prepare_process();
    // One thread runs everything but file work: it is all a box needs, and it keeps the agent small.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(8)
        .thread_stack_size(512 << 10)
        .thread_keep_alive(FOREVER)
        .thread_name("execd-files")
        .build();
    let code = match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(run(settings));
            // File work may hang on a dead mount; nothing waits for it.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            1
        }
    };
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
}

/// Standard error may be closed or broken; that must not matter.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "execd: {text}");
}

async fn run(mut settings: Settings) -> i32 {
    if settings.init && !is_pid_one() {
        become_subreaper();
    }
    // Nobody waits for it: this is the first of the threads that are kept.
    drop(tokio::task::spawn_blocking(|| ()));
    let mut status = Status(settings.status.take());
    let identity = match Accounts::load().resolve(&settings.user) {
        Ok(identity) if settings.booted => identity,
        Ok(_) => own_identity(),
        Err(error) => return status.failed("entrypoint", &error.to_string(), NOT_STARTED),
    };
    let home = complete_home(&mut settings.env, &identity);
    let cwd = match enter_cwd(settings.cwd.as_deref(), &identity) {
        Ok(cwd) => cwd,
        Err(error) => {
            let cwd = settings.cwd.unwrap_or_default();
            let message = format!("working directory {cwd} cannot be used: {error}");
            return status.failed("entrypoint", &message, NOT_STARTED);
        }
    };
    create_env_file(&settings.env_file, &identity);
    let listener = match settings.listener.take() {
        Some(listener) => {
            listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener))
        }
        None => serve::bind(settings.port),
    };
    let (listener, port) = match listener.and_then(|l| l.local_addr().map(|a| (l, a.port()))) {
        Ok(bound) => bound,
        Err(error) => {
            return status.failed("agent", &format!("listen on port {}: {error}", settings.port), 1);
        }
    };
    let reaper = match Reaper::start() {
        Ok(reaper) => reaper,
        Err(error) => return status.failed("agent", &format!("signal handling: {error}"), 1),
    };
    let meter = Meter::new(settings.limits);
    let (telemetry, exporter) = start_telemetry(&settings.env, &meter);
    let isolated = match harden(&settings, &home, &cwd) {
        Ok(isolated) => Arc::new(isolated),
        Err(error) => return status.failed("agent", &error.to_string(), 1),
    };
    let agent = Arc::new(Agent {
        token: settings.token,
        port,
        env: settings.env,
        env_file: settings.env_file,
        home,
        cwd,
        identity,
        reaper,
        commands: Arc::new(Commands::default()),
        sessions: Sessions::default(),
        terminals: Terminals::default(),
        meter,
        telemetry,
        contexts: Contexts::default(),
        isolated,
        confined_to: Vec::new(),
    });
    let server = tokio::spawn(serve::serve(listener, Arc::clone(&agent)));
    let ready = tokio::spawn(readiness::answer(readiness::port(&agent.env)));
    let code = live(&agent, settings.init, &settings.entrypoint, &mut status).await;
    server.abort();
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
            complain(&error.to_string());
            (Telemetry::default(), None)
        }
    }
}

/// From "accepting" to the end of the box.
async fn live(agent: &Agent, init: bool, argv: &[String], status: &mut Status) -> i32 {
    let ended = if init {
        let entrypoint = match start_entrypoint(agent, argv) {
            Ok(entrypoint) => entrypoint,
            Err(message) => return status.failed("entrypoint", &message, NOT_STARTED),
        };
        status.started();
        supervise::run_init(entrypoint, &agent.commands).await
    } else {
        status.started();
        supervise::run_classic(&agent.commands).await
    };
    ended.unwrap_or_else(|error| {
        complain(&format!("signal handling: {error}"));
        1
    })
}

fn start_entrypoint(agent: &Agent, argv: &[String]) -> Result<Option<Entrypoint>, String> {
    if argv.is_empty() {
        return Ok(None);
    }
    let launch = Launch {
        argv,
        env: &agent.env,
        cwd: Some(&agent.cwd),
        identity: Some(&agent.identity),
        stdin: None,
        stdout: None,
        stderr: None,
    };
    match agent.reaper.spawn(launch) {
        Ok((pid, exit)) => Ok(Some(Entrypoint { pid, exit })),
        Err(error) => Err(error.to_string()),
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

/// The one line the parent waits for.
struct Status(Option<File>);

impl Status {
    fn started(&mut self) {
        self.send(&json!({ "status": "started" }));
    }

    fn failed(&mut self, phase: &str, message: &str, code: i32) -> i32 {
        complain(message);
        self.send(&json!({ "status": "failed", "phase": phase, "message": message }));
        code
    }

    fn send(&mut self, line: &serde_json::Value) {
        // Taken, so that the parent sees the end of the pipe right after the line.
        if let Some(mut pipe) = self.0.take() {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}
