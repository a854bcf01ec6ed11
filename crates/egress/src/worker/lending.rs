//! The vault at its place in the worker: answers the API, and has a say when the policy changes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::audit::{Audit, Event};
use crate::control::answer::Answer;
use crate::control::{Request, VaultRoutes};
use crate::diagnostics::tell;
use crate::plane::Dependent;
use crate::policy::Rules;
use crate::policy::effective::InForce;
use crate::settings::{Level, Settings, Switch};
use crate::state::Kept;
use crate::vault::{self, Call, Conditions, Scope, Transport, Vault};

/// The vault, shared by those who ask it.
#[derive(Clone)]
pub(super) struct Shared(pub(super) Arc<Mutex<Vault>>);

impl Shared {
    /// What an earlier worker held. If that cannot be read, nothing is lent until a vault is made again.
    pub(super) fn restore(settings: &Settings, kept: &Kept) -> Self {
        let conditions = Conditions {
            token: settings.token.is_some(),
            interception: settings.intercept.tls == Switch::On,
            insecure: settings.intercept.verification == Switch::Off,
            scope: match settings.vault.scoped_matches {
                Switch::On => Scope::Scoped,
                Switch::Off => Scope::Any,
            },
            trusted: settings.vault.trusted_peers.clone(),
            passed: Vec::new(),
        };
        let mut vault = Vault::new(conditions);
        match kept.read() {
            Ok(held) => {
                let held = (!held.is_empty()).then_some(held);
                if let Err(error) = vault.restore(held.as_deref()) {
                    tell(Level::Error, error);
                }
            }
            Err(error) => tell(Level::Error, format_args!("the saved credential vault is not read: {error}")),
        }
        Self(Arc::new(Mutex::new(vault)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dependent for Shared {
    fn accepts(&self, rules: &dyn Rules) -> Result<(), String> {
        self.lock().check(rules).map_err(|refusal| refusal.to_string())
    }
}

/// The vault's part of the control API.
pub(super) struct Routes {
    pub(super) vault: Shared,
    pub(super) kept: Kept,
    pub(super) rules: Arc<InForce>,
    pub(super) audit: Arc<dyn Audit>,
}

impl VaultRoutes for Routes {
    fn answer(&self, request: &Request) -> Answer {
        let path = percent_encoding::percent_decode_str(&request.path).decode_utf8_lossy();
        let mut vault = self.vault.lock();
        let answer = vault::handle(
            &mut vault,
            Call {
                method: &request.method,
                path: &path,
                body: &request.body,
                transport: Transport::Plain(request.peer),
                rules: &*self.rules,
            },
        );
        if answer.changed {
            if let Err(error) = self.kept.replace(&vault.export()) {
                tell(
                    Level::Error,
                    format_args!("the credential vault is not kept for the next worker: {error}"),
                );
            }
            let detail = vault.revision().map_or("deleted".into(), |revision| format!("revision {revision}"));
            self.audit.tell(Event::Noted { what: "vault-changed".into(), detail });
        }
        let vault::Answer { status, content_type, allow, body, .. } = answer;
        Answer { status, content_type, allow, body }
    }
}
