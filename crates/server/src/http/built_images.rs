//! Images that builds made: read, remove, name. They share their paths with the local images of the embedded runtime, from which their ids
//! tell them apart.

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{StatusCode, Uri};
use sandglass_api::{
    builds::{BuiltImage, MoveTagRequest},
    page::Page,
};
use sandglass_sandbox::ImageId;

use super::{
    App,
    build_errors::{builds, of_build},
    error::{ApiError, ApiResult, Code},
    filters, image_builds, images,
    middleware::auth::Operator,
    parse::{QueryString, RawBody},
};
use crate::{
    builds::{BuildError, Builds, Image, ImageFilter, ImageState, Insistence},
    tenants::Principal,
};

/// `GET /images`
pub async fn list(
    State(app): State<App>,
    principal: Principal,
    local: Result<images::Images, ApiError>,
    uri: Uri,
) -> ApiResult<Response> {
    let query = QueryString::parse(uri.query());
    let built = match query.last("kind") {
        Some("built") => true,
        Some("local") => false,
        Some(_) => return Err(ApiError::invalid_parameter("kind must be local or built")),
        None => principal.tenant().is_some(),
    };
    if !built {
        return images::list(operator(&principal)?, local?).await;
    }
    let builds = builds(&app)?;
    let page = filters::page(&query)?;
    let asked: Vec<&str> = query.all("state").collect();
    let states: Vec<ImageState> = asked.iter().filter_map(|word| ImageState::of_word(word)).collect();
    if states.is_empty() && !asked.is_empty() {
        return Ok(Json(page.cut(Vec::<BuiltImage>::new())).into_response());
    }
    let filter = ImageFilter {
        namespace: principal.namespace().map(str::to_owned),
        states,
        repository_key: query.last("repository").map(str::to_owned),
    };
    let (skip, take) = page.window();
    let bound = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let found = builds.store().images(&filter, bound(skip), bound(take)).await;
    let (rows, total) = found.map_err(|error| of_build(error.into(), &builds))?;
    let pagination = page.describe(usize::try_from(total).unwrap_or(usize::MAX));
    Ok(Json(Page { items: rows.into_iter().map(shown).collect(), pagination }).into_response())
}

/// `GET /images/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<BuiltImage>> {
    let builds = builds(&app)?;
    Ok(Json(shown(find(&builds, &principal, &id).await?)))
}

/// `DELETE /images/{id}` and `DELETE /images/{reference}`
pub async fn remove(
    State(app): State<App>,
    principal: Principal,
    local: Result<images::Images, ApiError>,
    Path(reference): Path<String>,
    uri: Uri,
) -> ApiResult<Response> {
    if reference.parse::<ImageId>().is_err() {
        return images::remove(operator(&principal)?, local?, Path(reference)).await;
    }
    let builds = builds(&app)?;
    let id = find(&builds, &principal, &reference).await?.id;
    let query = QueryString::parse(uri.query());
    let force = matches!(query.last("force"), Some("" | "true" | "1"));
    let insistence = if force { Insistence::Force } else { Insistence::IfUnused };
    let image = builds.driver().delete_image(id, insistence).await;
    let image = image.map_err(|error| of_build(error, &builds))?;
    Ok((StatusCode::ACCEPTED, Json(shown(image))).into_response())
}

/// `PUT /images/tags/{repositoryKey}/{tag}`
pub async fn move_tag(
    State(app): State<App>,
    principal: Principal,
    Path((repository_key, tag)): Path<(String, String)>,
    body: RawBody,
) -> ApiResult<Json<BuiltImage>> {
    let builds = builds(&app)?;
    let tag = image_builds::tag(&tag)?;
    let asked: MoveTagRequest = serde_json::from_value(body.required()?)
        .map_err(|_| ApiError::invalid_parameter("the body must be {imageId}"))?;
    let image = find(&builds, &principal, &asked.image_id).await?;
    let namespace = image.lineage.namespace.as_deref();
    let moved = builds.driver().move_tag(namespace, &repository_key, tag, image.id).await;
    Ok(Json(shown(moved.map_err(|error| of_build(error, &builds))?)))
}

fn operator(principal: &Principal) -> ApiResult<Operator> {
    match principal.tenant() {
        None => Ok(Operator),
        Some(_) => Err(ApiError::new(Code::NotForTenants, "this belongs to the server, not to a tenant")),
    }
}

/// The image, if there is one for this caller.
async fn find(builds: &Builds, principal: &Principal, id: &str) -> ApiResult<Image> {
    let absent = || of_build(BuildError::ImageNotFound, builds);
    let id = id.parse().map_err(|_| absent())?;
    let image = builds.driver().image(id).await.map_err(|error| of_build(error, builds))?;
    if principal.may_see_namespace(image.lineage.namespace.as_deref()) { Ok(image) } else { Err(absent()) }
}

fn shown(image: Image) -> BuiltImage {
    BuiltImage {
        id: image.id.to_string(),
        key: image.key.to_string(),
        recipe_key: image.lineage.recipe_key.to_string(),
        repository_key: image.repository_key,
        reference: image.reference,
        digest: image.digest,
        size_bytes: image.size_bytes,
        commits: image.checkouts.into_iter().map(|checkout| (checkout.path, checkout.commit)).collect(),
        agent_generation: image.agent_generation,
        platform: image.platform,
        state: image.state.word().to_owned(),
        tags: image.tags.iter().map(|tag| tag.as_str().to_owned()).collect(),
        image_build_id: image.image_build_id.to_string(),
        sandbox_count: image.holders,
        restore_failures: image.restore_failures,
        created_at: image.created_at.into(),
        last_used_at: image.last_used_at.into(),
    }
}
