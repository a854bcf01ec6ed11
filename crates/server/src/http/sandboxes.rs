//! The sandbox routes: parse, call the engine, convert.

use axum::{
    Json,
    extract::{OriginalUri, Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderMap, StatusCode, Uri, header};
use sandglass_api::{
    lifecycle::{ActivityResponse, Endpoint, RenewResponse, Sandbox},
    page::Page,
};
use sandglass_sandbox::{Timestamp, lifecycle::state, source::RepositorySource};
use sha2::{Digest, Sha256};

use super::{
    App, decode, ended, engine_errors,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    filters,
    parse::{QueryString, RawBody},
    pools, present, snapshots, validate,
};
use crate::{
    engine::{
        commit::{EngineError, NewSandbox},
        index::Entry,
    },
    ingress::{EndpointQuery, Mount, Vantage, answer_endpoint, check_endpoint},
    telemetry::belonging,
    tenants::Principal,
    workspace::{Confidential, SecretFiles},
};

/// Longest `Idempotency-Key`.
const MAX_KEY_CHARS: usize = 255;

/// `POST /sandboxes`
pub async fn create(
    State(app): State<App>,
    principal: Principal,
    headers: HeaderMap,
    body: RawBody,
) -> ApiResult<Response> {
    let now = app.engine.clock().now();
    let value = body.required()?;
    let mut request = decode::create::create(&value)?;
    validate::create::before_snapshot(&request)?;
    let pool = pools::Named::of(&app, &principal, &mut request)?;
    let asked = validate::repository::Asked::of(&request);
    let restored = snapshots::restored(&app, &principal, &request).await?;
    let mut wanted = validate::create::create(request, restored, &app.rules, now)?;
    if let Some(asked) = asked {
        let (mut source, confidential) = sourced(&app, asked, principal.tenant()).await?;
        source.namespace = principal.namespace().map(str::to_owned);
        wanted.spec.source = Some(Box::new(source));
        wanted.confidential = confidential;
    }
    app.owns_image(&principal, &wanted.spec.image).await?;
    wanted.spec.tenant = principal.tenant().map(str::to_owned);
    if let Some(policies) = &mut wanted.spec.policies {
        policies.namespace = principal.namespace().map(str::to_owned);
    }
    let pool = pool.map(|pool| pool.settle(&mut wanted.spec));
    app.admit(&wanted.spec).await?;
    let wanted = wanted.settle(&app.rules).await?;
    let key = idempotency_key(&headers)?.map(|key| (principal.scoped(&key), fingerprint(&value)));
    let new = NewSandbox {
        spec: wanted.spec,
        facts: wanted.facts,
        secrets: wanted.secrets,
        key,
        pool,
        confidential: wanted.confidential,
    };
    // In a task of its own: a client that gives up must not take a half-answered create with it.
    let engine = app.engine.clone();
    let entry = tokio::spawn(belonging(async move { engine.create(new, now).await }))
        .await
        .map_err(|_| ApiError::internal())??;
    let mut answer = present::created(&entry, wanted.echoed_metadata);
    if let Some(asked) = wanted.echoed_entrypoint {
        answer.entrypoint = asked;
    }
    let location = format!("/v1/sandboxes/{}", entry.id);
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(answer)).into_response())
}

/// Checks what a request says of its repository, with the secrets that it names.
pub(super) async fn sourced(
    app: &App,
    asked: validate::repository::Asked,
    tenant: Option<&str>,
) -> ApiResult<(RepositorySource, Confidential)> {
    let workspaces = app.workspaces().ok_or_else(|| {
        ApiError::new(Code::ApiNotSupported, "this server makes no sandboxes from repositories")
    })?;
    let (config, tenant) = (app.config.clone(), tenant.map(str::to_owned));
    let asked = tokio::task::spawn_blocking(move || {
        asked.with_secrets(SecretFiles(config.workspaces.secrets_dir.as_deref()), tenant.as_deref())
    });
    let asked = asked.await.map_err(|_| ApiError::internal())??;
    asked.check(workspaces.images())
}

