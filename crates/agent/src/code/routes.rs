//! The routes below `/code`: requests checked, answers shaped.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::context::{Context, Job};
use super::languages::{self, Way};
use crate::command;
use crate::http::body::Body;
use crate::http::query::{Object, Query, decode, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::{Agent, drain};

const INTERRUPT_WAIT: Duration = Duration::from_secs(3);
const NO_SQL: &str =
    "sql is not available: this agent brings no database client; run one as a command, or use a kernel";

/// Everything below `/code` except interrupts.
pub async fn dispatch(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    match (request.method(), segments) {
        (&Method::POST, ["code"]) => run(agent, request.into_body()).await,
        (&Method::POST, ["code", "context"]) => create(agent, request.into_body()).await,
        (&Method::GET, ["code", "contexts"]) => list(agent, query),
        (&Method::DELETE, ["code", "contexts"]) => delete_all(agent, query).await,
        (&Method::GET, ["code", "contexts", id]) => {
            let context = agent.contexts.get(&decode(id, false)).ok_or_else(unknown)?;
            Ok(reply::json(&shape(&context)))
        }
        (&Method::DELETE, ["code", "contexts", id]) => {
            let id = decode(id, false);
            end(agent.contexts.remove(|context| context.id == id)).await.ok_or_else(unknown)
        }
        (method, segments) => {
            let message = format!("no such route: {method} /{}", segments.join("/"));
            drain(request.into_body()).await;
            Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message))
        }
    }
}

/// Interrupts the code that a context runs; `None` when the id is none of a context.
pub async fn interrupt(agent: &Agent, id: &str) -> Option<Outcome> {
    let context = agent.contexts.get(id)?;
    context.interrupt(INTERRUPT_WAIT).await;
    Some(Ok(reply::empty()))
}

/// Which context a request is about.
#[derive(Debug, Default, PartialEq, Eq)]
struct Which {
    id: Option<String>,
    language: String,
    cwd: Option<String>,
}

impl Which {
    fn parse(object: &Object) -> Result<Self, Failure> {
        let given = |key| Ok(object.string(key)?.filter(|text| !text.is_empty()));
        Ok(Which { id: given("id")?, language: given("language")?.unwrap_or_default(), cwd: given("cwd")? })
    }
}

async fn run(agent: &Arc<Agent>, body: Incoming) -> Outcome {
    let (code, which) = parse_run(read_json(body).await?)?;
    let context = match (&which.id, languages::way(&which.language)) {
        (Some(id), _) => agent.contexts.get(id).ok_or_else(unknown)?,
        (None, way @ (Way::Command | Way::Background)) => {
            let background = way == Way::Background;
            let request = json!({ "command": code, "cwd": which.cwd, "background": background });
            return command::run_value(agent, request).await;
        }
        (None, Way::Sql) => return Err(Failure::runtime(NO_SQL)),
        (None, Way::Kernel(language)) => agent.contexts.default_for(agent, &language, which.cwd).await?,
    };
    context.ready().await.map_err(Failure::runtime)?;
    let turn = context.turn().ok_or_else(|| Failure::runtime("session is busy"))?;
    let (events, body) = Body::channel(1, None);
    let job = Job { agent: Arc::clone(agent), code, events, turn };
    if context.run(job).await { Ok(reply::event_stream(body)) } else { Err(unknown()) }
}

fn parse_run(body: Value) -> Result<(String, Which), Failure> {
    let object = Object::new(body)?;
    let code = object.string("code")?.filter(|code| !code.is_empty());
    let code = code.ok_or_else(|| Failure::invalid("invalid request, validation error code is required"))?;
    let which = match object.raw("context") {
        None | Some(Value::Null) => Which::default(),
        Some(context) => Which::parse(&Object::new(context.clone())?)?,
    };
    Ok((code, which))
}

async fn create(agent: &Arc<Agent>, body: Incoming) -> Outcome {
    let which = Which::parse(&Object::new(read_json(body).await?)?)?;
    let context = match languages::way(&which.language) {
        Way::Kernel(language) => agent.contexts.create(agent, &language, which.cwd).await?,
        Way::Sql => return Err(Failure::runtime(NO_SQL)),
        Way::Command | Way::Background => return Err(no_contexts(&which.language)),
    };
    Ok(reply::json(&shape(&context)))
}

fn list(agent: &Arc<Agent>, query: &Query) -> Outcome {
    let language = query.get("language").filter(|language| !language.is_empty());
    let language = match language.map(|language| (language, languages::way(language))) {
        None => None,
        Some((_, Way::Kernel(language))) => Some(language),
        Some((language, _)) => return Err(no_contexts(language)),
    };
    let shapes: Vec<Value> =
        agent.contexts.list(language.as_deref()).iter().map(|context| shape(context)).collect();
    Ok(reply::json(&shapes))
}

async fn delete_all(agent: &Arc<Agent>, query: &Query) -> Outcome {
    let language = query.required("language")?;
    let Way::Kernel(language) = languages::way(language) else { return Err(no_contexts(language)) };
    end(agent.contexts.remove(|context| context.language == language)).await;
    Ok(reply::empty())
}

/// Ends contexts, all at once; `None` when there are none.
async fn end(contexts: Vec<Arc<Context>>) -> Option<reply::Reply> {
    // Tasks, so that they end also when whoever asked does not wait.
    let ending: Vec<_> =
        contexts.into_iter().map(|context| tokio::spawn(async move { context.end().await })).collect();
    let some = !ending.is_empty();
    for end in ending {
        let _ = end.await;
    }
    some.then(reply::empty)
}

fn shape(context: &Context) -> Value {
    let mut shape = json!({ "id": context.id, "language": context.language });
    if let (Value::Object(map), Some(cwd)) = (&mut shape, &context.cwd) {
        map.insert("cwd".into(), cwd.as_str().into());
    }
    shape
}

fn no_contexts(language: &str) -> Failure {
    Failure::runtime(format!("unsupported language runtime: {language:?} has no contexts"))
}

fn unknown() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, Code::ContextNotFound, "context not found")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_forgivingly_and_checked() {
        let (code, which) = parse_run(json!({"code": "1", "context": null})).unwrap();
        assert_eq!((code.as_str(), which), ("1", Which::default()));
        let (_, which) =
            parse_run(json!({"Code": "1", "context": {"language": "python", "id": ""}})).unwrap();
        assert_eq!(which, Which { language: "python".into(), ..Which::default() });
        for bad in [json!({}), json!({"code": ""}), json!({"code": 1}), json!({"code": "1", "context": "x"})]
        {
            assert!(parse_run(bad.clone()).is_err(), "{bad}");
        }
    }
}
