//! What concerns sandboxes that are made from repositories.

use axum::{
    Json, Router,
    extract::{
        Path, Query, State,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade},
    },
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde_json::{Value, json};

use super::{ID, Params, Shared, refused};

pub const BUILD: &str = "33333333-2222-4333-8444-555555555555";
pub const IMAGE: &str = "44444444-2222-4333-8444-555555555555";

pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/sandboxes/{id}/events", get(events))
        .route("/v1/sandboxes/{id}/services/{name}", put(switch))
        .route("/v1/sandboxes/{id}/services/{name}/logs", get(log))
        .route("/v1/sandboxes/{id}/services/{name}/access", post(access))
        .route("/v1/sandboxes/{id}/services/{name}/tunnel", get(tunnel))
        .route("/v1/image-builds", post(order).get(builds))
        .route("/v1/image-builds/{id}", get(build).delete(build))
        .route("/v1/image-builds/{id}/logs", get(build_log))
        .route("/v1/images", get(images))
        .route("/v1/images/{id}", axum::routing::delete(remove_image))
}

fn next(list: &mut Vec<String>) -> Response {
    if list.is_empty() {
        return StatusCode::NO_CONTENT.into_response();
    }
    ([(header::CONTENT_TYPE, "text/event-stream")], list.remove(0)).into_response()
}

async fn events(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    let mut seen = shared.0.lock().unwrap();
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()).unwrap_or("none").to_owned();
    seen.requests.push(format!("events after {last}"));
    next(&mut seen.events)
}

async fn switch(
    State(shared): State<Shared>,
    Path((_, name)): Path<(String, String)>,
    Json(body): Json<Value>,
) -> Json<Value> {
    shared.0.lock().unwrap().bodies.push(body);
    Json(json!({ "name": name, "state": "Starting" }))
}

async fn access(
    State(shared): State<Shared>,
    Path((id, name)): Path<(String, String)>,
    Json(body): Json<Value>,
) -> Response {
    let certified = body.get("publicKey").cloned();
    shared.0.lock().unwrap().bodies.push(body);
    let credential = match (name.as_str(), certified) {
        ("ssh", Some(_)) => {
            json!({ "type": "sshCertificate", "certificate": "ssh-ed25519-cert-v01@openssh.com AAAAcert",
                                    "hostKey": { "publicKey": "ssh-ed25519 AAAAhost", "fingerprint": "SHA256:x" } })
        }
        ("ssh", None) => {
            return refused(StatusCode::BAD_REQUEST, "SANDBOX::INVALID_PARAMETER", "publicKey is missing");
        }
        _ => json!({ "type": "url", "url": format!("http://h/{id}/{name}?signature=s") }),
    };
    Json(json!({ "endpoint": { "endpoint": "h", "headers": {} }, "credential": credential, "expiresAt": "2030-01-01T00:00:00Z" })).into_response()
}

/// Sends back what it gets, in capitals, and ends when its client has no more.
async fn tunnel(Path((id, name)): Path<(String, String)>, upgrade: WebSocketUpgrade) -> Response {
    match (id.as_str(), name.as_str()) {
        (ID, "ssh") => upgrade.on_upgrade(|socket| echo(socket, None)),
        (ID, "broken") => upgrade.on_upgrade(|socket| echo(socket, Some("the port was closed"))),
        _ => refused(StatusCode::NOT_FOUND, "SERVICE::NOT_FOUND", "the sandbox has no such service"),
    }
}

async fn echo(mut socket: WebSocket, breaks: Option<&'static str>) {
    let (mut code, mut reason) = (1000, "");
    while let Some(Ok(message)) = socket.recv().await {
        let Message::Binary(bytes) = message else { continue };
        if let Some(why) = breaks {
            (code, reason) = (1011, why);
            break;
        }
        if bytes.is_empty() {
            break;
        }
        let loud = bytes.to_ascii_uppercase();
        socket.send(Message::Binary(loud.into())).await.unwrap();
    }
    let farewell = Message::Close(Some(CloseFrame { code, reason: reason.into() }));
    if socket.send(farewell).await.is_ok() {
        while let Some(Ok(_)) = socket.recv().await {}
    }
}

async fn order(State(shared): State<Shared>, Json(body): Json<Value>) -> Response {
    let mut seen = shared.0.lock().unwrap();
    seen.bodies.push(body);
    let status = if seen.build["cache"]["hit"] == true { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, Json(shown(&seen.build))).into_response()
}

fn shown(build: &Value) -> Value {
    let mut shown = json!({ "id": BUILD, "status": { "state": "Running" }, "repository": { "url": "https://h/a/b", "commit": "0123456789abcdef" },
                            "recipe": "none", "cache": { "hit": false }, "createdAt": "2020-01-01T00:00:00Z" });
    for (name, value) in build.as_object().into_iter().flatten() {
        shown[name] = value.clone();
    }
    shown
}

async fn builds(State(shared): State<Shared>) -> Json<Value> {
    Json(json!({ "items": [shown(&shared.0.lock().unwrap().build)], "pagination": { "hasNextPage": false } }))
}

async fn build(State(shared): State<Shared>) -> Json<Value> {
    Json(shown(&shared.0.lock().unwrap().build))
}

async fn build_log(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    if headers.get(header::ACCEPT).is_none_or(|accepted| accepted != "text/event-stream") {
        return "plain log\n".into_response();
    }
    next(&mut shared.0.lock().unwrap().build_log)
}

async fn images() -> Json<Value> {
    let image = json!({ "id": IMAGE, "repositoryKey": "h/a/b", "commits": { "/workspace/b": "0123456789abcdef" }, "tags": ["latest"],
                        "state": "Ready", "sandboxCount": 1, "sizeBytes": 2048, "lastUsedAt": "2020-01-01T00:00:00Z" });
    Json(json!({ "items": [image], "pagination": { "hasNextPage": false } }))
}

async fn remove_image() -> StatusCode {
    StatusCode::ACCEPTED
}

async fn log(Path((_, name)): Path<(String, String)>, Query(query): Params) -> Response {
    if name != "web" {
        return refused(StatusCode::NOT_FOUND, "SERVICE::NOT_FOUND", "the sandbox has no such service");
    }
    let text = "one\ntwo\n";
    let from = match query.get("tail") {
        Some(lines) => text.len() - 4 * lines.parse::<usize>().unwrap(),
        None => query["from"].parse::<usize>().unwrap().min(text.len()),
    };
    let headers = [("x-log-offset", from.to_string()), ("x-log-next", text.len().to_string())];
    (headers, text[from..].to_owned()).into_response()
}
