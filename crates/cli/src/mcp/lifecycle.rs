//! The tools that make, describe and end sandboxes.

use std::{collections::BTreeMap, time::Duration};

use reqwest::Method;
use serde_json::{Map, Value, json};

use super::{
    arguments::{
        Diagnosis, SandboxConnect, SandboxCreate, SandboxDiagnostics, SandboxEndpoint, SandboxList,
        SandboxOnly, SandboxRenew,
    },
    call::Call,
    excerpt::Excerpt,
    failure::Failure,
    readiness::{self, Readiness},
    results::{
        Diagnostics, Done, EndpointInfo, Expiry, Health, Metrics, Pagination, SandboxInfo, SandboxPage,
        SandboxReady, State,
    },
};
use crate::client::{Route, Sandbox};

/// Upstream's own default, for programs that count on it.
const ENTRYPOINT: &[&str] = &["tail", "-f", "/dev/null"];
/// Setting of a Sandglass server that makes an entrypoint unnecessary.
const ENTRYPOINT_MODE: &str = "sandglass.entrypoint";
/// How long a state may take to be reached after it was asked for.
const SETTLING: Duration = Duration::from_secs(30);
/// How long a create that nobody wants any more may take to be answered.
const ABANDONED: Duration = Duration::from_secs(120);
/// Most of a diagnosis that is shown.
const DIAGNOSIS_BYTES: usize = 64 << 10;

fn seconds(value: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| Failure::arguments(format!("{value} is not a number of seconds")))
}

/// Whole seconds, rounded up: the API knows no others.
fn whole_seconds(value: f64) -> Result<u64, Failure> {
    let duration = seconds(value)?;
    Ok(duration.as_secs() + u64::from(duration.subsec_nanos() > 0))
}

pub async fn create(call: Call, arguments: SandboxCreate) -> Result<SandboxReady, Failure> {
    let patience = seconds(arguments.ready_timeout_seconds)?;
    let (wait, body) = (!arguments.skip_health_check, creation(arguments)?);
    let mut reporter = call.reporter();
    reporter.step("creating").await;
    let sandbox = requested(&call, &body).await?;
    let id = sandbox.id().to_owned();
    call.session().created(&id);
    let ready = async {
        if wait {
            readiness::wait(&call, sandbox, patience, &mut reporter).await
        } else {
            Ok(Readiness::NotYet(sandbox))
        }
    };
    let outcome = tokio::select! {
        outcome = ready => outcome,
        () = call.cancelled() => Err(Failure::cancelled()),
    };
    match outcome {
        Ok(Readiness::Over(sandbox)) => {
            discard(&call, &id).await;
            let why = readiness::describe(&sandbox);
            Err(Failure::new("SANDBOX_DID_NOT_START", format!("the sandbox did not start: {why}")))
        }
        Ok(Readiness::Ready(known)) => Ok(told(&call, known, true).await),
        Ok(Readiness::NotYet(known)) => Ok(told(&call, known, false).await),
        Err(failure) => {
            discard(&call, &id).await;
            Err(failure)
        }
    }
}

/// Sends the request to its end: if the call is taken back meanwhile, the sandbox that it makes must not stay.
async fn requested(call: &Call, body: &Value) -> Result<Sandbox, Failure> {
    let mut request = std::pin::pin!(call.client().create(body));
    tokio::select! {
        made = &mut request => return Ok(made?),
        () = call.cancelled() => {}
    }
    if let Ok(Ok(made)) = tokio::time::timeout(ABANDONED, request).await {
        discard(call, made.id()).await;
    }
    Err(Failure::cancelled())
}

async fn discard(call: &Call, id: &str) {
    // It expires by itself if this fails, and the caller is told why the create failed.
    if call.client().delete(id).await.is_ok() {
        call.session().removed(id);
    }
}

/// The answer to a create tells less than a look; but a sandbox that was made is told of in any case.
async fn told(call: &Call, known: Sandbox, ready: bool) -> SandboxReady {
    let sandbox = call.client().get(known.id()).await.unwrap_or(known);
    SandboxReady { sandbox_id: sandbox.id().to_owned(), ready, info: SandboxInfo::of(&sandbox) }
}

