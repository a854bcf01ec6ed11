//! The OpenAPI 3.1 document, put together from the route table and the schemas of the wire types.

use serde_json::{Map, Value, json};
use utoipa::OpenApi;

use crate::{
    builds::{
        BuiltImage, BuiltRepository, CreateImageBuildRequest, ImageBuild, ImageBuildCache, ImageBuildFailure,
        ImageBuildStatus, ImageBuildStep, MoveTagRequest, Prebuild, PrebuildRequest,
    },
    diagnostics::DiagnosticContent,
    error::{ErrorBody, RouterErrorBody, ValidationBody},
    ingress::IngressUses,
    lifecycle::{
        ActivityRequest, ActivityResponse, CreatePoolRequest, CreateSandboxRequest, CreateSandboxResponse,
        CreateSnapshotRequest, CreateTemplateRequest, Endpoint, Health, ListPoolsResponse, MetricsEvent,
        NetworkPolicy, Pool, RenewRequest, RenewResponse, Sandbox, SandboxEvent, SandboxEventPage,
        SandboxService, SandboxServices, ServiceAccess, ServiceAccessRequest, ServiceSwitch, Snapshot,
        Template, UpdatePoolRequest, Version,
    },
    page::Pagination,
    routes::{Content, Query, ROUTES, Route},
    webhooks::{Webhook, WebhookAttempt, WebhookDeliveries, WebhookDelivery, WebhookRequest, WebhookTest},
};

/// Version of the contract, not of the server.
const CONTRACT_VERSION: &str = "0.1.0";

#[derive(OpenApi)]
#[openapi(components(schemas(
    ActivityRequest,
    ActivityResponse,
    BuiltImage,
    BuiltRepository,
    CreateImageBuildRequest,
    ImageBuild,
    ImageBuildCache,
    ImageBuildFailure,
    ImageBuildStatus,
    ImageBuildStep,
    MoveTagRequest,
    Prebuild,
    PrebuildRequest,
    CreatePoolRequest,
    CreateSandboxRequest,
    CreateSandboxResponse,
    CreateSnapshotRequest,
    CreateTemplateRequest,
    DiagnosticContent,
    Endpoint,
    ErrorBody,
    Health,
    IngressUses,
    ListPoolsResponse,
    MetricsEvent,
    NetworkPolicy,
    Pagination,
    Pool,
    RenewRequest,
    RenewResponse,
    RouterErrorBody,
    Sandbox,
    SandboxEvent,
    SandboxEventPage,
    SandboxService,
    SandboxServices,
    ServiceAccess,
    ServiceAccessRequest,
    ServiceSwitch,
    Snapshot,
    Template,
    UpdatePoolRequest,
    ValidationBody,
    Version,
    Webhook,
    WebhookAttempt,
    WebhookDeliveries,
    WebhookDelivery,
    WebhookRequest,
    WebhookTest
)))]
struct Schemas;

/// The whole document.
pub fn document() -> Value {
    let components = serde_json::to_value(Schemas::openapi().components).expect("schemas are plain data");
    let mut schemas = match components.get("schemas") {
        Some(Value::Object(schemas)) => schemas.clone(),
        _ => Map::new(),
    };
    for (name, schema) in composed_schemas() {
        schemas.insert(name.to_owned(), schema);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Sandglass lifecycle API",
            "description": "Creates, watches, pauses, resumes and removes sandboxes; compatible with the OpenSandbox lifecycle API.",
            "version": CONTRACT_VERSION,
        },
        "paths": paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "apiKey": {"type": "apiKey", "in": "header", "name": "OPEN-SANDBOX-API-KEY"}
            }
        }
    })
}

/// Schemas that are no Rust type of their own: pages, and bodies that are bare maps or lists.
fn composed_schemas() -> Vec<(&'static str, Value)> {
    let page = |item: &str| {
        json!({
            "type": "object",
            "required": ["items", "pagination"],
            "properties": {
                "items": {"type": "array", "items": reference(item)},
                "pagination": reference("PaginationInfo"),
            }
        })
    };
    vec![
        ("ListSandboxesResponse", page("Sandbox")),
        ("ListSnapshotsResponse", page("Snapshot")),
        ("ListFsbTemplatesResponse", page("FsbTemplate")),
        ("ListImageBuildsResponse", page("ImageBuild")),
        ("ListPrebuildsResponse", page("Prebuild")),
        ("ListWebhooksResponse", page("Webhook")),
        (
            "MetadataPatch",
            json!({
                "type": "object",
                "description": "Text sets a key, `null` removes it, an absent key stays.",
                "additionalProperties": {"type": ["string", "null"]}
            }),
        ),
        (
            "ListImagesResponse",
            json!({
                "type": "object",
                "required": ["items"],
                "properties": {"items": {"type": "array", "items": {"type": "object"}}}
            }),
        ),
        (
            "PullImageRequest",
            json!({
                "type": "object",
                "required": ["reference"],
                "properties": {
                    "reference": {"type": "string"},
                    "auth": reference("ImageAuth"),
                    "platform": reference("PlatformSpec"),
                }
            }),
        ),
        ("NetworkRules", json!({"type": "array", "items": reference("NetworkRule")})),
        ("NetworkTargets", json!({"type": "array", "items": {"type": "string"}})),
    ]
}

