//! Credentials and bindings in their normal form, and how a request's text becomes that.

use std::net::IpAddr;

use http::HeaderName;
use serde::{Deserialize, Serialize};

use super::redaction::SHORTEST;
use super::request;
use super::secret::{self, Secret};
use super::state::Scope;

/// Members of one list of a binding. Together with the count of bindings this bounds the search for overlaps.
const MAX_VALUES: usize = 64;
const MAX_TEXT: usize = 2048;

const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

const RESERVED_HEADERS: [&str; 14] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "proxy-authorization",
    "proxy-authenticate",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

/// How a request travels; the port follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    Https,
    Http,
}

impl Scheme {
    #[must_use]
    pub const fn port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }
}

/// A part of a request in which placeholders may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Surface {
    Path,
    Query,
    Header,
    Body,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Credential {
    pub(super) name: String,
    pub(super) source: String,
    #[serde(with = "secret::exposed")]
    pub(super) value: Secret,
    pub(super) revision: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Binding {
    pub(super) name: String,
    pub(super) matches: Match,
    pub(super) auth: Auth,
    #[serde(default)]
    pub(super) substitutions: Vec<Substitution>,
}

/// What a binding applies to; serialises as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Match {
    pub(super) schemes: Vec<Scheme>,
    pub(super) ports: Vec<u16>,
    pub(super) hosts: Vec<String>,
    pub(super) methods: Vec<String>,
    pub(super) paths: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Auth {
    Bearer { credential: String },
    Basic { credential: String },
    ApiKey { name: String, credential: String },
    CustomHeaders { headers: Vec<(String, String)> },
    Passthrough,
}

/// A placeholder and the credential that replaces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Substitution {
    pub(super) credential: String,
    pub(super) placeholder: String,
    pub(super) surfaces: Vec<Surface>,
}

impl Auth {
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Bearer { .. } => "bearer",
            Self::Basic { .. } => "basic",
            Self::ApiKey { .. } => "apiKey",
            Self::CustomHeaders { .. } => "customHeaders",
            Self::Passthrough => "passthrough",
        }
    }

    pub(super) fn credentials(&self) -> Vec<&str> {
        match self {
            Self::Bearer { credential } | Self::Basic { credential } | Self::ApiKey { credential, .. } => {
                vec![credential]
            }
            Self::CustomHeaders { headers } => {
                headers.iter().map(|(_, credential)| credential.as_str()).collect()
            }
            Self::Passthrough => Vec::new(),
        }
    }
}

impl Binding {
    /// Every credential that it refers to.
    pub(super) fn credentials(&self) -> impl Iterator<Item = &str> {
        self.auth.credentials().into_iter().chain(self.substitutions.iter().map(|s| s.credential.as_str()))
    }

    /// The credentials that end up within a header.
    pub(super) fn in_headers(&self) -> impl Iterator<Item = &str> {
        let substituted = self.substitutions.iter().filter(|s| s.surfaces.contains(&Surface::Header));
        self.auth.credentials().into_iter().chain(substituted.map(|s| s.credential.as_str()))
    }
}

pub(super) fn credential(raw: request::Credential, revision: u64) -> Result<Credential, String> {
    let name = raw.name.trim().to_owned();
    if name.is_empty() {
        return Err("credential name cannot be blank".to_owned());
    }
    let source = match raw.source.kind.trim() {
        "" | "inline" => "inline".to_owned(),
        other => return Err(format!("unsupported credential source type {other:?}")),
    };
    if raw.source.value.expose().is_empty() {
        return Err(format!("credential {name:?} inline value cannot be empty"));
    }
    if raw.source.value.expose().len() < SHORTEST {
        return Err(format!(
            "credential {name:?} inline value has fewer than {SHORTEST} bytes: so few could not be kept out of answers"
        ));
    }
    Ok(Credential { name: bounded(name, "credential name")?, source, value: raw.source.value, revision })
}

pub(super) fn binding(raw: request::Binding, scope: Scope) -> Result<Binding, String> {
    let name = raw.name.trim().to_owned();
    if name.is_empty() {
        return Err("binding name cannot be blank".to_owned());
    }
    let name = bounded(name, "binding name")?;
    let within = |error: String| format!("binding {name:?}: {error}");
    scoped(&raw.matches, scope).map_err(within)?;
    let stray = raw
        .matches
        .ports
        .iter()
        .find(|port| (1..=65535).contains(*port) && !matches!(port, 80 | 443))
        .copied();
    let matches = matches(raw.matches).map_err(within)?;
    if let Some(port) = stray {
        return Err(format!("binding {name:?} port {port} is not a configured transparent intercept port"));
    }
    let substitutions =
        raw.auth.substitutions.iter().map(substitution).collect::<Result<Vec<_>, _>>().map_err(within)?;
    unique(&substitutions).map_err(within)?;
    let auth = auth(raw.auth).map_err(within)?;
    Ok(Binding { name, matches, auth, substitutions })
}

