//! Whether the server lives, and whether it can do its work.

use std::time::Duration;

use axum::response::IntoResponse;
use axum::{Json, extract::State, response::Response};
use http::StatusCode;
use sandglass_api::lifecycle::{Health, Version};
use serde_json::json;

use super::App;

/// `GET /health`, `GET /healthz`: the process answers.
pub async fn alive() -> Json<Health> {
    Json(Health { status: "healthy".to_owned() })
}

/// `GET /version`
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").to_owned() })
}

/// A probe must not wait as long as a runtime may.
const PROBE: Duration = Duration::from_secs(2);

/// Whether the runtime answers, by what the engine knows, else by asking it.
async fn runtime_answers(app: &App) -> bool {
    let probe = app.engine.runtime().inspect(sandglass_sandbox::SandboxId::random());
    app.engine.reachable().is_ok() && tokio::time::timeout(PROBE, probe).await.is_ok_and(|seen| seen.is_ok())
}

/// `GET /readyz`: the store and the runtime can be read. 503 says which cannot.
pub async fn ready(State(app): State<App>) -> Response {
    let store = app.engine.store().open_intents().await;
    let intents = store.as_ref().map_or(0, Vec::len);
    let runtime = runtime_answers(&app).await;
    let ok = store.is_ok() && runtime;
    let word = |ok: bool| if ok { "ok" } else { "unavailable" };
    let mut body = json!({
        "status": if ok { "ready" } else { "unavailable" },
        "checks": { "store": word(store.is_ok()), app.engine.runtime().name(): word(runtime) },
        "sandboxes": app.engine.index().census(),
        "openIntents": intents,
    });
    // What is outdated still serves, so it is said and does not count.
    if let Some(current) = app.telemetry.metrics.certificate_is_current() {
        body["checks"]["certificate"] = json!(if current { "ok" } else { "outdated" });
    }
    let status = if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}
