//! Tenants from an HTTP service: `GET <endpoint>` with the caller's key, answered with its namespace.
//!
//! Redirects are not followed and no proxy of the environment is used: both would show keys to somebody else.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use reqwest::{Client, Response, redirect::Policy};
use serde_json::Value;

use super::{
    cache::{Cached, Fetch, Fetched, Patience},
    keyring::{ProviderUnavailable, TenantProvider},
    open::OpenError,
    principal::Tenant,
};
use crate::{config::TenantsConfig, ingress::API_KEY};

/// How long an answer that does not say it is used.
const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// Largest answer that is read.
const MOST_BYTES: usize = 64 << 10;

/// The provider `http`.
pub struct HttpProvider(Cached<Service>);

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HttpProvider")
    }
}

impl HttpProvider {
    /// Does not ask anything yet: a provider that is down must not keep the server from starting.
    ///
    /// # Errors
    /// When the settings do not make a client.
    pub fn new(config: &TenantsConfig) -> Result<Self, OpenError> {
        let endpoint = config.endpoint.as_ref().ok_or(OpenError::NoEndpoint)?.expose().to_owned();
        crate::tls::use_ring();
        let client = Client::builder()
            .default_headers(own_headers(config)?)
            .redirect(Policy::none())
            .no_proxy()
            .timeout(config.timeout)
            .build()
            .map_err(OpenError::Client)?;
        let patience = Patience { turn: config.timeout, max_stale: config.max_stale };
        Ok(Self(Cached::new(Service { client, endpoint }, patience)))
    }
}

fn own_headers(config: &TenantsConfig) -> Result<HeaderMap, OpenError> {
    let mut headers = HeaderMap::new();
    if let (Some(name), Some(token)) = (&config.auth_header, &config.auth_token) {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| OpenError::AuthHeader)?;
        let mut value = HeaderValue::from_str(token.expose()).map_err(|_| OpenError::AuthHeader)?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

#[async_trait]
impl TenantProvider for HttpProvider {
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
        self.0.tenant(key).await
    }
}

struct Service {
    client: Client,
    endpoint: String,
}

#[async_trait]
impl Fetch for Service {
    async fn fetch(&self, key: &[u8]) -> Fetched {
        // What no header can carry is nobody's key.
        let Ok(mut value) = HeaderValue::from_bytes(key) else { return Fetched::Unknown };
        value.set_sensitive(true);
        let answer = match self.client.get(&self.endpoint).header(API_KEY, value).send().await {
            Ok(answer) => answer,
            Err(error) => return Fetched::Failed(told(error)),
        };
        match answer.status() {
            StatusCode::OK => match body(answer).await {
                Ok(body) => understood(&body),
                Err(error) => Fetched::Failed(error),
            },
            StatusCode::UNAUTHORIZED => Fetched::Unknown,
            status => Fetched::Failed(format!("it answers {status}")),
        }
    }
}

/// Without the address, which may carry a password.
fn told(error: reqwest::Error) -> String {
    if error.is_timeout() { "it does not answer in time".to_owned() } else { error.without_url().to_string() }
}

async fn body(mut answer: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(told)? {
        if body.len() + chunk.len() > MOST_BYTES {
            return Err("its answer is too long".to_owned());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// `{"namespace": "…", "ttl": seconds}`; anything else is a failure, not a refusal.
fn understood(body: &[u8]) -> Fetched {
    let answer: Value = match serde_json::from_slice(body) {
        Ok(answer) => answer,
        Err(_) => return Fetched::Failed("its answer is not JSON".to_owned()),
    };
    let namespace = answer["namespace"].as_str().map(str::trim).filter(|name| !name.is_empty());
    let Some(namespace) = namespace.filter(|name| !name.chars().any(char::is_control)) else {
        return Fetched::Failed("its answer has no usable namespace".to_owned());
    };
    let ttl = match &answer["ttl"] {
        Value::Null => Some(DEFAULT_TTL),
        // Beyond a century it makes no difference, and durations have an end.
        seconds => seconds
            .as_f64()
            .and_then(|seconds| Duration::try_from_secs_f64(seconds.min(100.0 * 365.0 * 86_400.0)).ok()),
    };
    let Some(ttl) = ttl else { return Fetched::Failed("its answer has no usable ttl".to_owned()) };
    let tenant = Tenant { name: namespace.to_owned(), namespace: namespace.to_owned() };
    Fetched::Known { tenant: Arc::new(tenant), ttl }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
