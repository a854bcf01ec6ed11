//! Every route of the HTTP API as data: the router, the authentication tests and the OpenAPI document are all
//! checked against this one table.
//!
//! The invariant: a route that is not listed here does not exist for clients.

/// Under which prefixes a route is reachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mount {
    /// At the root and under `/v1`.
    Both,
    /// At the root only.
    Bare,
    /// Under `/v1` only.
    V1,
}

impl Mount {
    /// The prefixes of this mount.
    pub const fn prefixes(self) -> &'static [&'static str] {
        match self {
            Self::Both => &["", "/v1"],
            Self::Bare => &[""],
            Self::V1 => &["/v1"],
        }
    }
}

/// What a body or an answer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// No body.
    Nothing,
    /// A JSON value of the named schema.
    Json(&'static str),
    /// A JSON value of the named schema, or plain text, depending on the query.
    JsonOrText(&'static str),
    /// A JSON value of the named schema, or a stream of server-sent events, depending on what is accepted.
    JsonOrStream(&'static str),
    /// Plain text.
    Text,
    /// A page for people.
    Html,
    /// JSON values, one a line, as the work goes on.
    JsonLines,
    /// Bytes whose meaning this document does not describe.
    Opaque,
}

/// A query parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    pub name: &'static str,
    /// `string`, `integer`, `boolean` or `array` (of strings, by repetition).
    pub kind: &'static str,
    pub about: &'static str,
}

/// One method on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub method: &'static str,
    /// Without the mount prefix, in the router's syntax (`{name}`, `{*rest}`).
    pub path: &'static str,
    pub mount: Mount,
    /// Whether a request without a key is refused when the server has one.
    pub needs_auth: bool,
    pub tag: &'static str,
    pub operation: &'static str,
    pub summary: &'static str,
    pub body: Content,
    pub body_required: bool,
    pub query: &'static [Query],
    pub success: u16,
    pub answer: Content,
    /// Statuses of application errors, apart from 401, 422 and 500.
    pub errors: &'static [u16],
}

impl Route {
    const fn new(
        method: &'static str,
        path: &'static str,
        operation: &'static str,
        summary: &'static str,
    ) -> Self {
        Self {
            method,
            path,
            mount: Mount::Both,
            needs_auth: true,
            tag: "Sandboxes",
            operation,
            summary,
            body: Content::Nothing,
            body_required: true,
            query: &[],
            success: 200,
            answer: Content::Nothing,
            errors: &[],
        }
    }

    const fn tag(self, tag: &'static str) -> Self {
        Self { tag, ..self }
    }

    const fn body(self, schema: &'static str) -> Self {
        Self { body: Content::Json(schema), ..self }
    }

    const fn optional_body(self, schema: &'static str) -> Self {
        Self { body: Content::Json(schema), body_required: false, ..self }
    }

    const fn query(self, query: &'static [Query]) -> Self {
        Self { query, ..self }
    }

    const fn answers(self, success: u16, answer: Content) -> Self {
        Self { success, answer, ..self }
    }

    const fn fails(self, errors: &'static [u16]) -> Self {
        Self { errors, ..self }
    }

    /// A route of the server itself: open, at the root.
    const fn open(self) -> Self {
        Self { mount: Mount::Bare, needs_auth: false, tag: "Server", ..self }
    }

    /// The full paths of this route in the router's syntax.
    pub fn paths(&self) -> impl Iterator<Item = String> + '_ {
        self.mount.prefixes().iter().map(|prefix| format!("{prefix}{}", self.path))
    }
}

const fn text(name: &'static str, about: &'static str) -> Query {
    Query { name, kind: "string", about }
}

const fn integer(name: &'static str, about: &'static str) -> Query {
    Query { name, kind: "integer", about }
}