fn paths() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        for path in route.paths() {
            let versioned = path.starts_with("/v1/");
            let method = route.method.to_ascii_lowercase();
            let item = paths.entry(path.replace("{*", "{")).or_insert_with(|| json!({}));
            if let Value::Object(item) = item {
                item.insert(method, operation(route, versioned));
            }
        }
    }
    Value::Object(paths)
}

fn operation(route: &Route, versioned: bool) -> Value {
    let suffix = if versioned { "_v1" } else { "" };
    let mut operation = json!({
        "operationId": format!("{}{suffix}", route.operation),
        "summary": route.summary,
        "tags": [route.tag],
        "responses": responses(route),
    });
    let parameters: Vec<Value> =
        path_parameters(route).chain(route.query.iter().map(query_parameter)).collect();
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    if route.body != Content::Nothing {
        operation["requestBody"] = json!({"required": route.body_required, "content": content(route.body)});
    }
    if route.needs_auth {
        operation["security"] = json!([{"apiKey": []}]);
    }
    operation
}

fn path_parameters(route: &Route) -> impl Iterator<Item = Value> + '_ {
    route.path.split('/').filter_map(|segment| {
        let name = segment.strip_prefix('{')?.strip_suffix('}')?.trim_start_matches('*');
        let kind = if name == "port" { "integer" } else { "string" };
        Some(json!({"name": name, "in": "path", "required": true, "schema": {"type": kind}}))
    })
}

fn query_parameter(query: &Query) -> Value {
    let schema = if query.kind == "array" {
        json!({"type": "array", "items": {"type": "string"}})
    } else {
        json!({"type": query.kind})
    };
    json!({"name": query.name, "in": "query", "required": false, "description": query.about, "schema": schema})
}

fn responses(route: &Route) -> Value {
    let mut responses = Map::new();
    let mut success = json!({"description": "Success"});
    if route.answer != Content::Nothing {
        success["content"] = content(route.answer);
    }
    responses.insert(route.success.to_string(), success);
    let mut errors: Vec<u16> = route.errors.to_vec();
    if route.needs_auth {
        errors.push(401);
        errors.push(500);
    }
    errors.sort_unstable();
    for status in errors {
        responses.insert(
            status.to_string(),
            json!({"description": "Error", "content": content(Content::Json("ErrorResponse"))}),
        );
    }
    if route.needs_auth {
        responses.insert(
            "422".to_owned(),
            json!({"description": "Malformed request", "content": content(Content::Json("HTTPValidationError"))}),
        );
    }
    Value::Object(responses)
}

fn content(content: Content) -> Value {
    match content {
        Content::Nothing => json!({}),
        Content::Json(schema) => json!({"application/json": {"schema": reference(schema)}}),
        Content::JsonOrText(schema) => json!({
            "application/json": {"schema": reference(schema)},
            "text/plain": {"schema": {"type": "string"}}
        }),
        Content::JsonOrStream(schema) => json!({
            "application/json": {"schema": reference(schema)},
            "text/event-stream": {"schema": {"type": "string"}}
        }),
        Content::Text => json!({"text/plain": {"schema": {"type": "string"}}}),
        Content::Html => json!({"text/html": {"schema": {"type": "string"}}}),
        Content::JsonLines => json!({"application/x-ndjson": {"schema": {"type": "object"}}}),
        Content::Opaque => json!({"*/*": {"schema": {}}}),
    }
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_leads_somewhere() {
        fn visit(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(target)) = map.get("$ref") {
                        found.push(target.clone());
                    }
                    map.values().for_each(|inner| visit(inner, found));
                }
                Value::Array(list) => list.iter().for_each(|inner| visit(inner, found)),
                _ => {}
            }
        }
        let document = document();
        let mut found = Vec::new();
        visit(&document, &mut found);
        assert!(!found.is_empty());
        for target in found {
            let pointer = target.trim_start_matches('#');
            assert!(document.pointer(pointer).is_some(), "{target}");
        }
    }

    #[test]
    fn the_document_covers_every_route() {
        let document = document();
        for route in ROUTES {
            for path in route.paths() {
                let item = &document["paths"][path.replace("{*", "{")];
                assert!(item[route.method.to_ascii_lowercase()].is_object(), "{} {path}", route.method);
            }
        }
    }

    /// The `/v1` copies differ from the bare ones in their operation id only, so they are left out of the review.
    #[test]
    fn the_document_is_reviewed() {
        let mut document = document();
        if let Some(Value::Object(paths)) = document.get_mut("paths") {
            paths.retain(|path, _| {
                !path.starts_with("/v1/")
                    || path == "/v1/metrics/events"
                    || ["/v1/images", "/v1/image-builds", "/v1/prebuilds", "/v1/ingress", "/v1/webhooks"]
                        .iter()
                        .any(|own| path.starts_with(own))
            });
        }
        insta::assert_json_snapshot!(document);
    }
}
