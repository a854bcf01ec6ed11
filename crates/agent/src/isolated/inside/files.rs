//! The file routes of a session, served where its files are.
//!
//! The holder shares the session's mount namespace and has its user's rights, but not its process table: nothing in
//! the session can see or touch it. The agent hands it one connected socket for each request.
//! Invariant: it does nothing that the session's own user could not do inside.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::accounts::Identity;
use crate::activity::Gauge;
use crate::binding::{Binding, Gate};
use crate::envs::LiveEnv;
use crate::files;
use crate::hardening;
use crate::http::query::Query;
use crate::http::reply::Failure;
use crate::http::router::Agent;
use crate::init::reap::Reaper;
use crate::isolated::plan::Plan;
use crate::isolated::wire::{Channel, Connection};

/// Lives until the session's init ends, and serves its files.
pub(super) fn hold(line: OwnedFd, plan: &Plan, init: i32) -> ExitCode {
    let lived = take_identity(plan).and_then(|()| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(4)
            .thread_stack_size(512 << 10)
            .thread_keep_alive(crate::init::FOREVER)
            .build()?;
        // As in the agent: with no thread at all the runtime would panic, and the session would be gone.
        drop(runtime.spawn_blocking(|| ()));
        let lived = runtime.block_on(live(line, plan, init));
        runtime.shutdown_background();
        lived
    });
    if lived.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// In a user namespace the session's user is this very one.
fn take_identity(plan: &Plan) -> io::Result<()> {
    let keep = if plan.uid == 0 && !plan.own_users { plan.capabilities } else { 0 };
    if !plan.own_users && !plan.probe {
        let (uid, gid) = (Uid::from_raw(plan.uid), Gid::from_raw(plan.gid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
    }
    hardening::keep_only(keep)?;
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

async fn live(line: OwnedFd, plan: &Plan, init: i32) -> io::Result<()> {
    // No wait in between, so the exit cannot be collected before it is waited for.
    let reaper = Reaper::start()?;
    let over = reaper.adopt(init);
    let line = Channel::new(line)?;
    let agent = Arc::new(agent(plan, reaper));
    let serve = async {
        while let Some((Connection {}, socket)) = line.receive().await? {
            let Some(socket) = socket else { continue };
            tokio::spawn(talk(socket, Arc::clone(&agent)));
        }
        io::Result::Ok(())
    };
    tokio::select! {
        served = serve => served,
        _ = over => Ok(()),
    }
}

async fn talk(socket: OwnedFd, agent: Arc<Agent>) -> io::Result<()> {
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(true)?;
    let stream = tokio::net::UnixStream::from_std(stream)?;
    let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
        let agent = Arc::clone(&agent);
        async move {
            let path = request.uri().path().to_owned();
            let query = Query::parse(request.uri().query());
            let segments: Vec<&str> = path.split('/').skip(1).collect();
            let answer = files::dispatch(&agent, &segments, &query, request).await;
            Ok::<_, Infallible>(answer.unwrap_or_else(Failure::into_reply))
        }
    });
    // A broken connection is the client's business; there is nobody to tell.
    let _ =
        http1::Builder::new().title_case_headers(true).serve_connection(TokioIo::new(stream), service).await;
    Ok(())
}

fn agent(plan: &Plan, reaper: Reaper) -> Agent {
    let own = rustix::process::geteuid().as_raw();
    let (uid, gid) =
        if plan.own_users { (own, rustix::process::getegid().as_raw()) } else { (plan.uid, plan.gid) };
    Agent {
        token: String::new(),
        port: 0,
        home: plan.env.get("HOME").cloned().unwrap_or_else(|| "/".into()),
        binding: Binding::new(Gate::Open, None).0,
        env: LiveEnv::new(plan.env.clone()),
        env_file: std::path::PathBuf::new(),
        cwd: plan.cwd.clone(),
        identity: Identity { uid, gid, ..Identity::default() },
        reaper,
        commands: Arc::default(),
        output: Arc::default(),
        contexts: Default::default(),
        meter: crate::metrics::Meter::new(crate::settings::Limits::default()),
        sessions: Default::default(),
        terminals: Default::default(),
        telemetry: Default::default(),
        isolated: Arc::default(),
        confined_to: plan.roots(),
        runs: Gauge::default(),
        proxied: Gauge::default(),
        workspace: OnceLock::new(),
    }
}
