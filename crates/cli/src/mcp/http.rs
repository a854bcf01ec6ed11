//! Clients over HTTP: the streamable transport at `/mcp`.
//!
//! Invariant: a web page cannot use us. Requests that name another host than ours, or an origin that was not allowed, are
//! refused, and beyond loopback every request needs the bearer token. Bound: 1,024 sessions, each forgotten after an hour
//! without a message, and 4 MiB for a request.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
};
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{AtEnd, Session, handler::Handler};
use crate::{interrupts::Interrupts, output::note, profile::Secret};

/// The variable with the token that clients must send.
pub const TOKEN_VARIABLE: &str = "SANDGLASS_MCP_TOKEN";
const SHORTEST_TOKEN: usize = 16;
const MOST_SESSIONS: usize = 1024;
/// A session in which nothing is said for so long ends, and with it what it waits for: it must outlast a silent command.
const LONGEST_SILENCE: Duration = Duration::from_secs(3600);
/// How long connections may stay open when we have to leave.
const PARTING: Duration = Duration::from_secs(3);

/// Where and for whom to serve.
#[derive(Debug)]
pub struct Listening {
    pub address: SocketAddr,
    /// Names besides our own under which we are reached.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may use us.
    pub allowed_origins: Vec<String>,
    pub token: Option<Secret>,
}

impl Listening {
    /// Whether this may be served at all.
    pub fn admitted(self) -> Result<Self> {
        if let Some(token) = &self.token {
            ensure!(
                token.expose().len() >= SHORTEST_TOKEN,
                "the token in {TOKEN_VARIABLE} is shorter than {SHORTEST_TOKEN} characters"
            );
        }
        ensure!(
            self.token.is_some() || self.address.ip().is_loopback(),
            "{} can be reached from other machines: set {TOKEN_VARIABLE} to a token that clients must send, or listen on 127.0.0.1",
            self.address.ip()
        );
        Ok(self)
    }

    /// Hosts that a request may name. None at all stands for any: whoever listens on every address has a token.
    fn hosts(&self) -> Vec<String> {
        let ip = self.address.ip();
        if ip.is_unspecified() && self.allowed_hosts.is_empty() {
            return Vec::new();
        }
        let own = match ip {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        let mut all = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "[::1]".to_owned(), own];
        all.extend(self.allowed_hosts.iter().cloned());
        all
    }
}

/// Serves until a signal arrives.
pub async fn serve(session: Session, listening: Listening, at_end: AtEnd) -> Result<u8> {
    let listening = listening.admitted()?;
    let listener = TcpListener::bind(listening.address)
        .await
        .with_context(|| format!("cannot listen on {}", listening.address))?;
    let mut interrupts = Interrupts::listen()?;
    let stop = CancellationToken::new();
    note(&format!("serving MCP at http://{}/mcp", listener.local_addr()?));
    let service = router(&session, listening, stop.clone());
    let serving = axum::serve(listener, service).with_graceful_shutdown(stop.clone().cancelled_owned());
    let mut serving = std::pin::pin!(serving.into_future());
    tokio::select! {
        ended = &mut serving => ended?,
        _ = interrupts.next() => {
            stop.cancel();
            // Connections that stay open in spite of that end with the process.
            let _ = tokio::time::timeout(PARTING, serving).await;
        }
    }
    session.end(at_end).await;
    Ok(0)
}

fn router(session: &Session, listening: Listening, stop: CancellationToken) -> Router {
    let mut config = StreamableHttpServerConfig::default()
        .with_allowed_origins(listening.allowed_origins.iter().cloned())
        .enforce_origin_validation()
        .with_cancellation_token(stop);
    let hosts = listening.hosts();
    config = if hosts.is_empty() { config.disable_allowed_hosts() } else { config.with_allowed_hosts(hosts) };
    let mut sessions = LocalSessionManager::default();
    sessions.session_config.keep_alive = Some(LONGEST_SILENCE);
    let sessions = Arc::new(sessions);
    let session = session.clone();
    let service =
        StreamableHttpService::new(move || Ok(Handler::new(session.clone())), sessions.clone(), config);
    let routes = Router::new()
        .route_service("/mcp", service)
        .layer(middleware::from_fn_with_state(sessions, limit_sessions));
    match listening.token {
        Some(token) => routes.layer(middleware::from_fn_with_state(token, authenticate)),
        None => routes,
    }
}

/// Refuses what could begin a session, while there are too many.
async fn limit_sessions(
    State(sessions): State<Arc<LocalSessionManager>>,
    request: Request,
    next: Next,
) -> Response {
    let begins = !request.headers().contains_key("mcp-session-id");
    if begins && sessions.sessions.read().await.len() >= MOST_SESSIONS {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many sessions\n").into_response();
    }
    next.run(request).await
}

async fn authenticate(State(token): State<Secret>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    match given.and_then(bearer) {
        Some(given) if bool::from(given.ct_eq(token.expose().as_bytes())) => next.run(request).await,
        _ => (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "a bearer token is needed\n")
            .into_response(),
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening(address: &str, token: Option<&str>) -> Listening {
        Listening {
            address: address.parse().unwrap(),
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            token: token.map(|token| Secret::from(token.to_owned())),
        }
    }

    #[test]
    fn beyond_loopback_a_token_of_some_length_is_needed() {
        for address in ["127.0.0.1:1", "[::1]:1"] {
            assert!(listening(address, None).admitted().is_ok());
        }
        for address in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1"] {
            let error = listening(address, None).admitted().unwrap_err().to_string();
            assert!(error.contains(TOKEN_VARIABLE), "{error}");
            assert!(listening(address, Some("0123456789abcdef")).admitted().is_ok());
        }
        let error = listening("127.0.0.1:1", Some("short-t")).admitted().unwrap_err().to_string();
        assert!(!error.contains("short-t"), "{error}");
    }

    #[test]
    fn any_host_is_only_taken_where_every_address_is_listened_on() {
        assert!(listening("127.0.0.1:1", None).hosts().contains(&"localhost".to_owned()));
        assert!(listening("10.0.0.1:1", None).hosts().contains(&"10.0.0.1".to_owned()));
        assert!(listening("0.0.0.0:1", None).hosts().is_empty());
        let mut named = listening("0.0.0.0:1", None);
        named.allowed_hosts.push("gate.example".to_owned());
        assert!(named.hosts().contains(&"gate.example".to_owned()));
    }

    #[test]
    fn bearer_tokens_are_read_from_the_header() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bearer  abc "), Some(&b"abc"[..]));
        for other in [&b"Basic abc"[..], b"Bearer", b""] {
            assert_eq!(bearer(other), None);
        }
    }
}
