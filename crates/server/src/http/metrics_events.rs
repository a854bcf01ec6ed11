//! What clients tell about their creates. Cheap, because every create sends one.

use axum::extract::State;
use http::{HeaderMap, StatusCode, header::USER_AGENT};

use super::{App, decode, error::ApiResult, parse::RawBody};
use crate::telemetry::metrics::Sdk;

/// `POST /v1/metrics/events`
pub async fn accept(State(app): State<App>, headers: HeaderMap, body: RawBody) -> ApiResult<StatusCode> {
    let event = decode::small::metrics_event(&body.required()?)?;
    let sdk = Sdk::of(headers.get(USER_AGENT).and_then(|value| value.to_str().ok()));
    app.telemetry.metrics.creates.record(sdk, event.success, event.took);
    Ok(StatusCode::NO_CONTENT)
}
