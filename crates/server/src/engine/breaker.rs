//! Kinds of sandboxes that do not become ready are not tried again and again: the breaker of the kind, in the store.
//!
//! Only sandboxes from repositories have one: of an image the first failure is the answer to the request. What is counted is what went wrong
//! once there was an image; a build that failed is remembered by the builds.

use sandglass_sandbox::{
    SandboxId,
    breaker::{Admission, Breaker},
    lifecycle::boot::Reason,
    ports::store::{Advance, StoreError},
    source::Lease,
    spec::Spec,
};
use sha2::{Digest, Sha256};
use tracing::{info, warn};

use super::{Engine, commit::EngineError};

impl Engine {
    /// What is meant by a kind: the runtime, the tenant and everything of the request that the boot depends on but commits and environment.
    fn kind_of(&self, spec: &Spec) -> Option<String> {
        let mut source = spec.source.as_deref()?.clone();
        // What is found on the way is not of the kind: a probe has to be known again by what it was admitted as.
        source.found = None;
        source.rejected.clear();
        source.ttl_seconds = None;
        source.lease = Lease::default();
        source.image_build.timeout_seconds = None;
        let text =
            serde_json::to_vec(&(self.runtime.name(), &spec.tenant, &source, &spec.entrypoint)).ok()?;
        Some(Sha256::digest(&text).iter().map(|b| format!("{b:02x}")).collect())
    }

    /// Changes the breaker of a kind until nobody else does at the same time.
    async fn with_breaker<T>(&self, key: &str, change: impl Fn(&mut Breaker) -> T) -> Result<T, StoreError> {
        loop {
            let known = self.store.breaker(key).await?;
            let version = known.as_ref().map(|record| record.version);
            let before = known.map(|record| record.breaker).unwrap_or_default();
            let mut breaker = before.clone();
            let done = change(&mut breaker);
            let now = self.clock.now();
            if breaker == before
                || self.store.save_breaker(key, version, &breaker, now).await? == Advance::Written
            {
                if std::mem::discriminant(&breaker) != std::mem::discriminant(&before) {
                    info!(kind = key, from = ?before, to = ?breaker, "a circuit breaker changed");
                }
                return Ok(done);
            }
        }
    }

    /// Whether a sandbox of this kind may be tried now.
    ///
    /// # Errors
    /// `CircuitOpen` with the time after which another attempt makes sense.
    pub(super) async fn try_kind(&self, id: SandboxId, spec: &Spec) -> Result<(), EngineError> {
        let Some(key) = self.kind_of(spec) else { return Ok(()) };
        let limits = self.settings.breaker;
        match self.with_breaker(&key, |breaker| breaker.admit(id, self.clock.now(), &limits)).await? {
            Admission::Pass | Admission::Probe => Ok(()),
            Admission::Refused(after) => Err(EngineError::CircuitOpen(after)),
        }
    }

    /// A sandbox failed before it was ready. Idempotent: written before the failure itself is.
    pub(super) async fn kind_failed(
        &self,
        id: SandboxId,
        spec: &Spec,
        reason: Reason,
        was_made: bool,
    ) -> Result<(), StoreError> {
        let Some(key) = self.kind_of(spec) else { return Ok(()) };
        let (now, limits) = (self.clock.now(), self.settings.breaker);
        self.with_breaker(&key, |breaker| {
            if counts(reason, was_made) {
                breaker.failed(id, now, &limits);
            } else {
                breaker.withdrawn(id, now);
            }
        })
        .await
    }

    /// A sandbox became ready.
    pub(super) async fn kind_ready(&self, spec: &Spec) -> Result<(), StoreError> {
        let Some(key) = self.kind_of(spec) else { return Ok(()) };
        self.with_breaker(&key, Breaker::ready).await
    }

    /// A sandbox was given up by its user before it was ready. May be lost: a probe has a deadline.
    pub(super) async fn kind_withdrawn(&self, id: SandboxId, spec: &Spec) {
        let Some(key) = self.kind_of(spec) else { return };
        let now = self.clock.now();
        if let Err(error) = self.with_breaker(&key, |breaker| breaker.withdrawn(id, now)).await {
            warn!(sandbox = %id, %error, "the circuit breaker does not know that its probe was cancelled");
        }
    }
}

/// Whether the kind is to blame for a failure.
fn counts(reason: Reason, was_made: bool) -> bool {
    match reason {
        Reason::ImagePullFailed
        | Reason::ContainerCreateFailed
        | Reason::AgentConnectTimeout
        | Reason::BootFailed
        | Reason::BootTimeout
        | Reason::HeartbeatLost
        | Reason::RuntimeLost
        | Reason::RuntimeError
        | Reason::ServiceFailed => true,
        Reason::ProvisionTimeout => was_made,
        Reason::RepositoryUnreachable
        | Reason::RepositoryAuthFailed
        | Reason::RefNotFound
        | Reason::ImageBuildFailed
        | Reason::ImageBuildTimeout
        | Reason::ImageNotCached
        | Reason::QuotaExceeded => false,
    }
}
