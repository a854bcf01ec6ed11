//! Pools of boxes that were started ahead.
//!
//! On a single host a pool is made of an image or of a repository instead of a pod template. As long as there is none, everything is answered as the
//! published API says for such hosts, so that clients find out in the documented way that pod templates are for Kubernetes.

use axum::{
    Json,
    extract::{Path, State},
};
use http::StatusCode;
use sandglass_api::lifecycle::{
    CreateSandboxRequest, ENTRYPOINT_EXTENSION, ImageBuildRequest, ImageSpec, ListPoolsResponse,
    POOL_REF_EXTENSION, Pool as Shown, PoolCapacitySpec, PoolFailure, PoolStatus, RepositoryCredential,
    RepositoryRequest,
};
use sandglass_sandbox::{
    pool::{Capacity, Pool},
    source::ImageBuild,
    spec::Spec,
};
use serde_json::{Value, json};

use super::{
    App, decode,
    error::{ApiError, ApiResult, Code},
    middleware::auth::Operator,
    parse::RawBody,
    sandboxes, validate,
};
use crate::{engine::pools::PoolView, tenants::Principal};

/// Boxes that one pool may keep waiting.
const MOST_WAITING: u64 = 1000;
/// What a sandbox of a pool runs when the request does not say.
const DEFAULT_ENTRYPOINT: [&str; 3] = ["tail", "-f", "/dev/null"];

fn lacking(app: &App) -> ApiError {
    let name = app.engine.runtime().name();
    let message = format!(
        "pools of pod templates are not available on the {name} runtime; create a pool with an image or a repository instead of a template"
    );
    ApiError::new(Code::PoolNotSupported, message)
}

/// Without any pool, and on runtimes that cannot have one, as the published API says.
fn some(app: &App) -> ApiResult<()> {
    if app.engine.has_pools() { Ok(()) } else { Err(lacking(app)) }
}

/// `POST /pools`
pub async fn create(
    State(app): State<App>,
    _: Operator,
    body: RawBody,
) -> ApiResult<(StatusCode, Json<Shown>)> {
    let asked = decode::pool::new_pool(&body.required()?)?;
    let Some(request) = asked.request else { return Err(lacking(&app)) };
    if !app.engine.runtime().capabilities().standby {
        return Err(lacking(&app));
    }
    let capacity = checked(asked.capacity)?;
    if request.image.as_ref().is_some_and(|image| image.auth.is_some()) {
        return Err(ApiError::invalid_parameter(
            "a pool keeps no credentials; pull the image first, or let the registry answer without them",
        ));
    }
    let now = app.engine.clock().now();
    let repository = match &request.repository {
        Some(repository) => of_repository(&app, repository, request.image_build.as_ref())?,
        None => Value::Null,
    };
    let source = validate::repository::Asked::of(&request);
    let mut template = validate::create::create(request, None, &app.rules, now)?.spec;
    template.extensions.clear();
    if let Some(source) = source {
        template.source = Some(Box::new(sandboxes::sourced(&app, source, None).await?.0));
    }
    app.admit(&template).await?;
    let pool = Pool { name: asked.name, capacity, template, repository, created_at: now };
    Ok((StatusCode::CREATED, Json(show(&app.engine.create_pool(pool).await?))))
}

/// The repository of a pool as it is kept: without anything that is secret.
fn of_repository(
    app: &App,
    repository: &RepositoryRequest,
    build: Option<&ImageBuildRequest>,
) -> ApiResult<Value> {
    if !app.engine.runtime().capabilities().sockets {
        let message = "pools of repositories need an engine on this machine: what a box is told when it is taken lies in this machine's files";
        return Err(ApiError::new(Code::PoolNotSupported, message));
    }
    let carried =
        |credential: &RepositoryCredential| credential.token.is_some() || credential.private_key.is_some();
    let others = repository.additional.iter().filter_map(|additional| additional.credential.as_ref());
    if repository.credential.iter().chain(others).any(carried) {
        return Err(ApiError::invalid_parameter(
            "a pool keeps no credentials; name one of the server's secrets: repository.credential.secretRef",
        ));
    }
    if build.is_some_and(|build| !build.secrets.is_empty()) {
        return Err(ApiError::invalid_parameter(
            "a pool keeps no secrets, so imageBuild.secrets cannot be given; build the image first without a pool",
        ));
    }
    serde_json::to_value(repository).map_err(|_| ApiError::internal())
}

/// `GET /pools`
pub async fn list(State(app): State<App>, _: Operator) -> ApiResult<Json<ListPoolsResponse>> {
    some(&app)?;
    Ok(Json(ListPoolsResponse { items: app.engine.all_pools().iter().map(show).collect() }))
}

