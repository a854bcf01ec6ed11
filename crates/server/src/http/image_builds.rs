//! Image builds: request, list, read, cancel, follow.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use http::{HeaderValue, StatusCode, Uri, header};
use sandglass_api::{
    builds::{
        BuiltRepository, CreateImageBuildRequest, ImageBuild, ImageBuildCache, ImageBuildFailure,
        ImageBuildStatus, ImageBuildStep,
    },
    page::Page,
};
use sandglass_repository::{RepositorySpec, recipe::RecipeRequest};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{
    App,
    build_errors::{builds, of_build, of_location, of_specification},
    error::{ApiError, ApiResult},
    filters,
    parse::{QueryString, RawBody},
};
use crate::{
    builds::{self, BuildFilter, BuildState, Builds, Joined, Order, Secret, Submitted, TagName, Want},
    tenants::Principal,
    workspace::{SecretFiles, secrets},
};

/// Members of `secrets` and of `metadata`.
const MEMBERS: usize = 64;
/// Bytes of one secret.
const SECRET: usize = 64 << 10;
/// Bytes of one value of `metadata`.
const METADATA: usize = 1024;
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// `POST /image-builds`
pub async fn create(State(app): State<App>, principal: Principal, body: RawBody) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let asked = read(body.required()?)?;
    let want = Want {
        tag: asked.tag.as_deref().map(tag).transpose()?,
        timeout: timeout(&builds, asked.timeout_seconds)?,
        ..Want::default()
    };
    let order = Order {
        namespace: principal.namespace().map(str::to_owned),
        source: builds
            .check(&with_secrets(&app, &principal, asked.repository).await?)
            .map_err(of_specification)?,
        recipe: recipe(asked.recipe)?,
        secrets: secrets(asked.secrets)?,
        platform: builds::check_platform(asked.platform.as_deref()).map_err(ApiError::invalid_parameter)?,
    };
    let metadata = metadata(asked.metadata)?;
    let force = asked.force;
    // In a task of its own: a client that gives up must not cut a begun build off from its row.
    let task = tokio::spawn(async move {
        let located = builds.locate(&order, &CancellationToken::new()).await.map_err(of_location)?;
        let submitted = builds.order(&located, force, &want, metadata).await;
        answer(&builds, submitted.map_err(|error| of_build(error, &builds))?).await
    });
    task.await.map_err(|_| ApiError::internal())?
}

/// The build with the status that says what became of the request.
async fn answer(builds: &Builds, submitted: Submitted) -> ApiResult<Response> {
    let (status, mut shown) = match submitted {
        Submitted::Build { build, joined } => {
            let mut shown = shown(builds, *build).await;
            let status = match joined {
                Joined::Began => StatusCode::ACCEPTED,
                Joined::Joined => {
                    shown.deduplicated = Some(true);
                    StatusCode::OK
                }
            };
            (status, shown)
        }
        Submitted::Image { image, .. } => {
            let build = builds.build(image.image_build_id).await.map_err(|e| of_build(e, builds))?;
            let mut shown = shown(builds, build).await;
            shown.cache.hit = true;
            (StatusCode::OK, shown)
        }
        Submitted::WithoutImage => return Err(ApiError::internal()),
    };
    shown.deduplicated = shown.deduplicated.or(Some(false));
    let location = HeaderValue::from_str(&format!("/v1/image-builds/{}", shown.id));
    let location = location.map_err(|_| ApiError::internal())?;
    Ok((status, [(header::LOCATION, location)], Json(shown)).into_response())
}

/// `GET /image-builds`
pub async fn list(
    State(app): State<App>,
    principal: Principal,
    uri: Uri,
) -> ApiResult<Json<Page<ImageBuild>>> {
    let builds = builds(&app)?;
    let query = QueryString::parse(uri.query());
    let page = filters::page(&query)?;
    let asked: Vec<&str> = query.all("state").collect();
    let states: Vec<BuildState> = asked.iter().filter_map(|word| BuildState::of_word(word)).collect();
    if states.is_empty() && !asked.is_empty() {
        return Ok(Json(page.cut(Vec::new())));
    }
    let filter = BuildFilter {
        namespace: principal.namespace().map(str::to_owned),
        states,
        repository_key: query.last("repository").map(str::to_owned),
    };
    let (skip, take) = page.window();
    let bound = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let found = builds.store().builds(&filter, bound(skip), bound(take)).await;
    let (rows, total) = found.map_err(|error| of_build(error.into(), &builds))?;
    let mut items = Vec::with_capacity(rows.len());
    for row in rows {
        items.push(shown(&builds, row).await);
    }
    Ok(Json(Page { items, pagination: page.describe(usize::try_from(total).unwrap_or(usize::MAX)) }))
}

