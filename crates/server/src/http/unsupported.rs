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
        Some(SandboxState::Running) => {
            Err(ApiError::new(Code::SnapshotNotImplemented, "snapshots are not available on this runtime"))
        }
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

/// Every pool route without a body.
pub async fn no_pools() -> impl IntoResponse {
    ApiError::new(Code::PoolNotSupported, "pools are not available on this runtime")
}

/// `POST /pools`
pub async fn create_pool(body: RawBody) -> ApiResult<()> {
    decode::small::new_pool(&body.required()?)?;
    Err(ApiError::new(Code::PoolNotSupported, "pools are not available on this runtime"))
}

/// `PUT /pools/{name}`
pub async fn update_pool(body: RawBody) -> ApiResult<()> {
    decode::small::resized_pool(&body.required()?)?;
    Err(ApiError::new(Code::PoolNotSupported, "pools are not available on this runtime"))
}

/// Every template route without a body.
pub async fn no_templates() -> impl IntoResponse {
    ApiError::new(Code::TemplatesNotSupported, "templates are not available on this runtime")
}

/// `POST /templates`
pub async fn create_template(body: RawBody) -> ApiResult<()> {
    decode::small::template(&body.required()?)?;
    Err(ApiError::new(Code::TemplatesNotSupported, "templates are not available on this runtime"))
}
