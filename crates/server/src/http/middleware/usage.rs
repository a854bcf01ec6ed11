//! Calls that count as use of a sandbox without going through its proxy: they extend its life when it was created so.

use axum::{
    extract::{Path, Request, State},
    middleware::Next,
    response::Response,
};

use crate::{http::App, tenants::Principal};

/// Counts the call when there is such a sandbox for this caller, whatever the call comes to.
pub async fn count(
    State(app): State<App>,
    Path(id): Path<String>,
    principal: Principal,
    request: Request,
    next: Next,
) -> Response {
    if app.find(&principal, &id).is_ok() {
        app.used(request.headers(), &id);
    }
    next.run(request).await
}