fn idempotency_key(headers: &HeaderMap) -> ApiResult<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    match value.to_str().map(str::trim) {
        Ok(key) if !key.is_empty() && key.len() <= MAX_KEY_CHARS => Ok(Some(key.to_owned())),
        _ => Err(ApiError::invalid_parameter("Idempotency-Key must be 1 to 255 visible ASCII characters")),
    }
}

/// The same JSON value has the same fingerprint, however it is spaced and ordered.
fn fingerprint(value: &serde_json::Value) -> String {
    let digest = Sha256::digest(value.to_string().as_bytes());
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// `GET /sandboxes`
pub async fn list(State(app): State<App>, principal: Principal, uri: Uri) -> ApiResult<Json<Page<Sandbox>>> {
    let query = QueryString::parse(uri.query());
    let page = filters::page(&query)?;
    let states = filters::states(&query);
    let metadata = filters::metadata(&query)?;
    let past = include_terminated(&query)?;
    app.readable()?;
    let matching = app
        .engine
        .index()
        .newest_first()
        .into_iter()
        .filter(|entry| principal.may_see(entry.tenant()))
        .filter(|entry| entry.status().is_some_and(|s| states.matches(s.state.word())))
        .filter(|entry| entry.facts().map_or(metadata.is_empty(), |f| metadata.matches(&f.metadata)));
    if past.unwrap_or_else(|| states.name(state::State::Terminated.word())) {
        let mut all: Vec<Sandbox> = matching.map(|entry| app.show(&entry)).collect();
        let ended = ended::ended(&app, &principal, None).await.map_err(EngineError::from)?;
        let ended = ended
            .into_iter()
            .filter(|sandbox| states.matches(&sandbox.status.state) && metadata.matches(&sandbox.metadata));
        // Lists have no words of the short dialect.
        all.extend(ended.map(|sandbox| Sandbox { seed_state: None, seed_uptime_seconds: None, ..sandbox }));
        all.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
        return Ok(Json(page.cut(all)));
    }
    let Page { items, pagination } = page.cut(matching.collect());
    Ok(Json(Page { items: items.iter().map(|entry| app.show(entry)).collect(), pagination }))
}

/// Whether sandboxes of which nothing is left are wanted too; `None`: not said.
fn include_terminated(query: &QueryString) -> ApiResult<Option<bool>> {
    let Some(text) = query.last("includeTerminated") else { return Ok(None) };
    let mut findings = Findings::new("query");
    let wanted = findings.within("includeTerminated", |f| f.boolean_text(text));
    findings.finish(wanted).map(Some)
}

/// `GET /sandboxes/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Json<Sandbox>> {
    let past = include_terminated(&QueryString::parse(uri.query()))?.unwrap_or(false);
    let entry = match app.find(&principal, &id) {
        Ok(entry) => entry,
        Err(absent) => {
            let Some(id) = id.parse().ok().filter(|_| past) else { return Err(absent) };
            let ended = ended::ended(&app, &principal, Some(id)).await.map_err(EngineError::from)?;
            return ended.into_iter().next().map(Json).ok_or(absent);
        }
    };
    app.readable()?;
    Ok(Json(app.show_in_short(&entry)))
}

