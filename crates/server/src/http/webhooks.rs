//! Webhooks: subscriptions to events, and what became of their deliveries.

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, Uri, header};
use sandglass_api::{
    page::Page,
    webhooks::{
        Webhook as Shown, WebhookAttempt, WebhookDeliveries, WebhookDelivery, WebhookRequest, WebhookTest,
    },
};
use sandglass_sandbox::{WebhookId, ports::store::StoreError};
use sandglass_webhooks::{
    Attempt, Delivery, DeliveryState, Fenced, Health, Owner, Selection, SigningSecret, Status, Webhook, Why,
};

use super::{
    App,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    filters,
    parse::{QueryString, RawBody},
};
use crate::{engine::commit::EngineError, tenants::Principal, webhooks::Webhooks};

/// Characters of a description.
const DESCRIPTION: usize = 1024;
const DELIVERIES: i64 = 50;
const MOST_DELIVERIES: i64 = 200;

/// A checked request.
struct Asked {
    request: WebhookRequest,
    selection: Selection,
    secret: Option<SigningSecret>,
}

fn webhooks(app: &App) -> ApiResult<&Webhooks> {
    let absent = || ApiError::new(Code::Unavailable, "this server sends no webhooks; its log says why");
    app.webhooks.as_ref().ok_or_else(absent)
}

fn failed(error: StoreError) -> ApiError {
    EngineError::from(error).into()
}

fn absent() -> ApiError {
    ApiError::new(Code::WebhookNotFound, "webhook not found")
}

fn read(webhooks: &Webhooks, body: &RawBody) -> ApiResult<Asked> {
    let malformed = |_| {
        // The reader's own message could repeat the secret.
        ApiError::invalid_parameter(
            "the body must be {url, events?, metadata?, secret?, description?, enabled?}",
        )
    };
    let request: WebhookRequest = serde_json::from_value(body.required()?).map_err(malformed)?;
    let refused = |why: String| ApiError::invalid_parameter(why);
    webhooks.receivers.check(&request.url).map_err(|error| refused(error.to_string()))?;
    if request.description.as_ref().is_some_and(|text| text.chars().count() > DESCRIPTION) {
        return Err(refused(format!("description must have at most {DESCRIPTION} characters")));
    }
    let selection = Selection::new(request.events.clone(), request.metadata.clone());
    let selection = selection.map_err(|error| refused(error.to_string()))?;
    let secret = request.secret.clone().map(SigningSecret::try_from).transpose();
    let secret = secret.map_err(|error| refused(format!("secret: {error}")))?;
    Ok(Asked { request, selection, secret })
}

fn owner(principal: &Principal) -> Owner {
    Owner {
        tenant: principal.tenant().map(str::to_owned),
        namespace: principal.namespace().map(str::to_owned),
    }
}

/// `POST /webhooks`
pub async fn create(State(app): State<App>, principal: Principal, body: RawBody) -> ApiResult<Response> {
    let webhooks = webhooks(&app)?;
    let Asked { request, selection, secret } = read(webhooks, &body)?;
    let owner = owner(&principal);
    let all = webhooks.store.webhooks().await.map_err(failed)?;
    if all.iter().filter(|(row, _)| row.owner == owner).count() >= webhooks.most {
        let message = format!("there are {} webhooks already; remove one first", webhooks.most);
        return Err(ApiError::new(Code::QuotaExceeded, message));
    }
    let now = app.engine.clock().now();
    let made_up = secret.is_none();
    let row = Webhook {
        id: WebhookId::random(),
        version: 1,
        owner,
        url: request.url,
        description: request.description,
        selection,
        secret: secret.unwrap_or_else(SigningSecret::random),
        replaced: None,
        status: status(request.enabled, None, now),
        created_at: now,
        updated_at: now,
    };
    let cursor = webhooks.couriers.now().await.map_err(failed)?;
    webhooks.store.insert_webhook(&row, cursor).await.map_err(failed)?;
    webhooks.couriers.changed();
    let secret = made_up.then(|| row.secret.expose().to_owned());
    let answer = Shown { secret, ..shown(row, Health::default()) };
    let location = HeaderValue::from_str(&format!("/v1/webhooks/{}", answer.id));
    let location = location.map_err(|_| ApiError::internal())?;
    let headers =
        [(header::LOCATION, location), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    Ok((StatusCode::CREATED, headers, Json(answer)).into_response())
}

/// What a request makes of the status before it.
fn status(enabled: bool, before: Option<Status>, now: sandglass_sandbox::Timestamp) -> Status {
    match (enabled, before) {
        (true, _) => Status::Enabled,
        // Why it was disabled first is what counts.
        (false, Some(disabled @ Status::Disabled { .. })) => disabled,
        (false, _) => Status::Disabled { why: Why::Asked, since: now },
    }
}

/// `GET /webhooks`
pub async fn list(State(app): State<App>, principal: Principal, uri: Uri) -> ApiResult<Json<Page<Shown>>> {
    let page = filters::page(&QueryString::parse(uri.query()))?;
    let mut rows = webhooks(&app)?.store.webhooks().await.map_err(failed)?;
    rows.retain(|(row, _)| principal.may_see(row.owner.tenant.as_deref()));
    Ok(Json(page.cut(rows.into_iter().map(|(row, health)| shown(row, health)).collect())))
}

/// The webhook, if there is one for this caller: another tenant's looks as if it did not exist.
async fn find(webhooks: &Webhooks, principal: &Principal, id: &str) -> ApiResult<(Webhook, Health)> {
    let id = id.parse().map_err(|_| absent())?;
    let found = webhooks.store.webhook(id).await.map_err(failed)?;
    found.filter(|(row, _)| principal.may_see(row.owner.tenant.as_deref())).ok_or_else(absent)
}

/// `GET /webhooks/{id}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<Shown>> {
    let (row, health) = find(webhooks(&app)?, &principal, &id).await?;
    Ok(Json(shown(row, health)))
}

