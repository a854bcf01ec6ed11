//! The HTTP client of the control plane.
//!
//! Owns addresses, headers and error texts; what a command does with an answer is the command's business. Answers stay
//! JSON values so that `-o json` shows everything a server sends. Invariant: redirects are never followed, because the
//! key would travel with them.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode, Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use serde_json::{Value, json};
use thiserror::Error;

use crate::profile::Profile;

/// Longest wait for an ordinary answer; streams and uploads have no limit.
const PATIENCE: Duration = Duration::from_secs(120);
/// Largest page the API serves.
const PAGE: u32 = 200;
const KEY_HEADER: &str = "OPEN-SANDBOX-API-KEY";

/// Why a request brought no usable answer.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error(
        "cannot reach the server at {base}: {reason}\nstart one with `sandglass serve`, or point --url or SANDGLASS_URL at a running one"
    )]
    Unreachable { base: String, reason: String },
    #[error("no answer from {base}: {reason}")]
    Interrupted { base: String, reason: String },
    #[error("{0}")]
    Refused(ApiError),
    #[error("the server at {base} answered something that is not the sandbox API")]
    NotTheApi { base: String },
}

/// An error answer.
#[derive(Debug, Clone)]
pub struct ApiError {
    pub status: StatusCode,
    pub code: String,
    pub message: String,
    pub request_id: Option<String>,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (", self.message)?;
        if !self.code.is_empty() {
            write!(f, "{}, ", self.code)?;
        }
        write!(f, "HTTP {}", self.status.as_u16())?;
        if let Some(id) = &self.request_id {
            write!(f, ", request {id}")?;
        }
        f.write_str(")")?;
        if self.status == StatusCode::UNAUTHORIZED {
            f.write_str("\ngive the server's key with SANDGLASS_API_KEY or --api-key")?;
        }
        Ok(())
    }
}

/// A sandbox as the server describes it.
#[derive(Debug, Clone)]
pub struct Sandbox(pub Value);

impl Sandbox {
    fn text(&self, pointer: &str) -> &str {
        self.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn id(&self) -> &str {
        self.text("/id")
    }

    pub fn state(&self) -> &str {
        self.text("/status/state")
    }

    pub fn reason(&self) -> &str {
        self.text("/status/reason")
    }

    pub fn message(&self) -> &str {
        self.text("/status/message")
    }

    pub fn image(&self) -> &str {
        match self.text("/image/uri") {
            "" => self.text("/snapshotId"),
            uri => uri,
        }
    }

    pub fn created_at(&self) -> &str {
        self.text("/createdAt")
    }

    pub fn expires_at(&self) -> &str {
        self.text("/expiresAt")
    }

    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.0.get("metadata")?.get(key)?.as_str()
    }

    /// Whether nothing can run in it any more.
    pub fn is_over(&self) -> bool {
        matches!(self.state(), "Terminated" | "Failed" | "Stopping")
    }

    /// Exit code of the entrypoint of a sandbox that is over: as reported, otherwise what the state implies.
    pub fn exit_code(&self) -> u8 {
        let number = |word: &str| {
            let (_, after) = self.message().split_once(word)?;
            let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
            after[..digits].parse::<i64>().ok()
        };
        let reported = self.0.pointer("/status/exitCode").and_then(Value::as_i64);
        let signalled = || number("signal ").map(|signal| 128 + signal);
        let code = match self.reason() {
            "OUT_OF_MEMORY" => Some(137),
            _ => reported.or_else(|| number("code ")).or_else(signalled),
        };
        match code {
            Some(code) => u8::try_from(code & 0xff).unwrap_or(1),
            None => u8::from(self.state() != "Terminated"),
        }
    }
}

/// Where a port of a sandbox is reached.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// `host[:port][/path]`, without a scheme.
    pub address: String,
    /// To be sent with every request.
    pub headers: Vec<(String, String)>,
    /// The answer itself.
    pub raw: Value,
}

/// Which way an endpoint should lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Whatever the server considers best.
    Default,
    /// Through the server, reachable from wherever the API is.
    ThroughServer,
}

/// Talks to one server.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    profile: Profile,
}

impl Client {
    /// Prepares a client; nothing is sent yet.
    pub fn new(profile: Profile) -> Result<Self> {
        // The second caller of this loses harmlessly: the provider is the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("sandglass/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(10))
            .tcp_keepalive(Duration::from_secs(20))
            .tcp_nodelay(true);
        if profile.scheme() == "http" {
            // Spares reading the system's certificates, which may not even exist.
            builder = builder.tls_certs_only([]);
        }
        if profile.is_loopback() {
            builder = builder.no_proxy();
        }
        Ok(Self { http: builder.build().context("cannot prepare the HTTP client")?, profile })
    }

