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
    /// Ends the connections on which credentials would have to be lent by now but cannot.
    pub(super) recheck: Box<dyn Fn() + Send + Sync>,
}

impl VaultRoutes for Routes {
    fn answer(&self, request: &Request) -> Answer {
        let path = percent_encoding::percent_decode_str(&request.path).decode_utf8_lossy();
        let mut vault = self.vault.lock();
        let call = Call {
            method: &request.method,
            path: &path,
            body: &request.body,
            transport: Transport::Plain(request.peer),
            rules: &*self.rules,
            keep: &|state| self.kept.replace(state),
        };
        let answer = vault::handle(&mut vault, call);
        let revision = vault.revision();
        drop(vault);
        if answer.changed {
            (self.recheck)();
            let detail = revision.map_or("deleted".into(), |revision| format!("revision {revision}"));
            self.audit.tell(Event::Noted { what: "vault-changed".into(), detail });
        }
        let vault::Answer { status, content_type, allow, body, .. } = answer;
        Answer { status, content_type, allow, body }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{HeaderMap, Method};

    use super::*;
    use crate::policy::always::Always;
    use crate::policy::document::Policy;
    use crate::policy::effective::Effective;
    use crate::rehearsal::{Notebook, settings};
    use crate::state::{Section, State};

    struct Stand {
        routes: Routes,
        notebook: Arc<Notebook>,
        rechecks: Arc<AtomicUsize>,
    }

    fn stand(kept: Kept) -> Stand {
        let settings = settings(&[
            ("OPENSANDBOX_EGRESS_TOKEN", "hush"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "on"),
        ]);
        let vault = Shared::restore(&settings, &kept);
        vault.lock().intercepting();
        let policy = Policy::parse(r#"{"egress":[{"action":"allow","target":"lent.test"}]}"#).unwrap();
        let rules = Arc::new(InForce::new(Effective::new(&Always::default(), &policy)));
        let (notebook, rechecks) = (Arc::new(Notebook::default()), Arc::new(AtomicUsize::new(0)));
        let counted = rechecks.clone();
        let recheck = Box::new(move || _ = counted.fetch_add(1, Ordering::Relaxed));
        let routes = Routes { vault, kept, rules, audit: notebook.clone(), recheck };
        Stand { routes, notebook, rechecks }
    }

    impl Stand {
        fn call(&self, method: Method, body: &str) -> (u16, String) {
            let request = Request {
                method,
                path: "/credential-vault".into(),
                headers: HeaderMap::new(),
                body: body.into(),
                peer: [127, 0, 0, 1].into(),
            };
            let answer = self.routes.answer(&request);
            (answer.status.as_u16(), answer.body)
        }

        fn done(&self) -> (usize, usize) {
            (self.rechecks.load(Ordering::Relaxed), self.notebook.events().len())
        }
    }

    const LENT: &str = r#"{"credentials":[{"name":"key","source":{"value":"s3cret-value"}}],
        "bindings":[{"name":"b","match":{"hosts":["lent.test"]},"auth":{"type":"bearer","credential":"key"}}]}"#;

    #[test]
    fn every_change_is_kept_and_existing_connections_are_looked_at_again() {
        let state = State::create().unwrap();
        let stand = stand(state.section(Section::Vault));
        assert_eq!(stand.call(Method::POST, LENT).0, 201);
        assert_eq!(stand.done(), (1, 1));
        assert_eq!(stand.call(Method::GET, "").0, 200);
        assert_eq!(stand.call(Method::POST, LENT).0, 409);
        assert_eq!(stand.done(), (1, 1), "nothing has changed");
        assert_eq!(stand.call(Method::PATCH, "{}").0, 200);
        let next = super::tests::stand(state.section(Section::Vault));
        assert_eq!(next.call(Method::GET, ""), stand.call(Method::GET, ""));
        assert_eq!(stand.call(Method::DELETE, "").0, 204);
        assert_eq!(stand.done(), (3, 3));
        assert!(super::tests::stand(state.section(Section::Vault)).routes.vault.lock().revision().is_none());
    }

    #[test]
    fn what_cannot_be_kept_does_not_take_effect() {
        let state = State::create().unwrap();
        let mut stand = stand(state.section(Section::Vault));
        assert_eq!(stand.call(Method::POST, LENT).0, 201);
        let (before, done) = (stand.call(Method::GET, ""), stand.done());
        stand.routes.kept = Kept::broken();
        for (method, body) in [(Method::PATCH, "{}"), (Method::DELETE, "")] {
            let (status, told) = stand.call(method, body);
            assert_eq!(status, 500);
            assert!(told.contains("unchanged") && !told.contains("s3cret"), "{told}");
            assert_eq!(stand.call(Method::GET, ""), before);
            assert_eq!(stand.done(), done);
        }
        assert_eq!(stand.routes.vault.lock().lent().now().unwrap().unwrap().revision, 1);
        let next = super::tests::stand(state.section(Section::Vault));
        assert_eq!(next.call(Method::GET, ""), before);
    }
}
