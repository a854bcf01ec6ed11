//! What servers may rely on: frozen, so that nobody changes it without a new generation.
//!
//! A test that fails here has found a change of the surface. Raise `GENERATION` in `sandglass_sandbox::agent`, say there what a server
//! may use from then on, and accept the new snapshot; the old one stays what it was.

use sandglass_sandbox::agent::{Agent as Generation, GENERATION, HEADER};
use sandglass_sandbox::workspace::Workspace;
use serde_json::json;

use crate::init::boot;
use crate::support::Agent;

/// Every route, with a request that the handler refuses or answers without doing anything.
const ROUTES: &[(&str, &str)] = &[
    ("GET", "/ping"),
    ("GET", "/ready"),
    ("POST", "/internal/init"),
    ("POST", "/internal/assign"),
    ("POST", "/command"),
    ("DELETE", "/command"),
    ("GET", "/command/status/{id}"),
    ("GET", "/command/{id}/logs"),
    ("POST", "/session"),
    ("POST", "/session/{id}/run"),
    ("DELETE", "/session/{id}"),
    ("POST", "/code"),
    ("DELETE", "/code"),
    ("POST", "/code/context"),
    ("GET", "/code/contexts"),
    ("DELETE", "/code/contexts"),
    ("GET", "/code/contexts/{id}"),
    ("DELETE", "/code/contexts/{id}"),
    ("GET", "/files/info"),
    ("DELETE", "/files"),
    ("POST", "/files/mv"),
    ("POST", "/files/permissions"),
    ("GET", "/files/search"),
    ("POST", "/files/replace"),
    ("POST", "/files/upload"),
    ("GET", "/files/download"),
    ("GET", "/directories/list"),
    ("POST", "/directories"),
    ("DELETE", "/directories"),
    ("GET", "/metrics"),
    ("POST", "/pty"),
    ("GET", "/pty/{id}"),
    ("DELETE", "/pty/{id}"),
    ("GET", "/pty/{id}/ws"),
    ("GET", "/v1/isolated/capabilities"),
    ("POST", "/v1/isolated/session"),
    ("GET", "/v1/isolated/sessions"),
    ("GET", "/v1/filesystem/{uid}/{gid}/files/info"),
    ("GET", "/v1/workspace/bridge/status"),
    ("GET", "/v1/workspace/bridge/events"),
    ("GET", "/v1/workspace/services"),
    ("GET", "/v1/workspace/services/{id}"),
    ("PUT", "/v1/workspace/services/{id}"),
    ("POST", "/v1/workspace/services/{id}/start"),
    ("POST", "/v1/workspace/services/{id}/restart"),
    ("POST", "/v1/workspace/services/{id}/stop"),
    ("GET", "/v1/workspace/services/{id}/tunnel"),
    ("GET", "/v1/workspace/logs"),
    ("GET", "/v1/workspace/logs/{source}"),
    ("GET", "/proxy/{port}/{path}"),
];

#[test]
fn the_surface_changes_with_the_generation_only() {
    let agent = Agent::start();
    let routes: Vec<String> = ROUTES
        .iter()
        .map(|(method, path)| {
            let target = path.replace("{uid}", "0").replace("{gid}", "0").replace("{port}", "1");
            let answer = agent.send(method, &target, &[("Upgrade", "none")], b"");
            let text = answer.text();
            assert!(!text.contains("no such route"), "{method} {path}: {text}");
            format!("{method} {path}")
        })
        .collect();
    let fields = [
        "sandboxId",
        "accessToken",
        "entrypoint",
        "env",
        "cwd",
        "user",
        "listenFd",
        "statusFd",
        "cpuMillis",
        "memoryBytes",
        "lifecycle",
        "standby",
    ];
    // A field that is read cannot be of another type; the others are set by `boot` itself.
    for field in ["accessToken", "entrypoint", "env", "user", "cpuMillis", "memoryBytes", "lifecycle"] {
        let mut config = json!({ "accessToken": "", "env": [] });
        config[field] = json!(false);
        assert_eq!(boot(&config).0.wait().unwrap().code(), Some(2), "{field}");
    }
    let ping = agent.get("/ping");
    let ready = agent.get("/ready");
    let shape = json!({
        "routes": routes,
        "boot configuration": fields,
        "status lines": status_lines(),
        "workspace document": workspace_document(),
        "introduction": [ping.header(HEADER), ready.header(HEADER)],
        "ready": ready.json(),
    });
    insta::with_settings!({ snapshot_path => "../snapshots", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_json_snapshot!(format!("generation-{GENERATION}"), shape);
    });
}

/// A document that names everything, as it is written.
fn workspace_document() -> serde_json::Value {
    let document: Workspace = serde_json::from_value(json!({
        "sandboxId": "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10", "generation": 1,
        "bridge": { "way": { "socket": sandglass_sandbox::workspace::BRIDGE_SOCKET } },
        "source": "image",
        "repositories": [{ "url": "https://git.example/acme/web.git", "ref": "refs/heads/main", "commit": "0".repeat(40),
            "path": "/workspace/web", "depth": 1 }],
        "git": { "hosts": ["git.example"], "knownHosts": "k", "authorities": "/a", "proxy": "http://p:1" },
        "boot": { "onSyncFailure": "warn",
            "setup": [{ "label": "web", "command": ["x"], "env": { "A": "b" }, "cwd": "/", "user": "u", "timeoutSeconds": 1, "capSeconds": 2 }],
            "start": [{ "label": "web", "command": ["x"] }] },
        "services": [
            { "name": "app", "kind": "custom", "command": ["x"], "port": 1, "probe": { "type": "http" } },
            { "name": "code-server", "kind": "code-server", "port": 2, "folder": "/", "program": "/p" },
            { "name": "ssh", "kind": "ssh", "port": 3, "authorizedKeys": ["k"], "certificateAuthorities": ["k"] },
            { "name": "terminal", "kind": "terminal" },
        ],
    }))
    .unwrap();
    serde_json::to_value(document).unwrap()
}

/// Boots with every field and brings about every line.
fn status_lines() -> Vec<String> {
    let config = |script: &str| {
        json!({ "accessToken": "t", "entrypoint": ["true"], "env": [["PATH", "/usr/bin:/bin"]], "user": "", "cpuMillis": 1000,
            "memoryBytes": 1 << 30, "lifecycle": { "preStart": { "command": ["sh", "-c", script] } } })
    };
    let (mut child, well, _) = boot(&config("true"));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let (mut child, badly, _) = boot(&config("exit 1"));
    assert_eq!(child.wait().unwrap().code(), Some(1));
    vec![well, badly]
}

#[test]
fn the_agent_introduces_itself() {
    let agent = Agent::start_with(&[], &[("EXECD_ACCESS_TOKEN", "t")]);
    let ping = agent.get("/ping");
    assert_eq!((ping.status, ping.header("content-length"), ping.body.len()), (200, Some("0"), 0));
    assert_eq!(ping.header(HEADER).unwrap().parse(), Ok(Generation::OURS));
}
