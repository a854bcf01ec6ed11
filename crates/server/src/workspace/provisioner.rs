//! The engine's port, on what is kept here.

use std::{fs::File, io::Read, sync::Arc, time::Duration};

use async_trait::async_trait;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sandglass_bridge::{
    server::{LeaseState, LeaseTimes, Registration, TokenHash},
    wire::Command,
};
use sandglass_sandbox::{
    ImageId, SandboxId,
    lifecycle::{
        boot::{AgentFacts, Failure, Reason},
        intent::{Create, Progress, RemoveReason},
    },
    pool::Pool,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Delivery, RuntimeError},
    },
    source::{FoundImage, ImageNews},
};
use tracing::{info, warn};

use super::{
    Confidential, Workspaces, ahead::not_released, blame::blames_image, channel, document::document,
    images::Wanted,
};
use crate::engine::provision::Provisioner;

/// There is one generation of a box: it is never made anew under the same id with other content.
const GENERATION: u64 = 1;
const TOKEN_BYTES: usize = 32;
/// Beyond the grace that an agent was given, for its answer.
const ANSWER: Duration = Duration::from_secs(2);

fn failed(what: &str, error: &dyn std::fmt::Display) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "channel", format!("{what}: {error}"))
}

#[async_trait]
impl Provisioner for Workspaces {
    fn known(&self) -> Vec<(SandboxId, AgentFacts)> {
        self.all_desks().iter().map(|desk| (desk.id, desk.kept().facts)).collect()
    }

    async fn accept(&self, id: SandboxId, secrets: &Confidential) -> Result<(), RuntimeError> {
        if let Err(error) = self.folders.keep_confidential(id, secrets) {
            // Half of them is nothing.
            let _ = self.folders.remove(id);
            let message = format!("the secrets of the request cannot be kept: {error}");
            return Err(RuntimeError::new(RuntimeErrorKind::Unavailable, "channel", message));
        }
        self.desk_for(id).open_to(&self.images, secrets);
        Ok(())
    }

