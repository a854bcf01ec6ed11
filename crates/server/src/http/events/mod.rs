//! What happened to a sandbox: a page of its history, or a stream of it.
//!
//! Also for a sandbox that is gone, as long as its history is kept.

mod stream;
pub(crate) mod translate;

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Uri, header};
use sandglass_api::lifecycle::SandboxEventPage;
use sandglass_sandbox::SandboxId;

use super::{
    App,
    error::{ApiError, ApiResult},
    fields::Findings,
    parse::QueryString,
};
use crate::{
    engine::commit::EngineError,
    http::middleware::auth::given_key,
    tenants::{Caller, Principal},
};

const DEFAULT_LIMIT: i64 = 100;
const MAX_LIMIT: i64 = 1000;
/// Lines read at once.
const CHUNK: u32 = 500;
/// Chunks looked through for one page, so that a rare type in a long history costs several requests and not one long one.
const CHUNKS: u32 = 20;

/// Which types of events are wanted; none given: all.
#[derive(Clone, Debug, Default)]
struct Types(Vec<String>);

impl Types {
    /// `a.b,c,d.*`: types, and families of them.
    fn parse(query: &QueryString) -> Self {
        let words = query.all("types").flat_map(|text| text.split(',')).map(str::trim);
        Self(words.filter(|word| !word.is_empty()).map(|w| w.trim_end_matches(".*").to_owned()).collect())
    }

    fn contain(&self, name: &str) -> bool {
        let family = name.split('.').next().unwrap_or(name);
        self.0.is_empty() || self.0.iter().any(|wanted| wanted == name || wanted == family)
    }
}

struct Asked {
    /// `None`: not said, so a stream begins now and a page at the beginning.
    after: Option<u64>,
    limit: usize,
    types: Types,
}

fn asked(query: &QueryString) -> ApiResult<Asked> {
    let mut findings = Findings::new("query");
    let mut number = |name: &str, least: i64, most: i64| match query.last(name) {
        None => Some(None),
        Some(text) => findings.within(name, |f| f.integer_text(text, least, most)).map(Some),
    };
    let after = number("after", 0, i64::MAX);
    let limit = number("limit", 1, MAX_LIMIT);
    let (after, limit) = findings.finish(after.zip(limit))?;
    Ok(Asked {
        after: after.and_then(|n| u64::try_from(n).ok()),
        limit: usize::try_from(limit.unwrap_or(DEFAULT_LIMIT)).unwrap_or(1),
        types: Types::parse(query),
    })
}

fn wants_stream(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .any(|part| {
            part.split(';').next().is_some_and(|t| t.trim().eq_ignore_ascii_case("text/event-stream"))
        })
}

/// The sandbox, living or gone, if this caller may know of it.
async fn subject(app: &App, principal: &Principal, id: &str) -> ApiResult<SandboxId> {
    let not_found = match app.find(principal, id) {
        Ok(entry) => return Ok(entry.id),
        Err(error) => error,
    };
    let Ok(id) = id.parse::<SandboxId>() else { return Err(not_found) };
    if app.engine.find(&id.to_string()).is_ok() {
        // It lives, and belongs to somebody else.
        return Err(not_found);
    }
    if app.engine.store().history_bounds(id).await.map_err(EngineError::from)?.is_none() {
        return Err(not_found);
    }
    if principal.tenant().is_some() {
        let owner = app.engine.past_owner(id).await.map_err(EngineError::from)?;
        if !principal.may_see(owner.as_deref()) {
            return Err(not_found);
        }
    }
    Ok(id)
}

/// `GET /sandboxes/{id}/events`
pub async fn events(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let asked = asked(&QueryString::parse(uri.query()))?;
    let id = subject(&app, &principal, &id).await?;
    if !wants_stream(&headers) {
        return Ok(Json(page(&app, id, asked).await?).into_response());
    }
    // The header is what a client sends by itself when it connects again.
    let position = match headers.get("last-event-id") {
        // What was never an id of ours is a position that is not kept.
        Some(text) => Some(text.to_str().ok().and_then(|t| t.trim().parse().ok()).unwrap_or(u64::MAX)),
        None => asked.after,
    };
    let given = given_key(&headers);
    let caller = Caller::new(app.keys.clone(), given, principal);
    stream::open(&app, caller, id, position, asked.types).await
}

async fn page(app: &App, id: SandboxId, asked: Asked) -> ApiResult<SandboxEventPage> {
    let mut items = Vec::new();
    let mut cursor = asked.after.unwrap_or(0);
    'read: for _ in 0..CHUNKS {
        let lines = app.engine.store().history_after(id, cursor, CHUNK).await.map_err(EngineError::from)?;
        let last = u32::try_from(lines.len()).unwrap_or(CHUNK) < CHUNK;
        for line in lines {
            cursor = line.seq;
            let event = translate::event(&line).filter(|event| asked.types.contain(&event.kind));
            items.extend(event);
            if items.len() >= asked.limit {
                break 'read;
            }
        }
        if last {
            break;
        }
    }
    let bounds = app.engine.store().history_bounds(id).await.map_err(EngineError::from)?;
    let bounds = bounds.ok_or_else(ApiError::sandbox_not_found);
    let (first, last) = match bounds {
        Ok(bounds) => (Some(bounds.first), Some(bounds.last)),
        // Nothing is written yet of a create that has just been accepted.
        Err(_) => (None, None),
    };
    Ok(SandboxEventPage {
        sandbox_id: id.to_string(),
        items,
        first_seq: first,
        last_seq: last,
        next_after: cursor,
        has_more: last.is_some_and(|last| cursor < last),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_words_or_families() {
        let types = |raw| Types::parse(&QueryString::parse(Some(raw)));
        assert!(types("").contain("sandbox.created"));
        let some = types("types=image.*,sandbox.failed&types=snapshot");
        for (name, wanted) in [
            ("image.progress", true),
            ("sandbox.failed", true),
            ("sandbox.created", false),
            ("snapshot.started", true),
            ("snapshots.x", false),
        ] {
            assert_eq!(some.contain(name), wanted, "{name}");
        }
    }

    #[test]
    fn a_stream_is_given_to_those_who_accept_one() {
        let accepting = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, http::HeaderValue::from_static(text));
            wants_stream(&headers)
        };
        assert!(accepting("text/event-stream"));
        assert!(accepting("application/json;q=0.5, Text/Event-Stream; q=1"));
        assert!(!accepting("*/*"));
        assert!(!accepting("text/event-streams"));
        assert!(!wants_stream(&HeaderMap::new()));
    }
}