/// The API's create request.
fn creation(arguments: SandboxCreate) -> Result<Value, Failure> {
    let image = arguments.image.filter(|image| !image.trim().is_empty());
    let mut body = Map::new();
    match (image, &arguments.snapshot_id) {
        (Some(image), None) => body.insert("image".into(), json!({ "uri": image })),
        (None, Some(snapshot)) => body.insert("snapshotId".into(), json!(snapshot.as_str())),
        _ => return Err(Failure::arguments("exactly one of image and snapshot_id is needed")),
    };
    match (arguments.auth_username, arguments.auth_password) {
        (None, None) => {}
        (Some(username), Some(password)) if body.contains_key("image") => {
            body["image"]["auth"] = json!({ "username": username, "password": password });
        }
        _ => {
            return Err(Failure::arguments("auth_username and auth_password go together, and with an image"));
        }
    }
    if let Some(lifetime) = arguments.timeout_seconds {
        body.insert("timeout".into(), json!(whole_seconds(lifetime)?));
    }
    let limits = arguments.resource.unwrap_or_else(|| {
        BTreeMap::from([("cpu".to_owned(), "1".to_owned()), ("memory".to_owned(), "2Gi".to_owned())])
    });
    body.insert("resourceLimits".into(), json!(limits));
    let told = arguments.extensions.as_ref().is_some_and(|all| all.contains_key(ENTRYPOINT_MODE));
    match arguments.entrypoint {
        Some(entrypoint) => body.insert("entrypoint".into(), json!(entrypoint)),
        None if told => None,
        None => body.insert("entrypoint".into(), json!(ENTRYPOINT)),
    };
    for (name, map) in
        [("env", arguments.env), ("metadata", arguments.metadata), ("extensions", arguments.extensions)]
    {
        if let Some(map) = map {
            body.insert(name.into(), json!(map));
        }
    }
    if let Some(policy) = arguments.network_policy {
        let mut policy = json!(policy);
        if policy.get("defaultAction").is_none() {
            policy["defaultAction"] = json!("deny");
        }
        body.insert("networkPolicy".into(), policy);
    }
    Ok(Value::Object(body))
}

pub async fn connect(call: Call, arguments: SandboxConnect) -> Result<SandboxReady, Failure> {
    let id = arguments.sandbox_id.as_str();
    let sandbox = call.client().get(id).await?;
    if arguments.skip_health_check {
        return Ok(SandboxReady { sandbox_id: id.to_owned(), ready: false, info: SandboxInfo::of(&sandbox) });
    }
    let patience = seconds(arguments.connect_timeout_seconds)?;
    match readiness::wait(&call, sandbox, patience, &mut call.reporter()).await? {
        Readiness::Ready(sandbox) => {
            Ok(SandboxReady { sandbox_id: id.to_owned(), ready: true, info: SandboxInfo::of(&sandbox) })
        }
        Readiness::NotYet(sandbox) => Err(Failure::new(
            "SANDBOX_NOT_READY",
            format!("the sandbox does not answer yet: {}", readiness::describe(&sandbox)),
        )),
        Readiness::Over(sandbox) => Err(Failure::new(
            "SANDBOX_OVER",
            format!("nothing can run in the sandbox any more: {}", readiness::describe(&sandbox)),
        )),
    }
}

pub async fn kill(call: Call, arguments: SandboxOnly) -> Result<Done, Failure> {
    let id = arguments.sandbox_id.as_str();
    let request = call.client().request(Method::DELETE, &["sandboxes", id])?;
    let sent = call.client().send(request.timeout(ABANDONED)).await.map_err(Failure::from);
    if sent.as_ref().map_or_else(Failure::is_absent, |_| true) {
        call.session().removed(id);
    }
    sent?;
    Ok(Done { status: "killed" })
}

pub async fn get_info(call: Call, arguments: SandboxOnly) -> Result<SandboxInfo, Failure> {
    Ok(SandboxInfo::of(&call.client().get(arguments.sandbox_id.as_str()).await?))
}

pub async fn list(call: Call, arguments: SandboxList) -> Result<SandboxPage, Failure> {
    let filter = arguments.filter.unwrap_or_default();
    let mut query: Vec<(&str, String)> =
        filter.states.unwrap_or_default().into_iter().map(|state| ("state", state)).collect();
    let metadata: Vec<(String, String)> = filter.metadata.unwrap_or_default().into_iter().collect();
    if !metadata.is_empty() {
        query.push(("metadata", crate::client::metadata_query(&metadata)));
    }
    query.push(("page", filter.page.unwrap_or(1).to_string()));
    query.push(("pageSize", filter.page_size.unwrap_or(20).to_string()));
    let answer = call.client().page(&["sandboxes"], &query).await?;
    let items = answer.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
    Ok(SandboxPage {
        sandbox_infos: items.into_iter().map(|item| SandboxInfo::of(&Sandbox(item))).collect(),
        pagination: Pagination::of(&answer),
        created_here: call.session().creations(),
    })
}

pub async fn renew(call: Call, arguments: SandboxRenew) -> Result<Expiry, Failure> {
    let lifetime = seconds(arguments.timeout_seconds)?;
    Ok(Expiry { expires_at: call.client().renew(arguments.sandbox_id.as_str(), lifetime).await? })
}

pub async fn pause(call: Call, arguments: SandboxOnly) -> Result<State, Failure> {
    let id = arguments.sandbox_id.as_str();
    call.client().ask(id, "pause").await?;
    Ok(State::of(&readiness::settle(&call, id, "Paused", SETTLING).await?))
}

pub async fn resume(call: Call, arguments: SandboxOnly) -> Result<State, Failure> {
    let id = arguments.sandbox_id.as_str();
    call.client().ask(id, "resume").await?;
    Ok(State::of(&readiness::settle(&call, id, "Running", SETTLING).await?))
}

