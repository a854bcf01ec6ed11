//! The connection to the server: following what it knows, and telling it what happens.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::StreamExt as _;
use http::StatusCode;
use reqwest::{Client, Method, RequestBuilder, Url};
use sandglass_api::ingress::{IngressLine, IngressUses};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::mirror::Mirror;
use crate::config::Secret;
use crate::ingress::API_KEY;

const CONNECT: Duration = Duration::from_secs(5);
/// A server that runs says so more often.
const SILENCE: Duration = Duration::from_secs(30);
/// The longest line that is read.
const LONGEST_LINE: usize = 64 << 10;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why the server's knowledge is not had.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedError {
    #[error("the server refuses the key; it has to be ingress.key or the API key of an operator")]
    Key,
    #[error("the server answers {0}; is it a Sandglass server that knows gateways?")]
    Status(StatusCode),
    #[error("the server cannot be reached: {0}")]
    Http(#[from] reqwest::Error),
    #[error("the server was silent for too long")]
    Silent,
    #[error("the server says what cannot be understood")]
    Malformed,
    #[error("the server has ended the stream")]
    Ended,
}

/// A server and the key to it. Cheap to clone.
#[derive(Clone)]
pub(super) struct Server {
    client: Client,
    base: Arc<Url>,
    key: Secret,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl Server {
    pub(super) fn new(base: Url, key: Secret) -> Result<Self, reqwest::Error> {
        crate::tls::use_ring();
        // Redirects would carry the key elsewhere.
        let client = Client::builder().no_proxy().connect_timeout(CONNECT);
        let client = client.redirect(reqwest::redirect::Policy::none()).build()?;
        Ok(Self { client, base: Arc::new(base), key })
    }

    #[cfg(test)]
    pub(super) fn base(&self) -> &Url {
        &self.base
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}/v1/ingress/{path}", self.base.as_str().trim_end_matches('/'));
        self.client.request(method, url).header(API_KEY, self.key.expose())
    }

    pub(super) async fn used(&self, id: &str) -> Result<(), FeedError> {
        let uses = IngressUses { sandboxes: vec![id.to_owned()] };
        accepted(&self.request(Method::POST, "uses").json(&uses).send().await?)
    }

    /// Returns when it runs.
    pub(super) async fn wake(&self, id: &str) -> Result<(), FeedError> {
        accepted(&self.request(Method::POST, &format!("sandboxes/{id}/wake")).send().await?)
    }

    /// Follows the server until told to stop, whatever happens to it.
    ///
    /// # Errors
    /// When the key is refused before anything was told: no waiting will change that.
    pub(super) async fn follow(&self, mirror: &Mirror, stop: &CancellationToken) -> Result<(), FeedError> {
        let (mut pause, mut told_once, mut away) = (FIRST_PAUSE, false, false);
        loop {
            let mut whole = false;
            let ended = stop.run_until_cancelled(self.read(mirror, &mut whole)).await;
            mirror.lost();
            let Some(error) = ended.map(|ended| ended.err().unwrap_or(FeedError::Ended)) else {
                return Ok(());
            };
            if whole {
                (pause, told_once, away) = (FIRST_PAUSE, true, false);
            }
            if matches!(error, FeedError::Key) && !told_once {
                return Err(error);
            }
            if !std::mem::replace(&mut away, true) {
                tracing::warn!(%error, sandboxes = mirror.len(), "the server is away; what is known is still served");
            }
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Ok(());
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn read(&self, mirror: &Mirror, whole: &mut bool) -> Result<(), FeedError> {
        let asked = self.request(Method::GET, "sandboxes?watch=true").send();
        let answer = timeout(SILENCE, asked).await.map_err(|_| FeedError::Silent)??;
        accepted(&answer)?;
        let mut pieces = answer.bytes_stream();
        let (mut unread, mut told) = (BytesMut::new(), HashSet::new());
        while let Some(piece) = timeout(SILENCE, pieces.next()).await.map_err(|_| FeedError::Silent)? {
            unread.extend_from_slice(&piece?);
            while let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
                let line = unread.split_to(end + 1);
                let line = serde_json::from_slice(&line).map_err(|_| FeedError::Malformed)?;
                if matches!(line, IngressLine::Whole) {
                    *whole = true;
                    tracing::info!(sandboxes = told.len(), "the server has told of its sandboxes");
                }
                mirror.take(line, &mut told);
            }
            if unread.len() > LONGEST_LINE {
                return Err(FeedError::Malformed);
            }
        }
        Ok(())
    }
}

fn accepted(answer: &reqwest::Response) -> Result<(), FeedError> {
    match answer.status() {
        status if status.is_success() => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(FeedError::Key),
        status => Err(FeedError::Status(status)),
    }
}
