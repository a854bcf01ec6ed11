//! Whether the box is somebody's yet: `GET /ready`, and `POST /internal/init` for boxes that were started ahead.
//!
//! Invariant: an initialisation that was well-formed is the only one there will ever be, whatever came of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use sandglass_sandbox::agent as generations;
use sandglass_sandbox::hooks::Hooks;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{mpsc, oneshot};

use crate::hooks::{periodic, run, source};
use crate::http::query::{Object, read_json};
use crate::http::reply::{self, Code, Failure, Outcome, Reply};
use crate::http::router::Agent;
use crate::journal::{self, Level};
use crate::standby::Standby;

const MAX_ID: usize = 128;
const MAX_ATTRIBUTES: usize = 64;

/// What an initialisation asks of the one who owns the entrypoint.
pub struct Restart {
    pub done: oneshot::Sender<Result<(), String>>,
}

/// Whose the box is, and how far it has come.
pub struct Binding {
    /// Nothing but the initialisation is answered before it.
    gated: bool,
    taken: AtomicBool,
    ready: AtomicBool,
    bound: OnceLock<Bound>,
    restarts: mpsc::Sender<Restart>,
    /// Where hooks are kept that come with the initialisation.
    hooks_file: Option<std::path::PathBuf>,
    /// What waits for the assignment, in a box of a pool.
    standby: Option<Standby>,
}

struct Bound {
    sandbox: String,
    generation: i64,
    token_digest: Option<[u8; 32]>,
}

/// Whether an initialisation is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    Open,
    UntilInitialised,
    /// Started ahead for a pool: waits for the server that made the box.
    Standby,
}

impl Binding {
    pub fn new(gate: Gate, hooks_file: Option<std::path::PathBuf>) -> (Self, mpsc::Receiver<Restart>) {
        let (restarts, asked) = mpsc::channel(1);
        let binding = Binding {
            gated: gate != Gate::Open,
            taken: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            bound: OnceLock::new(),
            restarts,
            hooks_file,
            standby: None,
        };
        (binding, asked)
    }

    /// Waits for an assignment, instead of for an initialisation.
    #[must_use]
    pub fn in_pool(self, standby: Standby) -> Self {
        Self { standby: Some(standby), ..self }
    }

    /// What waits for an assignment.
    pub fn standby(&self) -> Option<&Standby> {
        self.standby.as_ref()
    }

    /// The box is that sandbox's from now on, and only the token of this digest opens it. Takes effect once.
    pub fn bind(&self, sandbox: String, token: [u8; 32]) {
        let _ = self.bound.set(Bound { sandbox, generation: 1, token_digest: Some(token) });
    }

