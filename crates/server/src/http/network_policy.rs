//! The network policy of a running sandbox: checked here, kept and enforced by the sandbox's egress sidecar.

use axum::{
    body::Body,
    extract::{Path, State},
    response::Response,
};
use bytes::Bytes;
use http::{Method, Uri};

use super::{
    App, decode, engine_errors,
    error::{ApiError, ApiResult, Code},
    parse::RawBody,
};
use crate::{ingress::PolicyRequest, tenants::Principal};

/// `GET /sandboxes/{id}/networkpolicy`
pub async fn read(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Response> {
    ask(&app, &principal, &id, (Method::GET, &uri), Bytes::new()).await
}

/// `PUT /sandboxes/{id}/networkpolicy`
pub async fn replace(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
    body: RawBody,
) -> ApiResult<Response> {
    decode::small::policy(&body.required()?)?;
    ask(&app, &principal, &id, (Method::PUT, &uri), body.bytes).await
}

/// `PATCH /sandboxes/{id}/networkpolicy`
pub async fn patch(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
    body: RawBody,
) -> ApiResult<Response> {
    decode::small::rules(&body.required()?)?;
    ask(&app, &principal, &id, (Method::PATCH, &uri), body.bytes).await
}

/// `DELETE /sandboxes/{id}/networkpolicy`
pub async fn delete(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
    body: RawBody,
) -> ApiResult<Response> {
    decode::small::targets(&body.required()?)?;
    ask(&app, &principal, &id, (Method::DELETE, &uri), body.bytes).await
}

async fn ask(
    app: &App,
    principal: &Principal,
    id: &str,
    (method, uri): (Method, &Uri),
    body: Bytes,
) -> ApiResult<Response> {
    let entry = app.find(principal, id)?;
    if app.rules.runtime.policies.is_none() {
        let message =
            format!("network policies are not available on the {} runtime", app.engine.runtime().name());
        return Err(ApiError::new(Code::NotAvailable, message));
    }
    let target = app.target(&entry).ok_or_else(ApiError::sandbox_not_found)?;
    let asked = PolicyRequest { method, query: uri.query(), body };
    let answer = app.ingress.policy(&entry.id.to_string(), &target, asked).await;
    Ok(answer.map_err(engine_errors::of_refusal)?.map(Body::new))
}
