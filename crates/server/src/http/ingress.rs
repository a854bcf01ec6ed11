//! What a gateway elsewhere asks and tells: where sandboxes are, that they were used, that one is to wake.
//!
//! For the operator, and for the key that opens these routes only. A follower is told everything once and then what changes; it is compared
//! by digest, so that a follower costs a few bytes for each sandbox and no more when it does not read. At most [`FOLLOWERS`] at once.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    convert::Infallible,
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicUsize, Ordering::AcqRel},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::{OriginalUri, Path, State},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use http::{StatusCode, header};
use sandglass_api::ingress::{IngressLine, IngressPorts, IngressSandbox, IngressState, IngressUses};
use sandglass_sandbox::SandboxId;
use tokio::{sync::watch, time::Instant};

use super::{
    App,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    middleware::auth::Operator,
    parse::{QueryString, RawBody},
};
use crate::{
    engine::index::Entry,
    ingress::{Reach, Target},
    telemetry::belonging,
};

/// Streams at the same time.
const FOLLOWERS: usize = 64;
/// Sandboxes in one report of uses.
const MOST_USES: usize = 1024;
/// How long a stream is silent at most.
const ALIVE: Duration = Duration::from_secs(10);
/// Least time between two looks at everything there is.
const BREATH: Duration = Duration::from_millis(10);

/// `GET /v1/ingress/sandboxes`
pub async fn sandboxes(
    State(app): State<App>,
    _: Operator,
    OriginalUri(uri): OriginalUri,
) -> ApiResult<Response> {
    let query = QueryString::parse(uri.query());
    let mut findings = Findings::new("query");
    let watch = match query.last("watch") {
        Some(text) => findings.within("watch", |f| f.boolean_text(text)),
        None => Some(false),
    };
    let watch = findings.finish(watch)?;
    let place = Place::take().ok_or_else(|| {
        ApiError::new(Code::Unavailable, format!("{FOLLOWERS} gateways follow this server already"))
    })?;
    let follower = Follower {
        changed: app.engine.index().changes(),
        app,
        told: HashMap::new(),
        frames: VecDeque::new(),
        stage: if watch { Stage::Following } else { Stage::Once },
        looked: None,
        _place: place,
    };
    let lines = stream::unfold(follower, |mut follower| async {
        let line = follower.next().await?;
        Some((Ok::<_, Infallible>(line), follower))
    });
    let headers = [
        (header::CONTENT_TYPE.as_str(), "application/x-ndjson"),
        (header::CACHE_CONTROL.as_str(), "no-store"),
        // For proxies that would collect the lines.
        ("x-accel-buffering", "no"),
    ];
    Ok((headers, Body::from_stream(lines)).into_response())
}

/// `POST /v1/ingress/sandboxes/{id}/wake`: answers when it runs.
pub async fn wake(State(app): State<App>, _: Operator, Path(id): Path<String>) -> ApiResult<StatusCode> {
    let entry = app.engine.find(&id)?;
    if !entry.wakes() {
        return Err(ApiError::new(Code::NotPaused, "the sandbox does not wake on access"));
    }
    let engine = app.engine.clone();
    tokio::spawn(belonging(async move { engine.wake(&id).await }))
        .await
        .map_err(|_| ApiError::internal())??;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v1/ingress/uses`
pub async fn uses(State(app): State<App>, _: Operator, body: RawBody) -> ApiResult<StatusCode> {
    let value = body.required()?;
    let mut findings = Findings::new("body");
    let uses = findings.object(&value).cloned().and_then(|object| {
        let sandboxes =
            findings.required(&object, "sandboxes", |f, list| f.list(list, 0, |f, id| f.string(id)))?;
        Some(IngressUses { sandboxes })
    });
    for id in findings.finish(uses)?.sandboxes.iter().take(MOST_USES) {
        app.used(&http::HeaderMap::new(), id);
    }
    Ok(StatusCode::NO_CONTENT)
}

static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// One of the places for followers.
struct Place;

impl Place {
    fn take() -> Option<Self> {
        // Made first, so that it is given back when there was none left.
        let place = Self;
        (TAKEN.fetch_add(1, AcqRel) < FOLLOWERS).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, AcqRel);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Once,
    Following,
    Over,
}

struct Follower {
    app: App,
    changed: watch::Receiver<u64>,
    /// What the other side knows, as digests.
    told: HashMap<SandboxId, u64>,
    frames: VecDeque<Bytes>,
    stage: Stage,
    looked: Option<Instant>,
    _place: Place,
}

impl Follower {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some(frame);
            }
            if self.stage == Stage::Over {
                return None;
            }
            let Some(looked) = self.looked else {
                self.look();
                self.tell(&IngressLine::Whole);
                if self.stage == Stage::Once {
                    self.stage = Stage::Over;
                }
                continue;
            };
            let closing = self.app.engine.closing().clone();
            tokio::select! {
                changed = self.changed.changed() => {
                    changed.ok()?;
                    tokio::time::sleep_until(looked + BREATH).await;
                    self.look();
                }
                () = tokio::time::sleep(ALIVE) => self.tell(&IngressLine::Alive),
                () = closing.cancelled() => return None,
            }
        }
    }

    fn tell(&mut self, line: &IngressLine) {
        // Wire types are plain data.
        let mut text = serde_json::to_vec(line).unwrap_or_default();
        text.push(b'\n');
        self.frames.push_back(text.into());
    }

    /// Compares what there is with what was told.
    fn look(&mut self) {
        self.changed.borrow_and_update();
        self.looked = Some(Instant::now());
        let mut lines = Vec::new();
        let mut seen = HashSet::new();
        for entry in self.app.engine.index().newest_first() {
            let Some(target) = self.app.target(&entry) else { continue };
            seen.insert(entry.id);
            lines.push((entry.id, IngressLine::Put { sandbox: told(&entry, target) }));
        }
        // First, because an address may have been given to another sandbox meanwhile.
        let gone: Vec<SandboxId> = self.told.keys().filter(|id| !seen.contains(id)).copied().collect();
        for id in gone {
            self.told.remove(&id);
            self.tell(&IngressLine::Gone { id: id.to_string() });
        }
        for (id, line) in lines {
            let digest = digest(&line);
            if self.told.insert(id, digest) != Some(digest) {
                self.tell(&line);
            }
        }
    }
}

fn digest(line: &IngressLine) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(line).unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

fn told(entry: &Entry, target: Target) -> IngressSandbox {
    let (state, address) = match target.reach {
        Reach::Addressable(address) => (IngressState::Up, Some(address)),
        Reach::Paused(address) => (IngressState::Paused, Some(address)),
        Reach::Starting(address) => (IngressState::Starting, address),
        Reach::Nowhere => (IngressState::Unreachable, None),
        Reach::Gone => (IngressState::Over, None),
    };
    IngressSandbox {
        id: entry.id.to_string(),
        state,
        address,
        ports: target.mapped.map(|m| IngressPorts { agent: m.agent, http: m.http, egress: m.egress }),
        agent_token: target.agent_token,
        route_token: if target.open || target.secure_access {
            String::new()
        } else {
            target.route_token.clone()
        },
        secure_access: target.secure_access.then_some(target.route_token),
        open: target.open,
        wakes: target.wakes,
        renews: target.renews,
        expires_at: entry.facts().and_then(|facts| facts.expires_at).map(Into::into),
    }
}