    /// Connection settings in use.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The underlying client, for requests to sandboxes.
    pub fn http(&self) -> &reqwest::Client {
        &self.http
    }

    /// The key as a header, if there is one.
    pub fn key_header(&self) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        if let Some(key) = self.profile.key() {
            let mut value = HeaderValue::from_str(key.expose())
                .map_err(|_| anyhow::anyhow!("the API key contains characters that no header can carry"))?;
            value.set_sensitive(true);
            headers.insert(KEY_HEADER, value);
        }
        Ok(headers)
    }

    /// What every request to an endpoint carries: the key, since it may lead through the server, and the endpoint's own.
    pub fn endpoint_headers(&self, endpoint: &Endpoint) -> Result<HeaderMap> {
        let mut headers = self.key_header()?;
        for (name, value) in &endpoint.headers {
            let name: HeaderName = name.parse().context("the server named an impossible endpoint header")?;
            let mut value =
                HeaderValue::from_str(value).context("the server named an impossible endpoint header")?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(headers)
    }

    /// Starts a request below `/v1`; segments are percent-encoded.
    pub fn request(&self, method: Method, segments: &[&str]) -> Result<RequestBuilder> {
        let mut url = Url::parse(self.profile.base()).context("the server address is not a URL")?;
        url.path_segments_mut()
            .map_err(|()| anyhow::anyhow!("the server address cannot carry a path"))?
            .pop_if_empty()
            .push("v1")
            .extend(segments);
        Ok(self.http.request(method, url).headers(self.key_header()?))
    }

    /// Sends a request and turns error answers into errors.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response, ClientError> {
        let response = request.send().await.map_err(|error| transport(self.profile.base(), &error))?;
        accepted(response).await.map_err(ClientError::Refused)
    }

    async fn json(&self, request: RequestBuilder) -> Result<Value> {
        let response = self.send(request.timeout(PATIENCE)).await?;
        let bytes = response.bytes().await.map_err(|error| transport(self.profile.base(), &error))?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|_| ClientError::NotTheApi { base: self.profile.base().to_owned() })?;
        Ok(value)
    }

    /// Sends a request whose answer is JSON.
    pub async fn call(&self, method: Method, segments: &[&str], body: Option<&Value>) -> Result<Value> {
        let mut request = self.request(method, segments)?;
        if let Some(body) = body {
            request = request.json(body);
        }
        self.json(request).await
    }

    /// One page of a list.
    pub async fn page(&self, segments: &[&str], query: &[(&str, String)]) -> Result<Value> {
        let answer = self.json(self.request(Method::GET, segments)?.query(query)).await?;
        if answer.get("items").is_some_and(Value::is_array) {
            return Ok(answer);
        }
        Err(ClientError::NotTheApi { base: self.profile.base().to_owned() }.into())
    }

    /// Asks for a text.
    pub async fn text(&self, segments: &[&str], query: &[(&str, String)]) -> Result<String> {
        let request = self.request(Method::GET, segments)?.query(query).timeout(PATIENCE);
        let response = self.send(request).await?;
        Ok(response.text().await.map_err(|error| transport(self.profile.base(), &error))?)
    }

    pub async fn create(&self, body: &Value) -> Result<Sandbox> {
        Ok(Sandbox(self.call(Method::POST, &["sandboxes"], Some(body)).await?))
    }

    pub async fn get(&self, id: &str) -> Result<Sandbox> {
        Ok(Sandbox(self.call(Method::GET, &["sandboxes", id], None).await?))
    }

    /// All sandboxes that match, newest first, from every page.
    pub async fn list(&self, states: &[String], metadata: &[(String, String)]) -> Result<Vec<Sandbox>> {
        let mut all = Vec::new();
        for page in 1.. {
            let mut query: Vec<(&str, String)> =
                states.iter().map(|state| ("state", state.clone())).collect();
            if !metadata.is_empty() {
                query.push(("metadata", metadata_query(metadata)));
            }
            query.extend([("page", page.to_string()), ("pageSize", PAGE.to_string())]);
            let mut answer = self.page(&["sandboxes"], &query).await?;
            let items = answer.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take);
            let items = items.unwrap_or_default();
            let last = items.is_empty();
            all.extend(items.into_iter().map(Sandbox));
            let more = answer.pointer("/pagination/hasNextPage").and_then(Value::as_bool).unwrap_or(false);
            if !more || last {
                break;
            }
        }
        Ok(all)
    }

    /// Removes a sandbox; `false` when there was none.
    pub async fn delete(&self, id: &str) -> Result<bool> {
        let request = self.request(Method::DELETE, &["sandboxes", id])?.timeout(PATIENCE);
        match self.send(request).await {
            Ok(_) => Ok(true),
            Err(ClientError::Refused(error)) if error.status == StatusCode::NOT_FOUND => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// `pause` or `resume`.
    pub async fn ask(&self, id: &str, verb: &str) -> Result<()> {
        let request = self.request(Method::POST, &["sandboxes", id, verb])?.timeout(PATIENCE);
        self.send(request).await?;
        Ok(())
    }

    /// Moves the expiry to now plus `ttl` and returns the new instant.
    pub async fn renew(&self, id: &str, ttl: Duration) -> Result<String> {
        let at = jiff::Timestamp::now().checked_add(ttl).context("that time is too far away")?;
        let body = json!({ "expiresAt": format!("{at:.6}") });
        let answer = self.call(Method::POST, &["sandboxes", id, "renew-expiration"], Some(&body)).await?;
        Ok(answer.get("expiresAt").and_then(Value::as_str).unwrap_or_default().to_owned())
    }

    /// Where a port is reached.
    pub async fn endpoint(&self, id: &str, port: u16, route: Route) -> Result<Endpoint> {
        let through = (route == Route::ThroughServer).to_string();
        let request = self
            .request(Method::GET, &["sandboxes", id, "endpoints", &port.to_string()])?
            .query(&[("use_server_proxy", through)]);
        let raw = self.json(request).await?;
        let Some(address) = raw.get("endpoint").and_then(Value::as_str) else {
            return Err(ClientError::NotTheApi { base: self.profile.base().to_owned() }.into());
        };
        let headers = raw.get("headers").and_then(Value::as_object).map(|map| {
            map.iter().filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
        });
        Ok(Endpoint { address: address.to_owned(), headers: headers.unwrap_or_default(), raw })
    }

    /// The full id of a sandbox given by id, unique id prefix, or name.
    pub async fn resolve(&self, reference: &str) -> Result<String> {
        if is_full_id(reference) {
            return Ok(reference.to_owned());
        }
        if reference.is_empty() {
            bail!("an empty string names no sandbox");
        }
        let all = self.list(&[], &[]).await?;
        pick(&all, reference)
    }
}

fn is_full_id(text: &str) -> bool {
    let uuid = text.strip_prefix("fsb-").unwrap_or(text);
    uuid.len() == 36
        && uuid.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

fn pick(all: &[Sandbox], reference: &str) -> Result<String> {
    if let Some(exact) = all.iter().find(|sandbox| sandbox.id() == reference) {
        return Ok(exact.id().to_owned());
    }
    let mut found: Vec<&Sandbox> = all.iter().filter(|sandbox| sandbox.id().starts_with(reference)).collect();
    if found.is_empty() {
        found = all.iter().filter(|sandbox| sandbox.metadata("name") == Some(reference)).collect();
    }
    match found.as_slice() {
        [] => bail!("there is no sandbox `{reference}`; `sandglass ps` lists what there is"),
        [one] => Ok(one.id().to_owned()),
        several => {
            let ids: Vec<&str> = several.iter().map(|sandbox| sandbox.id()).take(5).collect();
            bail!("`{reference}` could be any of {} sandboxes: {}", several.len(), ids.join(", "))
        }
    }
}

/// Turns an error answer into an [`ApiError`]; shared with requests to the in-sandbox agent.
pub async fn accepted(response: Response) -> Result<Response, ApiError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let request_id =
        response.headers().get("x-request-id").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let location =
        response.headers().get("location").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = response.text().await.unwrap_or_default();
    let (code, mut message) = explain(&body);
    if message.is_empty() {
        message = match location {
            Some(target) if status.is_redirection() => {
                format!("the server redirects to {target}; use that address with --url")
            }
            _ => status.canonical_reason().unwrap_or("the server gave no reason").to_owned(),
        };
    }
    Err(ApiError { status, code, message, request_id })
}

/// Code and message of an error body, whichever of the known shapes it has.
fn explain(body: &str) -> (String, String) {
    let Ok(value) = serde_json::from_str::<Value>(body) else {
        return (String::new(), crate::output::shortened(body.trim(), 500));
    };
    let inner = value.get("detail").filter(|detail| detail.is_object()).unwrap_or(&value);
    let text = |key: &str| inner.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut message = text("message");
    if message.is_empty() {
        message = text("error");
    }
    if let Some(problems) = value.get("detail").and_then(Value::as_array) {
        let told: Vec<String> = problems.iter().filter_map(problem).collect();
        if !told.is_empty() {
            message = told.join("; ");
        }
    } else if message.is_empty() {
        message = value.get("detail").and_then(Value::as_str).unwrap_or_default().to_owned();
    }
    (text("code"), message)
}

/// One entry of a validation error: where, and what.
fn problem(entry: &Value) -> Option<String> {
    let what = entry.get("msg")?.as_str()?;
    let place: Vec<String> = entry
        .get("loc")
        .and_then(Value::as_array)
        .map(|path| path.iter().skip(1).map(|part| part.to_string().trim_matches('"').to_owned()).collect())
        .unwrap_or_default();
    Some(if place.is_empty() { what.to_owned() } else { format!("{}: {what}", place.join(".")) })
}

/// A transport failure without the address, which may carry tokens in its path.
pub fn transport(base: &str, error: &reqwest::Error) -> ClientError {
    let mut reason = String::from("connection failed");
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(inner) = cause {
        reason = inner.to_string();
        cause = inner.source();
    }
    if error.is_timeout() {
        reason = "timed out".to_owned();
    }
    let base = base.to_owned();
    if error.is_connect() {
        ClientError::Unreachable { base, reason }
    } else {
        ClientError::Interrupted { base, reason }
    }
}

/// The metadata filter is a query string inside a query parameter.
pub fn metadata_query(pairs: &[(String, String)]) -> String {
    let mut inner = reqwest::Url::parse("q:").expect("a constant URL");
    inner.query_pairs_mut().extend_pairs(pairs);
    inner.query().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, name: &str) -> Sandbox {
        Sandbox(json!({ "id": id, "metadata": { "name": name } }))
    }

    #[test]
    fn abbreviations_must_be_unique_and_names_come_second() {
        let all = [sandbox("abc-1", "web"), sandbox("abd-2", "abc"), sandbox("xyz-3", "web")];
        assert_eq!(pick(&all, "abc").unwrap(), "abc-1");
        assert_eq!(pick(&all, "x").unwrap(), "xyz-3");
        assert!(pick(&all, "ab").unwrap_err().to_string().contains("abc-1, abd-2"));
        assert!(pick(&all, "web").is_err());
        assert!(pick(&all, "nope").unwrap_err().to_string().contains("sandglass ps"));
    }

    #[test]
    fn full_ids_need_no_lookup() {
        assert!(is_full_id("550e8400-e29b-41d4-a716-446655440000"));
        assert!(is_full_id("fsb-550e8400-e29b-41d4-a716-446655440000"));
        assert!(!is_full_id("550e8400"));
        assert!(!is_full_id("550e8400-e29b-41d4-a716-44665544000g"));
    }

    #[test]
    fn every_known_error_shape_is_understood() {
        let of = |body: &str| explain(body);
        let pair = |code: &str, message: &str| (code.to_owned(), message.to_owned());
        assert_eq!(of(r#"{"code":"A::B","message":"no"}"#), pair("A::B", "no"));
        assert_eq!(of(r#"{"detail":{"code":"A","message":"no"}}"#), pair("A", "no"));
        assert_eq!(of(r#"{"error":"Unauthorized"}"#), pair("", "Unauthorized"));
        assert_eq!(of(r#"{"detail":"Not Found"}"#), pair("", "Not Found"));
        assert_eq!(
            of(r#"{"code":"V","message":"bad","detail":[{"loc":["body","timeout"],"msg":"too small"}]}"#),
            pair("V", "timeout: too small")
        );
        assert_eq!(of("<html>"), pair("", "<html>"));
    }

    #[test]
    fn exit_codes_come_from_the_status() {
        let code = |status: Value| Sandbox(json!({ "status": status })).exit_code();
        assert_eq!(code(json!({ "state": "Terminated" })), 0);
        assert_eq!(code(json!({ "state": "Failed" })), 1);
        assert_eq!(code(json!({ "state": "Failed", "exitCode": 7 })), 7);
        assert_eq!(code(json!({ "state": "Failed", "message": "exited with code 137" })), 137);
        assert_eq!(code(json!({ "state": "Failed", "message": "killed by signal 11" })), 139);
        assert_eq!(code(json!({ "state": "Failed", "reason": "OUT_OF_MEMORY", "message": "ran out" })), 137);
    }

    #[test]
    fn metadata_is_encoded_inside_the_parameter() {
        assert_eq!(metadata_query(&[("k".into(), "v%&=".into())]), "k=v%25%26%3D");
    }
}
