//! Prebuilds: standing orders for builds.

use std::ops::RangeInclusive;

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, Uri, header};
use sandglass_api::{
    builds::{Prebuild as Shown, PrebuildRequest},
    page::Page,
};
use sandglass_sandbox::PrebuildId;
use serde_json::Value;

use super::{
    App,
    build_errors::{builds, of_build, of_specification, unavailable},
    error::{ApiError, ApiResult},
    filters,
    image_builds::{recipe, tag, timeout, with_secrets},
    parse::{QueryString, RawBody},
};
use crate::{
    builds::{BuildError, Builds, Prebuild, PrebuildSource},
    tenants::Principal,
    workspace::secrets,
};

/// Seconds between two looks at a remote.
const POLL: RangeInclusive<u64> = 60..=30 * 86_400;
const SECRET: RangeInclusive<usize> = 8..=256;

/// A checked request, and the secret of its webhook.
struct Asked {
    source: Value,
    request: PrebuildRequest,
}

async fn read(app: &App, principal: &Principal, builds: &Builds, body: &RawBody) -> ApiResult<Asked> {
    let malformed = |_| {
        ApiError::invalid_parameter(
            "the body must be {repository, recipe?, ref?, pollSeconds?, enabled?, keep?, tag?, timeoutSeconds?, webhookSecret?}",
        )
    };
    let request: PrebuildRequest = serde_json::from_value(body.required()?).map_err(malformed)?;
    let mut repository = request.repository.clone();
    if let (Some(reference), Some(members)) = (&request.reference, repository.as_object_mut()) {
        members.insert("ref".into(), reference.as_str().into());
    }
    if secrets::carries(&repository) {
        return Err(ApiError::invalid_parameter(
            "a prebuild keeps no credentials; name one of the server's secrets: repository.credential.secretRef",
        ));
    }
    let known = with_secrets(app, principal, repository.clone()).await?;
    builds.check(&known).map_err(of_specification)?;
    if request.poll_seconds.is_some_and(|seconds| !POLL.contains(&seconds)) {
        let (least, most) = POLL.into_inner();
        return Err(ApiError::invalid_parameter(format!("pollSeconds must be between {least} and {most}")));
    }
    if request.webhook_secret.as_ref().is_some_and(|secret| !SECRET.contains(&secret.len())) {
        return Err(ApiError::invalid_parameter("webhookSecret must have 8 to 256 bytes"));
    }
    timeout(builds, request.timeout_seconds)?;
    let recipe = recipe(request.recipe.clone())?;
    let tenant = principal.tenant().map(str::to_owned);
    let source = serde_json::to_value(PrebuildSource { repository, recipe, tenant });
    Ok(Asked { source: source.map_err(|_| ApiError::internal())?, request })
}

/// `POST /prebuilds`
pub async fn create(State(app): State<App>, principal: Principal, body: RawBody) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let Asked { source, request } = read(&app, &principal, &builds, &body).await?;
    let prebuild = Prebuild {
        id: PrebuildId::random(),
        version: 1,
        namespace: principal.namespace().map(str::to_owned),
        source,
        poll_seconds: request.poll_seconds,
        enabled: request.enabled,
        keep: request.keep,
        tag: request.tag.as_deref().map(tag).transpose()?,
        timeout_seconds: timeout_seconds(&builds, &request),
        schedule: Default::default(),
        seen: None,
        last_error: None,
        created_at: builds.driver().now(),
    };
    keep_secret(&builds, prebuild.id, request.webhook_secret).await?;
    let added = builds.driver().add_prebuild(prebuild).await.map_err(|error| of_build(error, &builds))?;
    let location = HeaderValue::from_str(&format!("/v1/prebuilds/{}", added.id));
    let location = location.map_err(|_| ApiError::internal())?;
    Ok((StatusCode::CREATED, [(header::LOCATION, location)], Json(shown(added))).into_response())
}

fn timeout_seconds(builds: &Builds, request: &PrebuildRequest) -> u64 {
    request.timeout_seconds.unwrap_or_else(|| builds.default_timeout().as_secs())
}

