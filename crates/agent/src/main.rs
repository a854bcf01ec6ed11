//! The agent: reads how it was booted, serves the API, runs the entrypoint, ends with its exit code.

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use sandglass_agent::accounts::{Accounts, Identity};
use sandglass_agent::command::Commands;
use sandglass_agent::envs::Env;
use sandglass_agent::http::router::Agent;
use sandglass_agent::http::serve::{bind, serve};
use sandglass_agent::init::reap::Reaper;
use sandglass_agent::init::spawn::Launch;
use sandglass_agent::init::supervise::{Entrypoint, run_classic, run_init};
use sandglass_agent::init::{become_subreaper, is_pid_one, prepare_process};
use sandglass_agent::metrics::Meter;
use sandglass_agent::settings::{Settings, Start};

/// What a shell answers for a program that cannot be started.
const CANNOT_START: u8 = 127;

/// Blocking file work at the same time; each thread costs memory that the box is charged for.
const MAX_BLOCKING_THREADS: usize = 8;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned()).collect();
    let settings = match Settings::load(&args) {
        Ok(Start::Serve(settings)) => *settings,
        Ok(Start::Print(text)) => {
            say(&text);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            complain(&error.to_string());
            return ExitCode::FAILURE;
        }
    };
    prepare_process();
    if settings.init && !is_pid_one() {
        become_subreaper();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_stack_size(256 * 1024)
        .build();
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(run(settings));
            // Blocking file work must not hold up the end of the box.
            runtime.shutdown_background();
            code
        }
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Standard output may be closed; that is no reason to fail.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "execd: {text}");
}

/// The status pipe of the boot contract: one line, then closed.
struct Status(Option<File>);

impl Status {
    fn started(&mut self) {
        self.tell(&serde_json::json!({ "status": "started" }));
    }

    fn failed(&mut self, phase: &str, message: &str) {
        if self.0.is_none() {
            complain(message);
        }
        self.tell(&serde_json::json!({ "status": "failed", "phase": phase, "message": message }));
    }

    fn tell(&mut self, line: &serde_json::Value) {
        if let Some(mut pipe) = self.0.take() {
            // Nobody reads it any more: the boot was given up, and the box with it.
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}

async fn run(mut settings: Settings) -> ExitCode {
    let mut status = Status(settings.status.take());
    let accounts = Accounts::load();
    let identity = match accounts.resolve(&settings.user) {
        Ok(identity) => identity,
        Err(error) => {
            status.failed("user", &error.to_string());
            return ExitCode::from(CANNOT_START);
        }
    };
    let home = complete_env(&mut settings.env, &identity, &accounts);
    let cwd = working_directory(&settings);
    if settings.booted {
        make_env_file(&settings.env_file, &identity);
    }
    let listener = match listen(settings.listener.take(), settings.port) {
        Ok(listener) => listener,
        Err(error) => {
            status.failed("listen", &format!("cannot listen on port {}: {error}", settings.port));
            return ExitCode::FAILURE;
        }
    };
    let reaper = match Reaper::start() {
        Ok(reaper) => reaper,
        Err(error) => {
            status.failed("init", &format!("cannot watch for ended processes: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let commands = Arc::new(Commands::default());
    let agent = Arc::new(Agent {
        token: std::mem::take(&mut settings.token),
        port: settings.port,
        env: settings.env.clone(),
        env_file: settings.env_file.clone(),
        home,
        cwd: cwd.clone(),
        identity: identity.clone(),
        reaper: reaper.clone(),
        commands: Arc::clone(&commands),
        meter: Meter::new(settings.limits),
    });
    tokio::spawn(serve(listener, agent));
    let entrypoint = match start_entrypoint(&settings, &cwd, &identity, &reaper) {
        Ok(entrypoint) => entrypoint,
        Err(message) => {
            status.failed("entrypoint", &message);
            return ExitCode::from(CANNOT_START);
        }
    };
    status.started();
    let ended =
        if settings.init { run_init(entrypoint, &commands).await } else { run_classic(&commands).await };
    match ended {
        Ok(code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
        Err(error) => {
            complain(&format!("cannot handle signals: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn listen(given: Option<TcpListener>, port: u16) -> std::io::Result<tokio::net::TcpListener> {
    match given {
        Some(listener) => {
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener)
        }
        None => bind(port),
    }
}

/// HOME as the user database says, unless the image or the request said otherwise. Returns it.
fn complete_env(env: &mut Env, identity: &Identity, accounts: &Accounts) -> String {
    let of_user =
        identity.home.clone().or_else(|| accounts.user_by_uid(identity.uid).map(|u| u.home.clone()));
    let default = if identity.uid == 0 { "/root" } else { "/" };
    let home = of_user.unwrap_or_else(|| default.to_owned());
    env.entry("HOME".into()).or_insert(home).clone()
}

/// Where processes start; made if it is missing, as Docker does.
fn working_directory(settings: &Settings) -> PathBuf {
    match &settings.cwd {
        Some(cwd) => {
            let path = PathBuf::from(cwd);
            // On a read-only root it cannot be made; starting a process there then says so.
            let _ = std::fs::create_dir_all(&path);
            path
        }
        None => std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
    }
}

/// The file that `set_env` of the clients appends to; every user of the box may.
fn make_env_file(path: &Path, identity: &Identity) {
    let Some(dir) = path.parent() else { return };
    let _ = std::fs::create_dir_all(dir);
    let made = std::fs::OpenOptions::new().append(true).create(true).open(path);
    if made.is_ok() {
        let _ = std::os::unix::fs::chown(path, Some(identity.uid), Some(identity.gid));
    }
}

fn start_entrypoint(
    settings: &Settings,
    cwd: &Path,
    identity: &Identity,
    reaper: &Reaper,
) -> Result<Option<Entrypoint>, String> {
    if !settings.init || settings.entrypoint.is_empty() {
        return Ok(None);
    }
    let switch = (identity.uid != 0 || identity.gid != 0 || !identity.groups.is_empty()).then_some(identity);
    let launch = Launch {
        argv: &settings.entrypoint,
        env: &settings.env,
        cwd: Some(cwd),
        identity: switch,
        stdin: None,
        stdout: None,
        stderr: None,
    };
    let (pid, exit) = reaper.spawn(launch).map_err(|error| error.to_string())?;
    Ok(Some(Entrypoint { pid, exit }))
}