/// The build, if there is one for this caller: another tenant's looks as if it did not exist.
pub(super) async fn find(builds: &Builds, principal: &Principal, id: &str) -> ApiResult<builds::ImageBuild> {
    let absent = || of_build(builds::BuildError::NotFound, builds);
    let id = id.parse().map_err(|_| absent())?;
    let row = builds.build(id).await.map_err(|error| of_build(error, builds))?;
    if principal.may_see_namespace(row.slot.namespace.as_deref()) { Ok(row) } else { Err(absent()) }
}

/// `GET /image-builds/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<ImageBuild>> {
    let builds = builds(&app)?;
    let row = find(&builds, &principal, &id).await?;
    Ok(Json(shown(&builds, row).await))
}

/// `DELETE /image-builds/{id}`
pub async fn cancel(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    let row = builds.driver().cancel(id).await.map_err(|error| of_build(error, &builds))?;
    Ok((StatusCode::ACCEPTED, Json(shown(&builds, row).await)).into_response())
}

/// `GET /image-builds/{id}/events`
pub async fn events(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Response> {
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &id).await?.id;
    let (row, changes) = builds.driver().subscribe(id).await.map_err(|error| of_build(error, &builds))?;
    let closing = app.engine.closing().clone();
    let frames = stream::unfold(Some((Some(row), changes)), move |state| {
        let (builds, closing) = (builds.clone(), closing.clone());
        async move {
            let (row, mut changes) = state?;
            let row = match row {
                Some(row) => row,
                None => {
                    let changed = tokio::select! {
                        changed = changes.changed() => changed.is_ok(),
                        () = tokio::time::sleep(KEEP_ALIVE) => {
                            return Some((Ok(Bytes::from_static(b": \n\n")), Some((None, changes))));
                        }
                        () = closing.cancelled() => return None,
                    };
                    let told = changes.borrow_and_update().clone();
                    match told.filter(|_| changed) {
                        Some(row) => builds::ImageBuild::clone(&row),
                        // Nobody tells any more: it is looked at once again.
                        None => builds.build(id).await.ok()?,
                    }
                }
            };
            let over = row.state.terminal();
            let version = row.version;
            let data = serde_json::to_string(&shown(&builds, row).await).ok()?;
            let frame = format!("id: {version}\nevent: image_build.changed\ndata: {data}\n\n");
            let next = (!over).then_some((None, changes));
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(frame)), next))
        }
    });
    Ok(event_stream(Body::from_stream(frames)))
}

pub(super) fn event_stream(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE.as_str(), "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL.as_str(), "no-store"),
        // For proxies that would collect the frames.
        ("x-accel-buffering", "no"),
    ];
    (headers, body).into_response()
}

fn read(body: Value) -> ApiResult<CreateImageBuildRequest> {
    // The reader's own message could repeat a secret.
    serde_json::from_value(body).map_err(|_| {
        ApiError::invalid_parameter(
            "the body must be {repository, recipe?, secrets?, tag?, timeoutSeconds?, platform?, force?, metadata?}",
        )
    })
}

pub(super) fn repository(value: Value) -> ApiResult<RepositorySpec> {
    serde_json::from_value(value).map_err(|_| {
        ApiError::invalid_parameter(
            "repository must be {url, ref?, depth?, submodules?, lfs?, path?, credential?, additional?}",
        )
    })
}

/// The repository with the secrets that it names.
pub(super) async fn with_secrets(
    app: &App,
    principal: &Principal,
    value: Value,
) -> ApiResult<RepositorySpec> {
    let (config, tenant) = (app.config.clone(), principal.tenant().map(str::to_owned));
    let read = tokio::task::spawn_blocking(move || {
        let files = SecretFiles(config.workspaces.secrets_dir.as_deref());
        secrets::resolved(value, files, tenant.as_deref())
    });
    let resolved = read.await.map_err(|_| ApiError::internal())?;
    repository(resolved.map_err(|error| ApiError::invalid_parameter(error.to_string()))?)
}

pub(super) fn recipe(value: Option<Value>) -> ApiResult<RecipeRequest> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(RecipeRequest::Auto) };
    serde_json::from_value(value).map_err(|_| {
        ApiError::invalid_parameter(
            "recipe must be {type, …} with the type auto, dockerfile, devcontainer, hooks or none, and its own members",
        )
    })
}

