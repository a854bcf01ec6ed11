//! Sandboxes that go, freeze or are copied when nobody uses them, or when their time is over.
//!
//! Owns what is known of their use ([`Usage`]) and its rows; the decisions are [`sandglass_sandbox::policy`]'s, the actions are ordinary intents
//! and snapshots. Does not own where use is noticed: heartbeats, the ingress and requests report it.
//!
//! Invariants: an action is judged and begun under the sandbox's facts lock, so that a renewal or a lease that was confirmed is never
//! overtaken; that it was begun is stored before it is; of a sandbox whose agent is not heard nothing is concluded, also after a restart.

mod act;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{
        boot::Link,
        request::{Refused, Request},
        state::State,
    },
    policy::{Action, Policies, Usage},
    ports::store::StoreError,
};
use tracing::warn;

pub(super) use act::LONGEST_SLEEP;

use super::{Engine, commit::EngineError, history::RENEWED, index::Entry};

/// Use is stored when it has moved by a tenth of the idle time, within these bounds: so much a server that is killed may forget.
const FINEST: Duration = Duration::from_secs(1);
const COARSEST: Duration = Duration::from_secs(30);

/// What a heartbeat says of use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Signs {
    /// Something works: a command that was asked for, a lease that a program in the box took.
    pub at_work: bool,
    /// Something is open: a terminal, an SSH session, a connection.
    pub present: bool,
}

/// One sandbox with an idle policy, or with an action that was begun.
#[derive(Debug, Clone)]
struct Watched {
    usage: Usage,
    stored: Option<Usage>,
    /// Its agent was heard by this server.
    heard: bool,
}

/// What is known of the use of sandboxes.
#[derive(Debug, Default)]
pub(super) struct Book(Mutex<HashMap<SandboxId, Watched>>);

impl Book {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is shown of the use of a sandbox with policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UseView {
    /// Until when it counts as used, as far as is known.
    pub in_use_until: Timestamp,
    pub leased_until: Option<Timestamp>,
    /// When its idle action is due.
    pub idle_at: Option<Timestamp>,
    /// Why the last attempt of an action failed.
    pub failure: Option<String>,
}

/// A lease that was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leased {
    pub until: Timestamp,
    /// When its idle action is due; `None` without such a policy.
    pub idle_at: Option<Timestamp>,
}

impl Entry {
    /// Its policies, if it was created with any.
    pub fn policies(&self) -> Option<&Policies> {
        self.spec()?.policies.as_ref()
    }

    /// When its idle clock begins; `None` before.
    fn clock_began(&self) -> Option<Timestamp> {
        let spec = self.spec()?;
        match spec.source {
            Some(_) => self.agent.as_deref()?.ready_at,
            None => self.observed.as_deref()?.started_at,
        }
    }

    /// Whether its agent is heard now.
    fn is_heard(&self) -> bool {
        self.agent.as_deref().is_some_and(|agent| agent.link == Link::Attached)
    }

    /// Whether its expiry is no end: it is frozen then, and stays.
    pub(super) fn outlives_expiry(&self) -> bool {
        self.policies().is_some_and(|policies| policies.on_expire == Action::Pause)
            && self.status().is_some_and(|status| {
                matches!(status.state, State::Running | State::Pausing | State::Paused | State::Resuming)
            })
    }
}

impl Engine {
    /// After a restart: what earlier servers knew.
    pub(super) async fn recall_usages(&self) -> Result<(), StoreError> {
        let known = self.store.usages().await?;
        let watched = known
            .into_iter()
            .map(|(id, usage)| (id, Watched { stored: Some(usage.clone()), usage, heard: false }));
        self.book.lock().extend(watched);
        Ok(())
    }

    /// Changes what is known of the use of a sandbox, if its use matters. Cheap when it does not.
    fn watch(&self, id: SandboxId, change: impl FnOnce(&mut Watched)) {
        if let Some(watched) = self.book.lock().get_mut(&id) {
            return change(watched);
        }
        let Some(entry) = self.index.get(id) else { return };
        if entry.policies().is_none_or(|policies| policies.idle.is_none()) {
            return;
        }
        let Some(began) = entry.clock_began() else { return };
        let mut book = self.book.lock();
        change(book.entry(id).or_insert_with(|| Watched {
            usage: Usage::begun(began),
            stored: None,
            heard: false,
        }));
    }

    /// Somebody used the sandbox.
    pub fn used(&self, id: SandboxId) {
        let now = self.clock.now();
        self.watch(id, |watched| watched.usage.used(now));
    }

    /// Something of the sandbox is open, and somebody is there.
    pub fn present(&self, id: SandboxId) {
        let now = self.clock.now();
        self.watch(id, |watched| watched.usage.present(now));
    }

    /// Its agent sent a heartbeat, with these signs of use.
    pub fn heard(&self, id: SandboxId, signs: Signs) {
        let now = self.clock.now();
        self.watch(id, |watched| {
            watched.heard = true;
            if signs.at_work {
                watched.usage.used(now);
            }
            if signs.present {
                watched.usage.present(now);
            }
        });
    }

