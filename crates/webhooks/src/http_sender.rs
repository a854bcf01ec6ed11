//! Requests to receivers over HTTP.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use reqwest::{
    Client, StatusCode,
    dns::{Addrs, Name, Resolve, Resolving},
    header,
    redirect::Policy,
};

use crate::{
    address::Receivers,
    ports::{Request, SendError, Sender, Sent},
};

/// Bytes of an answer that are read, so that its connection can be used again.
const ANSWER: usize = 64 << 10;
const CONNECT: Duration = Duration::from_secs(5);

/// The HTTP client cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for webhooks cannot be set up: {0}")]
pub struct ClientError(#[from] reqwest::Error);

/// See the module documentation. Follows no redirects, uses no proxy, sends no cookies.
#[derive(Debug, Clone)]
pub struct HttpSender {
    client: Client,
    receivers: Arc<Receivers>,
}

/// Resolves names to those of their addresses that may be called, with every connection anew: what a name led to when it was
/// checked says nothing about later.
#[derive(Debug, Clone)]
struct Guarded(Arc<Receivers>);

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let receivers = self.0.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> = found.filter(|address| receivers.allows(address.ip())).collect();
            if allowed.is_empty() {
                return Err(NotAllowed.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("its name leads to private addresses only; the configuration does not allow them")]
struct NotAllowed;

impl HttpSender {
    /// A client for receivers that these rules allow. `timeout` is for a request with its answer. A provider for TLS must be installed.
    ///
    /// # Errors
    /// When the client cannot be set up.
    pub fn new(receivers: Arc<Receivers>, timeout: Duration) -> Result<Self, ClientError> {
        let client = Client::builder()
            .user_agent(concat!("sandglass/", env!("CARGO_PKG_VERSION")))
            .timeout(timeout)
            .connect_timeout(CONNECT.min(timeout))
            .redirect(Policy::none())
            .no_proxy()
            .dns_resolver(Arc::new(Guarded(receivers.clone())))
            .pool_max_idle_per_host(2)
            .build()?;
        Ok(Self { client, receivers })
    }
}

#[async_trait]
impl Sender for HttpSender {
    async fn send(&self, request: &Request) -> Result<Sent, SendError> {
        // Again: an address that is no name never passes the resolver, and what is allowed may have been changed since.
        let url =
            self.receivers.check(&request.url).map_err(|error| SendError::Refused(error.to_string()))?;
        let sent = self
            .client
            .post(url)
            .header(header::CONTENT_TYPE, "application/json")
            .header("webhook-id", &request.id)
            .header("webhook-timestamp", request.timestamp.to_string())
            .header("webhook-signature", &request.signatures)
            .body(request.body.clone())
            .send();
        let mut answer = sent.await.map_err(|error| of_client(&error))?;
        let status = answer.status();
        let retry_after = retry_after(&answer);
        let mut read = 0;
        // The status says it all; a body that does not end is not waited for longer than the timeout.
        while let Ok(Some(chunk)) = answer.chunk().await {
            read += chunk.len();
            if read > ANSWER {
                break;
            }
        }
        Ok(Sent { status: status.as_u16(), retry_after })
    }
}

fn retry_after(answer: &reqwest::Response) -> Option<Duration> {
    let asks = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&answer.status());
    let text = answer.headers().get(header::RETRY_AFTER).filter(|_| asks)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

/// The innermost cause says what happened; the outer ones repeat the address.
fn of_client(error: &reqwest::Error) -> SendError {
    let mut cause: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let why = cause.to_string();
    if cause.is::<NotAllowed>() {
        SendError::Refused(why)
    } else if error.is_timeout() {
        SendError::TimedOut
    } else if error.is_connect() {
        SendError::Connect(why)
    } else {
        SendError::Broken(why)
    }
}
