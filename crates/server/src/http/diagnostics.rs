//! Logs, events, inspect and summary of a sandbox, as JSON with `scope` and as text without.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, Uri, header};
use sandglass_sandbox::ports::runtime::{Condition, ExitCause, Exposure, Observation};
use serde::Serialize;

use super::{
    App,
    engine_errors::of_query,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    parse::QueryString,
};
use crate::{
    agents::Readiness,
    config::RuntimeKind,
    diagnostics::{
        Console, EventFacts, EventLine, EventScope, InspectFacts, LogFilter, LogScope, PortFacts, Summary,
        UnsupportedScope, describe_events, describe_logs, parse_since, render_events, render_inspect,
        render_runtime, render_summary,
    },
    engine::{
        history::{OF_EGRESS, OWNER, RECORD},
        index::Entry,
    },
    ingress::{AGENT_PORT, EGRESS_PORT, HTTP_PORT},
    tenants::Principal,
};

/// How long a page waits for what the runtime adds to it.
const DESCRIBE: Duration = Duration::from_secs(5);
/// Lines read when a time bound has to be found among them.
const MOST_LINES: usize = 10_000;

fn text(body: String, deprecated: Deprecated) -> Response {
    let mut response = ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response();
    if deprecated == Deprecated::Yes {
        response
            .headers_mut()
            .insert(HeaderName::from_static("deprecation"), HeaderValue::from_static("true"));
    }
    response
}

#[derive(PartialEq)]
enum Deprecated {
    Yes,
    No,
}

impl From<UnsupportedScope> for ApiError {
    fn from(scope: UnsupportedScope) -> Self {
        Self::new(Code::DiagnosticsScope, format!("scope must be one of: {}", scope.supported.join(", ")))
    }
}

fn number(query: &QueryString, name: &str, default: usize, max: i64) -> ApiResult<usize> {
    let Some(given) = query.last(name) else { return Ok(default) };
    let mut findings = Findings::new("query");
    let parsed = findings.within(name, |f| f.integer_text(given, 1, max));
    Ok(usize::try_from(findings.finish(parsed)?).unwrap_or(default))
}

async fn console(app: &App, entry: &Entry, lines: usize) -> ApiResult<String> {
    if entry.observed.is_none() {
        return Ok(String::new());
    }
    let read = app.engine.runtime().logs(entry.id, lines).await;
    let lines = read.map_err(|error| of_query("the logs cannot be read", &error))?;
    Ok(lines.into_iter().map(|line| line + "\n").collect())
}

