//! Tells a webhook of every request that was let through.

use std::net::SocketAddr;
use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio_util::task::TaskTracker;

use super::queue::Queue;

/// Messages under way at the same time.
const AT_ONCE: usize = 8;

/// Where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSettings {
    pub url: reqwest::Url,
    /// Messages that may wait; what is beyond is dropped.
    pub queue: usize,
    pub timeout: Duration,
}

/// See the module documentation. Clones share the queue.
#[derive(Clone, Debug)]
pub struct Audit(Queue<serde_json::Value>);

/// A request that was let through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routed<'a> {
    pub(super) id: &'a str,
    /// Without the query, which may carry secrets.
    pub(super) path: &'a str,
    pub(super) method: &'a Method,
    pub(super) target: SocketAddr,
}

impl Audit {
    /// Starts the workers. They end when the last clone is gone and the queue is empty.
    ///
    /// # Errors
    /// When no HTTP client can be made.
    pub fn start(settings: AuditSettings, tasks: &TaskTracker) -> Result<Self, reqwest::Error> {
        let AuditSettings { url, queue, timeout } = settings;
        crate::tls::use_ring();
        let client = reqwest::Client::builder().no_proxy().timeout(timeout).build()?;
        let send = move |message: serde_json::Value| {
            let request = client.post(url.clone()).json(&message);
            async move {
                let answer = request.send().await.and_then(reqwest::Response::error_for_status);
                if let Err(error) = answer {
                    tracing::debug!(error = %error.without_url(), "the audit webhook failed");
                }
            }
        };
        Ok(Self(Queue::start((queue, AT_ONCE), tasks, send)))
    }

    pub(super) fn routed(&self, routed: Routed<'_>) {
        self.0.put(json!({
            "sandbox_id": routed.id,
            "uri": routed.path,
            "method": routed.method.as_str(),
            "target": routed.target.to_string(),
            "request_time": jiff::Timestamp::now().to_string(),
        }));
    }
}