fn scoped(raw: &request::Match, scope: Scope) -> Result<(), String> {
    if scope == Scope::Any {
        return Ok(());
    }
    if raw.methods.is_empty() {
        return Err("match.methods cannot be empty".to_owned());
    }
    if raw.paths.is_empty() {
        return Err("match.paths cannot be empty".to_owned());
    }
    if raw.paths.iter().any(|path| matches!(path.trim(), "/*" | "*")) {
        return Err("match.paths cannot contain \"/*\"".to_owned());
    }
    Ok(())
}

fn matches(raw: request::Match) -> Result<Match, String> {
    if raw.hosts.is_empty() {
        return Err("match.hosts cannot be empty".to_owned());
    }
    let schemes = if raw.schemes.is_empty() { vec![Scheme::Https] } else { each(&raw.schemes, scheme)? };
    if let Some(port) = raw.ports.iter().find(|port| !(1..=65535).contains(*port)) {
        return Err(format!("invalid port {port}"));
    }
    let hosts = each(&raw.hosts, host)?;
    let methods = if raw.methods.is_empty() {
        METHODS.map(str::to_owned).to_vec()
    } else {
        each(&raw.methods, method)?
    };
    let paths = if raw.paths.is_empty() { vec!["/*".to_owned()] } else { each(&raw.paths, path)? };
    let ports = schemes.iter().map(|scheme| scheme.port()).collect();
    Ok(Match { schemes, ports, hosts, methods, paths })
}

/// Normal forms, each once, in the order of their first mention.
fn each<T: PartialEq>(raw: &[String], normal: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    if raw.len() > MAX_VALUES {
        return Err(format!("a list within match has more than {MAX_VALUES} members"));
    }
    let mut values = Vec::with_capacity(raw.len());
    for text in raw {
        let value = normal(text.trim())?;
        if !values.contains(&value) {
            values.push(value);
        }
    }
    Ok(values)
}

fn scheme(text: &str) -> Result<Scheme, String> {
    match text.to_ascii_lowercase().as_str() {
        "https" => Ok(Scheme::Https),
        "http" => Ok(Scheme::Http),
        other => Err(format!("unsupported scheme {other:?}")),
    }
}

fn method(text: &str) -> Result<String, String> {
    let method = text.to_ascii_uppercase();
    match method.as_str() {
        "" => Err("method cannot be blank".to_owned()),
        // One echoes the request, the other is no request to this host.
        "TRACE" | "CONNECT" => Err(format!("method {method:?} cannot carry credentials")),
        _ if http::Method::from_bytes(method.as_bytes()).is_err() => {
            Err(format!("invalid method {method:?}"))
        }
        _ => bounded(method, "method"),
    }
}

fn path(text: &str) -> Result<String, String> {
    if !text.starts_with('/') {
        return Err("path pattern must start with /".to_owned());
    }
    bounded(text.to_owned(), "path pattern")
}

/// A host or wildcard in lower case, without a trailing dot.
pub(super) fn host(text: &str) -> Result<String, String> {
    let host = text.strip_suffix('.').unwrap_or(text).to_lowercase();
    if host.is_empty() {
        return Err("host cannot be blank".to_owned());
    }
    if host.contains('/') {
        return Err(format!("host {host:?} must not include scheme or path"));
    }
    if let Some(suffix) = host.strip_prefix("*.") {
        if suffix.parse::<IpAddr>().is_ok() {
            return Err(format!("wildcard host {host:?} cannot target an IP address"));
        }
        if !qualified(suffix) {
            return Err(format!("invalid wildcard host {host:?}"));
        }
        return Ok(host);
    }
    if host.contains('*') {
        return Err(format!("invalid wildcard host {host:?}"));
    }
    if host.parse::<IpAddr>().is_ok() {
        return Err(format!("credential binding host {host:?} must be an FQDN, not an IP address"));
    }
    if !qualified(&host) {
        return Err(format!("credential binding host {host:?} must be an FQDN"));
    }
    Ok(host)
}

