//! The snapshot routes, and what a create finds under a snapshot's id.

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, Uri, header};
use sandglass_api::{
    lifecycle::{CreateSandboxRequest, Snapshot, SnapshotStatus},
    page::Page,
};
use sandglass_sandbox::{
    ports::store::SnapshotFilter,
    snapshot::{SnapshotRecord, SnapshotState},
};

use super::{
    App, decode,
    error::{ApiError, ApiResult},
    filters,
    parse::{QueryString, RawBody},
    validate::create::{Restored, wanted_snapshot},
};
use crate::{
    engine::{commit::EngineError, snapshots::SnapshotError},
    tenants::Principal,
};

fn shown(record: SnapshotRecord) -> Snapshot {
    Snapshot {
        id: record.id.to_string(),
        sandbox_id: record.source.to_string(),
        name: record.name,
        status: SnapshotStatus {
            state: record.state.word().to_owned(),
            reason: Some(record.reason),
            message: record.message,
            last_transition_at: Some(record.last_transition_at.into()),
        },
        created_at: record.created_at.into(),
    }
}

/// The snapshot, if there is one for this caller: another tenant's looks as if it did not exist.
async fn find(app: &App, principal: &Principal, id: &str) -> ApiResult<SnapshotRecord> {
    let record = app.engine.find_snapshot(id).await?;
    if principal.may_see_namespace(record.namespace.as_deref()) {
        Ok(record)
    } else {
        Err(SnapshotError::NotFound.into())
    }
}

/// `POST /sandboxes/{id}/snapshots`
pub async fn create(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Response> {
    let name = decode::small::snapshot(body.optional()?.as_ref())?;
    app.find(&principal, &id)?;
    let engine = app.engine.clone();
    let namespace = principal.namespace().map(str::to_owned);
    // In a task of its own: a client that gives up must not leave a row that nobody works on.
    let accepted = tokio::spawn(async move { engine.create_snapshot(&id, name, namespace.as_deref()).await })
        .await
        .map_err(|_| ApiError::internal())??;
    // Also for a request without the prefix, as the published clients expect.
    let location =
        HeaderValue::from_str(&format!("/v1/snapshots/{}", accepted.id)).map_err(|_| ApiError::internal())?;
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(shown(accepted))).into_response())
}

/// The filter of a list; `None` when nothing can match it.
fn filter(query: &QueryString, namespace: Option<&str>) -> Option<SnapshotFilter> {
    let asked: Vec<&str> = query.all("state").collect();
    // Unlike those of sandboxes, states of snapshots are compared with their case.
    let states: Vec<_> = asked.iter().filter_map(|word| SnapshotState::of_word(word)).collect();
    if states.is_empty() && !asked.is_empty() {
        return None;
    }
    let source = match query.last("sandboxId") {
        None => None,
        Some(id) => Some(id.parse().ok()?),
    };
    Some(SnapshotFilter {
        namespace: namespace.map(str::to_owned),
        source,
        name: query.last("name").map(str::to_owned),
        states,
    })
}

/// `GET /snapshots`
pub async fn list(State(app): State<App>, principal: Principal, uri: Uri) -> ApiResult<Json<Page<Snapshot>>> {
    let query = QueryString::parse(uri.query());
    let page = filters::page(&query)?;
    let Some(filter) = filter(&query, principal.namespace()) else {
        return Ok(Json(page.cut(Vec::new())));
    };
    let (skip, take) = page.window();
    let bound = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let (found, total) =
        app.engine.store().snapshots(&filter, bound(skip), bound(take)).await.map_err(EngineError::from)?;
    let pagination = page.describe(usize::try_from(total).unwrap_or(usize::MAX));
    Ok(Json(Page { items: found.into_iter().map(shown).collect(), pagination }))
}

/// `GET /snapshots/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<Snapshot>> {
    Ok(Json(shown(find(&app, &principal, &id).await?)))
}

/// `DELETE /snapshots/{id}`
pub async fn delete(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    let id = find(&app, &principal, &id).await?.id;
    let engine = app.engine.clone();
    tokio::spawn(async move { engine.delete_snapshot(id).await })
        .await
        .map_err(|_| ApiError::internal())??;
    Ok(StatusCode::NO_CONTENT)
}

/// The snapshot that a create names, found and fit to be restored from; `None` when it names none.
pub(super) async fn restored(
    app: &App,
    principal: &Principal,
    request: &CreateSandboxRequest,
) -> ApiResult<Option<Restored>> {
    let Some(id) = wanted_snapshot(request) else { return Ok(None) };
    let record = find(app, principal, id.trim()).await?;
    let image = app.engine.restore_image(&record)?;
    Ok(Some(Restored { snapshot: record.id, image }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(raw: &str) -> Option<SnapshotFilter> {
        filter(&QueryString::parse(Some(raw)), Some("ns"))
    }

    #[test]
    fn states_keep_their_case_and_unknown_words_match_nothing() {
        assert_eq!(of("").unwrap().states, []);
        assert_eq!(
            of("state=Ready&state=Failed").unwrap().states,
            [SnapshotState::Ready, SnapshotState::Failed]
        );
        assert_eq!(of("state=ready&state=Ready").unwrap().states, [SnapshotState::Ready]);
        for nothing in ["state=ready", "state=", "state=Ready,Failed", "sandboxId=x", "sandboxId="] {
            assert_eq!(of(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn names_are_exact_and_the_namespace_is_the_callers() {
        let filter = of("name=a%20b&namespace=other").unwrap();
        assert_eq!((filter.name.as_deref(), filter.namespace.as_deref()), (Some("a b"), Some("ns")));
    }
}