/// `GET /pools/{name}`
pub async fn get(State(app): State<App>, _: Operator, Path(name): Path<String>) -> ApiResult<Json<Shown>> {
    some(&app)?;
    Ok(Json(show(&app.engine.pool(&name)?)))
}

/// `PUT /pools/{name}`
pub async fn resize(
    State(app): State<App>,
    _: Operator,
    Path(name): Path<String>,
    body: RawBody,
) -> ApiResult<Json<Shown>> {
    let capacity = decode::pool::resized_pool(&body.required()?)?;
    some(&app)?;
    app.engine.pool(&name)?;
    Ok(Json(show(&app.engine.resize_pool(&name, checked(capacity)?).await?)))
}

/// `DELETE /pools/{name}`
pub async fn delete(State(app): State<App>, _: Operator, Path(name): Path<String>) -> ApiResult<StatusCode> {
    some(&app)?;
    app.engine.delete_pool(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn checked(capacity: Capacity) -> ApiResult<Capacity> {
    let says = |message: &str| Err(ApiError::invalid_parameter(message));
    if capacity.buffer_min > capacity.buffer_max {
        return says("capacitySpec.bufferMin must not be above bufferMax");
    }
    if capacity.pool_min > capacity.pool_max {
        return says("capacitySpec.poolMin must not be above poolMax");
    }
    if capacity.buffer_max.min(capacity.pool_max).max(capacity.pool_min) > MOST_WAITING {
        return says("capacitySpec must not keep more than 1000 sandboxes waiting");
    }
    Ok(capacity)
}

fn show(view: &PoolView) -> Shown {
    let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    let Capacity { buffer_min, buffer_max, pool_min, pool_max } = view.pool.capacity;
    let template = &view.pool.template;
    Shown {
        name: view.pool.name.clone(),
        capacity_spec: PoolCapacitySpec {
            buffer_max: number(buffer_max),
            buffer_min: number(buffer_min),
            pool_max: number(pool_max),
            pool_min: number(pool_min),
        },
        status: Some(PoolStatus {
            total: number(view.available + view.allocated),
            allocated: number(view.allocated),
            available: number(view.available),
            revision: view.pool.revision(),
            starting: Some(number(view.starting)),
            last_failure: view.failure.as_ref().map(|failure| PoolFailure {
                message: failure.message.clone(),
                at: failure.at.into(),
                count: i64::from(failure.count),
            }),
        }),
        created_at: Some(view.pool.created_at.into()),
        image: match &template.source {
            None => Some(template.image.clone()),
            Some(_) => view.image.clone(),
        }
        .map(|uri| ImageSpec { uri, auth: None }),
        repository: repository_of(&view.pool).map(without_credentials),
    }
}

fn repository_of(pool: &Pool) -> Option<RepositoryRequest> {
    // Null without one.
    serde_json::from_value(pool.repository.clone()).ok()
}

fn without_credentials(mut repository: RepositoryRequest) -> RepositoryRequest {
    repository.credential = None;
    repository.additional.iter_mut().for_each(|additional| additional.credential = None);
    repository
}

/// The pool that a create names, with what the request leaves to it.
#[derive(Debug)]
pub(super) struct Named {
    pool: String,
    template: Spec,
    limits: bool,
}

impl Named {
    /// Completes a request that names a pool by what the pool says. A request that names one where there is none is refused later, as
    /// the published API says.
    ///
    /// # Errors
    /// 404 when there are pools and none of that name; 400 when the pool is of something else than the request asks for.
    pub(super) fn of(
        app: &App,
        principal: &Principal,
        request: &mut CreateSandboxRequest,
    ) -> ApiResult<Option<Self>> {
        let templated = request.template_id.as_deref().is_some_and(|id| !id.trim().is_empty());
        let Some(extensions) = &mut request.extensions else { return Ok(None) };
        let name = extensions.get(POOL_REF_EXTENSION).map(|name| name.trim().to_owned());
        let Some(name) = name.filter(|name| !name.is_empty() && !templated && app.engine.has_pools()) else {
            return Ok(None);
        };
        let pool = app.engine.pool(&name)?.pool;
        let template = pool.template.clone();
        extensions.remove(POOL_REF_EXTENSION);
        let chosen = extensions.contains_key(ENTRYPOINT_EXTENSION);
        match &template.source {
            Some(source) => complete_by_repository(&pool, principal, request, &source.image_build)?,
            None => {
                refuse_repository(&name, request)?;
                if request.image.is_none() {
                    request.image = Some(ImageSpec { uri: template.image.clone(), auth: None });
                }
                if request.entrypoint.is_none() && !chosen {
                    request.entrypoint = Some(DEFAULT_ENTRYPOINT.map(str::to_owned).to_vec());
                }
            }
        }
        Ok(Some(Self { pool: name, template, limits: request.resource_limits.is_none() }))
    }

    /// Puts into the checked specification what is the pool's; returns its name.
    pub(super) fn settle(self, spec: &mut Spec) -> String {
        if self.limits {
            spec.limits = self.template.limits;
        }
        spec.extensions.insert(POOL_REF_EXTENSION.to_owned(), self.pool.clone());
        self.pool
    }
}

/// A request that names a pool of an image asks for nothing that only a repository gives.
fn refuse_repository(pool: &str, request: &CreateSandboxRequest) -> ApiResult<()> {
    let given = [
        ("repository", request.repository.is_some()),
        ("imageBuild", request.image_build.is_some()),
        ("boot", request.boot.is_some()),
        ("services", request.services.is_some()),
        ("agent", request.agent.is_some()),
    ];
    let named: Vec<&str> = given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    if named.is_empty() {
        return Ok(());
    }
    let message = format!("pool {pool} is of an image, so these cannot be given: {}", named.join(", "));
    Err(ApiError::invalid_parameter(message))
}

/// The repository and the recipe that the request leaves to its pool.
fn complete_by_repository(
    pool: &Pool,
    principal: &Principal,
    request: &mut CreateSandboxRequest,
    build: &ImageBuild,
) -> ApiResult<()> {
    let name = &pool.name;
    if request.image.is_some() {
        let message = format!("pool {name} is of a repository, so image cannot be given");
        return Err(ApiError::invalid_parameter(message));
    }
    if request.repository.is_none() {
        if principal.tenant().is_some() {
            let message = format!("pool {name} is of a repository of the server; name yours: repository");
            return Err(ApiError::invalid_parameter(message));
        }
        request.repository = repository_of(pool);
    }
    let word = |word: serde_json::Result<Value>| word.ok().and_then(|word| word.as_str().map(str::to_owned));
    let asked = request.image_build.get_or_insert_with(|| ImageBuildRequest {
        policy: word(serde_json::to_value(build.policy)),
        fit: word(serde_json::to_value(build.fit)),
        tag: build.tag.clone(),
        timeout_seconds: build.timeout_seconds.and_then(|seconds| i64::try_from(seconds).ok()),
        ..ImageBuildRequest::default()
    });
    if asked.recipe.is_none() && !build.recipe.is_null() {
        asked.recipe = Some(build.recipe.clone());
    }
    Ok(())
}

/// A create that makes what a pool keeps: a box whose agent holds it open.
pub(super) fn template_request(parts: &serde_json::Map<String, serde_json::Value>) -> serde_json::Value {
    let mut request = json!({ "extensions": { ENTRYPOINT_EXTENSION: "none" }, "resourceLimits": {} });
    for name in ["image", "repository", "imageBuild", "resourceLimits", "platform"] {
        if let Some(value) = parts.get(name).filter(|value| !value.is_null()) {
            request[name] = value.clone();
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::spec::Entrypoint;

    use super::*;

    #[test]
    fn bounds_that_contradict_each_other_are_refused() {
        let capacity = |buffer_min, buffer_max, pool_min, pool_max| {
            checked(Capacity { buffer_min, buffer_max, pool_min, pool_max })
        };
        assert!(capacity(1, 3, 0, 10).is_ok());
        assert!(capacity(0, 0, 0, 0).is_ok());
        assert!(capacity(0, u64::MAX, 0, 10).is_ok(), "the pool's own bound counts");
        assert!(capacity(4, 3, 0, 10).is_err());
        assert!(capacity(1, 3, 11, 10).is_err());
        assert!(capacity(1, 2000, 0, 5000).is_err());
    }

    #[test]
    fn a_template_runs_nothing() {
        let parts = json!({"image": {"uri": "a"}, "resourceLimits": {"cpu": "1"}, "name": "p"});
        let request = template_request(parts.as_object().unwrap());
        let request = decode::create::create(&request).unwrap();
        assert_eq!(request.image.unwrap().uri, "a");
        assert!(request.entrypoint.is_none());
        let rules = validate::create::CreateRules::embedded();
        let request = decode::create::create(&template_request(parts.as_object().unwrap())).unwrap();
        let now = sandglass_sandbox::Timestamp::clamped(0);
        let template = validate::create::create(request, None, &rules, now).unwrap().spec;
        assert_eq!((template.entrypoint, template.limits.cpu_millis), (Entrypoint::AgentOnly, Some(1000)));
    }
}
