//! Pushes that code hosts tell prebuilds of. Anybody reaches this, so nothing that a stranger does may keep the hosts out.
//!
//! Everybody gets a place, the one that waited longest loses its own when there are too many, and none has one for longer than hosts wait for an
//! answer. Invariant: without the secret nobody can tell a prebuild that is not there from one that is. Both are looked up, read and hashed under
//! the same bounds, and answered alike.

use std::time::Duration;

use axum::{
    body::Body,
    extract::{Path, Request, State},
};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use sandglass_sandbox::PrebuildId;

use super::{
    App,
    build_errors::{builds, of_build, unavailable},
    error::{ApiError, ApiResult, Code},
};
use crate::{
    builds::{Builds, Prebuild, Push, PushPlace, Pushed, Webhook},
    ingress::Observed,
};

/// Bytes of a body: pushes of large repositories are announced with all their commits.
const PUSH: u64 = 5 << 20;
/// For a push to be there and checked: the common hosts wait no longer for the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Seconds after which a push that gave way may be sent again.
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
    let Ok(id) = id.parse() else { return Err(unsigned()) };
    let place = builds.place_for_push(Observed::of(&head.headers, &head.extensions).client);
    let prebuild = in_time(place, check(&builds, id, (head.headers, body))).await?;
    if prebuild.enabled {
        builds.driver().pushed(id).await.map_err(|error| of_build(error, &builds))?;
    }
    Ok(StatusCode::ACCEPTED)
}

/// What comes of a push that is still read when its time is over, or its place needed.
async fn in_time<T>(place: PushPlace, checked: impl Future<Output = ApiResult<T>>) -> ApiResult<T> {
    let late = |_| ApiError::new(Code::BodyTooSlow, "the push did not arrive in time");
    tokio::select! {
        // What is there already needs its place no more.
        biased;
        checked = tokio::time::timeout(PATIENCE, checked) => checked.map_err(late)?,
        () = place.put_out() => {
            let busy = unavailable("too many pushes are being read at the moment; send it again");
            Err(busy.with_header(header::RETRY_AFTER, HeaderValue::from(RETRY)))
        }
    }
}

/// The prebuild whose secret the push was signed with.
async fn check(builds: &Builds, id: PrebuildId, (headers, body): (HeaderMap, Body)) -> ApiResult<Prebuild> {
    let row = builds.store().prebuild(id).await.map_err(|error| of_build(error.into(), builds))?;
    let handle = builds.clone();
    let opened = tokio::task::spawn_blocking(move || match webhook_of(&headers) {
        Some(webhook) => handle.open_push(id, &webhook),
        None => Ok(Pushed::Unsigned),
    });
    let signed = match opened.await {
        Ok(Ok(Pushed::Signed)) => true,
        Ok(Ok(Pushed::Open(push))) => read(push, body).await?,
        Ok(Ok(Pushed::Unsigned)) => false,
        Ok(Err(error)) => {
            tracing::warn!(%error, "the secret of a webhook cannot be read");
            return Err(unavailable("the push cannot be checked at the moment"));
        }
        Err(_) => return Err(ApiError::internal()),
    };
    row.filter(|_| signed).ok_or_else(unsigned)
}

/// Reads the body to its end and keeps nothing of it. Whether it was signed.
async fn read(mut push: Box<Push>, mut body: Body) -> ApiResult<bool> {
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
    Ok(push.signed())
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

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::builds::PushPlaces;

    #[tokio::test(start_paused = true)]
    async fn a_push_that_does_not_come_to_its_end_is_given_up() {
        let places = PushPlaces::default();
        let begun = tokio::time::Instant::now();
        let late = in_time(places.take(None), pending::<ApiResult<()>>()).await.unwrap_err();
        assert_eq!((late.status, begun.elapsed() >= PATIENCE), (StatusCode::REQUEST_TIMEOUT, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_push_gives_way_to_newer_ones_unless_it_is_there() {
        let places = PushPlaces::default();
        let crowded = || {
            let place = places.take(None);
            (place, (0..64).map(|_| places.take(None)).collect::<Vec<_>>())
        };
        let (place, _others) = crowded();
        let begun = tokio::time::Instant::now();
        let busy = in_time(place, pending::<ApiResult<()>>()).await.unwrap_err();
        assert_eq!((busy.status, begun.elapsed()), (StatusCode::SERVICE_UNAVAILABLE, Duration::ZERO));
        let (place, _more) = crowded();
        assert!(in_time(place, ready(Ok(()))).await.is_ok());
    }
}
