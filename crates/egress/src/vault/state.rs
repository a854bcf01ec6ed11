//! What the vault holds, what may be written to it, and its form outside the process.

use std::collections::BTreeMap;
use std::sync::Arc;

use http::StatusCode;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::policy::{Action, Rules};

use super::active::{Active, Lent};
use super::api::Call;
use super::binding::{Binding, Credential};
use super::overlap;
use super::secret::Secret;
use super::texts::exceeds;

/// Of each, credentials and bindings.
const MAX_ITEMS: usize = 512;
/// Bytes of all values together.
const MAX_VALUES: usize = 256 << 10;
/// Bytes of everything together, in the form that outlives the process.
const MAX_KEPT: usize = 2 << 20;
/// Bytes that are looked for in requests and answers: placeholders, values and headers, in every form in which they may be written. Each
/// takes some ten bytes of memory.
const MAX_SEARCHED: usize = 512 << 10;
/// Bytes that bindings put into requests, once for each place where they may do so.
const MAX_INSERTED: usize = 4 << 20;

/// Whether bindings have to name methods and paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scope {
    #[default]
    Any,
    /// Methods and paths are required and `/*` is refused.
    Scoped,
}

/// What has to be so before the vault may be written to.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// The API asks for a token.
    pub token: bool,
    /// Interception is on.
    pub interception: bool,
    /// Upstream certificates are not verified.
    pub insecure: bool,
    pub scope: Scope,
    /// From here writes are taken without TLS, besides loopback.
    pub trusted: Vec<IpNet>,
    /// Names that are passed through undecrypted, as patterns of the policy: exact or `*.suffix`.
    pub passed: Vec<String>,
}

/// Why something was not done; says nothing secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("credential vault not found")]
    Missing,
    #[error("credential vault already exists")]
    Exists,
    #[error("expectedRevision {expected} does not match current revision {current}")]
    Revision { expected: i64, current: u64 },
    /// A precondition of the vault does not hold.
    #[error("{0}")]
    Unready(&'static str),
    #[error("credential vault writes require TLS or loopback transport")]
    Transport,
    #[error("{0}")]
    Invalid(String),
    /// The vault would hold more than it has room for.
    #[error("{0}")]
    TooLarge(String),
    /// It could not be kept for the time after this process; says why.
    #[error("credential vault is unchanged, it cannot be kept: {0}")]
    Unkept(String),
}

impl Refusal {
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Missing => StatusCode::NOT_FOUND,
            Self::Exists | Self::Revision { .. } => StatusCode::CONFLICT,
            Self::Unready(_) => StatusCode::PRECONDITION_FAILED,
            Self::Transport => StatusCode::UPGRADE_REQUIRED,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Unkept(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// The state that a process left behind is not one.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the saved state of the credential vault cannot be read")]
pub struct Unrestorable;

/// The vault of one sandbox.
#[derive(Debug)]
pub struct Vault {
    pub(super) conditions: Conditions,
    pub(super) contents: Option<Contents>,
    ready: bool,
    lent: Lent,
}

/// Both maps are keyed by name, which is also the order in which they are shown.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Contents {
    pub(super) revision: u64,
    pub(super) credentials: BTreeMap<String, Credential>,
    pub(super) bindings: BTreeMap<String, Binding>,
}

impl Contents {
    /// The value of a credential that exists.
    pub(super) fn value(&self, credential: &str) -> &str {
        self.credentials[credential].value.expose()
    }
}

impl Vault {
    /// An empty vault. Nothing can be read through [`Vault::lent`] before [`Vault::restore`], so that requests wait or fail instead of
    /// leaving without their credentials.
    #[must_use]
    pub fn new(conditions: Conditions) -> Self {
        Self { conditions, contents: None, ready: false, lent: Lent::unreadable() }
    }

    /// Takes over what an earlier process exported; `None` for a vault that never existed. After a failure nothing can be read.
    pub fn restore(&mut self, exported: Option<&[u8]>) -> Result<(), Unrestorable> {
        let contents = exported.map(serde_json::from_slice::<Option<Contents>>).transpose();
        // The parser's message could repeat what it has read.
        let contents = contents.map_err(|_| Unrestorable)?.flatten();
        self.replace(contents);
        Ok(())
    }

    /// Everything, secrets included, for the memory that outlives this process. Never to be written to a disk or a log.
    #[must_use]
    pub fn export(&self) -> Secret {
        exported(self.contents.as_ref())
    }

    /// To be called when the interceptor accepts connections and its authority has been exported.
    pub fn intercepting(&mut self) {
        self.ready = true;
    }

    /// What the interceptor reads; follows every change.
    #[must_use]
    pub fn lent(&self) -> Lent {
        self.lent.clone()
    }

    #[must_use]
    pub fn revision(&self) -> Option<u64> {
        self.contents.as_ref().map(|contents| contents.revision)
    }