pub async fn metrics(call: Call, arguments: SandboxOnly) -> Result<Metrics, Failure> {
    let answer = call.agent(arguments.sandbox_id.as_str()).await?.metrics().await?;
    let number = |key: &str| answer.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    Ok(Metrics {
        cpu_count: number("cpu_count"),
        cpu_used_percentage: number("cpu_used_pct"),
        memory_total_in_mib: number("mem_total_mib"),
        memory_used_in_mib: number("mem_used_mib"),
        timestamp: answer.get("timestamp").and_then(Value::as_i64).unwrap_or(0),
    })
}

pub async fn healthcheck(call: Call, arguments: SandboxOnly) -> Result<Health, Failure> {
    let id = arguments.sandbox_id.as_str();
    let sandbox = call.client().get(id).await?;
    let answered = async { call.agent(id).await?.ping().await.map_err(Failure::from) };
    let reason = match answered.await {
        Ok(()) => None,
        Err(failure) => Some(format!("{}; {}", readiness::describe(&sandbox), failure.message())),
    };
    Ok(Health { sandbox_id: id.to_owned(), healthy: reason.is_none(), reason })
}

pub async fn get_endpoint(call: Call, arguments: SandboxEndpoint) -> Result<EndpointInfo, Failure> {
    let route = if arguments.use_server_proxy { Route::ThroughServer } else { Route::Default };
    let client = call.client();
    let found = client.endpoint(arguments.sandbox_id.as_str(), arguments.port, route).await?;
    let key = client.profile().key();
    // The endpoint's own headers open one port of one sandbox; the key would open everything.
    let harmless = |value: &str| key.is_none_or(|key| !value.contains(key.expose()));
    Ok(EndpointInfo {
        url: format!("{}://{}", client.profile().scheme(), found.address),
        endpoint: found.address,
        headers: found.headers.into_iter().filter(|(_, value)| harmless(value)).collect(),
    })
}

pub async fn diagnostics(call: Call, arguments: SandboxDiagnostics) -> Result<Diagnostics, Failure> {
    let id = arguments.sandbox_id.as_str();
    let lines = arguments.lines.clamp(1, 500).to_string();
    let (part, query) = match arguments.kind {
        Diagnosis::Logs => ("logs", vec![("tail", lines)]),
        Diagnosis::Events => ("events", vec![("limit", lines)]),
        Diagnosis::Summary => ("summary", vec![("tail", lines.clone()), ("event_limit", lines)]),
    };
    let text = call.client().text(&["sandboxes", id, "diagnostics", part], &query).await?;
    let mut excerpt = Excerpt::new(DIAGNOSIS_BYTES);
    excerpt.push(text.as_bytes());
    Ok(Diagnostics { sandbox_id: id.to_owned(), content: excerpt.finish() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(arguments: Value) -> Result<Value, Failure> {
        creation(serde_json::from_value(arguments).unwrap())
    }

    #[test]
    fn a_create_with_an_image_only_has_the_usual_defaults() {
        let expected = json!({
            "image": { "uri": "tools:1" }, "timeout": 600, "entrypoint": ["tail", "-f", "/dev/null"],
            "resourceLimits": { "cpu": "1", "memory": "2Gi" },
        });
        assert_eq!(body(json!({ "image": "tools:1" })).unwrap(), expected);
    }

    #[test]
    fn everything_that_is_given_is_sent() {
        let sent = body(json!({
            "image": "tools:1", "auth_username": "u", "auth_password": "p", "timeout_seconds": 90.5,
            "env": { "A": "b" }, "metadata": { "k": "v" }, "resource": { "memory": "64Mi" },
            "network_policy": { "egress": [{ "action": "allow", "target": "*.example.com" }] },
            "extensions": { "sandglass.entrypoint": "none" },
        }));
        let expected = json!({
            "image": { "uri": "tools:1", "auth": { "username": "u", "password": "p" } }, "timeout": 91,
            "env": { "A": "b" }, "metadata": { "k": "v" }, "resourceLimits": { "memory": "64Mi" },
            "networkPolicy": {
                "defaultAction": "deny", "egress": [{ "action": "allow", "target": "*.example.com" }]
            },
            "extensions": { "sandglass.entrypoint": "none" },
        });
        assert_eq!(sent.unwrap(), expected);
    }

    #[test]
    fn a_snapshot_takes_the_place_of_an_image() {
        let sent = body(json!({ "snapshot_id": "s-1", "timeout_seconds": null })).unwrap();
        assert_eq!(
            (sent.get("image"), sent.get("timeout"), &sent["snapshotId"]),
            (None, None, &json!("s-1"))
        );
        for wrong in [json!({}), json!({ "image": " " }), json!({ "image": "a", "snapshot_id": "b" })] {
            assert_eq!(body(wrong).unwrap_err().code(), "INVALID_ARGUMENTS");
        }
    }

    #[test]
    fn half_a_login_and_impossible_times_are_refused() {
        for wrong in [
            json!({ "image": "a", "auth_username": "u" }),
            json!({ "snapshot_id": "a", "auth_username": "u", "auth_password": "p" }),
            json!({ "image": "a", "timeout_seconds": -1 }),
        ] {
            assert_eq!(body(wrong).unwrap_err().code(), "INVALID_ARGUMENTS");
        }
    }
}
