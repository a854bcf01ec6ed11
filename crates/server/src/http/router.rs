//! All routes on one page, grouped by who may reach them.

use axum::{
    Router,
    middleware::{from_fn, from_fn_with_state},
    routing::{get, patch, post, put},
};

use super::{
    App, build_logs, built_images, diagnostics, docs, events, front::Front, health, image_builds, images,
    ingress, metrics_events, metrics_page, middleware, network_policy, pools, prebuilds, pushes, sandboxes,
    service_access, service_logs, services, snapshots, unsupported, webhooks,
};

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
        .route("/sandboxes/{id}/activity", post(sandboxes::activity))
        .route("/sandboxes/{id}/endpoints/{port}", get(sandboxes::endpoint))
        .route("/sandboxes/{id}/diagnostics/logs", get(diagnostics::logs))
        .route("/sandboxes/{id}/diagnostics/events", get(diagnostics::events))
        .route("/sandboxes/{id}/diagnostics/inspect", get(diagnostics::inspect))
        .route("/sandboxes/{id}/diagnostics/summary", get(diagnostics::summary))
        .route("/sandboxes/{id}/events", get(events::events))
        .route("/sandboxes/{id}/services", get(services::list))
        .route("/sandboxes/{id}/services/{name}", get(services::get).put(services::switch))
        .route("/sandboxes/{id}/services/{name}/restart", post(services::restart))
        .route("/sandboxes/{id}/services/{name}/access", post(service_access::open))
        .route("/sandboxes/{id}/services/{name}/tunnel", get(service_access::tunnel))
        .route("/sandboxes/{id}/services/{name}/logs", get(service_logs::read))
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
        .route("/pools", post(pools::create).get(pools::list))
        .route("/pools/{name}", get(pools::get).put(pools::resize).delete(pools::delete))
        // What single hosts lack: validated, then refused with the documented code.
        .route("/templates", post(unsupported::create_template).get(unsupported::list_templates))
        .route("/templates/{id}", get(unsupported::no_templates).delete(unsupported::no_templates))
}

/// Routes of ours and of `/v1` only. All need the key.
fn v1_only() -> Router<App> {
    Router::new()
        .route("/metrics/events", post(metrics_events::accept))
        .route("/ingress/sandboxes", get(ingress::sandboxes))
        .route("/ingress/sandboxes/{id}/wake", post(ingress::wake))
        .route("/ingress/uses", post(ingress::uses))
        .route("/images", get(built_images::list))
        .route("/images/pull", post(images::pull))
        .route("/images/import", post(images::import))
        .route("/images/prune", post(images::prune))
        .route("/images/{reference}", get(built_images::get).delete(built_images::remove))
        .route("/images/tags/{repository_key}/{tag}", put(built_images::move_tag))
        .route("/image-builds", post(image_builds::create).get(image_builds::list))
        .route("/image-builds/{id}", get(image_builds::get).delete(image_builds::cancel))
        .route("/image-builds/{id}/logs", get(build_logs::read))
        .route("/image-builds/{id}/events", get(image_builds::events))
        .route("/prebuilds", post(prebuilds::create).get(prebuilds::list))
        .route("/prebuilds/{id}", get(prebuilds::get).put(prebuilds::replace).delete(prebuilds::remove))
        .route("/prebuilds/{id}/trigger", post(prebuilds::trigger))
        .route("/webhooks", post(webhooks::create).get(webhooks::list))
        .route("/webhooks/{id}", get(webhooks::get).put(webhooks::replace).delete(webhooks::remove))
        .route("/webhooks/{id}/test", post(webhooks::test))
        .route("/webhooks/{id}/deliveries", get(webhooks::deliveries))
        // Needs no key: the push is signed.
        .route("/prebuilds/{id}/webhook", post(pushes::accept))
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

/// The whole service.
pub fn build(app: App) -> Front {
    let door = middleware::auth::Door {
        keys: app.keys.clone(),
        open_metrics: app.config.server.open_metrics,
        ingress_key: app.config.ingress.key.as_ref().and_then(|key| middleware::auth::digest(key.expose())),
    };
    let (ingress, telemetry) = (app.ingress.clone(), app.telemetry.clone());
    let cap = middleware::concurrency::Cap::new(app.config.server.limit_concurrency);
    let router = Router::new()
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
        .with_state(app)
        .layer(from_fn(middleware::cors::answer))
        .layer(from_fn_with_state(telemetry.clone(), middleware::request_id::attach));
    Front::new(ingress, telemetry, router)
}
