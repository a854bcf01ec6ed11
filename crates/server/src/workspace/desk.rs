//! Everything that is known of one agent, and the part of it that outlives the server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandglass_bridge::{
    server::{RepositoryScope, SavedSandbox},
    wire::{Activity, GitCredential, Load, Secret, ServiceHealth},
};
use sandglass_repository::{Credential, Source, redact::Redactor};
use sandglass_sandbox::{
    ImageBuildId, ImageId, SandboxId, Timestamp,
    lifecycle::boot::AgentFacts,
    ports::store::{AgentRecord, EventRecord, StoreError},
};
use sandglass_supervise::report::ServiceChange;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Confidential, HostKey, Workspaces, images::Images};

/// The user name of a token that came without one; hosts look at the token alone.
const TOKEN_USER: &str = "x-access-token";

/// See the module documentation.
pub(super) struct Desk {
    pub id: SandboxId,
    kept: Mutex<Kept>,
    /// Held from looking at what is kept until the store has what becomes of it.
    pub writing: tokio::sync::Mutex<()>,
    pulse: Mutex<Pulse>,
    confidence: Mutex<Confidence>,
    /// There may be commands, or the stream of commands may have another owner.
    pub stirred: Notify,
    /// The sandbox is gone.
    pub closing: CancellationToken,
    /// Whether its socket is open.
    pub open: std::sync::atomic::AtomicBool,
    /// Whether its agent is asked, because it cannot call.
    pub asked: std::sync::atomic::AtomicBool,
}

/// What the store has.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kept {
    /// Absent until the box is about to be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<SavedSandbox>,
    pub facts: AgentFacts,
    /// The last change of each service.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<String, ServiceChange>,
    /// Of its SSH servers, by the names of the services.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_keys: BTreeMap<String, HostKey>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Lines of history that its agent has caused.
    #[serde(default)]
    pub lines: u64,
    /// The build that it waits or waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<ImageBuildId>,
    /// The image that is held for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
}

/// What every heartbeat says anew.
#[derive(Debug, Clone, Default)]
pub(super) struct Pulse {
    pub heartbeat_at: Option<Timestamp>,
    pub activity: Activity,
    pub load: Load,
    pub health: Vec<ServiceHealth>,
}

/// What is made of the secrets of a create.
#[derive(Default)]
struct Confidence {
    credentials: Vec<(RepositoryScope, GitCredential)>,
    redactor: Option<Arc<Redactor>>,
}

impl Kept {
    pub(super) fn fresh(now: Timestamp) -> Self {
        Self {
            registry: None,
            facts: AgentFacts::expected(now),
            services: BTreeMap::new(),
            host_keys: BTreeMap::new(),
            agent_version: None,
            lines: 0,
            build: None,
            image: None,
        }
    }

    pub(super) fn read(record: &AgentRecord) -> Result<Self, StoreError> {
        serde_json::from_value(record.body.clone()).map_err(|e| {
            let id = record.sandbox_id;
            StoreError::Corrupt(format!("what is kept of the agent of {id} is unreadable: {e}"))
        })
    }

    fn record(&self, id: SandboxId) -> Result<AgentRecord, StoreError> {
        let body = serde_json::to_value(self).map_err(|e| StoreError::Corrupt(e.to_string()))?;
        Ok(AgentRecord { sandbox_id: id, body })
    }
}