const PAGE: Query = integer("page", "Page, from 1. Default 1.");
const PAGE_SIZE: Query = integer("pageSize", "Items on a page, 1 to 200. Default 20.");
const METADATA: Query = text(
    "metadata",
    "`key=value` pairs joined by `&`, keys and values percent-encoded once more. All must match exactly.",
);
const STATES: Query = Query { name: "state", kind: "array", about: "Keep these states; may be repeated." };
const INCLUDE_TERMINATED: Query = Query {
    name: "includeTerminated",
    kind: "boolean",
    about: "Also sandboxes that are gone, for 24 hours after their end. In lists the state `Terminated` asks for them too.",
};
const DELIVERY_STATE: Query = text("state", "Only deliveries that are `Pending`, `Delivered` or `Dead`.");
const DELIVERIES: Query = integer("limit", "How many, 1 to 200. Default 50.");
const TAIL: Query = integer("tail", "Last lines of the log to return.");

/// Routes of ours: the local images of the embedded runtime.
const fn images(
    method: &'static str,
    path: &'static str,
    operation: &'static str,
    summary: &'static str,
) -> Route {
    Route { mount: Mount::V1, ..Route::new(method, path, operation, summary).tag("Images") }
}

/// Routes of ours: builds of images from repositories.
const fn builds(
    method: &'static str,
    path: &'static str,
    operation: &'static str,
    summary: &'static str,
) -> Route {
    Route { mount: Mount::V1, ..Route::new(method, path, operation, summary).tag("Image builds") }
}

/// Routes of ours: standing orders for builds.
const fn prebuilds(
    method: &'static str,
    path: &'static str,
    operation: &'static str,
    summary: &'static str,
) -> Route {
    Route { mount: Mount::V1, ..Route::new(method, path, operation, summary).tag("Prebuilds") }
}

/// Routes of ours: subscriptions to events.
const fn webhooks(
    method: &'static str,
    path: &'static str,
    operation: &'static str,
    summary: &'static str,
) -> Route {
    Route { mount: Mount::V1, ..Route::new(method, path, operation, summary).tag("Webhooks") }
}

/// Routes of ours: what a gateway asks and tells.
const fn ingress(
    method: &'static str,
    path: &'static str,
    operation: &'static str,
    summary: &'static str,
) -> Route {
    Route { mount: Mount::V1, ..Route::new(method, path, operation, summary).tag("Ingress") }
}

const PROXY: &str = "/sandboxes/{sandbox_id}/proxy/{port}";
const PROXY_PATH: &str = "/sandboxes/{sandbox_id}/proxy/{port}/{*full_path}";

const fn proxy(method: &'static str, path: &'static str, operation: &'static str) -> Route {
    let route = Route::new(method, path, operation, "Forward a request to a port of a sandbox");
    Route { body: Content::Opaque, body_required: false, ..route }
        .answers(200, Content::Opaque)
        .fails(&[400, 404, 502, 504])
        .tag("Proxy")
}

const fn policy(method: &'static str, operation: &'static str, summary: &'static str) -> Route {
    Route::new(method, "/sandboxes/{sandbox_id}/networkpolicy", operation, summary)
        .answers(200, Content::Opaque)
        .fails(&[404, 501])
        .tag("Network policy")
}