async fn keep_secret(builds: &Builds, id: PrebuildId, secret: Option<String>) -> ApiResult<()> {
    let builds = builds.clone();
    let kept = tokio::task::spawn_blocking(move || builds.set_webhook_secret(id, secret.as_deref())).await;
    match kept {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            tracing::warn!(%error, "the secret of a webhook cannot be kept");
            Err(unavailable("the webhook's secret cannot be kept at the moment; try again"))
        }
        Err(_) => Err(ApiError::internal()),
    }
}

/// `GET /prebuilds`
pub async fn list(State(app): State<App>, principal: Principal, uri: Uri) -> ApiResult<Json<Page<Shown>>> {
    let builds = builds(&app)?;
    let page = filters::page(&QueryString::parse(uri.query()))?;
    let mut rows = builds.store().prebuilds().await.map_err(|error| of_build(error.into(), &builds))?;
    rows.retain(|row| principal.may_see_namespace(row.namespace.as_deref()));
    rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id)));
    Ok(Json(page.cut(rows.into_iter().map(shown).collect())))
}

async fn find(builds: &Builds, principal: &Principal, id: &str) -> ApiResult<Prebuild> {
    let row = any(builds, id).await?;
    if principal.may_see_namespace(row.namespace.as_deref()) { Ok(row) } else { Err(absent(builds)) }
}

/// Whoever's it is.
async fn any(builds: &Builds, id: &str) -> ApiResult<Prebuild> {
    let id = id.parse().map_err(|_| absent(builds))?;
    let row = builds.store().prebuild(id).await.map_err(|error| of_build(error.into(), builds))?;
    row.ok_or_else(|| absent(builds))
}

fn absent(builds: &Builds) -> ApiError {
    of_build(BuildError::PrebuildNotFound, builds)
}

/// `GET /prebuilds/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<Shown>> {
    let builds = builds(&app)?;
    Ok(Json(shown(find(&builds, &principal, &id).await?)))
}

/// `PUT /prebuilds/{id}`
pub async fn replace(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Json<Shown>> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    let Asked { source, request } = read(&app, &principal, &builds, &body).await?;
    let tag = request.tag.as_deref().map(tag).transpose()?;
    let seconds = timeout_seconds(&builds, &request);
    if request.webhook_secret.is_some() {
        keep_secret(&builds, id, request.webhook_secret.clone()).await?;
    }
    let edit = |before: &Prebuild| Prebuild {
        source: source.clone(),
        poll_seconds: request.poll_seconds,
        enabled: request.enabled,
        keep: request.keep,
        tag: tag.clone(),
        timeout_seconds: seconds,
        ..before.clone()
    };
    let edited = builds.driver().edit_prebuild(id, edit).await;
    Ok(Json(shown(edited.map_err(|error| of_build(error, &builds))?)))
}

/// `DELETE /prebuilds/{id}`
pub async fn remove(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    builds.driver().remove_prebuild(id).await.map_err(|error| of_build(error, &builds))?;
    keep_secret(&builds, id, None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /prebuilds/{id}/trigger`
pub async fn trigger(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    let triggered = builds.driver().trigger(id).await.map_err(|error| of_build(error, &builds))?;
    Ok((StatusCode::ACCEPTED, Json(shown(triggered))).into_response())
}

fn shown(row: Prebuild) -> Shown {
    let mut source = row.source;
    Shown {
        id: row.id.to_string(),
        repository: secrets::without_credentials(source["repository"].take()),
        recipe: source["recipe"].take(),
        poll_seconds: row.poll_seconds,
        enabled: row.enabled,
        keep: row.keep,
        tag: row.tag.map(String::from),
        timeout_seconds: row.timeout_seconds,
        next_poll_at: row.schedule.next_poll_at.map(Into::into),
        image_build_id: row.seen.as_ref().and_then(|seen| seen.build).map(|id| id.to_string()),
        seen_at: row.seen.map(|seen| seen.at.into()),
        last_error: row.last_error,
        created_at: row.created_at.into(),
    }
}
