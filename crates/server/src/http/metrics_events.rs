//! What clients tell about their creates. Cheap, because every create sends one.

use http::StatusCode;

use super::{decode, error::ApiResult, parse::RawBody};

/// `POST /v1/metrics/events`
pub async fn accept(body: RawBody) -> ApiResult<StatusCode> {
    decode::small::metrics_event(&body.required()?)?;
    Ok(StatusCode::NO_CONTENT)
}