/// `DELETE /sandboxes/{id}`
pub async fn delete(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    app.find(&principal, &id)?;
    let engine = app.engine.clone();
    tokio::spawn(async move { engine.delete(&id).await }).await.map_err(|_| ApiError::internal())??;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /sandboxes/{id}/metadata`
pub async fn patch_metadata(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Json<Sandbox>> {
    let patch = decode::small::metadata_patch(&body.required()?)?;
    let entry = app.find(&principal, &id)?;
    validate::labels::check_patch(&patch)?;
    let entry = if patch.is_empty() { entry } else { app.engine.patch_metadata(&id, &patch).await? };
    Ok(Json(app.show(&entry)))
}

/// `POST /sandboxes/{id}/pause`
pub async fn pause(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    app.find(&principal, &id)?;
    let engine = app.engine.clone();
    tokio::spawn(async move { engine.pause(&id).await }).await.map_err(|_| ApiError::internal())??;
    Ok(StatusCode::ACCEPTED)
}

/// `POST /sandboxes/{id}/resume`
pub async fn resume(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    app.find(&principal, &id)?;
    let engine = app.engine.clone();
    tokio::spawn(async move { engine.resume(&id).await }).await.map_err(|_| ApiError::internal())??;
    Ok(StatusCode::ACCEPTED)
}

/// `POST /sandboxes/{id}/renew-expiration`
pub async fn renew(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Json<RenewResponse>> {
    let wanted: Timestamp = decode::small::renew(&body.required()?)?;
    app.find(&principal, &id)?;
    let renewed = app.engine.renew(&id, wanted).await?;
    Ok(Json(RenewResponse { expires_at: renewed.into() }))
}

/// `POST /sandboxes/{id}/activity`
pub async fn activity(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Json<ActivityResponse>> {
    let lasts = decode::small::activity(&body.required()?)?;
    app.find(&principal, &id)?;
    let leased = app.engine.lease(&id, lasts).await?;
    Ok(Json(ActivityResponse { leased_until: leased.until.into(), idle_at: leased.idle_at.map(Into::into) }))
}

/// `GET /sandboxes/{id}/endpoints/{port}`
pub async fn endpoint(
    State(app): State<App>,
    principal: Principal,
    Path((id, port)): Path<(String, String)>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> ApiResult<Json<Endpoint>> {
    let query = QueryString::parse(uri.query());
    let mut findings = Findings::new("path");
    let port = findings.within("port", |f| f.integer_text(&port, i64::MIN, i64::MAX));
    let port = findings.finish(port)?;
    let mut findings = Findings::new("query");
    let use_server_proxy = match query.last("use_server_proxy") {
        Some(text) => findings.within("use_server_proxy", |f| f.boolean_text(text)),
        None => Some(false),
    };
    let expires =
        query.last("expires").and_then(|text| findings.within("expires", |f| f.wide_integer_text(text)));
    let use_server_proxy = findings.finish(use_server_proxy)?;
    let asked = EndpointQuery { port, use_server_proxy, expires };
    let now = u64::try_from(app.engine.clock().now().as_millis() / 1000).unwrap_or(0);
    let gateway = app.minting.as_deref();
    check_endpoint(asked, gateway, now).map_err(engine_errors::of_refusal)?;
    let entry = app.find(&principal, &id)?;
    endpoint_of(&app, &entry, asked, (&uri, &headers)).map(Json)
}

/// The endpoint that is asked for, as it is for whoever asks so. `uri` is the original one.
pub(super) fn endpoint_of(
    app: &App,
    entry: &Entry,
    asked: EndpointQuery,
    (uri, headers): (&Uri, &HeaderMap),
) -> ApiResult<Endpoint> {
    let target = app.target(entry).ok_or_else(ApiError::sandbox_not_found)?;
    let public_host = app.public_host();
    let vantage = vantage(app, uri, headers, &public_host)?;
    let answer =
        answer_endpoint(asked, vantage, &entry.id.to_string(), &target).map_err(engine_errors::of_refusal)?;
    let headers = answer.headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Ok(Endpoint { endpoint: answer.endpoint, headers })
}

/// From where a request asks how to get into sandboxes. `uri` is the original one.
pub(super) fn vantage<'a>(
    app: &'a App,
    uri: &'a Uri,
    headers: &'a HeaderMap,
    public_host: &'a str,
) -> ApiResult<Vantage<'a>> {
    let host = headers
        .get(header::HOST)
        .and_then(|h| h.to_str().ok())
        .or_else(|| uri.authority().map(|a| a.as_str()));
    let host =
        host.ok_or_else(|| ApiError::new(Code::BadRequest, "the request has no usable Host header"))?;
    Ok(Vantage {
        host,
        mount: Mount::of(uri.path()),
        eip: app.config.server.eip.as_deref(),
        public_host,
        style: app.endpoint_style(),
        open_proxy: app.config.server.open_proxy,
        gateway: app.minting.as_deref(),
        now: u64::try_from(app.engine.clock().now().as_millis() / 1000).unwrap_or(0),
    })
}