impl Desk {
    pub(super) fn of(id: SandboxId, kept: Kept) -> Self {
        Self {
            id,
            kept: Mutex::new(kept),
            writing: tokio::sync::Mutex::new(()),
            pulse: Mutex::default(),
            confidence: Mutex::default(),
            stirred: Notify::new(),
            closing: CancellationToken::new(),
            open: std::sync::atomic::AtomicBool::new(false),
            asked: std::sync::atomic::AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the store has, or is about to have.
    pub(super) fn kept(&self) -> Kept {
        self.lock().clone()
    }

    /// Whether the boot is over, however it ended.
    pub(super) fn has_booted(&self) -> bool {
        let kept = self.lock();
        kept.facts.ready_at.is_some() || kept.facts.failure.is_some()
    }

    /// Changes what need not be stored at once.
    pub(super) fn note(&self, change: impl FnOnce(&mut Kept)) {
        change(&mut self.lock());
    }

    pub(super) fn pulse(&self) -> MutexGuard<'_, Pulse> {
        self.pulse.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn confidence(&self) -> MutexGuard<'_, Confidence> {
        self.confidence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the secrets of the create into use: for the agent's questions, and to keep them out of what it tells.
    pub(super) fn open_to(&self, images: &Arc<dyn Images>, secrets: &Confidential) {
        let source = secrets.repository().ok().and_then(|repository| images.check(&repository).ok());
        let credentials = source.as_ref().map(credentials).unwrap_or_default();
        let passwords = credentials.iter().map(|(_, credential)| credential.password.reveal().as_str());
        let values = passwords.chain(secrets.build_secrets.values().map(String::as_str));
        let redactor = Arc::new(Redactor::new(values.collect::<Vec<_>>()));
        *self.confidence() = Confidence { credentials, redactor: Some(redactor) };
    }

    /// Repositories that the agent may ask credentials for.
    pub(super) fn scopes(&self) -> Vec<RepositoryScope> {
        self.confidence().credentials.iter().map(|(scope, _)| scope.clone()).collect()
    }

    pub(super) fn credential(&self, scope: &RepositoryScope) -> Option<GitCredential> {
        let confidence = self.confidence();
        confidence.credentials.iter().find(|(of, _)| of == scope).map(|(_, credential)| credential.clone())
    }

    /// Without the secrets of the create.
    pub(super) fn redacted(&self, text: &str) -> String {
        match &self.confidence().redactor {
            Some(redactor) => String::from_utf8_lossy(&redactor.redact(text.as_bytes())).into_owned(),
            None => text.to_owned(),
        }
    }
}

fn credentials(source: &Source) -> Vec<(RepositoryScope, GitCredential)> {
    let of = |member: &sandglass_repository::Member| {
        let scope = RepositoryScope::new(&member.url.authority(), member.url.path()).ok()?;
        let credential = match member.credential.as_ref()? {
            Credential::Token { username, token } => GitCredential {
                username: username.clone().unwrap_or_else(|| TOKEN_USER.to_owned()),
                password: Secret::new(token.expose().to_owned()),
                known_hosts: None,
                expires_at: None,
            },
            Credential::SshKey { private_key, known_hosts } => GitCredential {
                username: String::new(),
                password: Secret::new(private_key.expose().to_owned()),
                known_hosts: Some(known_hosts.clone().unwrap_or_default()),
                expires_at: None,
            },
            Credential::SecretRef { .. } => return None,
        };
        Some((scope, credential))
    };
    source.members.iter().filter_map(of).collect()
}

impl Workspaces {
    /// Changes what is kept of an agent: in the store first, with the lines that go with it, then here and in the engine's index.
    /// `acked` is the position that counts once it is stored.
    pub(super) async fn write(
        &self,
        desk: &Desk,
        acked: Option<u64>,
        change: impl FnOnce(&mut Kept) -> Vec<EventRecord>,
    ) -> Result<(), StoreError> {
        let _writing = desk.writing.lock().await;
        if desk.closing.is_cancelled() {
            return Err(StoreError::Unavailable("the sandbox is gone".into()));
        }
        let before = desk.kept();
        let mut kept = before.clone();
        let lines = change(&mut kept);
        let saved = self.registry().saved_sandbox(&desk.id.to_string());
        kept.registry = saved
            .or(kept.registry)
            .map(|saved| SavedSandbox { acked_seq: acked.unwrap_or(saved.acked_seq), ..saved });
        let Some(engine) = self.engine() else {
            return Err(StoreError::Unavailable("the server is ending".into()));
        };
        engine.agent_told(&kept.record(desk.id)?, kept.facts.clone(), &lines).await?;
        // What was noted meanwhile is kept.
        desk.note(|now| {
            let (build, image) = (now.build, now.image);
            *now = kept;
            if build != before.build {
                now.build = build;
            }
            if image != before.image {
                now.image = image;
            }
        });
        Ok(())
    }
}
