//! All routes on one page, grouped by who may reach them.

use std::time::Duration;

use axum::{
    Router,
    extract::{Request, State},
    middleware::{from_fn, from_fn_with_state, map_response},
    response::Response,
    routing::{any, delete, get, patch, post},
};
use http::{HeaderValue, header::STRICT_TRANSPORT_SECURITY};

use super::{
    App, diagnostics, docs, events, health, images, ingress, metrics_events, metrics_page, middleware,
    network_policy, sandboxes, services, snapshots, unsupported,
};
use crate::ingress::proxy_handler;

/// Routes that exist at the root and under `/v1`.
fn both_mounts(app: &App) -> Router<App> {
    let use_of_sandbox = from_fn_with_state(app.clone(), middleware::usage::count);
    Router::new()
        // Sandboxes. All need the key.
        .route("/sandboxes", post(sandboxes::create).get(sandboxes::list))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::delete))
        .route("/sandboxes/{id}/metadata", patch(sandboxes::patch_metadata))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/renew-expiration", post(sandboxes::renew))
        .route("/sandboxes/{id}/endpoints/{port}", get(sandboxes::endpoint))
        .route("/sandboxes/{id}/diagnostics/logs", get(diagnostics::logs))
        .route("/sandboxes/{id}/diagnostics/events", get(diagnostics::events))
        .route("/sandboxes/{id}/diagnostics/inspect", get(diagnostics::inspect))
        .route("/sandboxes/{id}/diagnostics/summary", get(diagnostics::summary))
        .route("/sandboxes/{id}/events", get(events::events))
        .route("/sandboxes/{id}/services", get(services::list))
        .route("/sandboxes/{id}/services/{name}", get(services::get).put(services::switch))
        .route("/sandboxes/{id}/services/{name}/restart", post(services::restart))
        // Snapshots, as far as the runtime makes them.
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/snapshots", get(snapshots::list))
        .route("/snapshots/{id}", get(snapshots::get).delete(snapshots::delete))
        .route(
            "/sandboxes/{id}/networkpolicy",
            get(network_policy::read)
                .put(network_policy::replace)
                .patch(network_policy::patch)
                .delete(network_policy::delete)
                .route_layer(use_of_sandbox),
        )
        // What single hosts lack: validated, then refused with the documented code.
        .route("/pools", post(unsupported::create_pool).get(unsupported::no_pools))
        .route(
            "/pools/{name}",
            get(unsupported::no_pools).put(unsupported::update_pool).delete(unsupported::no_pools),
        )
        .route("/templates", post(unsupported::create_template).get(unsupported::list_templates))
        .route("/templates/{id}", get(unsupported::no_templates).delete(unsupported::no_templates))
}

/// Ports of sandboxes, on both mounts. Admission is the ingress's own: the key, or the sandbox's token. Apart from the others, because
/// every layer costs every request, and most of them leave these alone ([`middleware::auth::is_proxied`]).
fn ports() -> Router<App> {
    Router::new()
        .route("/sandboxes/{id}/proxy/{port}", any(proxy))
        .route("/sandboxes/{id}/proxy/{port}/", any(proxy))
        .route("/sandboxes/{id}/proxy/{port}/{*path}", any(proxy))
        .route("/v1/sandboxes/{id}/proxy/{port}", any(proxy))
        .route("/v1/sandboxes/{id}/proxy/{port}/", any(proxy))
        .route("/v1/sandboxes/{id}/proxy/{port}/{*path}", any(proxy))
}

/// Routes of ours and of `/v1` only. All need the key.
fn v1_only() -> Router<App> {
    Router::new()
        .route("/metrics/events", post(metrics_events::accept))
        .route("/ingress/sandboxes", get(ingress::sandboxes))
        .route("/ingress/sandboxes/{id}/wake", post(ingress::wake))
        .route("/ingress/uses", post(ingress::uses))
        .route("/images", get(images::list))
        .route("/images/pull", post(images::pull))
        .route("/images/import", post(images::import))
        .route("/images/prune", post(images::prune))
        .route("/images/{reference}", delete(images::remove))
}

/// Routes that anybody may reach.
fn open() -> Router<App> {
    Router::new()
        .route("/health", get(health::alive))
        .route("/healthz", get(health::alive))
        .route("/readyz", get(health::ready))
        .route("/version", get(health::version))
        .route("/openapi.json", get(docs::document))
        .route("/docs", get(docs::page))
        .route("/redoc", get(docs::page))
}

async fn proxy(State(app): State<App>, request: Request) -> Response {
    proxy_handler(app.ingress, request).await
}

/// Over TLS only: browsers are told not to come back without, if that is wanted.
pub fn strictly_over_tls(router: Router, max_age: Option<Duration>) -> Router {
    let Some(age) = max_age else { return router };
    let told =
        HeaderValue::try_from(format!("max-age={}", age.as_secs())).expect("a number is a header value");
    router.layer(map_response(move |mut response: Response| {
        let told = told.clone();
        async move {
            // Also over whatever a program in a sandbox says: the host is the server's, not the program's.
            response.headers_mut().insert(STRICT_TRANSPORT_SECURITY, told);
            response
        }
    }))
}

/// The whole service.
pub fn build(app: App) -> Router {
    let door = middleware::auth::Door {
        keys: app.keys.clone(),
        open_metrics: app.config.server.open_metrics,
        ingress_key: app.config.ingress.key.as_ref().and_then(|key| middleware::auth::digest(key.expose())),
    };
    let telemetry = app.telemetry.clone();
    let cap = middleware::concurrency::Cap::new(app.config.server.limit_concurrency);
    Router::new()
        .merge(both_mounts(&app))
        .nest("/v1", both_mounts(&app).merge(v1_only()))
        // The page is one for the whole process, so it is not under the API's version.
        .route("/metrics", get(metrics_page::page))
        .merge(open())
        .fallback(middleware::routing::not_found)
        .method_not_allowed_fallback(middleware::routing::method_not_allowed)
        .layer(from_fn(middleware::routing::normalize))
        .layer(from_fn_with_state(door, middleware::auth::require_key))
        .layer(from_fn_with_state(cap, middleware::concurrency::limit))
        .merge(ports())
        .with_state(app)
        .layer(from_fn(middleware::cors::answer))
        .layer(from_fn_with_state(telemetry, middleware::request_id::attach))
}