/// The table. Its order is the order of the document and of the `Allow` header.
pub const ROUTES: &[Route] = &[
    Route::new("POST", "/sandboxes", "create_sandbox", "Create a sandbox")
        .body("CreateSandboxRequest")
        .answers(202, Content::Json("CreateSandboxResponse"))
        .fails(&[400, 403, 404, 409, 429, 503]),
    Route::new("GET", "/sandboxes", "list_sandboxes", "List sandboxes, newest first")
        .query(&[STATES, METADATA, INCLUDE_TERMINATED, PAGE, PAGE_SIZE])
        .answers(200, Content::Json("ListSandboxesResponse"))
        .fails(&[400, 503]),
    Route::new("GET", "/sandboxes/{sandbox_id}", "get_sandbox", "Read a sandbox")
        .query(&[INCLUDE_TERMINATED])
        .answers(200, Content::Json("Sandbox"))
        .fails(&[403, 404]),
    Route::new("DELETE", "/sandboxes/{sandbox_id}", "delete_sandbox", "Kill and remove a sandbox")
        .answers(204, Content::Nothing)
        .fails(&[403, 404, 409]),
    Route::new("PATCH", "/sandboxes/{sandbox_id}/metadata", "patch_sandbox_metadata", "Change metadata")
        .body("MetadataPatch")
        .answers(200, Content::Json("Sandbox"))
        .fails(&[400, 403, 404, 409]),
    Route::new("POST", "/sandboxes/{sandbox_id}/pause", "pause_sandbox", "Freeze a running sandbox")
        .answers(202, Content::Nothing)
        .fails(&[403, 404, 409]),
    Route::new("POST", "/sandboxes/{sandbox_id}/resume", "resume_sandbox", "Thaw a paused sandbox")
        .answers(202, Content::Nothing)
        .fails(&[403, 404, 409]),
    Route::new(
        "POST",
        "/sandboxes/{sandbox_id}/renew-expiration",
        "renew_sandbox_expiration",
        "Move the expiry of a sandbox",
    )
    .body("RenewSandboxExpirationRequest")
    .answers(200, Content::Json("RenewSandboxExpirationResponse"))
    .fails(&[400, 403, 404, 409]),
    Route::new(
        "POST",
        "/sandboxes/{sandbox_id}/activity",
        "lease_sandbox_activity",
        "Keep a sandbox from becoming idle for a while",
    )
    .body("ActivityRequest")
    .answers(200, Content::Json("ActivityResponse"))
    .fails(&[403, 404, 409, 503]),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/endpoints/{port}",
        "get_sandbox_endpoint",
        "How to reach a port of a sandbox",
    )
    .query(&[
        Query { name: "use_server_proxy", kind: "boolean", about: "Answer a path through this server." },
        integer("expires", "Ask for a signed endpoint that is valid until this Unix second."),
    ])
    .answers(200, Content::Json("Endpoint"))
    .fails(&[400, 403, 404]),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/events",
        "list_sandbox_events",
        "History of a sandbox, also of one that is gone; a live stream with `Accept: text/event-stream`",
    )
    .query(&[
        integer(
            "after",
            "Only what came after this sequence; a stream begins there unless `Last-Event-ID` is sent.",
        ),
        integer("limit", "Events to return, 1 to 1000. Default 100. Not for a stream."),
        text("types", "Types or families to keep, joined by commas, for instance `sandbox.failed,image`."),
    ])
    .answers(200, Content::JsonOrStream("SandboxEventPage"))
    .fails(&[404, 503]),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/services",
        "list_sandbox_services",
        "Services that are kept running",
    )
    .answers(200, Content::Json("SandboxServices"))
    .fails(&[403, 404])
    .tag("Services"),
    Route::new("GET", "/sandboxes/{sandbox_id}/services/{name}", "get_sandbox_service", "Read a service")
        .answers(200, Content::Json("SandboxService"))
        .fails(&[403, 404])
        .tag("Services"),
    Route::new(
        "PUT",
        "/sandboxes/{sandbox_id}/services/{name}",
        "switch_sandbox_service",
        "Switch a service on or off",
    )
    .body("ServiceSwitch")
    .answers(200, Content::Json("SandboxService"))
    .fails(&[400, 403, 404, 409, 503])
    .tag("Services"),
    Route::new(
        "POST",
        "/sandboxes/{sandbox_id}/services/{name}/restart",
        "restart_sandbox_service",
        "Start a service anew",
    )
    .answers(202, Content::Nothing)
    .fails(&[403, 404, 409, 503])
    .tag("Services"),
    Route::new(
        "POST",
        "/sandboxes/{sandbox_id}/services/{name}/access",
        "open_sandbox_service",
        "Be let into a service for a few minutes",
    )
    .optional_body("ServiceAccessRequest")
    .answers(200, Content::Json("ServiceAccess"))
    .fails(&[400, 403, 404, 409])
    .tag("Services"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/services/{name}/tunnel",
        "tunnel_to_sandbox_service",
        "A WebSocket that is a connection to a service's port",
    )
    .answers(101, Content::Nothing)
    .fails(&[400, 403, 404, 409, 502, 503, 504])
    .tag("Services"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/services/{name}/logs",
        "sandbox_service_logs",
        "What a service wrote, also after its end; a hook is named boot.PHASE.HOOK",
    )
    .query(&[TAIL, integer("from", "Offset of the first byte; the header X-Log-Next says where to read on.")])
    .answers(200, Content::Text)
    .fails(&[400, 403, 404, 503])
    .tag("Services"),
    Route::new("POST", "/sandboxes/{sandbox_id}/snapshots", "create_snapshot", "Snapshot a running sandbox")
        .optional_body("CreateSnapshotRequest")
        .answers(202, Content::Json("Snapshot"))
        .fails(&[400, 403, 404, 409, 501])
        .tag("Snapshots"),
    Route::new("GET", "/snapshots", "list_snapshots", "List snapshots, newest first")
        .query(&[text("sandboxId", "Source sandbox."), text("name", "Exact name."), STATES, PAGE, PAGE_SIZE])
        .answers(200, Content::Json("ListSnapshotsResponse"))
        .fails(&[501])
        .tag("Snapshots"),
    Route::new("GET", "/snapshots/{snapshot_id}", "get_snapshot", "Read a snapshot")
        .answers(200, Content::Json("Snapshot"))
        .fails(&[403, 404, 501])
        .tag("Snapshots"),
    Route::new("DELETE", "/snapshots/{snapshot_id}", "delete_snapshot", "Remove a snapshot")
        .answers(204, Content::Nothing)
        .fails(&[403, 404, 409, 501])
        .tag("Snapshots"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/diagnostics/logs",
        "get_sandbox_logs",
        "Output of the entrypoint; JSON with `scope`, text without",
    )
    .query(&[
        text("scope", "`container` or `all`."),
        TAIL,
        text("since", "Only what is younger, for instance `10m`."),
        text("container", "Ignored unless the runtime has several."),
    ])
    .answers(200, Content::JsonOrText("DiagnosticContentResponse"))
    .fails(&[400, 404])
    .tag("Diagnostics"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/diagnostics/events",
        "get_sandbox_events",
        "What happened to the sandbox; JSON with `scope`, text without",
    )
    .query(&[text("scope", "`runtime` or `all`."), integer("limit", "Events to return, 1 to 500.")])
    .answers(200, Content::JsonOrText("DiagnosticContentResponse"))
    .fails(&[400, 404])
    .tag("Diagnostics"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/diagnostics/inspect",
        "get_sandbox_inspect",
        "Everything the runtime knows about the sandbox, as text",
    )
    .answers(200, Content::Text)
    .fails(&[404])
    .tag("Diagnostics"),
    Route::new(
        "GET",
        "/sandboxes/{sandbox_id}/diagnostics/summary",
        "get_sandbox_diagnostics_summary",
        "Inspection, events and logs in one text",
    )
    .query(&[TAIL, integer("event_limit", "Events to return.")])
    .answers(200, Content::Text)
    .fails(&[404])
    .tag("Diagnostics"),
    policy("GET", "get_network_policy", "Read the egress policy"),
    policy("PUT", "replace_network_policy", "Replace the egress policy").body("NetworkPolicy"),
    policy("PATCH", "patch_network_policy", "Add or change rules of the egress policy").body("NetworkRules"),
    policy("DELETE", "delete_network_policy", "Remove rules from the egress policy").body("NetworkTargets"),
    Route::new("POST", "/pools", "create_pool", "Create a pool")
        .body("CreatePoolRequest")
        .answers(201, Content::Json("PoolResponse"))
        .fails(&[400, 409, 501])
        .tag("Pools"),
    Route::new("GET", "/pools", "list_pools", "List pools")
        .answers(200, Content::Json("ListPoolsResponse"))
        .fails(&[501])
        .tag("Pools"),
    Route::new("GET", "/pools/{pool_name}", "get_pool", "Read a pool")
        .answers(200, Content::Json("PoolResponse"))
        .fails(&[404, 501])
        .tag("Pools"),
    Route::new("PUT", "/pools/{pool_name}", "update_pool", "Resize a pool")
        .body("UpdatePoolRequest")
        .answers(200, Content::Json("PoolResponse"))
        .fails(&[400, 404, 501])
        .tag("Pools"),
    Route::new("DELETE", "/pools/{pool_name}", "delete_pool", "Remove a pool")
        .answers(204, Content::Nothing)
        .fails(&[404, 501])
        .tag("Pools"),
    Route::new("POST", "/templates", "create_template", "Create a template")
        .body("CreateFsbTemplateRequest")
        .answers(201, Content::Json("FsbTemplate"))
        .fails(&[400, 409, 501, 503])
        .tag("Templates"),
    Route::new("GET", "/templates", "list_templates", "List templates, newest first")
        .query(&[PAGE, PAGE_SIZE, METADATA])
        .answers(200, Content::Json("ListFsbTemplatesResponse"))
        .fails(&[400, 501])
        .tag("Templates"),
    Route::new("GET", "/templates/{template_id}", "get_template", "Read a template")
        .answers(200, Content::Json("FsbTemplate"))
        .fails(&[404, 501])
        .tag("Templates"),
    Route::new("DELETE", "/templates/{template_id}", "delete_template", "Remove a template")
        .answers(204, Content::Nothing)
        .fails(&[404, 501])
        .tag("Templates"),
    proxy("GET", PROXY, "proxy_root_get"),
    proxy("POST", PROXY, "proxy_root_post"),
    proxy("PUT", PROXY, "proxy_root_put"),
    proxy("PATCH", PROXY, "proxy_root_patch"),
    proxy("DELETE", PROXY, "proxy_root_delete"),
    proxy("GET", PROXY_PATH, "proxy_get"),
    proxy("POST", PROXY_PATH, "proxy_post"),
    proxy("PUT", PROXY_PATH, "proxy_put"),
    proxy("PATCH", PROXY_PATH, "proxy_patch"),
    proxy("DELETE", PROXY_PATH, "proxy_delete"),
    images("GET", "/images", "list_images", "List local images, or those that builds made")
        .query(&[
            text("kind", "`local` or `built`. Default: `local` for the operator, `built` for tenants."),
            text("repository", "Of built images: only of this repository key."),
            STATES,
            PAGE,
            PAGE_SIZE,
        ])
        .answers(200, Content::Json("ListImagesResponse"))
        .fails(&[400, 403, 501, 503]),
    images("GET", "/images/{reference}", "get_image", "Read an image that a build made, by its id")
        .answers(200, Content::Json("BuiltImage"))
        .fails(&[404, 503]),
    images("PUT", "/images/tags/{repository_key}/{tag}", "move_image_tag", "Move a name to a built image")
        .body("MoveTagRequest")
        .answers(200, Content::Json("BuiltImage"))
        .fails(&[400, 404, 409, 503]),
    images("POST", "/images/pull", "pull_image", "Pull an image from its registry")
        .body("PullImageRequest")
        .answers(200, Content::JsonLines)
        .fails(&[400, 403, 501]),
    Route {
        body: Content::Opaque,
        ..images("POST", "/images/import", "import_image", "Import an image from an uploaded archive")
            .query(&[text("name", "Reference to give to an archive that carries none.")])
            .answers(200, Content::JsonLines)
            .fails(&[400, 403, 501, 507])
    },
    images("POST", "/images/prune", "prune_images", "Remove what no image and no sandbox uses")
        .answers(200, Content::Opaque)
        .fails(&[403, 501]),
    images("DELETE", "/images/{reference}", "remove_image", "Remove a local image, or a built one by its id")
        .query(&[Query {
            name: "force",
            kind: "boolean",
            about: "A built image in use goes as soon as nobody uses it.",
        }])
        .answers(200, Content::Opaque)
        .fails(&[400, 403, 404, 409, 501, 503]),
    builds("POST", "/image-builds", "create_image_build", "Build an image of a repository")
        .body("CreateImageBuildRequest")
        .answers(202, Content::Json("ImageBuild"))
        .fails(&[400, 404, 409, 412, 429, 502, 503]),
    builds("GET", "/image-builds", "list_image_builds", "List image builds, newest first")
        .query(&[STATES, text("repository", "Only of this repository key."), PAGE, PAGE_SIZE])
        .answers(200, Content::Json("ListImageBuildsResponse"))
        .fails(&[503]),
    builds("GET", "/image-builds/{image_build_id}", "get_image_build", "Read an image build")
        .answers(200, Content::Json("ImageBuild"))
        .fails(&[404, 503]),
    builds("DELETE", "/image-builds/{image_build_id}", "cancel_image_build", "End an image build")
        .answers(202, Content::Json("ImageBuild"))
        .fails(&[404, 409, 503]),
    builds(
        "GET",
        "/image-builds/{image_build_id}/logs",
        "image_build_logs",
        "The log of an image build, as text or as server-sent events",
    )
    .query(&[
        text("step", "Only the output of this step."),
        TAIL,
        text("since", "A byte offset, or an instant in RFC 3339."),
        Query { name: "follow", kind: "boolean", about: "Go on until the build ended." },
    ])
    .answers(200, Content::Text)
    .fails(&[400, 404, 429, 503]),
    builds(
        "GET",
        "/image-builds/{image_build_id}/events",
        "image_build_events",
        "The build as it is and as it becomes, as server-sent events",
    )
    .answers(200, Content::Opaque)
    .fails(&[404, 503]),
    prebuilds("POST", "/prebuilds", "create_prebuild", "Keep the image of a repository fresh")
        .body("PrebuildRequest")
        .answers(201, Content::Json("Prebuild"))
        .fails(&[400, 503]),
    prebuilds("GET", "/prebuilds", "list_prebuilds", "List prebuilds")
        .query(&[PAGE, PAGE_SIZE])
        .answers(200, Content::Json("ListPrebuildsResponse"))
        .fails(&[503]),
    prebuilds("GET", "/prebuilds/{prebuild_id}", "get_prebuild", "Read a prebuild")
        .answers(200, Content::Json("Prebuild"))
        .fails(&[404, 503]),
    prebuilds("PUT", "/prebuilds/{prebuild_id}", "replace_prebuild", "Change a prebuild")
        .body("PrebuildRequest")
        .answers(200, Content::Json("Prebuild"))
        .fails(&[400, 404, 503]),
    prebuilds("DELETE", "/prebuilds/{prebuild_id}", "delete_prebuild", "Remove a prebuild")
        .answers(204, Content::Nothing)
        .fails(&[404, 503]),
    prebuilds("POST", "/prebuilds/{prebuild_id}/trigger", "trigger_prebuild", "Look at the remote at once")
        .answers(202, Content::Json("Prebuild"))
        .fails(&[404, 503]),
    Route {
        body: Content::Opaque,
        needs_auth: false,
        ..prebuilds(
            "POST",
            "/prebuilds/{prebuild_id}/webhook",
            "push_prebuild",
            "Tell of a push; signed with the prebuild's secret instead of a key",
        )
        .answers(202, Content::Nothing)
        .fails(&[401, 404, 413, 503])
    },
    webhooks("POST", "/webhooks", "create_webhook", "Have events sent to a receiver")
        .body("WebhookRequest")
        .answers(201, Content::Json("Webhook"))
        .fails(&[400, 429, 503]),
    webhooks("GET", "/webhooks", "list_webhooks", "List webhooks, newest first")
        .query(&[PAGE, PAGE_SIZE])
        .answers(200, Content::Json("ListWebhooksResponse"))
        .fails(&[503]),
    webhooks("GET", "/webhooks/{webhook_id}", "get_webhook", "Read a webhook")
        .answers(200, Content::Json("Webhook"))
        .fails(&[404, 503]),
    webhooks("PUT", "/webhooks/{webhook_id}", "replace_webhook", "Change, enable or disable a webhook")
        .body("WebhookRequest")
        .answers(200, Content::Json("Webhook"))
        .fails(&[400, 404, 409, 503]),
    webhooks("DELETE", "/webhooks/{webhook_id}", "delete_webhook", "Remove a webhook with its deliveries")
        .answers(204, Content::Nothing)
        .fails(&[404, 503]),
    webhooks("POST", "/webhooks/{webhook_id}/test", "test_webhook", "Send a test message, once")
        .answers(200, Content::Json("WebhookTest"))
        .fails(&[404, 503]),
    webhooks(
        "GET",
        "/webhooks/{webhook_id}/deliveries",
        "list_webhook_deliveries",
        "What became of the latest deliveries",
    )
    .query(&[DELIVERY_STATE, DELIVERIES])
    .answers(200, Content::Json("WebhookDeliveries"))
    .fails(&[404, 503]),
    ingress(
        "GET",
        "/ingress/sandboxes",
        "follow_sandboxes",
        "Where sandboxes are, for a gateway; one JSON value a line",
    )
    .query(&[Query { name: "watch", kind: "boolean", about: "Go on with what changes." }])
    .answers(200, Content::JsonLines)
    .fails(&[403, 503]),
    ingress(
        "POST",
        "/ingress/sandboxes/{sandbox_id}/wake",
        "wake_sandbox",
        "Resume a sandbox that wakes on access",
    )
    .answers(204, Content::Nothing)
    .fails(&[403, 404, 409]),
    ingress(
        "POST",
        "/ingress/uses",
        "report_uses",
        "Tell that sandboxes were used, which may extend their life",
    )
    .body("IngressUses")
    .answers(204, Content::Nothing)
    .fails(&[403]),
    Route {
        mount: Mount::V1,
        ..Route::new("POST", "/metrics/events", "report_metrics_event", "Report how a create went")
            .body("MetricsEvent")
            .answers(204, Content::Nothing)
            .tag("Metrics")
    },
    Route {
        mount: Mount::Bare,
        ..Route::new("GET", "/metrics", "metrics_page", "What is counted and measured, for Prometheus")
            .answers(200, Content::Text)
            .fails(&[403])
            .tag("Metrics")
    },
    Route::new("GET", "/health", "health_check", "Is the process up")
        .open()
        .answers(200, Content::Json("Health")),
    Route::new("GET", "/healthz", "liveness", "Is the process up")
        .open()
        .answers(200, Content::Json("Health")),
    Route::new("GET", "/readyz", "readiness", "Can the server do its work")
        .open()
        .answers(200, Content::Json("Health"))
        .fails(&[503]),
    Route::new("GET", "/version", "version_info", "Version of the server")
        .open()
        .answers(200, Content::Json("Version")),
    Route::new("GET", "/docs", "docs", "This document, readable").open().answers(200, Content::Html),
    Route::new("GET", "/redoc", "redoc", "This document, readable").open().answers(200, Content::Html),
    Route::new("GET", "/openapi.json", "openapi", "This document").open().answers(200, Content::Opaque),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_route_and_no_operation_is_listed_twice() {
        let mut seen = BTreeSet::new();
        for route in ROUTES {
            for path in route.paths() {
                assert!(seen.insert((route.method, path.clone())), "{} {path}", route.method);
            }
        }
        let operations: BTreeSet<_> = ROUTES.iter().map(|route| route.operation).collect();
        assert_eq!(operations.len(), ROUTES.len());
    }

    #[test]
    fn only_the_servers_own_pages_and_signed_pushes_are_open() {
        let open: Vec<_> = ROUTES.iter().filter(|route| !route.needs_auth).map(|route| route.path).collect();
        assert_eq!(
            open,
            [
                "/prebuilds/{prebuild_id}/webhook",
                "/health",
                "/healthz",
                "/readyz",
                "/version",
                "/docs",
                "/redoc",
                "/openapi.json"
            ]
        );
    }
}
