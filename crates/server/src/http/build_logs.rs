//! The log of an image build, as text or as server-sent events, from wherever the reader wants, as it grows.

use axum::{
    body::{Body, Bytes},
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use http::{HeaderMap, Uri, header};
use sandglass_builds::build::StepName;
use sandglass_sandbox::Timestamp;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    App,
    build_errors::{builds, of_log},
    error::{ApiError, ApiResult},
    image_builds::{event_stream, find},
    parse::QueryString,
};
use crate::{
    builds::{Follower, LogError, Piece, Until},
    tenants::Principal,
};

/// What of the log is wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Wanted {
    step: Option<StepName>,
    not_before: Option<Timestamp>,
}

/// `GET /image-builds/{id}/logs`
pub async fn read(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    let query = QueryString::parse(uri.query());
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let as_events = accepted.contains("text/event-stream");
    let mut wanted = Wanted { step: step(&query)?, not_before: None };
    let mut from = 0;
    if let Some(text) = query.last("since") {
        match (text.parse(), text.parse::<jiff::Timestamp>()) {
            (Ok(offset), _) => from = offset,
            (_, Ok(at)) => wanted.not_before = Some(Timestamp::clamped(at.as_millisecond())),
            _ => return Err(ApiError::invalid_parameter("since must be an offset or an RFC 3339 instant")),
        }
    }
    if let Some(text) = query.last("tail") {
        let lines =
            text.parse().map_err(|_| ApiError::invalid_parameter("tail must be a number of lines"))?;
        from = builds.logs().tail_offset(id, lines).await.map_err(of_log)?.max(from);
    }
    // What a reader that comes back has seen counts most.
    let seen = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let from = seen.filter(|_| as_events).unwrap_or(from);
    let follow = matches!(query.last("follow"), Some("" | "true" | "1"));
    let until = if follow { Until::Sealed } else { Until::Now };
    let follower = match builds.logs().follow(id, from, until).await {
        Ok(follower) => Some(follower),
        // Nothing was written, and the build is there.
        Err(LogError::NotFound) => None,
        Err(error) => return Err(of_log(error)),
    };
    let reader = Reader { follower, wanted, as_events, closing: app.engine.closing().clone() };
    let frames = stream::unfold(reader, |mut reader| async {
        let frame = reader.next().await?;
        Some((Ok::<_, std::convert::Infallible>(frame), reader))
    });
    let body = Body::from_stream(frames);
    if as_events {
        return Ok(event_stream(body));
    }
    let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, body).into_response())
}

fn step(query: &QueryString) -> ApiResult<Option<StepName>> {
    let Some(word) = query.last("step").filter(|word| !word.is_empty()) else { return Ok(None) };
    let known = StepName::of_word(word);
    known.map(Some).ok_or_else(|| ApiError::invalid_parameter("step is not one of a build's steps"))
}

struct Reader {
    /// `None` at the end.
    follower: Option<Follower>,
    wanted: Wanted,
    as_events: bool,
    closing: CancellationToken,
}

impl Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let follower = self.follower.as_mut()?;
            let next = tokio::select! {
                next = follower.next() => next,
                () = self.closing.cancelled() => return None,
            };
            let piece = match next {
                Ok(Some(piece)) => piece,
                Ok(None) | Err(_) => {
                    let position = follower.position();
                    self.follower = None;
                    if self.as_events {
                        return Some(Bytes::from(format!("id: {position}\nevent: end\ndata: {{}}\n\n")));
                    }
                    return None;
                }
            };
            if self.wanted.takes(&piece) {
                return Some(if self.as_events { frame(&piece) } else { Bytes::from(piece.text()) });
            }
        }
    }
}

impl Wanted {
    fn takes(&self, piece: &Piece) -> bool {
        match piece {
            Piece::Output { step, at, .. } => {
                self.step.is_none_or(|wanted| wanted == *step)
                    && self.not_before.is_none_or(|wanted| wanted <= *at)
            }
            Piece::Elided { .. } => true,
        }
    }
}

fn frame(piece: &Piece) -> Bytes {
    let (event, data) = match piece {
        Piece::Output { offset, step, at, bytes } => {
            let text = String::from_utf8_lossy(bytes);
            let at = sandglass_api::WireTime::from(*at);
            ("output", json!({ "offset": offset, "step": step.word(), "time": at, "text": text }))
        }
        Piece::Elided { from, to } => ("elided", json!({ "from": from, "to": to })),
    };
    Bytes::from(format!("id: {}\nevent: {event}\ndata: {data}\n\n", piece.end()))
}