    /// The sandbox counts as used for so long, whatever else happens in it.
    ///
    /// # Errors
    /// When it does not run, or the lease cannot be stored.
    pub async fn lease(self: &Arc<Self>, id: &str, lasts: Duration) -> Result<Leased, EngineError> {
        let id = self.find(id)?.id;
        let _facts = self.facts_lock(id).lock().await;
        let gone = || EngineError::NotFound(id.to_string());
        let entry = self.index.get(id).ok_or_else(gone)?;
        match entry.status().ok_or_else(gone)?.state {
            State::Running => {}
            State::Stopping => return Err(gone()),
            other => return Err(Refused::NotRunning(other).into()),
        }
        let until = self.in_future(lasts);
        self.watch(id, |watched| {
            watched.usage.used(self.clock.now());
            watched.usage.lease(until);
        });
        self.store_usage(id).await?;
        let idle_at = self.use_of(&entry).and_then(|view| view.idle_at);
        Ok(Leased { until, idle_at })
    }

    /// What is known of the use of a sandbox; `None` when it does not matter, or its clock has not begun.
    pub fn use_of(&self, entry: &Entry) -> Option<UseView> {
        let policies = entry.policies()?;
        let known = self.book.lock().get(&entry.id).map(|watched| watched.usage.clone());
        let usage = known.or_else(|| entry.clock_began().map(Usage::begun))?;
        Some(UseView {
            in_use_until: usage.in_use_until(policies.max_presence()),
            leased_until: usage.leased_until,
            idle_at: usage.idle_at(policies).filter(|_| entry.clock_began().is_some()),
            failure: usage.taking.and_then(|taking| taking.error),
        })
    }

    /// The sandbox runs again after it was frozen, which nobody does without wanting to use it.
    pub(super) async fn runs_again(&self, id: SandboxId) {
        self.used(id);
        if let Err(error) = self.store_usage(id).await {
            warn!(sandbox = %id, %error, "its use could not be stored; it is stored later");
        }
    }

    /// A sandbox that was frozen at its expiry gets a life of the length that it was created with before it runs again.
    pub(super) async fn relive(self: &Arc<Self>, entry: &Entry) -> Result<(), EngineError> {
        let (Some(policies), Some(facts)) = (entry.policies(), entry.facts()) else { return Ok(()) };
        let now = self.clock.now();
        let over = |at: Timestamp| policies.begins_at(at) <= now;
        if policies.on_expire != Action::Pause || !facts.expires_at.is_some_and(over) {
            return Ok(());
        }
        let least = policies.expire_reserve().saturating_mul(2).max(Duration::from_secs(60));
        let life = policies.life_seconds.map_or(least, Duration::from_secs).max(least);
        let until = self.in_future(life);
        self.change_facts(entry.id, Request::Renew, |facts| {
            facts.expires_at = facts.expires_at.max(Some(until));
            Ok(())
        })
        .await?;
        self.note(entry.id, RENEWED, &format!("{until}, because it was resumed after its time was over"))
            .await;
        Ok(())
    }

    /// Stores what is known of the use of one sandbox, if that is not stored yet.
    async fn store_usage(&self, id: SandboxId) -> Result<(), StoreError> {
        let known = self.book.lock().get(&id).cloned();
        let Some(watched) = known.filter(|watched| watched.stored.as_ref() != Some(&watched.usage)) else {
            return Ok(());
        };
        self.store.save_usage(id, &watched.usage).await?;
        if let Some(now) = self.book.lock().get_mut(&id) {
            now.stored = Some(watched.usage);
        }
        Ok(())
    }

    /// Stores what has moved far enough, everything with `all`, and forgets sandboxes that are gone.
    pub(super) async fn keep_usages(&self, all: bool) {
        let mut moved = Vec::new();
        let mut gone = Vec::new();
        let known: Vec<(SandboxId, Watched)> =
            self.book.lock().iter().map(|(id, watched)| (*id, watched.clone())).collect();
        for (id, watched) in known {
            let Some(entry) = self.index.get(id) else {
                gone.push(id);
                continue;
            };
            let idle = entry.policies().and_then(|policies| policies.idle);
            let step = idle.map_or(COARSEST, |idle| Duration::from_secs(idle.timeout_seconds / 10));
            let step = if all { Duration::from_millis(1) } else { step.clamp(FINEST, COARSEST) };
            if has_moved(&watched, step) {
                moved.push(id);
            }
        }
        for id in moved {
            if let Err(error) = self.store_usage(id).await {
                warn!(sandbox = %id, %error, "its use could not be stored; trying again");
                return;
            }
        }
        if self.reachable().is_err() {
            // What exists is not known.
            return;
        }
        for id in gone {
            match self.store.forget_usage(id).await {
                Ok(()) => drop(self.book.lock().remove(&id)),
                Err(error) => warn!(sandbox = %id, %error, "the row of its use stays for now"),
            }
        }
    }
}

/// Whether what is known has moved by at least so much since it was stored.
fn has_moved(watched: &Watched, step: Duration) -> bool {
    let Some(stored) = &watched.stored else {
        // Until something is known that the sandbox itself does not tell.
        return watched.usage.present_at.is_some()
            || watched.usage.leased_until.is_some()
            || watched.usage.taking.is_some()
            || watched.heard;
    };
    let usage = &watched.usage;
    let present = match (stored.present_at, usage.present_at) {
        (Some(stored), Some(now)) => stored.until(now) >= step,
        (stored, now) => stored != now,
    };
    stored.used_at.until(usage.used_at) >= step
        || present
        || stored.leased_until != usage.leased_until
        || stored.taking != usage.taking
}
