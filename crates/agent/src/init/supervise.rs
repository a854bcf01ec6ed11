//! The entrypoint's life: start, signal forwarding, shutdown and the exit code of the whole box.
//!
//! Invariant: the process ends only by returning a code from here, after other children had their chance.

use std::future::pending;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::reap::Exit;
use super::{is_pid_one, signal_everyone, signal_group};
use crate::command::Commands;

const FORWARDED: [i32; 4] = [libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];
const STOP_GRACE: Duration = Duration::from_secs(10);
const AFTER_KILL: Duration = Duration::from_secs(5);

/// The process the box exists for.
pub struct Entrypoint {
    pub pid: i32,
    pub exit: oneshot::Receiver<Exit>,
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

    async fn next(&mut self) -> i32 {
        let Signals { term, int, forwarded } = self;
        let [(_, hup), (_, usr1), (_, usr2), (_, winch)] = &mut forwarded[..] else { return pending().await };
        tokio::select! {
            _ = term.recv() => libc::SIGTERM,
            _ = int.recv() => libc::SIGINT,
            _ = hup.recv() => libc::SIGHUP,
            _ = usr1.recv() => libc::SIGUSR1,
            _ = usr2.recv() => libc::SIGUSR2,
            _ = winch.recv() => libc::SIGWINCH,
        }
    }
}

/// Runs the box until its entrypoint ends or it is told to stop; returns the exit code.
pub async fn run_init(mut entrypoint: Option<Entrypoint>, commands: &Commands) -> std::io::Result<i32> {
    let mut signals = Signals::new()?;
    loop {
        let exited = async {
            match entrypoint.as_mut() {
                Some(entrypoint) => (&mut entrypoint.exit).await.unwrap_or(Exit::Code(255)),
                None => pending().await,
            }
        };
        tokio::select! {
            exit = exited => {
                stop_others(commands).await;
                return Ok(exit.shell_code());
            }
            number = signals.next() => match number {
                libc::SIGTERM | libc::SIGINT => {
                    return Ok(shut_down(entrypoint, number, commands).await);
                }
                number => if let Some(entrypoint) = &entrypoint {
                    signal_group(entrypoint.pid, number);
                },
            },
        }
    }
}

async fn shut_down(entrypoint: Option<Entrypoint>, number: i32, commands: &Commands) -> i32 {
    let Some(mut entrypoint) = entrypoint else {
        stop_others(commands).await;
        return 0;
    };
    signal_group(entrypoint.pid, number);
    let code = match timeout(STOP_GRACE, &mut entrypoint.exit).await {
        Ok(exit) => exit.unwrap_or(Exit::Code(255)),
        Err(_) => {
            signal_group(entrypoint.pid, libc::SIGKILL);
            let exit = timeout(AFTER_KILL, &mut entrypoint.exit).await;
            exit.ok()
                .and_then(Result::ok)
                .unwrap_or(Exit::Signal { number: libc::SIGKILL, core_dumped: false })
        }
    };
    stop_others(commands).await;
    code.shell_code()
}

/// Ends every other process: asked first, killed after a bounded wait.
async fn stop_others(commands: &Commands) {
    let everyone = |number: i32| {
        if is_pid_one() { signal_everyone(number) } else { commands.signal_all(number) }
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
pub async fn run_classic(commands: &Commands) -> std::io::Result<i32> {
    let mut signals = Signals::new()?;
    loop {
        let number = signals.next().await;
        if commands.forward_to_foreground(number) || number == libc::SIGWINCH {
            continue;
        }
        if is_pid_one() {
            stop_others(commands).await;
            return Ok(128 + number);
        }
        super::die_by(number);
    }
}