fn qualified(host: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        matches!(bytes.len(), 1..=63)
            && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
            && bytes[0] != b'-'
            && bytes[bytes.len() - 1] != b'-'
    };
    host.len() <= 253 && host.contains('.') && host.split('.').all(label)
}

fn auth(raw: request::Auth) -> Result<Auth, String> {
    let kind = raw.kind.trim();
    let credential = raw.credential.trim().to_owned();
    let required = |credential: String| {
        if credential.is_empty() { Err(format!("{kind} auth requires credential")) } else { Ok(credential) }
    };
    match kind {
        "bearer" => Ok(Auth::Bearer { credential: required(credential)? }),
        "basic" => Ok(Auth::Basic { credential: required(credential)? }),
        "apiKey" => Ok(Auth::ApiKey { name: header_name(&raw.name)?, credential: required(credential)? }),
        "customHeaders" => custom_headers(&raw.headers),
        "passthrough" => Ok(Auth::Passthrough),
        other => Err(format!("unsupported auth type {other:?}")),
    }
}

fn custom_headers(raw: &[request::Header]) -> Result<Auth, String> {
    if raw.is_empty() {
        return Err("customHeaders auth requires headers".to_owned());
    }
    if raw.len() > MAX_VALUES {
        return Err(format!("customHeaders auth has more than {MAX_VALUES} headers"));
    }
    let mut headers: Vec<(String, String)> = Vec::with_capacity(raw.len());
    for entry in raw {
        let name = header_name(&entry.name)?;
        if headers.iter().any(|(other, _)| *other == name) {
            return Err(format!("duplicate custom header name {name:?}"));
        }
        let credential = entry.credential.trim();
        if credential.is_empty() {
            return Err(format!("customHeaders entry {name:?} requires credential"));
        }
        headers.push((name, credential.to_owned()));
    }
    Ok(Auth::CustomHeaders { headers })
}

/// The name in its canonical form, `X-Api-Key`.
fn header_name(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.len() > 256 || HeaderName::from_bytes(text.as_bytes()).is_err() {
        let shown: String = text.chars().take(256).collect();
        return Err(format!("invalid credential header name {shown:?}"));
    }
    let mut upper = true;
    let canonical = text
        .chars()
        .map(|c| {
            let c = if upper { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() };
            upper = c == '-';
            c
        })
        .collect::<String>();
    if RESERVED_HEADERS.contains(&canonical.to_ascii_lowercase().as_str()) {
        return Err(format!("reserved credential header name {canonical:?}"));
    }
    Ok(canonical)
}

fn substitution(raw: &request::Substitution) -> Result<Substitution, String> {
    let credential = raw.credential.trim().to_owned();
    if credential.is_empty() {
        return Err("substitution requires credential".to_owned());
    }
    let placeholder = raw.placeholder.clone();
    if placeholder.is_empty() {
        return Err("substitution placeholder cannot be empty".to_owned());
    }
    if placeholder.chars().any(char::is_control) || placeholder.len() > MAX_TEXT {
        return Err(
            "substitution placeholder cannot be longer than 2048 bytes or contain control characters"
                .to_owned(),
        );
    }
    if raw.surfaces.is_empty() {
        return Err(format!("substitution for placeholder {placeholder:?} requires in"));
    }
    let surface = |text: &str| match text {
        "path" => Ok(Surface::Path),
        "query" => Ok(Surface::Query),
        "header" => Ok(Surface::Header),
        "body" => Ok(Surface::Body),
        other => Err(format!("unsupported substitution surface {other:?}")),
    };
    Ok(Substitution { credential, placeholder, surfaces: each(&raw.surfaces, surface)? })
}

fn unique(substitutions: &[Substitution]) -> Result<(), String> {
    if substitutions.len() > MAX_VALUES {
        return Err(format!("more than {MAX_VALUES} substitutions"));
    }
    for (at, one) in substitutions.iter().enumerate() {
        let before = substitutions[..at].iter().filter(|other| other.placeholder == one.placeholder);
        for other in before {
            if other.surfaces.iter().any(|surface| one.surfaces.contains(surface)) {
                return Err(format!(
                    "duplicate substitution placeholder {:?} on one surface",
                    one.placeholder
                ));
            }
        }
    }
    Ok(())
}

fn bounded(text: String, what: &str) -> Result<String, String> {
    if text.len() > MAX_TEXT { Err(format!("{what} is longer than {MAX_TEXT} bytes")) } else { Ok(text) }
}
