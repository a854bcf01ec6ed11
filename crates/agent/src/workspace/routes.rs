//! `/v1/workspace`: services and their output, and the channel for a server that asks instead of being called.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use sandglass_bridge::agent::{VitalSigns, Vitals};
use sandglass_bridge::pull::{self, PullQuery, PullStatus};
use sandglass_bridge::wire::limits::PROTOCOL_VERSION;
use sandglass_supervise::log::LogError;
use sandglass_supervise::service::ServiceError;
use sandglass_supervise::service::snapshot::ServiceSnapshot;
use serde_json::{Value, json};

use super::{Workspace, tunnel};
use crate::http::body::Body;
use crate::http::query::{Object, Query, decode, read_json};
use crate::http::reply::{self, Code, Failure, Outcome, Reply};
use crate::http::router::{Agent, drain};

/// Of a log, in one answer.
const MAX_LOG: usize = 1 << 20;

/// Answers the routes below `/v1/workspace`.
pub async fn dispatch(
    agent: &Arc<Agent>,
    path: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let method = request.method().clone();
    let Some(workspace) = agent.workspace.get() else {
        drain(request.into_body()).await;
        return Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, "this box is no workspace"));
    };
    if let (&Method::PUT, ["services", name]) = (&method, path) {
        return put(workspace, &decode(name, false), request.into_body()).await;
    }
    if let (&Method::GET, ["services", name, "tunnel"]) = (&method, path) {
        return tunnel::accept(agent, workspace, &decode(name, false), request).await;
    }
    drain(request.into_body()).await;
    match (&method, path) {
        (&Method::GET, ["bridge", "status"]) => Ok(status(workspace)),
        (&Method::GET, ["bridge", "events"]) => events(workspace, query),
        (&Method::GET, ["services"]) => {
            let all = workspace.services.snapshots();
            let items: Vec<Value> = all.into_iter().map(|one| shown(workspace, one)).collect();
            Ok(reply::json(&json!({ "items": items })))
        }
        (&Method::GET, ["services", name]) => one(workspace, &decode(name, false), StatusCode::OK),
        (&Method::POST, ["services", name, verb @ ("start" | "restart" | "stop")]) => {
            let name = decode(name, false);
            let services = &workspace.services;
            let asked = match *verb {
                "start" => services.start(&name).await,
                "restart" => services.restart(&name).await,
                _ => services.stop(&name).await,
            };
            asked.map_or_else(|error| Ok(refused(&error)), |()| one(workspace, &name, StatusCode::ACCEPTED))
        }
        (&Method::GET, ["logs"]) => Ok(sources(workspace)),
        (&Method::GET, ["logs", source]) => log(workspace, &decode(source, false), query),
        _ => {
            let message = format!("no such route: {method} /v1/workspace/{}", path.join("/"));
            Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message))
        }
    }
}

fn status(workspace: &Workspace) -> Reply {
    let VitalSigns { activity, services, load } = workspace.link.vitals().read();
    let (boot_id, ring) = workspace.link.with_ring(|ring| (ring.boot().clone(), ring.status()));
    reply::json(&PullStatus {
        boot_id,
        generation: workspace.link.generation(),
        agent_version: env!("CARGO_PKG_VERSION").into(),
        protocol_version: PROTOCOL_VERSION,
        acked_seq: ring.acked_seq,
        last_seq: ring.last_seq,
        activity,
        services,
        load,
    })
}

/// Only where the server asks: what is acknowledged here would be missing there.
fn events(workspace: &Workspace, query: &Query) -> Outcome {
    let number = |name: &str| match query.get(name) {
        None => Ok(None),
        Some(text) => text
            .parse::<u64>()
            .map(Some)
            .map_err(|_| Failure::invalid(format!("{name} must be a number from 0"))),
    };
    let boot = match query.get("boot") {
        None => None,
        Some(text) => Some(text.parse().map_err(|error| Failure::invalid(format!("boot: {error}")))?),
    };
    let asked = PullQuery {
        boot,
        after: number("after")?.unwrap_or(0),
        limit: usize::try_from(number("limit")?.unwrap_or(0)).unwrap_or(usize::MAX),
        ack: number("ack")?,
    };
    if asked.ack.is_some() && workspace.link.handle().is_some() {
        let message = "events are sent to the server of this box; they cannot be acknowledged here";
        return Err(Failure::new(StatusCode::CONFLICT, Code::NotSupported, message));
    }
    Ok(reply::json(&workspace.link.with_ring(|ring| pull::events(ring, &asked))))
}

fn shown(workspace: &Workspace, service: ServiceSnapshot) -> Value {
    let key = workspace.shared.host_key(&service.name);
    let mut shown = serde_json::to_value(service).unwrap_or_default();
    if let Some(key) = key {
        shown["hostKey"] = json!(key);
    }
    shown
}

fn one(workspace: &Workspace, name: &str, status: StatusCode) -> Outcome {
    match workspace.services.snapshot(name) {
        Some(service) => Ok(reply::json_reply(status, &shown(workspace, service))),
        None => Ok(refused(&ServiceError::NotFound(name.to_owned()))),
    }
}

/// `{"enabled": true | false}`.
async fn put(workspace: &Workspace, name: &str, body: Incoming) -> Outcome {
    let wanted = Object::new(read_json(body).await?)?.flag("enabled")?;
    let asked = match wanted {
        Some(true) => workspace.services.start(name).await,
        Some(false) => workspace.services.disable(name).await,
        None => return Err(Failure::invalid("enabled must be true or false")),
    };
    asked.map_or_else(|error| Ok(refused(&error)), |()| one(workspace, name, StatusCode::ACCEPTED))
}

fn refused(error: &ServiceError) -> Reply {
    let status = match error {
        ServiceError::NotFound(_) => StatusCode::NOT_FOUND,
        ServiceError::Invalid(_) => StatusCode::BAD_REQUEST,
        ServiceError::Disabled { .. }
        | ServiceError::Exists(_)
        | ServiceError::PortTaken { .. }
        | ServiceError::Ending => StatusCode::CONFLICT,
    };
    reply::json_reply(status, &json!({ "code": error.code(), "message": error.to_string() }))
}

fn sources(workspace: &Workspace) -> Reply {
    let logs = &workspace.ports.logs;
    let items: Vec<Value> = logs
        .sources()
        .into_iter()
        .filter_map(|source| {
            let extent = logs.extent(&source)?;
            Some(json!({ "source": source, "oldest": extent.oldest, "end": extent.end }))
        })
        .collect();
    reply::json(&json!({ "items": items }))
}

/// The bytes from `?from=` on, as far as they are kept; where to read on and what is kept in headers.
fn log(workspace: &Workspace, source: &str, query: &Query) -> Outcome {
    let from =
        query.get("from").map_or(Ok(0), str::parse).map_err(|_| Failure::invalid("from must be a number"))?;
    let batch = match workspace.ports.logs.read(source, from, MAX_LOG) {
        Ok(batch) => batch,
        Err(error @ LogError::NotFound(_)) => return Err(Failure::not_found(error.to_string())),
        Err(error) => return Err(Failure::runtime(error.to_string())),
    };
    let first = batch.frames.first().map_or(batch.next, |frame| frame.offset);
    let text: Vec<u8> = batch.frames.into_iter().flat_map(|frame| frame.data).collect();
    let mut reply = reply::with_type(StatusCode::OK, reply::TEXT, Body::Full(text.into()));
    for (name, value) in
        [("x-log-offset", first), ("x-log-next", batch.next), ("x-log-oldest", batch.extent.oldest)]
    {
        reply.headers_mut().insert(name, value.into());
    }
    Ok(reply)
}
