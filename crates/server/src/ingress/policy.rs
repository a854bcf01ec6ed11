//! Requests about a sandbox's network policy: what its egress enforcer answers is the answer.

use std::net::SocketAddr;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderValue};
use http::uri::PathAndQuery;
use http::{HeaderName, Method, Request, Response};
use http_body_util::Full;
use sandglass_proxy::{HeaderEdits, ResponseBody};

use super::carrier::Way;
use super::edits;
use super::lookup::Target;
use super::refusal::Refusal;
use super::relay::{IngressState, address};
use super::ways::Need;
use super::{AGENT_TOKEN, EGRESS_PORT, EGRESS_TOKEN};

/// A request that was checked already.
#[derive(Clone, Debug)]
pub struct PolicyRequest<'a> {
    pub method: Method,
    pub query: Option<&'a str>,
    /// JSON, or empty.
    pub body: Bytes,
}

impl IngressState {
    /// Asks the enforcer of `target` with the token that it was started with.
    ///
    /// # Errors
    /// When there is no enforcer, or it cannot be reached.
    pub async fn policy(
        &self,
        id: &str,
        target: &Target,
        asked: PolicyRequest<'_>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let token = target.egress_token.as_deref().filter(|token| !token.is_empty());
        let token = token.ok_or(Refusal::NoEnforcer)?;
        let application = SocketAddr::new(address(target.reach)?, EGRESS_PORT);
        self.used(id);
        let ride = self.connect(target, application, Need::Shared).await?;
        let mut edits = HeaderEdits { hide: &edits::OWN_WORDS, ..HeaderEdits::default() };
        let mut put = |name: HeaderName, value: &str| {
            if let Ok(value) = HeaderValue::from_str(value) {
                edits.set.push((name, value));
            }
        };
        put(HOST, &application.to_string());
        put(EGRESS_TOKEN, token);
        if ride.way() == Way::Agent {
            put(AGENT_TOKEN, &target.agent_token);
        }
        let mut request = Request::new(Full::new(asked.body.clone()));
        *request.method_mut() = asked.method;
        let to = to(ride.way(), asked.query)?;
        if !asked.body.is_empty() {
            request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        ride.exchange(request, to, edits, None).await
    }
}

fn to(way: Way, query: Option<&str>) -> Result<PathAndQuery, Refusal> {
    let path = match way {
        Way::Direct => "/policy".to_owned(),
        Way::Agent => format!("/proxy/{EGRESS_PORT}/policy"),
    };
    let text = query.map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
    PathAndQuery::try_from(text).map_err(|_| Refusal::TargetMalformed)
}