    async fn find_image(
        &self,
        id: SandboxId,
        create: &Create,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure> {
        let unreadable = |e: &dyn std::fmt::Display| {
            let message = format!("the server cannot read what it kept of the request: {e}");
            Failure::new(Reason::RuntimeError, message)
        };
        let secrets = self.folders.confidential(id).map_err(|e| unreadable(&e))?;
        let asked = secrets.repository().map_err(|e| unreadable(&e))?;
        let repository = self.images.check(&asked).map_err(|e| unreadable(&e))?;
        let source = create.spec.source.as_deref();
        let source = source.ok_or_else(|| unreadable(&"it names no repository"))?;
        let desk = self.desk_for(id);
        desk.open_to(&self.images, &secrets);
        let platform = create.spec.platform.as_ref().map(|p| format!("{}/{}", p.os, p.arch));
        let wanted = Wanted {
            sandbox: id,
            namespace: source.namespace.as_deref(),
            asked: source,
            repository: &repository,
            build_secrets: &secrets.build_secrets,
            platform: platform.as_deref(),
        };
        let noted = |news: ImageNews| {
            if let ImageNews::Stands(Progress::Queued { build } | Progress::Building { build }) = news {
                desk.note(|kept| kept.build = Some(build));
            }
            told(news);
        };
        let found = self.images.find(wanted, &noted).await?;
        desk.note(|kept| kept.image = found.image);
        Ok(found)
    }

    async fn deliver(&self, id: SandboxId, create: &Create) -> Result<Vec<Delivery>, RuntimeError> {
        let source = create.spec.source.as_deref();
        let Some((source, found)) = source.and_then(|s| Some((s, s.found.as_ref()?))) else {
            return Err(failed("the box cannot be made", &"no image was found for it"));
        };
        let desk = self.desk_for(id);
        if desk.scopes().is_empty() {
            // After a restart in between.
            let secrets =
                self.folders.confidential(id).map_err(|e| failed("its secrets cannot be read", &e))?;
            desk.open_to(&self.images, &secrets);
        }
        let Some(this) = self.this() else {
            return Err(failed("the box cannot be made", &"the server is ending"));
        };
        channel::open(&this, &desk).map_err(|e| failed("its socket cannot be opened", &e))?;
        let sockets = self.engine().is_some_and(|engine| engine.runtime().capabilities().sockets);
        let token = self.token(id, &desk).map_err(|e| failed("its token cannot be made", &e))?;
        let authority = self
            .authority_of(id, source)
            .map_err(|e| failed("the authority of its SSH server cannot be made", &e))?;
        let written = document(id, GENERATION, source, found, &self.settings, sockets, authority.as_deref());
        self.folders.keep_document(id, &written).map_err(|e| failed("its document cannot be written", &e))?;
        if let Some(path) = &self.settings.git_authorities {
            self.folders
                .keep_authorities(id, path)
                .map_err(|e| failed("the file of builds.git_authorities cannot be brought along", &e))?;
        }
        let times = LeaseTimes {
            attach: Some(self.settings.attach_within),
            heartbeat_interval: Duration::from_secs(source.lease.heartbeat_interval_seconds),
            timeout: Duration::from_secs(source.lease.heartbeat_timeout_seconds),
            grace: self.settings.grace,
        };
        let name = id.to_string();
        let registration = Registration {
            sandbox: name.parse().map_err(|e| failed("its agent cannot be expected", &e))?,
            generation: GENERATION,
            token: TokenHash::of(&token),
            repositories: desk.scopes(),
            times,
        };
        self.with_registry(|registry, now| {
            registry.register(registration, now).map(|()| registry.hold(&name, now))
        })
        .map_err(|e| failed("its agent cannot be expected", &e))?;
        let now = self.clock.now();
        let kept = self.write(&desk, None, |kept| {
            kept.facts = AgentFacts::expected(now);
            Vec::new()
        });
        kept.await.map_err(|e| RuntimeError::new(RuntimeErrorKind::Unavailable, "channel", e.to_string()))?;
        Ok(self.folders.delivery(id, sockets))
    }

    async fn made(&self, id: SandboxId, create: &Create, made: Result<(), &RuntimeError>) -> bool {
        let image = create.spec.source.as_deref().and_then(|s| s.found.as_ref()?.image);
        match made {
            Ok(()) => {
                self.settled(id);
                let name = id.to_string();
                self.with_registry(|registry, now| registry.release(&name, now));
                self.sooner.notify_one();
                if let Some(this) = self.this() {
                    this.ask(id);
                }
                if let Some(image) = image {
                    self.images.made(image, true).await;
                }
                false
            }
            Err(error) => {
                let Some(image) = image.filter(|_| blames_image(&create.spec, error)) else { return false };
                self.images.made(image, false).await;
                let build = self.desk(id).and_then(|desk| desk.kept().build);
                if let Err(error) = self.images.release(id, build, Some(image)).await {
                    // The last release, when nothing is left of the sandbox, is of the image that it has then.
                    warn!(sandbox = %id, %image, %error, "an image that is not used stays held until the next start");
                }
                if let Some(desk) = self.desk(id) {
                    desk.note(|kept| (kept.build, kept.image) = (None, None));
                }
                true
            }
        }
    }

    fn settled(&self, id: SandboxId) {
        if let Err(error) = self.folders.forget_build_secrets(id) {
            warn!(sandbox = %id, %error, "the build secrets of a sandbox stay as long as it lives");
        }
    }

    fn condition(&self, id: SandboxId, condition: &Condition) {
        if self.desk(id).is_none() {
            return;
        }
        let name = id.to_string();
        match condition {
            Condition::Paused => self.with_registry(|registry, now| registry.hold(&name, now)),
            Condition::Running => self.with_registry(|registry, now| registry.release(&name, now)),
            Condition::Starting | Condition::Exited(_) => return,
        }
        self.sooner.notify_one();
    }

    fn narrow(&self, id: SandboxId) {
        if self.desk(id).is_some() {
            self.registry().stop(&id.to_string());
        }
    }

    async fn drain(&self, id: SandboxId, reason: RemoveReason) {
        let Some(desk) = self.desk(id) else { return };
        let name = id.to_string();
        let state = {
            let mut registry = self.registry();
            registry.stop(&name);
            registry.lease_state(&name)
        };
        desk.stirred.notify_waiters();
        // Only an agent that is heard can say that it is done.
        if !matches!(state, Some(LeaseState::Live | LeaseState::Attached)) {
            return;
        }
        let grace = self.settings.shutdown_grace;
        let shutdown = Command::Shutdown { grace_seconds: grace.as_secs(), reason: reason.word().to_owned() };
        let told = self.command(id, &shutdown, grace + ANSWER);
        tokio::select! {
            done = told => match done {
                Ok(_) => info!(sandbox = %id, "the agent ended what it ran"),
                Err(error) => warn!(sandbox = %id, %error, "the agent did not end what it ran"),
            },
            () = self.ended(id) => {}
            () = self.stopping.cancelled() => {}
        }
    }

    async fn find_ahead(&self, id: SandboxId, pool: &Pool) -> Result<FoundImage, Failure> {
        self.image_ahead(id, pool).await
    }

    fn deliver_ahead(&self, id: SandboxId) -> Result<Vec<Delivery>, RuntimeError> {
        self.files_ahead(id)
    }

    fn adopt_ahead(&self, id: SandboxId, found: &FoundImage) {
        self.held_already(id, found);
    }

    async fn leave_ahead(&self, id: SandboxId) -> Result<(), RuntimeError> {
        self.let_go_ahead(id).await
    }

    async fn newest(&self, image: ImageId) -> Option<ImageId> {
        self.images.newest(image).await
    }

    async fn forget(&self, id: SandboxId) -> Result<(), RuntimeError> {
        let (desk, ahead) = (self.desk(id), self.held_ahead(id));
        if desk.is_none() && ahead.is_none() && !self.folders.has(id) {
            return Ok(());
        }
        let name = id.to_string();
        self.with_registry(|registry, _| {
            registry.gone(&name);
            registry.forget(&name);
        });
        let mut held = (None, None);
        if let Some(desk) = &desk {
            desk.closing.cancel();
            desk.stirred.notify_waiters();
            let kept = desk.kept();
            held = (kept.build, kept.image);
        }
        self.images.release(id, held.0, held.1).await.map_err(not_released)?;
        if let Some(ahead) = ahead.filter(|ahead| (ahead.build, ahead.image) != held) {
            self.images.release(id, ahead.build, ahead.image).await.map_err(not_released)?;
        }
        self.forget_ahead(id);
        self.folders.remove(id).map_err(|e| failed("its folder cannot be removed", &e))?;
        // Not while something is being written, which would bring it back.
        let _writing = match &desk {
            Some(desk) => Some(desk.writing.lock().await),
            None => None,
        };
        self.store
            .forget_agent(id)
            .await
            .map_err(|e| RuntimeError::new(RuntimeErrorKind::Unavailable, "channel", e.to_string()))?;
        self.desks().remove(&id);
        Ok(())
    }
}

impl Workspaces {
    /// Returns when the box has ended by itself.
    async fn ended(&self, id: SandboxId) {
        match self.engine() {
            Some(engine) => {
                let over = engine.index().wait_for(id, |entry| {
                    let condition = entry.and_then(|e| e.observed.as_ref()).map(|o| &o.condition);
                    (!matches!(condition, Some(Condition::Running))).then_some(())
                });
                over.await;
            }
            None => std::future::pending().await,
        }
    }

    /// The token of the box: the one that it was handed, or a new one.
    fn token(&self, id: SandboxId, desk: &Arc<super::desk::Desk>) -> std::io::Result<String> {
        let known = desk.kept().registry.map(|saved| saved.token);
        if let (Some(token), Some(known)) = (self.folders.token(id), known)
            && TokenHash::of(&token).is(&known)
        {
            return Ok(token);
        }
        let mut random = [0; TOKEN_BYTES];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let token = URL_SAFE_NO_PAD.encode(random);
        self.folders.keep_token(id, &token)?;
        Ok(token)
    }
}
