//! The flags of `sandglass ingress`.

use super::go_flags::{Flag, Takes};

const fn value(name: &'static str, default: &'static str, about: &'static str) -> Flag {
    Flag { name, takes: Takes::Value, default, about }
}

const fn switch(name: &'static str, default: &'static str, about: &'static str) -> Flag {
    Flag { name, takes: Takes::Switch, default, about }
}

/// Accepted, so that command lines of the OpenSandbox ingress work.
const fn without_effect(name: &'static str, takes: Takes) -> Flag {
    Flag { name, takes, default: "", about: "accepted; has no effect" }
}

pub(super) const FLAGS: &[Flag] = &[
    value("server", "", "address of the server to learn from [env: SANDGLASS_INGRESS_SERVER]"),
    value(
        "key-file",
        "",
        "file with the server's ingress.key or API key [env: the key itself in SANDGLASS_INGRESS_KEY]",
    ),
    value("host", "0.0.0.0", "address to listen on"),
    value("port", "28888", "port to listen on"),
    value("mode", "header", "where the route stands: header (or host name), or uri"),
    value("log-level", "info", "error, warn, info or debug"),
    value(
        "secure-access-keys",
        "",
        "keys of signed routes, k=base64,… [env: OPENSANDBOX_SECURE_ACCESS_KEYS]",
    ),
    value(
        "secure-access-signature",
        "full",
        "weakest signatures that open anything: full, or short (32 bits)",
    ),
    switch("renew-through-server", "true", "tell the server of sandboxes in use, unless Redis is told"),
    switch("renew-intent-enabled", "false", "tell a Redis list of sandboxes in use"),
    value(
        "renew-intent-redis-dsn",
        "redis://127.0.0.1:6379/0",
        "where Redis is [env: SANDGLASS_INGRESS_REDIS_DSN]",
    ),
    value("renew-intent-queue-key", "opensandbox:renew:intent", "name of the list"),
    value("renew-intent-queue-max-len", "0", "longest list; 0 is without end"),
    value(
        "renew-intent-min-interval",
        "60",
        "least seconds between two messages for one sandbox; 0 tells every use",
    ),
    switch("audit-enabled", "false", "tell a webhook of every request that is let through"),
    value("audit-webhook-url", "", "where to"),
    value("audit-queue-size", "1024", "messages that may wait"),
    value("audit-timeout", "3s", "how long one may take"),
    switch("wake-enabled", "true", "resume paused sandboxes that were created to wake on access"),
    value("wake-park-budget", "5s", "how long a request waits for its sandbox"),
    value("wake-park-max", "1024", "requests that may wait"),
    value("published-host", "", "address where published ports of sandboxes are reached from here"),
    value("sync-timeout", "30s", "how long the server may take to tell of its sandboxes at the start"),
    value("max-connections", "0", "open connections; 0 is half of what the process may open"),
    value("header-timeout", "20s", "how long the head of a request may take"),
    value("drain-timeout", "30s", "how long requests may take once told to stop"),
    value("tls-cert", "", "certificate chain in PEM form; with tls-key, serves TLS only"),
    value("tls-key", "", "private key in PEM form"),
    value("provider-type", "", "Kubernetes providers come with the Kubernetes runtime"),
    without_effect("namespace", Takes::Value),
    without_effect("kubeconfig", Takes::Value),
    without_effect("master", Takes::Value),
    without_effect("wake-retry-interval", Takes::Value),
    without_effect("wake-retry-factor", Takes::Value),
    without_effect("wake-retry-jitter", Takes::Value),
    without_effect("activity-enabled", Takes::Switch),
    without_effect("activity-redis-dsn", Takes::Value),
    without_effect("activity-min-interval", Takes::Value),
    without_effect("activity-ttl-seconds", Takes::Value),
    without_effect("fastpath-endpoint", Takes::Value),
    without_effect("fastpath-access-mode", Takes::Value),
    without_effect("fastpath-wait-timeout-millis", Takes::Value),
];