    /// The entrypoint runs; a box that nobody has to initialise is ready.
    pub fn started(&self) {
        if !self.gated || self.standby.is_some() {
            self.ready.store(true, Ordering::Release);
        }
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Why a request cannot be answered yet.
    pub fn closed(&self, path: &str) -> Option<Reply> {
        // An assigned box can be asked while it comes up, like any other.
        let assigned = self.standby.is_some() && self.bound.get().is_some();
        if !self.gated || assigned || self.is_ready() || is_exempt(path) {
            return None;
        }
        let error =
            "execd is not initialized yet: POST /internal/init has not been called or has not finished";
        Some(reply::json_reply(StatusCode::SERVICE_UNAVAILABLE, &json!({ "error": error })))
    }

    /// Whether a token is the one that counts now. An empty one that was configured lets everybody in.
    pub fn accepts(&self, given: &[u8], configured: &str) -> bool {
        if let Some(wanted) = self.bound.get().and_then(|bound| bound.token_digest) {
            let digest: [u8; 32] = Sha256::digest(given).into();
            return digest.ct_eq(&wanted).into();
        }
        configured.is_empty() || bool::from(given.ct_eq(configured.as_bytes()))
    }
}

fn is_exempt(path: &str) -> bool {
    matches!(path.trim_end_matches('/'), "/ready" | "/internal/init" | "/internal/assign")
}

/// Whether a path is open to callers without a token.
pub fn is_open(path: &str) -> bool {
    is_exempt(path) || path.trim_end_matches('/') == "/ping"
}

/// Tells the generation of this agent, in a header that clients take no notice of.
pub fn introduce(mut reply: Reply) -> Reply {
    if let Ok(value) = HeaderValue::try_from(generations::Agent::OURS.to_string()) {
        reply.headers_mut().insert(generations::HEADER, value);
    }
    reply
}

/// `GET /ready`.
pub fn ready(agent: &Agent) -> Outcome {
    let binding = &agent.binding;
    let ready = binding.is_ready();
    let mut shape = json!({ "initialized": ready });
    if let Some(bound) = binding.bound.get() {
        shape["sandboxId"] = bound.sandbox.as_str().into();
        shape["generation"] = bound.generation.into();
    } else if let Some(id) = agent.env.get("OPENSANDBOX_ID") {
        shape["sandboxId"] = id.as_str().into();
    }
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok(introduce(reply::json_reply(status, &shape)))
}

/// `/internal/init`.
pub async fn initialise(agent: &Arc<Agent>, request: Request<Incoming>) -> Outcome {
    if request.method() != Method::POST {
        return Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, "no such route"));
    }
    let asked = Init::parse(read_json(request.into_body()).await?)?;
    let binding = &agent.binding;
    if !binding.gated || binding.standby.is_some() {
        return Err(Failure::new(
            StatusCode::CONFLICT,
            Code::AlreadyInitialized,
            "this agent was started for its sandbox and waits for no initialisation",
        ));
    }
    if binding.taken.swap(true, Ordering::AcqRel) {
        return Err(Failure::new(StatusCode::CONFLICT, Code::AlreadyInitialized, "initialised already"));
    }
    // A client that hangs up must not leave a box half initialised.
    let agent = Arc::clone(agent);
    let work = tokio::spawn(async move { carry_out(&agent, asked).await });
    work.await.unwrap_or_else(|_| Err(Failure::runtime("the initialisation was interrupted")))
}

async fn carry_out(agent: &Arc<Agent>, asked: Init) -> Outcome {
    let mut env = agent.env.clone();
    env.extend(asked.envs);
    crate::envs::strip_secrets(&mut env);
    env.insert("OPENSANDBOX_ID".into(), asked.sandbox.clone());
    agent.env.bind(env);
    let answer =
        json!({ "status": "initialized", "sandboxId": asked.sandbox, "generation": asked.generation });
    let binding = &agent.binding;
    let _ = binding.bound.set(Bound {
        sandbox: asked.sandbox,
        generation: asked.generation,
        token_digest: asked.token_digest,
    });
    if let Some(path) = binding.hooks_file.as_deref().filter(|_| !asked.hooks.is_empty())
        && let Err(error) = source::keep(path, &asked.hooks)
    {
        journal::note(Level::Warning, &format!("hooks are not kept in {}: {error}", path.display()));
    }
    if let Some(hook) = &asked.hooks.pre_start {
        let ran = run::run(agent, &hook.command, hook.timeout()).await;
        ran.map_err(|failed| Failure::runtime(format!("preStart: {failed}")))?;
    }
    if asked.restart {
        let (done, restarted) = oneshot::channel();
        let _ = binding.restarts.send(Restart { done }).await;
        let restarted = restarted.await.unwrap_or_else(|_| Err("there is no entrypoint to restart".into()));
        restarted.map_err(|message| Failure::runtime(format!("entrypoint: {message}")))?;
    }
    periodic::begin(agent, &asked.hooks.periodic);
    binding.ready.store(true, Ordering::Release);
    let mut answer = answer;
    if !asked.warnings.is_empty() {
        answer["warning"] = asked.warnings.into();
    }
    Ok(introduce(reply::json(&answer)))
}

/// The body of an initialisation, checked.
struct Init {
    sandbox: String,
    generation: i64,
    restart: bool,
    token_digest: Option<[u8; 32]>,
    envs: BTreeMap<String, String>,
    hooks: Hooks,
    warnings: Vec<&'static str>,
}

