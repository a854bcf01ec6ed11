//! Pushes that code hosts tell prebuilds of. Anybody reaches this, so every check that needs no body comes before the body.

use axum::{
    body::Body,
    extract::{Path, Request, State},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt;

use super::{
    App,
    build_errors::{builds, of_build, unavailable},
    error::{ApiError, ApiResult, Code},
    parse::BODY_PATIENCE,
    prebuilds,
};
use crate::builds::{Push, Pushed, Webhook};

/// Bytes of a body: pushes of large repositories are announced with all their commits.
const PUSH: u64 = 5 << 20;
/// Seconds after which there may be room for another push.
const RETRY: u32 = 5;

/// `POST /prebuilds/{id}/webhook`
pub async fn accept(
    State(app): State<App>,
    Path(id): Path<String>,
    request: Request,
) -> ApiResult<StatusCode> {
    let builds = builds(&app)?;
    let (head, body) = request.into_parts();
    if webhook_of(&head.headers).is_none() {
        return Err(unsigned());
    }
    if told_length(&head.headers).is_some_and(|length| length > PUSH) {
        return Err(too_large());
    }
    // Nobody learns from the answer which prebuilds there are.
    let row = prebuilds::any(&builds, &id).await.map_err(|error| match error.status {
        StatusCode::NOT_FOUND => unsigned(),
        _ => error,
    })?;
    let (handle, id) = (builds.clone(), row.id);
    let opened = tokio::task::spawn_blocking(move || match webhook_of(&head.headers) {
        Some(webhook) => handle.open_push(id, &webhook),
        None => Ok(Pushed::Unsigned),
    });
    match opened.await {
        Ok(Ok(Pushed::Signed)) => {}
        Ok(Ok(Pushed::Open(push))) => read(push, body).await?,
        Ok(Ok(Pushed::Unsigned)) => return Err(unsigned()),
        Ok(Ok(Pushed::Busy)) => {
            let busy = unavailable("too many pushes are being read at the moment; send it again");
            return Err(busy.with_header(header::RETRY_AFTER, HeaderValue::from(RETRY)));
        }
        Ok(Err(error)) => {
            tracing::warn!(%error, "the secret of a webhook cannot be read");
            return Err(unavailable("the push cannot be checked at the moment"));
        }
        Err(_) => return Err(ApiError::internal()),
    }
    if row.enabled {
        builds.driver().pushed(id).await.map_err(|error| of_build(error, &builds))?;
    }
    Ok(StatusCode::ACCEPTED)
}

/// Reads the body to its end and keeps nothing of it.
async fn read(mut push: Box<Push>, mut body: Body) -> ApiResult<()> {
    let whole = async {
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| too_large())?;
            let Ok(piece) = frame.into_data() else { continue };
            length += piece.len() as u64;
            if length > PUSH {
                return Err(too_large());
            }
            push.update(&piece);
        }
        if push.signed() { Ok(()) } else { Err(unsigned()) }
    };
    let late = |_| ApiError::new(Code::BodyTooSlow, "the push did not arrive in time");
    tokio::time::timeout(BODY_PATIENCE, whole).await.map_err(late)?
}

fn unsigned() -> ApiError {
    ApiError::new(Code::WebhookUnsigned, "the push is not signed with the prebuild's secret")
}

fn too_large() -> ApiError {
    ApiError::new(Code::BodyTooLarge, "the push is larger than 5 MiB or was cut off")
}

fn told_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The signature that the request carries, whichever host sent it.
fn webhook_of(headers: &HeaderMap) -> Option<Webhook<'_>> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    text("x-hub-signature-256")
        .map(Webhook::Prefixed)
        .or_else(|| text("x-gitea-signature").map(Webhook::Bare))
        .or_else(|| text("x-gitlab-token").map(Webhook::Token))
}
