//! The entrypoint's life: start, signal forwarding, shutdown and the exit code of the whole box.
//!
//! Invariant: the process ends only by returning a code from here, after other children had their chance.

use std::future::pending;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::begin::NotStarted;
use super::reap::{Exit, Reaper};
use super::spawn::Launch;
use super::{is_pid_one, signal_everyone, signal_group};
use crate::binding::Restart;
use crate::http::router::Agent;

const FORWARDED: [i32; 5] = [libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH, libc::SIGQUIT];
const STOP_GRACE: Duration = Duration::from_secs(10);
const AFTER_KILL: Duration = Duration::from_secs(5);

/// The process the box exists for.
pub struct Entrypoint {
    pub pid: i32,
    pub exit: oneshot::Receiver<Exit>,
}

impl Entrypoint {
    /// Starts it, with the box's own input and output. Nothing to start is no failure.
    pub fn start(agent: &Agent, argv: &[String]) -> Result<Option<Self>, String> {
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

    /// Ends it: asked first, killed after the grace.
    async fn stop(&mut self, number: i32, grace: Duration) -> Exit {
        signal_group(self.pid, number);
        match timeout(grace, &mut self.exit).await {
            Ok(exit) => exit.unwrap_or(Exit::Code(255)),
            Err(_) => {
                signal_group(self.pid, libc::SIGKILL);
                let exit = timeout(AFTER_KILL, &mut self.exit).await;
                exit.ok()
                    .and_then(Result::ok)
                    .unwrap_or(Exit::Signal { number: libc::SIGKILL, core_dumped: false })
            }
        }
    }
}

struct Signals {
    term: Signal,
    int: Signal,
    forwarded: Vec<(i32, Signal)>,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let on = |number| signal(SignalKind::from_raw(number));
        let mut forwarded = Vec::new();
        for number in FORWARDED {
            forwarded.push((number, on(number)?));
        }
        Ok(Signals { term: on(libc::SIGTERM)?, int: on(libc::SIGINT)?, forwarded })
    }

    /// The next one that ends the box; the others have nobody to go to yet.
    async fn until_stop(&mut self) -> i32 {
        loop {
            let number = self.next().await;
            if matches!(number, libc::SIGTERM | libc::SIGINT) {
                return number;
            }
        }
    }

    async fn next(&mut self) -> i32 {
        let Signals { term, int, forwarded } = self;
        let [(_, hup), (_, usr1), (_, usr2), (_, winch), (_, quit)] = &mut forwarded[..] else {
            return pending().await;
        };
        tokio::select! {
            _ = term.recv() => libc::SIGTERM,
            _ = int.recv() => libc::SIGINT,
            _ = hup.recv() => libc::SIGHUP,
            _ = usr1.recv() => libc::SIGUSR1,
            _ = usr2.recv() => libc::SIGUSR2,
            _ = winch.recv() => libc::SIGWINCH,
            _ = quit.recv() => libc::SIGQUIT,
        }
    }
}

/// How the box ended.
pub enum Ended {
    Code(i32),
    NotStarted(NotStarted),
}

/// Runs the box until its entrypoint ends or it is told to stop. `starting` brings the entrypoint up.
pub async fn run_init(
    agent: &Agent,
    argv: &[String],
    starting: impl Future<Output = Result<Option<Entrypoint>, NotStarted>>,
    mut restarts: mpsc::Receiver<Restart>,
) -> std::io::Result<Ended> {
    let mut signals = Signals::new()?;
    tokio::pin!(starting);
    let mut entrypoint = tokio::select! {
        // First, so that a start that waits for nothing is over before anything else happens.
        biased;
        started = &mut starting => match started {
            Ok(entrypoint) => entrypoint,
            Err(why) => {
                wind_down(agent).await;
                return Ok(Ended::NotStarted(why));
            }
        },
        number = signals.until_stop() => {
            if let Some(workspace) = agent.workspace.get() {
                workspace.cancel_boot();
                // The boot ends what it has begun, in the grace; what then is left ends as everything else.
                let _ = timeout(workspace.grace() + AFTER_KILL, &mut starting).await;
            }
            wind_down(agent).await;
            return Ok(Ended::Code(128 + number));
        }
    };
    loop {
        let exited = async {
            match entrypoint.as_mut() {
                Some(entrypoint) => (&mut entrypoint.exit).await.unwrap_or(Exit::Code(255)),
                None => pending().await,
            }
        };
        tokio::select! {
            exit = exited => {
                wind_down(agent).await;
                return Ok(Ended::Code(exit.shell_code()));
            }
            number = signals.next() => match number {
                libc::SIGTERM | libc::SIGINT => {
                    let code = match entrypoint.as_mut() {
                        Some(entrypoint) => entrypoint.stop(number, stop_grace(agent)).await.shell_code(),
                        None => 0,
                    };
                    wind_down(agent).await;
                    return Ok(Ended::Code(code));
                }
                // What would end another process with a core dump is not for the first one of a box.
                libc::SIGQUIT => {}
                number => if let Some(entrypoint) = &entrypoint {
                    signal_group(entrypoint.pid, number);
                },
            },
            Some(asked) = restarts.recv() => {
                if let Some(running) = entrypoint.as_mut() {
                    running.stop(libc::SIGTERM, STOP_GRACE).await;
                }
                let started = Entrypoint::start(agent, argv);
                let _ = asked.done.send(started.as_ref().map(|_| ()).map_err(Clone::clone));
                entrypoint = started.unwrap_or_default();
            }
        }
    }
}

fn stop_grace(agent: &Agent) -> Duration {
    agent.workspace.get().map_or(STOP_GRACE, |workspace| workspace.grace())
}

/// Ends the services of a workspace in their order, and then everything else.
async fn wind_down(agent: &Agent) {
    if let Some(workspace) = agent.workspace.get() {
        workspace.stop_services().await;
    }
    stop_others(&agent.reaper).await;
}

/// Ends every other process: asked first, killed after a bounded wait.
async fn stop_others(reaper: &Reaper) {
    let everyone = |number: i32| {
        if is_pid_one() { signal_everyone(number) } else { reaper.signal_all(number) }
    };
    if !everyone(libc::SIGTERM) {
        return;
    }
    let deadline = Instant::now() + STOP_GRACE;
    let mut step = Duration::from_millis(1);
    while Instant::now() < deadline {
        sleep(step).await;
        if !everyone(0) {
            return;
        }
        step = (step * 2).min(Duration::from_millis(50));
    }
    everyone(libc::SIGKILL);
    sleep_until(Instant::now() + Duration::from_millis(50)).await;
}

/// Without `--init`: signals go to running foreground commands, or end the process as they always would.
pub async fn run_classic(agent: &Agent) -> std::io::Result<i32> {
    let mut signals = Signals::new()?;
    loop {
        let number = signals.next().await;
        if agent.commands.forward_to_foreground(number) || number == libc::SIGWINCH {
            continue;
        }
        if is_pid_one() {
            stop_others(&agent.reaper).await;
            return Ok(128 + number);
        }
        super::die_by(number);
    }
}