    /// Whether the bindings in force could stay under these rules; to be asked before the rules change.
    pub fn check(&self, rules: &dyn Rules) -> Result<(), Refusal> {
        let Some(contents) = &self.contents else { return Ok(()) };
        contents
            .bindings
            .values()
            .try_for_each(|binding| self.permitted(binding, rules))
            .map_err(Refusal::Invalid)
    }

    pub(super) fn writable(&self) -> Result<(), Refusal> {
        let unready = if !self.conditions.token {
            "credential vault requires egress API auth token"
        } else if !self.conditions.interception {
            "credential vault requires transparent mitmproxy"
        } else if self.conditions.insecure {
            "credential vault rejects insecure upstream TLS mode"
        } else if !self.ready {
            "credential proxy is not ready"
        } else {
            return Ok(());
        };
        Err(Refusal::Unready(unready))
    }

    /// Puts this in force if it is valid under the rules and has been kept; otherwise nothing changes.
    pub(super) fn commit(&mut self, candidate: Option<Contents>, call: &Call<'_>) -> Result<(), Refusal> {
        if let Some(candidate) = &candidate {
            bounded(candidate)?;
            self.validate(candidate, call.rules).map_err(Refusal::Invalid)?;
            if exceeds(candidate, MAX_SEARCHED, MAX_INSERTED) {
                return Err(Refusal::TooLarge(format!(
                    "credential vault is too large: placeholders and values, as they may be written, come to more than {MAX_SEARCHED} bytes, or what bindings put into requests to more than {MAX_INSERTED}"
                )));
            }
        }
        let state = exported(candidate.as_ref());
        if state.expose().len() > MAX_KEPT {
            return Err(Refusal::TooLarge(format!(
                "credential vault is too large: it holds at most {MAX_KEPT} bytes of credentials and bindings"
            )));
        }
        (call.keep)(state.expose().as_bytes()).map_err(|error| Refusal::Unkept(error.to_string()))?;
        self.replace(candidate);
        Ok(())
    }

    fn replace(&mut self, contents: Option<Contents>) {
        self.lent.set(contents.as_ref().map(|contents| Arc::new(Active::of(contents))));
        self.contents = contents;
    }

    fn validate(&self, candidate: &Contents, rules: &dyn Rules) -> Result<(), String> {
        for binding in candidate.bindings.values() {
            references(binding, &candidate.credentials)?;
            self.permitted(binding, rules)?;
        }
        match overlap::first(candidate.bindings.values()) {
            Some((a, b)) => Err(format!("bindings {a:?} and {b:?} can match the same request")),
            None => Ok(()),
        }
    }

    fn permitted(&self, binding: &Binding, rules: &dyn Rules) -> Result<(), String> {
        for host in &binding.matches.hosts {
            let probe = match host.strip_prefix("*.") {
                Some(suffix) => format!("probe.{suffix}"),
                None => host.clone(),
            };
            if rules.name(&probe).action != Action::Allow {
                return Err(format!(
                    "binding {:?} host {host:?} is not allowed by egress policy",
                    binding.name
                ));
            }
            if passes(&self.conditions.passed, host) || passes(&self.conditions.passed, &probe) {
                return Err(format!(
                    "binding {:?} host {host:?} matches mitmproxy ignore_hosts",
                    binding.name
                ));
            }
        }
        Ok(())
    }
}

fn exported(contents: Option<&Contents>) -> Secret {
    Secret::new(serde_json::to_string(&contents).expect("maps with string keys always serialise"))
}

fn bounded(candidate: &Contents) -> Result<(), Refusal> {
    let values: usize = candidate.credentials.values().map(|c| c.value.expose().len()).sum();
    let fits = candidate.credentials.len() <= MAX_ITEMS
        && candidate.bindings.len() <= MAX_ITEMS
        && values <= MAX_VALUES;
    if fits {
        return Ok(());
    }
    Err(Refusal::TooLarge(format!(
        "credential vault is too large: it holds at most {MAX_ITEMS} credentials, {MAX_ITEMS} bindings and {MAX_VALUES} bytes of values"
    )))
}

fn passes(patterns: &[String], host: &str) -> bool {
    patterns.iter().any(|pattern| match pattern.strip_prefix('*') {
        Some(suffix) => host.ends_with(suffix),
        None => host == pattern,
    })
}

fn references(binding: &Binding, credentials: &BTreeMap<String, Credential>) -> Result<(), String> {
    if let Some(name) = binding.credentials().find(|name| !credentials.contains_key(*name)) {
        return Err(format!("binding {:?} references unknown credential {name:?}", binding.name));
    }
    let unfit =
        |name: &&str| credentials[*name].value.expose().bytes().any(|b| matches!(b, 0..=8 | 10..=31 | 127));
    match binding.in_headers().find(unfit) {
        Some(name) => Err(format!(
            "binding {:?} cannot put credential {name:?} into a header: it has control characters",
            binding.name
        )),
        None => Ok(()),
    }
}