impl Init {
    fn parse(body: Value) -> Result<Self, Failure> {
        let object = Object::new(body)?;
        let sandbox = object.string("sandboxId")?.unwrap_or_default();
        if sandbox.trim().is_empty() || sandbox.len() > MAX_ID || sandbox.contains('\0') {
            return Err(invalid(&format!("sandboxId must have 1 to {MAX_ID} characters")));
        }
        let generation = object.integer("generation")?.filter(|number| *number > 0);
        let generation = generation.ok_or_else(|| invalid("generation must be a number above zero"))?;
        let restart = match object.string("entrypointPolicy")?.as_deref() {
            None | Some("" | "keep") => false,
            Some("restart") => true,
            Some(_) => return Err(invalid("entrypointPolicy must be keep or restart")),
        };
        let token_digest = match object.string("accessTokenHash")?.filter(|hash| !hash.is_empty()) {
            None => None,
            Some(hash) => Some(
                digest(&hash)
                    .ok_or_else(|| invalid("accessTokenHash must be sha256: and 64 hexadecimal digits"))?,
            ),
        };
        let hooks = match object.raw("lifecycle").filter(|value| !value.is_null()) {
            None => Hooks::default(),
            Some(value) => Hooks::parse(&value.to_string()).map_err(|e| invalid(&e.to_string()))?,
        };
        let attributes = attributes(&object)?;
        let warnings = (attributes > 0)
            .then_some("telemetry attributes are not used: measurements keep those of the start");
        let envs = crate::command::envs_of(&object)?;
        let warnings = warnings.into_iter().collect();
        Ok(Init { sandbox, generation, restart, token_digest, envs, hooks, warnings })
    }
}

fn attributes(object: &Object) -> Result<usize, Failure> {
    let Some(telemetry) = object.raw("telemetry").filter(|value| !value.is_null()) else { return Ok(0) };
    let count = match telemetry.get("attributes") {
        None | Some(Value::Null) => 0,
        Some(Value::Object(map)) if map.values().all(Value::is_string) => map.len(),
        Some(_) => return Err(invalid("telemetry.attributes must be an object of strings")),
    };
    if count > MAX_ATTRIBUTES {
        return Err(invalid(&format!("telemetry.attributes must have at most {MAX_ATTRIBUTES} entries")));
    }
    Ok(count)
}

fn digest(text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 64)?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = u8::try_from(high * 16 + low).ok()?;
    }
    Some(bytes)
}

fn invalid(message: &str) -> Failure {
    Failure::invalid(format!("invalid request, validation error {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_initialises_is_checked() {
        let good = json!({"sandboxId": "s", "generation": 1});
        assert!(Init::parse(good.clone()).is_ok());
        let with = |key: &str, value: Value| {
            let mut body = good.clone();
            body[key] = value;
            Init::parse(body)
        };
        for (key, value) in [
            ("sandboxId", json!("")),
            ("sandboxId", json!("x".repeat(MAX_ID + 1))),
            ("generation", json!(0)),
            ("generation", json!(null)),
            ("entrypointPolicy", json!("both")),
            ("accessTokenHash", json!("sha256:12")),
            ("accessTokenHash", json!("md5:00")),
            ("envs", json!({"A=B": "x"})),
            ("lifecycle", json!({"preStart": {"command": []}})),
            ("lifecycle", json!([])),
            ("telemetry", json!({"attributes": {"a": 1}})),
        ] {
            assert!(with(key, value.clone()).is_err(), "{key} {value}");
        }
        let hash = format!("sha256:{}", "0aF".repeat(21) + "1");
        let init = with("accessTokenHash", json!(hash)).unwrap();
        assert_eq!(init.token_digest.unwrap()[..3], [0x0a, 0xf0, 0xaf]);
        assert!(!init.restart && init.warnings.is_empty());
        assert_eq!(with("telemetry", json!({"attributes": {"a": "b"}})).unwrap().warnings.len(), 1);
    }
}
