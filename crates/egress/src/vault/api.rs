//! The vault's part of the control API, as a function from a request to an answer.
//!
//! Authentication is the caller's. Errors are plain text, successes JSON.

use std::io;
use std::net::IpAddr;

use http::{Method, StatusCode};
use serde::Serialize;

use crate::policy::Rules;

use super::binding::{Auth, Binding, Credential, Match};
use super::mutation;
use super::request;
use super::state::{Contents, Refusal, Vault};

/// Bytes of a request's body that are taken; a caller may stop reading one byte later.
pub const MAX_BODY: usize = 1 << 20;

/// How a request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Tls,
    Plain(IpAddr),
}

/// A request that has shown the token, if one is asked for.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub method: &'a Method,
    /// Percent-decoded, from `/credential-vault` on.
    pub path: &'a str,
    pub body: &'a [u8],
    pub transport: Transport,
    /// What would have to allow the hosts of new bindings.
    pub rules: &'a dyn Rules,
    /// Keeps the state that is to be in force, secrets included, for the time after this process. A change that is not kept is not made.
    pub keep: &'a dyn Fn(&[u8]) -> io::Result<()>,
}

/// What is to be written back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: StatusCode,
    pub content_type: &'static str,
    /// The value of `Allow`, with 405.
    pub allow: Option<&'static str>,
    pub body: String,
    /// The vault is not what it was.
    pub changed: bool,
}

impl Answer {
    fn text(status: StatusCode, text: &str) -> Self {
        let content_type = "text/plain; charset=utf-8";
        Self { status, content_type, allow: None, body: format!("{text}\n"), changed: false }
    }

    fn json(status: StatusCode, value: &impl Serialize) -> Self {
        let body = serde_json::to_string(value).expect("views have string keys only");
        Self { status, content_type: "application/json", allow: None, body: body + "\n", changed: false }
    }

    fn wrong_method(allow: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed") }
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        Self::text(refusal.status(), &refusal.to_string())
    }
}

#[derive(Serialize)]
struct StateView<'a> {
    revision: u64,
    credentials: Vec<CredentialView<'a>>,
    bindings: Vec<BindingView<'a>>,
}

#[derive(Serialize)]
struct CredentialsView<'a> {
    revision: u64,
    credentials: Vec<CredentialView<'a>>,
}

#[derive(Serialize)]
struct BindingsView<'a> {
    revision: u64,
    bindings: Vec<BindingView<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CredentialView<'a> {
    name: &'a str,
    source_type: &'a str,
    revision: u64,
}

#[derive(Serialize)]
struct BindingView<'a> {
    name: &'a str,
    revision: u64,
    #[serde(rename = "match")]
    matches: &'a Match,
    auth: AuthView<'a>,
}

#[derive(Serialize)]
struct AuthView<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
}

impl Contents {
    fn credential_views(&self) -> Vec<CredentialView<'_>> {
        self.credentials.values().map(credential_view).collect()
    }

    fn binding_views(&self) -> Vec<BindingView<'_>> {
        self.bindings.values().map(|binding| self.binding_view(binding)).collect()
    }

    fn binding_view<'a>(&self, binding: &'a Binding) -> BindingView<'a> {
        let name = match &binding.auth {
            Auth::ApiKey { name, .. } => Some(name.as_str()),
            _ => None,
        };
        let auth = AuthView { kind: binding.auth.kind(), name };
        BindingView { name: &binding.name, revision: self.revision, matches: &binding.matches, auth }
    }

    fn view(&self) -> StateView<'_> {
        StateView {
            revision: self.revision,
            credentials: self.credential_views(),
            bindings: self.binding_views(),
        }
    }
}

fn credential_view(credential: &Credential) -> CredentialView<'_> {
    CredentialView { name: &credential.name, source_type: &credential.source, revision: credential.revision }
}

/// Answers one request, changing the vault if it asks for that.
pub fn handle(vault: &mut Vault, call: Call<'_>) -> Answer {
    let Some(rest) = call.path.strip_prefix("/credential-vault") else {
        return Answer::text(StatusCode::NOT_FOUND, "not found");
    };
    let rest = match rest {
        "" | "/" => return whole(vault, call).unwrap_or_else(Answer::from),
        // The sandbox shares the network with this API in one placement: what is in force is never given away.
        "/_active" => return Answer::text(StatusCode::FORBIDDEN, "forbidden"),
        rest => rest,
    };
    let reads = rest == "/credentials"
        || rest == "/bindings"
        || rest.starts_with("/credentials/")
        || rest.starts_with("/bindings/");
    if !reads {
        return Answer::text(StatusCode::NOT_FOUND, "not found");
    }
    if call.method != Method::GET {
        return Answer::wrong_method("GET");
    }
    match &vault.contents {
        Some(contents) => part(contents, rest),
        None => Refusal::Missing.into(),
    }
}

