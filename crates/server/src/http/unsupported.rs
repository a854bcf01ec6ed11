//! Routes of later capabilities: the request is validated, then refused with the code documented for a runtime that lacks them.

use axum::{
    Json,
    extract::{Path, State},
    response::IntoResponse,
};
use http::Uri;
use sandglass_api::{lifecycle::Snapshot, page::Page};
use sandglass_sandbox::lifecycle::state::State as SandboxState;

use super::{
    App, decode,
    error::{ApiError, ApiResult, Code},
    filters,
    parse::{QueryString, RawBody},
};
use crate::tenants::Principal;

/// `POST /sandboxes/{id}/snapshots`
pub async fn create_snapshot(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<()> {
    decode::small::snapshot(body.optional()?.as_ref())?;
    let entry = app.find(&principal, &id)?;
    match entry.status().map(|s| s.state) {
        Some(SandboxState::Running) => Err(ApiError::new(
            Code::SnapshotNotImplemented,
            "snapshots are not available on the embedded runtime",
        )),
        _ => {
            Err(ApiError::new(Code::SnapshotInvalidSourceState, "only a running sandbox can be snapshotted"))
        }
    }
}

/// `GET /snapshots`: there are none.
pub async fn list_snapshots(uri: Uri) -> ApiResult<Json<Page<Snapshot>>> {
    Ok(Json(filters::page(&QueryString::parse(uri.query()))?.cut(Vec::new())))
}

/// `GET` and `DELETE /snapshots/{id}`
pub async fn get_snapshot() -> ApiError {
    ApiError::new(Code::SnapshotNotFound, "snapshot not found")
}

fn no_policy(app: &App, principal: &Principal, id: &str) -> ApiError {
    match app.find(principal, id) {
        Ok(_) => {
            ApiError::new(Code::NotAvailable, "network policies are not available on the embedded runtime")
        }
        Err(e) => e,
    }
}

/// `GET /sandboxes/{id}/networkpolicy`
pub async fn read_policy(State(app): State<App>, principal: Principal, Path(id): Path<String>) -> ApiError {
    no_policy(&app, &principal, &id)
}

/// `PUT /sandboxes/{id}/networkpolicy`
pub async fn replace_policy(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<()> {
    decode::small::policy(&body.required()?)?;
    Err(no_policy(&app, &principal, &id))
}

/// `PATCH /sandboxes/{id}/networkpolicy`
pub async fn patch_policy(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<()> {
    decode::small::rules(&body.required()?)?;
    Err(no_policy(&app, &principal, &id))
}

/// `DELETE /sandboxes/{id}/networkpolicy`
pub async fn delete_policy(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<()> {
    decode::small::targets(&body.required()?)?;
    Err(no_policy(&app, &principal, &id))
}

/// Every pool route without a body.
pub async fn no_pools() -> impl IntoResponse {
    ApiError::new(Code::PoolNotSupported, "pools are not available on the embedded runtime")
}

/// `POST /pools`
pub async fn create_pool(body: RawBody) -> ApiResult<()> {
    decode::small::new_pool(&body.required()?)?;
    Err(ApiError::new(Code::PoolNotSupported, "pools are not available on the embedded runtime"))
}

/// `PUT /pools/{name}`
pub async fn update_pool(body: RawBody) -> ApiResult<()> {
    decode::small::resized_pool(&body.required()?)?;
    Err(ApiError::new(Code::PoolNotSupported, "pools are not available on the embedded runtime"))
}

/// Every template route without a body.
pub async fn no_templates() -> impl IntoResponse {
    ApiError::new(Code::TemplatesNotSupported, "templates are not available on the embedded runtime")
}

/// `POST /templates`
pub async fn create_template(body: RawBody) -> ApiResult<()> {
    decode::small::template(&body.required()?)?;
    Err(ApiError::new(Code::TemplatesNotSupported, "templates are not available on the embedded runtime"))
}