pub(super) fn tag(text: &str) -> ApiResult<TagName> {
    text.parse().map_err(|error| ApiError::invalid_parameter(format!("tag: {error}")))
}

pub(super) fn timeout(builds: &Builds, seconds: Option<u64>) -> ApiResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    let most = builds.max_timeout().as_secs();
    if (1..=most).contains(&seconds) {
        Ok(Some(Duration::from_secs(seconds)))
    } else {
        Err(ApiError::invalid_parameter(format!("timeoutSeconds must be between 1 and {most}")))
    }
}

fn secrets(given: BTreeMap<String, String>) -> ApiResult<BTreeMap<String, Secret>> {
    let named = |name: &String| {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        !name.is_empty() && name.bytes().all(word) && !name.starts_with(|c: char| c.is_ascii_digit())
    };
    if given.len() > MEMBERS || !given.keys().all(named) {
        let message = format!("secrets must be at most {MEMBERS}, with names of letters, digits and `_`");
        return Err(ApiError::invalid_parameter(message));
    }
    if given.values().any(|value| value.len() > SECRET || value.contains('\0')) {
        return Err(ApiError::invalid_parameter("a secret is longer than 64 KiB or holds a zero byte"));
    }
    Ok(given.into_iter().map(|(name, value)| (name, Secret::new(value))).collect())
}

fn metadata(given: BTreeMap<String, String>) -> ApiResult<BTreeMap<String, String>> {
    let fits = |(name, value): (&String, &String)| !name.is_empty() && name.len() + value.len() <= METADATA;
    if given.len() <= MEMBERS && given.iter().all(fits) {
        Ok(given)
    } else {
        let message = format!("metadata must have at most {MEMBERS} members of at most {METADATA} bytes");
        Err(ApiError::invalid_parameter(message))
    }
}

/// The build as clients see it.
async fn shown(builds: &Builds, row: builds::ImageBuild) -> ImageBuild {
    let log_bytes = builds.logs().length(row.id).await.unwrap_or(0);
    let current = row.current_step().map(|step| step.word().to_owned());
    let mut repositories = row.plan.checkouts.into_iter().map(|checkout| BuiltRepository {
        url: checkout.url,
        reference: checkout.reference,
        commit: checkout.commit,
        path: checkout.path,
    });
    let none = || BuiltRepository {
        url: String::new(),
        reference: None,
        commit: String::new(),
        path: String::new(),
    };
    let repository = repositories.next().unwrap_or_else(none);
    let status = ImageBuildStatus {
        state: row.state.word().to_owned(),
        reason: row.cause.as_ref().map(|cause| cause.kind.word().to_owned()).or(current),
        message: row.cause.as_ref().map(|cause| cause.message.clone()),
        last_transition_at: row.last_transition_at.into(),
    };
    let failure = row.cause.map(|cause| ImageBuildFailure {
        reason: cause.kind.word().to_owned(),
        step: cause.step.map(|step| step.word().to_owned()),
        exit_code: cause.exit_code,
        message: cause.message,
        output_tail: cause.tail,
    });
    let recipe = serde_json::to_value(row.plan.recipe.kind).ok();
    ImageBuild {
        id: row.id.to_string(),
        key: row.slot.key.to_string(),
        recipe_key: row.recipe_key.to_string(),
        status,
        repository,
        additional: repositories.collect(),
        recipe: recipe.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned(),
        platform: row.plan.platform,
        attempt: row.attempt,
        cache: ImageBuildCache { hit: false, parent_image_id: row.parent_image.map(|id| id.to_string()) },
        waiters: row.waiters.len(),
        steps: row.steps.into_iter().map(step).collect(),
        image_id: row.image.map(|id| id.to_string()),
        failure,
        log_bytes,
        created_at: row.created_at.into(),
        started_at: row.started_at.map(Into::into),
        finished_at: row.finished_at.map(Into::into),
        deadline_at: row.deadline_at.into(),
        metadata: row.metadata,
        deduplicated: None,
    }
}

fn step(step: sandglass_builds::build::StepRecord) -> ImageBuildStep {
    ImageBuildStep {
        name: step.name.word().to_owned(),
        state: format!("{:?}", step.state),
        started_at: step.started_at.map(Into::into),
        finished_at: step.finished_at.map(Into::into),
        exit_code: step.exit_code,
    }
}
