//! `GET /metrics`: everything that is counted and measured, for Prometheus.
//!
//! It belongs to whoever runs the server: behind the key, and not for tenants, unless `server.open_metrics` opens it to all.

use axum::{
    extract::{FromRequestParts as _, Request, State},
    response::{IntoResponse, Response},
};
use http::header::CONTENT_TYPE;

use super::{App, middleware::auth::Operator};
use crate::telemetry::metrics::prometheus;

/// The page.
pub async fn page(State(app): State<App>, request: Request) -> Response {
    if !app.config.server.open_metrics {
        let (mut parts, _) = request.into_parts();
        if let Err(refusal) = Operator::from_request_parts(&mut parts, &app).await {
            return refusal.into_response();
        }
    }
    let families = app.telemetry.metrics.families(Some(&app.engine));
    ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], prometheus::page(&families)).into_response()
}