/// `PUT /webhooks/{id}`
pub async fn replace(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    body: RawBody,
) -> ApiResult<Json<Shown>> {
    let webhooks = webhooks(&app)?;
    let (before, _) = find(webhooks, &principal, &id).await?;
    let Asked { request, selection, secret } = read(webhooks, &body)?;
    let now = app.engine.clock().now();
    let replaced = match &secret {
        Some(new) if *new != before.secret => {
            now.checked_add(webhooks.overlap).map(|until| (before.secret.clone(), until))
        }
        _ => before.replaced.clone(),
    };
    let row = Webhook {
        version: before.version + 1,
        url: request.url,
        description: request.description,
        selection,
        secret: secret.unwrap_or_else(|| before.secret.clone()),
        replaced,
        status: status(request.enabled, Some(before.status), now),
        updated_at: now,
        ..before.clone()
    };
    let wakes = row.status == Status::Enabled && before.status != Status::Enabled;
    // What happened while it was disabled is not sent.
    let cursor = match wakes {
        true => Some(webhooks.couriers.now().await.map_err(failed)?),
        false => None,
    };
    let written = webhooks.store.replace_webhook(before.version, &row, cursor).await.map_err(failed)?;
    if written == Fenced::Lost {
        let message = "the webhook was changed or removed meanwhile; read it again";
        return Err(ApiError::new(Code::WebhookConflict, message));
    }
    if row.status != Status::Enabled {
        webhooks.store.abandon(row.id, now).await.map_err(failed)?;
    }
    webhooks.couriers.changed();
    let (row, health) = find(webhooks, &principal, &id).await?;
    Ok(Json(shown(row, health)))
}

/// `DELETE /webhooks/{id}`
pub async fn remove(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    let webhooks = webhooks(&app)?;
    let (row, _) = find(webhooks, &principal, &id).await?;
    webhooks.store.delete_webhook(row.id).await.map_err(failed)?;
    webhooks.couriers.changed();
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /webhooks/{id}/test`
pub async fn test(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
) -> ApiResult<Json<WebhookTest>> {
    let webhooks = webhooks(&app)?;
    let (row, _) = find(webhooks, &principal, &id).await?;
    let tested = webhooks.couriers.test(&row).await;
    Ok(Json(WebhookTest {
        message_id: tested.message_id,
        delivered: tested.attempt.error.is_none(),
        attempt: attempt(tested.attempt),
    }))
}

/// `GET /webhooks/{id}/deliveries`
pub async fn deliveries(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    uri: Uri,
) -> ApiResult<Json<WebhookDeliveries>> {
    let webhooks = webhooks(&app)?;
    let (row, _) = find(webhooks, &principal, &id).await?;
    let query = QueryString::parse(uri.query());
    let mut findings = Findings::new("query");
    let limit = match query.last("limit") {
        None => Some(DELIVERIES),
        Some(text) => findings.within("limit", |f| f.integer_text(text, 1, MOST_DELIVERIES)),
    };
    let limit = u32::try_from(findings.finish(limit)?).unwrap_or(1);
    let asked = query.last("state");
    let known = [DeliveryState::Pending, DeliveryState::Delivered, DeliveryState::Dead];
    let state = asked.and_then(|text| known.into_iter().find(|s| s.word().eq_ignore_ascii_case(text)));
    if asked.is_some() && state.is_none() {
        return Ok(Json(WebhookDeliveries { items: Vec::new() }));
    }
    let rows = webhooks.store.deliveries(row.id, state.map(DeliveryState::word), limit).await;
    let items = rows.map_err(failed)?.into_iter().map(delivery).collect();
    Ok(Json(WebhookDeliveries { items }))
}

fn shown(row: Webhook, health: Health) -> Shown {
    let (disabled_reason, disabled_at) = match row.status {
        Status::Enabled => (None, None),
        Status::Disabled { why, since } => (Some(why.word().to_owned()), Some(since.into())),
    };
    Shown {
        id: row.id.to_string(),
        url: row.url,
        description: row.description,
        events: row.selection.events().to_vec(),
        metadata: row.selection.metadata().clone(),
        enabled: row.status == Status::Enabled,
        disabled_reason,
        disabled_at,
        consecutive_failures: health.failures,
        failing_since: health.failing_since.map(Into::into),
        last_delivered_at: health.last_delivered_at.map(Into::into),
        secret: None,
        created_at: row.created_at.into(),
        updated_at: row.updated_at.into(),
    }
}

fn attempt(attempt: Attempt) -> WebhookAttempt {
    WebhookAttempt {
        at: attempt.at.into(),
        status: attempt.status,
        error: attempt.error,
        duration_ms: attempt.duration_ms,
    }
}

fn delivery(row: Delivery) -> WebhookDelivery {
    let of = |family: &str| row.subject.strip_prefix(family).map(str::to_owned);
    WebhookDelivery {
        sandbox_id: of("sandbox:"),
        image_build_id: of("image_build:"),
        next_attempt_at: (row.state == DeliveryState::Pending).then(|| row.next_at.into()),
        message_id: row.message_id,
        kind: row.kind,
        seq: row.seq,
        state: row.state.word().to_owned(),
        attempt_count: row.attempts,
        attempts: row.last.into_iter().map(attempt).collect(),
        created_at: row.created_at.into(),
        finished_at: row.finished_at.map(Into::into),
    }
}