/// `GET /sandboxes/{id}/diagnostics/logs`
pub async fn logs(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Response> {
    let query = QueryString::parse(uri.query());
    let scope = query.last("scope").map(LogScope::parse).transpose()?;
    let tail = number(&query, "tail", 100, 10_000)?;
    let entry = app.find(&principal, &id)?;
    if let Some(scope) = scope {
        // One line more than is shown tells whether some were left out.
        let lines = console(&app, &entry, crate::diagnostics::LOG_LINES + 1).await?;
        let console = Console { rotated: b"", current: lines.as_bytes() };
        return json(&describe_logs(&entry.id.to_string(), scope, console));
    }
    let mut filter = LogFilter::last(tail);
    let mut wanted = tail;
    if let Some(since) = query.last("since") {
        let now = jiff::Timestamp::from_millisecond(app.engine.clock().now().as_millis())
            .map_err(|_| ApiError::internal())?;
        filter = filter.within(parse_since(since), now);
        wanted = MOST_LINES;
    }
    let lines = console(&app, &entry, wanted).await?;
    Ok(text(Console { rotated: b"", current: lines.as_bytes() }.select(filter).text, Deprecated::Yes))
}

fn json<T: Serialize>(value: &T) -> ApiResult<Response> {
    Ok(Json(value).into_response())
}

async fn event_facts(app: &App, entry: &Entry) -> ApiResult<EventFacts> {
    let unreadable = |_| ApiError::new(Code::QueryFailed, "the history cannot be read");
    let history = app.engine.store().history(entry.id, 500).await.map_err(unreadable)?;
    let mut events: Vec<EventLine> = history
        .into_iter()
        .filter(|e| ![OWNER, RECORD].contains(&e.kind.as_str()))
        // The box's own record, which follows, has these with the time at which they happened.
        .filter(|e| entry.observed.is_none() || !e.kind.starts_with(OF_EGRESS))
        .map(|e| EventLine { at_ms: e.at.as_millis(), kind: e.kind, message: e.message })
        .collect();
    if entry.observed.is_some() {
        let read = app.engine.runtime().events(entry.id).await;
        let inside = read.map_err(|error| of_query("the box's events cannot be read", &error))?;
        events.extend(inside.into_iter().map(|e| EventLine {
            at_ms: e.at.as_millis(),
            kind: e.kind,
            message: e.message,
        }));
    }
    events.sort_by_key(|e| e.at_ms);
    let status = entry.status();
    let observed = entry.observed.as_deref();
    Ok(EventFacts {
        id: entry.id.to_string(),
        status: status.map_or("Unknown".into(), |s| format!("{} ({})", s.state.word(), s.reason)),
        created_at_ms: entry.created_at().as_millis(),
        started_at_ms: observed.and_then(|o| o.started_at).map(|t| t.as_millis()),
        finished_at_ms: finished(entry),
        events,
    })
}

fn finished(entry: &Entry) -> Option<i64> {
    match &entry.observed.as_deref()?.condition {
        Condition::Exited(exit) => Some(exit.at.as_millis()),
        _ => None,
    }
}

/// `GET /sandboxes/{id}/diagnostics/events`
pub async fn events(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Response> {
    let query = QueryString::parse(uri.query());
    let scope = query.last("scope").map(EventScope::parse).transpose()?;
    let limit = number(&query, "limit", 50, 500)?;
    let entry = app.find(&principal, &id)?;
    let facts = event_facts(&app, &entry).await?;
    match scope {
        Some(scope) => json(&describe_events(&facts, scope)),
        None => Ok(text(render_events(&facts, limit).text, Deprecated::Yes)),
    }
}

fn inspect_facts(app: &App, entry: &Entry) -> InspectFacts {
    let observed = entry.observed.as_deref();
    let status = entry.status();
    let exit = observed.and_then(|o| match &o.condition {
        Condition::Exited(exit) => Some(exit),
        _ => None,
    });
    let spec = entry.spec();
    let address = observed.and_then(|o| o.address);
    InspectFacts {
        id: entry.id.to_string(),
        name: format!("sandbox-{}", entry.id),
        image: spec.map(|s| s.image.clone()).unwrap_or_default(),
        status: status.as_ref().map_or("Unknown".into(), |s| s.state.word().to_owned()),
        running: observed.is_some_and(|o| o.condition == Condition::Running),
        paused: observed.is_some_and(|o| o.condition == Condition::Paused),
        oom_killed: exit.is_some_and(|e| e.cause == ExitCause::OutOfMemory),
        // 0 until it ends, as engines say it; none for what a signal ended.
        exit_code: exit.map_or(Some(0), |e| e.code),
        started_at_ms: observed.and_then(|o| o.started_at).map(|t| t.as_millis()),
        finished_at_ms: finished(entry),
        error: status.and_then(|s| s.message),
        cpu_millis: spec.and_then(|s| s.limits.cpu_millis),
        memory_bytes: spec.and_then(|s| s.limits.memory_bytes),
        pids_limit: spec.and_then(|s| s.limits.pids),
        networks: address.map(|a| (network_name(app), a)).into_iter().collect(),
        ports: observed.map(|o| ports(app, o)).unwrap_or_default(),
        labels: entry.facts().map(|f| f.metadata.clone()).unwrap_or_default(),
        env: spec.map(|s| shown_environment(app, &s.env)).unwrap_or_default(),
    }
}

fn network_name(app: &App) -> String {
    match app.config.runtime.kind {
        RuntimeKind::Docker => app.config.docker.network_mode.clone(),
        RuntimeKind::Embedded | RuntimeKind::Kubernetes => "sandglass".to_owned(),
    }
}

/// The ports that lead into the box by themselves.
fn ports(app: &App, observed: &Observation) -> Vec<PortFacts> {
    let bound = |port: u16, to: Option<String>| PortFacts { port, bound_to: to };
    // Ports that only the server may use are not published where others are.
    let secure = observed.spec.secure_access;
    let host = if secure { Ipv4Addr::LOCALHOST } else { app.config.docker.publish_host };
    let mapped = |port: u16, to: u16| bound(port, (to != 0).then(|| format!("{host}:{to}")));
    match observed.exposure {
        Exposure::Published { agent, http, egress } => {
            let enforcer = egress.map(|egress| mapped(EGRESS_PORT, egress));
            [mapped(AGENT_PORT, agent), mapped(HTTP_PORT, http)].into_iter().chain(enforcer).collect()
        }
        Exposure::Address | Exposure::Host | Exposure::None => {
            let at = observed.address.map(|address| SocketAddr::new(address, AGENT_PORT).to_string());
            vec![bound(AGENT_PORT, at)]
        }
    }
}

/// Values that the operator gives to every sandbox are secrets whatever their names.
fn shown_environment(app: &App, env: &[(String, String)]) -> Vec<(String, String)> {
    let base = &app.rules.runtime.base_env;
    let operators = |name: &str, value: &str| base.iter().any(|(n, v)| n == name && v.expose() == value);
    env.iter()
        .map(|(name, value)| {
            let shown = if operators(name, value) { "***" } else { value.as_str() };
            (name.clone(), shown.to_owned())
        })
        .collect()
}

/// `GET /sandboxes/{id}/diagnostics/inspect`
pub async fn inspect(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    let entry = app.find(&principal, &id)?;
    Ok(text(inspect_page(&app, &entry).await, Deprecated::No))
}

/// The page, with what the runtime adds when it answers.
async fn inspect_page(app: &App, entry: &Entry) -> String {
    let mut page = render_inspect(&inspect_facts(app, entry));
    if entry.observed.is_some() {
        let describe = tokio::time::timeout(DESCRIBE, app.engine.runtime().describe(entry.id)).await;
        let mut facts = match describe {
            Ok(Ok(facts)) => facts,
            Ok(Err(error)) => [("error".to_owned(), error.message)].into(),
            Err(_) => [("error".to_owned(), "the runtime does not answer".to_owned())].into(),
        };
        if let Some((agent, readiness)) = app.agent(entry).await {
            facts.insert(
                "Agent".to_owned(),
                format!("generation {}, used as {}", agent.generation, agent.agreed()),
            );
            if readiness == Readiness::Preparing {
                facts.insert("Entrypoint".to_owned(), "not started: its hook still runs".to_owned());
            }
        }
        page.push_str(&render_runtime(&facts));
    }
    page
}

/// `GET /sandboxes/{id}/diagnostics/summary`
pub async fn summary(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Response> {
    let query = QueryString::parse(uri.query());
    let tail = number(&query, "tail", 50, 10_000)?;
    let limit = number(&query, "event_limit", 20, 500)?;
    let entry = app.find(&principal, &id)?;
    let logs = console(&app, &entry, tail).await;
    let page = Summary {
        id: entry.id.to_string(),
        inspect: Ok(render_inspect(&inspect_facts(&app, &entry))),
        events: event_facts(&app, &entry).await.map(|f| render_events(&f, limit).text).map_err(|e| e.message),
        logs: logs
            .map(|lines| {
                Console { rotated: b"", current: lines.as_bytes() }.select(LogFilter::last(tail)).text
            })
            .map_err(|e| e.message),
        tail,
    };
    Ok(text(render_summary(&page), Deprecated::No))
}