fn part(contents: &Contents, rest: &str) -> Answer {
    let revision = contents.revision;
    match rest {
        "/credentials" => Answer::json(
            StatusCode::OK,
            &CredentialsView { revision, credentials: contents.credential_views() },
        ),
        "/bindings" => {
            Answer::json(StatusCode::OK, &BindingsView { revision, bindings: contents.binding_views() })
        }
        _ => {
            if let Some(name) = rest.strip_prefix("/credentials/") {
                return match contents.credentials.get(name.trim()) {
                    Some(credential) => Answer::json(StatusCode::OK, &credential_view(credential)),
                    None => Answer::text(StatusCode::NOT_FOUND, "credential not found"),
                };
            }
            let name = rest.strip_prefix("/bindings/").unwrap_or_default().trim();
            match contents.bindings.get(name) {
                Some(binding) => Answer::json(StatusCode::OK, &contents.binding_view(binding)),
                None => Answer::text(StatusCode::NOT_FOUND, "binding not found"),
            }
        }
    }
}

fn whole(vault: &mut Vault, call: Call<'_>) -> Result<Answer, Refusal> {
    match *call.method {
        Method::GET => {
            Ok(Answer::json(StatusCode::OK, &vault.contents.as_ref().ok_or(Refusal::Missing)?.view()))
        }
        Method::POST => create(vault, call),
        Method::PATCH => patch(vault, call),
        Method::DELETE => {
            vault.writable()?;
            transport(vault, call.transport)?;
            if vault.contents.is_none() {
                return Err(Refusal::Missing);
            }
            vault.commit(None, &call)?;
            let content_type = "text/plain; charset=utf-8";
            Ok(Answer {
                status: StatusCode::NO_CONTENT,
                content_type,
                allow: None,
                body: String::new(),
                changed: true,
            })
        }
        _ => Ok(Answer::wrong_method("GET, POST, PATCH, DELETE")),
    }
}

fn create(vault: &mut Vault, call: Call<'_>) -> Result<Answer, Refusal> {
    vault.writable()?;
    transport(vault, call.transport)?;
    let raw: request::Create = read(call.body, "invalid credential vault request")?;
    if vault.contents.is_some() {
        return Err(Refusal::Exists);
    }
    let scope = vault.conditions.scope;
    let credentials = mutation::credentials(raw.credentials, 1).map_err(Refusal::Invalid)?;
    let bindings = mutation::bindings(raw.bindings, scope).map_err(Refusal::Invalid)?;
    vault.commit(Some(Contents { revision: 1, credentials, bindings }), &call)?;
    Ok(shown(vault, StatusCode::CREATED))
}

fn patch(vault: &mut Vault, call: Call<'_>) -> Result<Answer, Refusal> {
    vault.writable()?;
    transport(vault, call.transport)?;
    let raw: request::Patch = read(call.body, "invalid credential vault mutation request")?;
    let mut candidate = vault.contents.clone().ok_or(Refusal::Missing)?;
    let current = candidate.revision;
    if let Some(expected) = raw.expected_revision.filter(|expected| u64::try_from(*expected) != Ok(current)) {
        return Err(Refusal::Revision { expected, current });
    }
    candidate.revision += 1;
    let scope = vault.conditions.scope;
    mutation::patch_credentials(&mut candidate.credentials, raw.credentials, candidate.revision)
        .map_err(Refusal::Invalid)?;
    mutation::patch_bindings(&mut candidate.bindings, raw.bindings, scope).map_err(Refusal::Invalid)?;
    vault.commit(Some(candidate), &call)?;
    Ok(shown(vault, StatusCode::OK))
}

fn shown(vault: &Vault, status: StatusCode) -> Answer {
    let contents = vault.contents.as_ref().expect("it was committed just now");
    Answer { changed: true, ..Answer::json(status, &contents.view()) }
}

fn transport(vault: &Vault, transport: Transport) -> Result<(), Refusal> {
    let allowed = match transport {
        Transport::Tls => true,
        Transport::Plain(peer) => {
            let peer = peer.to_canonical();
            peer.is_loopback() || vault.conditions.trusted.iter().any(|network| network.contains(&peer))
        }
    };
    if allowed { Ok(()) } else { Err(Refusal::Transport) }
}

fn read<T: serde::de::DeserializeOwned>(body: &[u8], what: &str) -> Result<T, Refusal> {
    if body.len() > MAX_BODY {
        return Err(Refusal::Invalid(format!("{what}: body is larger than {MAX_BODY} bytes")));
    }
    request::read(body).map_err(|error| Refusal::Invalid(format!("{what}: {error}")))
}
