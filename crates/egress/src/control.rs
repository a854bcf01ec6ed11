//! The control API: the policy, the credential vault and the health of this process. What they mean is elsewhere.

pub mod answer;
mod policy;
pub mod server;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderMap, Method, StatusCode};
use subtle::ConstantTimeEq;

use crate::plane::Plane;
use crate::vault::Secret;

use answer::Answer;

/// Header that carries the token.
pub const TOKEN: &str = "opensandbox-egress-auth";

/// A request with its whole body.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    pub peer: IpAddr,
}

/// Answers requests about the vault, which is another part's.
pub trait VaultRoutes: Send + Sync {
    fn answer(&self, request: &Request) -> Answer;
}

/// Whether everything that has to enforce does.
#[derive(Debug, Default)]
pub struct Health(AtomicBool);

impl Health {
    pub fn set_ready(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn set_unready(&self) {
        self.0.store(false, Ordering::Release);
    }

    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Everything that the API reaches.
pub struct Control {
    pub token: Option<Secret>,
    pub plane: Arc<Mutex<Plane>>,
    pub vault: Box<dyn VaultRoutes>,
    pub health: Arc<Health>,
}

impl Control {
    /// Answers a request that takes no time: handlers run one after the other.
    pub fn answer(&self, request: &Request) -> Answer {
        match request.path.as_str() {
            "/healthz" => self.health(),
            "/policy" => self.authorised(request, |request| {
                let mut plane = self.plane.lock().unwrap_or_else(PoisonError::into_inner);
                policy::answer(&mut plane, request)
            }),
            // Whoever asks, with a token or without: nobody gets what is in force from here.
            path if is_what_is_in_force(path) => Answer::text(StatusCode::FORBIDDEN, "forbidden"),
            path if is_of_the_vault(path) => self.authorised(request, |request| self.vault.answer(request)),
            _ => Answer::text(StatusCode::NOT_FOUND, "404 page not found"),
        }
    }

    fn health(&self) -> Answer {
        if self.health.is_ready() {
            Answer::plain(StatusCode::OK, "ok")
        } else {
            Answer::plain(StatusCode::SERVICE_UNAVAILABLE, "mitmproxy not ready")
        }
    }

    fn authorised(&self, request: &Request, answer: impl FnOnce(&Request) -> Answer) -> Answer {
        let shown = request.headers.get(TOKEN).map(|value| value.as_bytes()).unwrap_or_default();
        match &self.token {
            Some(token) if !bool::from(token.expose().as_bytes().ct_eq(shown)) => {
                Answer::text(StatusCode::UNAUTHORIZED, "unauthorized")
            }
            _ => answer(request),
        }
    }
}

fn is_of_the_vault(path: &str) -> bool {
    path.strip_prefix("/credential-vault").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn is_what_is_in_force(path: &str) -> bool {
    percent_encoding::percent_decode_str(path).eq(b"/credential-vault/_active".iter().copied())
}

#[cfg(test)]
mod tests;
