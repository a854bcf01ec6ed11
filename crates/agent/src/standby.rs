//! A box that was started ahead and waits in a pool: `POST /internal/assign` tells whose it is and what it runs.
//!
//! The token that the agent was started with is the pool's alone and opens nothing but this route; the sandbox's own comes with the
//! assignment. Invariant: there is one assignment. The same one may be told again, after a server died in between, and gets the answer of
//! the first.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use sandglass_sandbox::hooks::Hooks;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{mpsc, watch};

use crate::binding;
use crate::bootstrap;
use crate::envs::{self, Env};
use crate::http::query::read_json;
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::{Agent, TOKEN_HEADER};
use crate::init::begin::NotStarted;
use crate::workspace::{self, Document, Workspace};

/// Whose the box is, as the server tells it.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    sandbox_id: String,
    access_token: String,
    #[serde(default)]
    entrypoint: Vec<String>,
    /// Over the environment of the start; later entries win.
    #[serde(default)]
    env: Vec<(String, String)>,
    /// Hooks in the form of requests.
    #[serde(default)]
    lifecycle: Hooks,
}

impl Assignment {
    fn check(&self) -> Result<(), Failure> {
        let invalid = |what: &str| Failure::invalid(format!("invalid assignment: {what}"));
        if self.sandbox_id.is_empty() || self.access_token.is_empty() {
            return Err(invalid("sandboxId and accessToken must not be empty"));
        }
        self.lifecycle.check().map_err(|error| invalid(&error.to_string()))
    }

    fn who(&self) -> [u8; 32] {
        Sha256::digest(format!("{}\0{}", self.sandbox_id, self.access_token)).into()
    }
}

type Said = Option<Result<(), String>>;

/// The side of the route.
pub struct Standby {
    taken: OnceLock<[u8; 32]>,
    assignments: mpsc::Sender<Assignment>,
    said: watch::Receiver<Said>,
}

/// The side of the one who starts the entrypoint.
pub struct Waiting {
    assignments: mpsc::Receiver<Assignment>,
    say: watch::Sender<Said>,
    /// Where the document of the workspace is, when it is not in its usual place.
    document: Option<PathBuf>,
}

/// What is to be started.
pub struct Assigned {
    pub entrypoint: Vec<String>,
    pub hooks: Hooks,
}

/// Both sides of a box that waits.
pub fn standby(document: Option<PathBuf>) -> (Standby, Waiting) {
    let (assignments, waiting) = mpsc::channel(1);
    let (say, said) = watch::channel(None);
    (Standby { taken: OnceLock::new(), assignments, said }, Waiting { assignments: waiting, say, document })
}

impl Waiting {
    /// Waits for the assignment and makes the box that sandbox's.
    pub async fn assigned(&mut self, agent: &Arc<Agent>) -> Result<Assigned, NotStarted> {
        let Some(assignment) = self.assignments.recv().await else { std::future::pending().await };
        let mut env: Env = agent.env.clone();
        let given = assignment.env.into_iter();
        env.extend(given.filter(|(name, value)| !name.contains(['=', '\0']) && !value.contains('\0')));
        envs::strip_secrets(&mut env);
        env.insert("OPENSANDBOX_ID".into(), assignment.sandbox_id.clone());
        let own = Some(assignment.sandbox_id.as_str());
        let document = Document::find(self.document.as_deref(), own).map_err(NotStarted::agent)?;
        if let Some(document) = &document {
            workspace::export(document, &mut env);
        }
        let entrypoint = bootstrap::command(assignment.entrypoint, &env).map_err(NotStarted::entrypoint)?;
        agent.env.bind(env);
        agent.binding.bind(assignment.sandbox_id, Sha256::digest(assignment.access_token).into());
        if let Some(document) = document {
            let _ = agent.workspace.set(Workspace::open(document, agent));
        }
        Ok(Assigned { entrypoint, hooks: assignment.lifecycle })
    }

    /// Answers whoever has told, and will tell, the assignment.
    pub fn say(&self, begun: Result<(), &NotStarted>) {
        self.say.send_replace(Some(begun.map_err(|why| format!("{}: {}", why.phase, why.message))));
    }
}

/// `/internal/assign`.
pub async fn assign(agent: &Arc<Agent>, request: Request<Incoming>) -> Outcome {
    if request.method() != Method::POST {
        return Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, "no such route"));
    }
    let Some(standby) = agent.binding.standby() else {
        let message = "this agent was started for its sandbox and waits for no assignment";
        return Err(Failure::new(StatusCode::CONFLICT, Code::AlreadyInitialized, message));
    };
    let given = request.headers().get(TOKEN_HEADER).map_or(&b""[..], |value| value.as_bytes());
    if agent.token.is_empty() || !bool::from(given.ct_eq(agent.token.as_bytes())) {
        return Err(Failure::new(StatusCode::UNAUTHORIZED, Code::NotFound, "not the token of this box"));
    }
    let assignment: Assignment = serde_json::from_value(read_json(request.into_body()).await?)
        .map_err(|error| Failure::invalid(format!("invalid assignment: {error}")))?;
    assignment.check()?;
    let (who, id) = (assignment.who(), assignment.sandbox_id.clone());
    if standby.taken.set(who).is_ok() {
        // There is room: nobody else gets here.
        let _ = standby.assignments.try_send(assignment);
    } else if standby.taken.get() != Some(&who) {
        let message = "this box is assigned already, to another sandbox";
        return Err(Failure::new(StatusCode::CONFLICT, Code::AlreadyInitialized, message));
    }
    let mut said = standby.said.clone();
    let said = said.wait_for(Option::is_some).await.ok().and_then(|said| said.clone());
    match said.unwrap_or_else(|| Err("the box is ending".to_owned())) {
        Ok(()) => Ok(binding::introduce(reply::json(&json!({ "status": "assigned", "sandboxId": id })))),
        Err(why) => Err(Failure::runtime(why)),
    }
}
