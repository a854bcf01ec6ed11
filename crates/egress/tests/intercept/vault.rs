//! The vault's API: status, texts and what is never shown.

use std::net::IpAddr;

use http::{Method, StatusCode};
use sandglass_egress::vault::{Answer, Call, Conditions, Scope, Transport, Vault, handle};
use serde_json::{Value, json};

use crate::stack::{SECRET, World, conditions};

pub struct Api {
    vault: Vault,
    world: World,
}

impl Api {
    pub fn new(conditions: Conditions) -> Self {
        let mut vault = Vault::new(conditions);
        vault.restore(None).unwrap();
        vault.intercepting();
        let world = World::default();
        world
            .names
            .lock()
            .unwrap()
            .extend(["api.example.com", "other.example.com", "*.wild.example.com"].map(str::to_owned));
        Self { vault, world }
    }

    fn from(&mut self, transport: Transport, method: Method, path: &str, body: &str) -> Answer {
        let keep = &|_: &[u8]| Ok(());
        let call = Call { method: &method, path, body: body.as_bytes(), transport, rules: &self.world, keep };
        let answer = handle(&mut self.vault, call);
        assert!(!answer.body.contains(SECRET), "{}", answer.body);
        assert_eq!(
            answer.content_type.starts_with("application/json"),
            answer.status.is_success() && answer.status != 204
        );
        answer
    }

    pub fn call(&mut self, method: Method, path: &str, body: &str) -> (u16, String) {
        let answer = self.from(loopback(), method, path, body);
        (answer.status.as_u16(), answer.body.trim_end_matches('\n').to_owned())
    }

    pub fn get(&mut self, path: &str) -> (u16, Value) {
        let (status, body) = self.call(Method::GET, path, "");
        (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
    }
}

fn loopback() -> Transport {
    Transport::Plain("127.0.0.1".parse().unwrap())
}

fn credential(name: &str) -> Value {
    json!({"name": name, "source": {"type": "inline", "value": SECRET}})
}

pub fn binding(name: &str, matches: Value) -> Value {
    json!({"name": name, "match": matches, "auth": {"type": "bearer", "credential": "token"}})
}

pub fn create(bindings: &[Value]) -> String {
    json!({"credentials": [credential("token")], "bindings": bindings}).to_string()
}

#[test]
fn a_vault_is_made_read_changed_and_deleted() {
    let mut api = Api::new(conditions());
    assert_eq!(api.get("/credential-vault"), (404, "credential vault not found".into()));
    let body = json!({
        "credentials": [credential("zebra"), credential(" token ")],
        "bindings": [
            binding("b", json!({"hosts": [" API.Example.com. ", "api.example.com"], "schemes": ["HTTPS"], "methods": ["get", "GET"], "ports": [443]})),
            json!({"name": "a", "match": {"hosts": ["*.wild.example.com"], "paths": ["/x*"]}, "auth": {"type": "apiKey", "name": "x-api-KEY", "credential": "zebra"}}),
        ],
    });
    let (status, state) = api.call(Method::POST, "/credential-vault", &body.to_string());
    assert_eq!(status, 201);
    let expected = json!({
        "revision": 1,
        "credentials": [
            {"name": "token", "sourceType": "inline", "revision": 1},
            {"name": "zebra", "sourceType": "inline", "revision": 1},
        ],
        "bindings": [
            {"name": "a", "revision": 1, "auth": {"type": "apiKey", "name": "X-Api-Key"},
             "match": {"schemes": ["https"], "ports": [443], "hosts": ["*.wild.example.com"], "methods": ["GET", "POST", "PUT", "PATCH", "DELETE"], "paths": ["/x*"]}},
            {"name": "b", "revision": 1, "auth": {"type": "bearer"},
             "match": {"schemes": ["https"], "ports": [443], "hosts": ["api.example.com"], "methods": ["GET"], "paths": ["/*"]}},
        ],
    });
    assert_eq!(serde_json::from_str::<Value>(&state).unwrap(), expected);
    assert_eq!(api.get("/credential-vault"), (200, expected.clone()));
    assert_eq!(
        api.get("/credential-vault/credentials"),
        (200, json!({"revision": 1, "credentials": expected["credentials"]}))
    );
    assert_eq!(
        api.get("/credential-vault/bindings"),
        (200, json!({"revision": 1, "bindings": expected["bindings"]}))
    );
    assert_eq!(api.get("/credential-vault/credentials/zebra"), (200, expected["credentials"][1].clone()));
    assert_eq!(api.get("/credential-vault/bindings/a"), (200, expected["bindings"][0].clone()));
    assert_eq!(api.get("/credential-vault/credentials/no"), (404, "credential not found".into()));
    assert_eq!(api.get("/credential-vault/bindings/no"), (404, "binding not found".into()));
    assert_eq!(
        api.call(Method::POST, "/credential-vault", "{}"),
        (409, "credential vault already exists".to_owned())
    );
}

#[test]
fn a_patch_moves_the_revision_of_what_it_names() {
    let mut api = Api::new(conditions());
    let two = [credential("zebra"), credential("token")];
    let bound = [
        binding("b", json!({"hosts": ["api.example.com"]})),
        binding("a", json!({"hosts": ["other.example.com"]})),
    ];
    let body = json!({"credentials": two, "bindings": bound});
    assert_eq!(api.call(Method::POST, "/credential-vault", &body.to_string()).0, 201);
    let patch = json!({
        "expectedRevision": 1,
        "credentials": {"replace": [credential("zebra")], "add": [credential("new")]},
        "bindings": {"delete": ["b"]},
    });
    let (status, state) = api.call(Method::PATCH, "/credential-vault", &patch.to_string());
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!((status, &state["revision"]), (200, &json!(2)));
    let revisions: Vec<_> = state["credentials"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["name"].clone(), c["revision"].clone()))
        .collect();
    assert_eq!(revisions, [(json!("new"), json!(2)), (json!("token"), json!(1)), (json!("zebra"), json!(2))]);
    assert_eq!(state["bindings"].as_array().unwrap().len(), 1);
    assert_eq!(state["bindings"][0]["revision"], 2);

    let answer = api.from(loopback(), Method::DELETE, "/credential-vault", "");
    assert_eq!((answer.status, answer.body.as_str(), answer.changed), (StatusCode::NO_CONTENT, "", true));
    assert_eq!(
        api.call(Method::DELETE, "/credential-vault", ""),
        (404, "credential vault not found".to_owned())
    );
    assert_eq!(
        api.call(Method::PATCH, "/credential-vault", "{}"),
        (404, "credential vault not found".to_owned())
    );
}

/// Each body is refused with this text, and there is no vault afterwards.
fn refused(cases: &[(String, &str)]) {
    for (body, expected) in cases {
        let mut api = Api::new(conditions());
        let found = api.call(Method::POST, "/credential-vault", body);
        assert_eq!(found, (400, (*expected).to_owned()), "{body}");
        assert_eq!(api.get("/credential-vault").0, 404);
    }
}

#[test]
fn requests_and_credentials_that_are_not_valid_are_refused() {
    let named = |name: &str| format!(r#"{{"credentials":[{{"name":"{name}"}}]}}"#);
    let kind = r#"{"credentials":[{"name":"a","source":{"type":"http","value":"x"}}]}"#;
    let short = r#"{"credentials":[{"name":"a","source":{"value":"abc"}}]}"#;
    let twice = json!({"credentials": [credential("a"), credential("a ")]});
    refused(&[
        (String::new(), "invalid credential vault request: EOF"),
        (r#"{"x":1}"#.to_owned(), r#"invalid credential vault request: json: unknown field "x""#),
        (named(" "), "credential name cannot be blank"),
        (named("a"), r#"credential "a" inline value cannot be empty"#),
        (
            short.to_owned(),
            r#"credential "a" inline value has fewer than 4 bytes: so few could not be kept out of answers"#,
        ),
        (kind.to_owned(), r#"unsupported credential source type "http""#),
        (twice.to_string(), r#"duplicate credential name "a""#),
    ]);
    let long = " ".repeat((1 << 20) + 1);
    let text = "invalid credential vault request: body is larger than 1048576 bytes";
    refused(&[(long, text)]);
}

#[test]
fn matches_that_are_not_valid_are_refused() {
    let ok = json!({"hosts": ["api.example.com"]});
    let more = |member: &str, value: Value| {
        let mut matches = ok.clone();
        matches[member] = value;
        create(&[binding("b", matches)])
    };
    let paths = json!({"hosts": ["api.example.com"], "paths": ["/v1/*"]});
    let port = r#"binding "b" port 8443 is not a configured transparent intercept port"#;
    refused(&[
        (create(&[binding("b", json!({}))]), r#"binding "b": match.hosts cannot be empty"#),
        (create(&[binding(" ", ok.clone())]), "binding name cannot be blank"),
        (create(&[binding("b", ok.clone()), binding("b", ok.clone())]), r#"duplicate binding name "b""#),
        (more("schemes", json!(["ftp"])), r#"binding "b": unsupported scheme "ftp""#),
        (more("ports", json!([0])), r#"binding "b": invalid port 0"#),
        (more("ports", json!([8443])), port),
        (more("methods", json!([" "])), r#"binding "b": method cannot be blank"#),
        (more("methods", json!(["trace"])), r#"binding "b": method "TRACE" cannot carry credentials"#),
        (more("paths", json!(["v1"])), r#"binding "b": path pattern must start with /"#),
        (
            create(&[binding("b", ok.clone()), binding("a", paths)]),
            r#"bindings "a" and "b" can match the same request"#,
        ),
    ]);
}

#[test]
fn hosts_that_are_none_or_not_allowed_are_refused() {
    let cases = [
        (" ", ": host cannot be blank"),
        ("https://a.b", r#": host "https://a.b" must not include scheme or path"#),
        ("192.0.2.1", r#": credential binding host "192.0.2.1" must be an FQDN, not an IP address"#),
        ("localhost", r#": credential binding host "localhost" must be an FQDN"#),
        ("a*.example.com", r#": invalid wildcard host "a*.example.com""#),
        ("*.*.example.com", r#": invalid wildcard host "*.*.example.com""#),
        ("*.192.0.2.1", r#": wildcard host "*.192.0.2.1" cannot target an IP address"#),
        ("no.example.com", r#" host "no.example.com" is not allowed by egress policy"#),
        ("*.no.example.com", r#" host "*.no.example.com" is not allowed by egress policy"#),
    ];
    for (host, text) in cases {
        refused(&[(create(&[binding("b", json!({"hosts": [host]}))]), &format!(r#"binding "b"{text}"#))]);
    }
}

#[test]
fn ways_to_lend_that_are_not_valid_are_refused() {
    let auth = |auth: &str| {
        let auth: Value = serde_json::from_str(auth).unwrap();
        create(&[json!({"name": "b", "match": {"hosts": ["api.example.com"]}, "auth": auth})])
    };
    let substitution =
        |members: &str| auth(&format!(r#"{{"type":"passthrough","substitutions":[{members}]}}"#));
    let headers = |entries: &str| auth(&format!(r#"{{"type":"customHeaders","headers":[{entries}]}}"#));
    let unknown = r#"binding "b" references unknown credential "no""#;
    let key = |name: &str| auth(&format!(r#"{{"type":"apiKey","name":"{name}","credential":"token"}}"#));
    refused(&[
        (auth(r#"{"type":"digest"}"#), r#"binding "b": unsupported auth type "digest""#),
        (auth(r#"{"type":"bearer"}"#), r#"binding "b": bearer auth requires credential"#),
        (auth(r#"{"type":"bearer","credential":"no"}"#), unknown),
        (key("a b"), r#"binding "b": invalid credential header name "a b""#),
        (key("host"), r#"binding "b": reserved credential header name "Host""#),
        (headers(""), r#"binding "b": customHeaders auth requires headers"#),
        (
            headers(r#"{"name":"x-a","credential":"token"},{"name":"X-A","credential":"token"}"#),
            r#"binding "b": duplicate custom header name "X-A""#,
        ),
        (headers(r#"{"name":"x-a"}"#), r#"binding "b": customHeaders entry "X-A" requires credential"#),
        (
            substitution(r#"{"credential":"token","placeholder":"","in":["body"]}"#),
            r#"binding "b": substitution placeholder cannot be empty"#,
        ),
        (
            substitution(r#"{"credential":"token","placeholder":"x","in":["cookie"]}"#),
            r#"binding "b": unsupported substitution surface "cookie""#,
        ),
        (substitution(r#"{"credential":"no","placeholder":"x","in":["body"]}"#), unknown),
        (
            substitution(
                r#"{"credential":"token","placeholder":"x","in":["body"]},{"credential":"token","placeholder":"x","in":["body"]}"#,
            ),
            r#"binding "b": duplicate substitution placeholder "x" on one surface"#,
        ),
    ]);
    let split = json!({
        "credentials": [{"name": "token", "source": {"value": "a\r\nb"}}],
        "bindings": [binding("b", json!({"hosts": ["api.example.com"]}))],
    });
    let text = r#"binding "b" cannot put credential "token" into a header: it has control characters"#;
    refused(&[(split.to_string(), text)]);
}

#[test]
fn bindings_that_do_not_compete_live_together() {
    let mut api = Api::new(conditions());
    let body = create(&[
        binding("a", json!({"hosts": ["api.example.com"], "paths": ["/v1/*"]})),
        binding("b", json!({"hosts": ["api.example.com"], "paths": ["/v2/*"]})),
        binding("c", json!({"hosts": ["api.example.com"], "schemes": ["http"]})),
        binding("d", json!({"hosts": ["*.wild.example.com"], "methods": ["GET"]})),
        binding("e", json!({"hosts": ["*.a.wild.example.com"], "methods": ["POST"]})),
        binding("f", json!({"hosts": ["x.wild.example.com"]})),
    ]);
    assert_eq!(api.call(Method::POST, "/credential-vault", &body).0, 201);
}

#[test]
fn a_patch_is_done_whole_or_not_at_all() {
    let mut api = Api::new(conditions());
    api.call(
        Method::POST,
        "/credential-vault",
        &create(&[binding("b", json!({"hosts": ["api.example.com"]}))]),
    );
    let before = api.get("/credential-vault");
    let exported = api.vault.export();
    let other = binding("o", json!({"hosts": ["other.example.com"]}));
    let cases = [
        (json!({"expectedRevision": 7}), 409, "expectedRevision 7 does not match current revision 1"),
        (json!({"expectedRevision": -1}), 409, "expectedRevision -1 does not match current revision 1"),
        (
            json!({"credentials": {"delete": ["token"]}}),
            400,
            r#"binding "b" references unknown credential "token""#,
        ),
        (json!({"credentials": {"delete": ["no"]}}), 400, r#"credential "no" does not exist"#),
        (json!({"credentials": {"delete": [" "]}}), 400, "credential delete name cannot be blank"),
        (json!({"credentials": {"replace": [credential("no")]}}), 400, r#"credential "no" does not exist"#),
        (json!({"credentials": {"add": [credential("token")]}}), 400, r#"credential "token" already exists"#),
        (
            json!({"credentials": {"add": [credential("n"), credential("n")]}}),
            400,
            r#"duplicate credential add name "n""#,
        ),
        (
            json!({"credentials": {"delete": ["token"], "add": [credential("token")]}}),
            400,
            r#"credential "token" mentioned by multiple operations"#,
        ),
        (
            json!({"bindings": {"add": [other.clone()], "delete": ["b", "b"]}}),
            400,
            r#"binding "b" mentioned by multiple operations"#,
        ),
        (
            json!({"bindings": {"add": [other, binding("x", json!({"hosts": ["api.example.com"]}))]}}),
            400,
            r#"bindings "b" and "x" can match the same request"#,
        ),
        (
            json!({"bindings": {"extra": []}}),
            400,
            r#"invalid credential vault mutation request: json: unknown field "extra""#,
        ),
    ];
    for (body, status, text) in cases {
        assert_eq!(
            api.call(Method::PATCH, "/credential-vault", &body.to_string()),
            (status, text.to_owned()),
            "{body}"
        );
        assert_eq!(api.get("/credential-vault"), before);
        assert!(api.vault.export() == exported);
    }
}

#[test]
fn writes_have_preconditions_and_reads_have_none() {
    let ready = conditions();
    let cases = [
        (Conditions { token: false, ..ready.clone() }, "credential vault requires egress API auth token"),
        (
            Conditions { interception: false, ..ready.clone() },
            "credential vault requires transparent mitmproxy",
        ),
        (
            Conditions { insecure: true, ..ready.clone() },
            "credential vault rejects insecure upstream TLS mode",
        ),
    ];
    for (conditions, text) in cases {
        let mut api = Api::new(conditions);
        for method in [Method::POST, Method::PATCH, Method::DELETE] {
            assert_eq!(api.call(method, "/credential-vault", "{}"), (412, text.to_owned()));
        }
        assert_eq!(api.get("/credential-vault").0, 404);
    }
    let mut api = Api { vault: Vault::new(ready), world: World::default() };
    assert_eq!(
        api.call(Method::POST, "/credential-vault", "{}"),
        (412, "credential proxy is not ready".to_owned())
    );
}

#[test]
fn secrets_travel_over_tls_loopback_or_trusted_networks_only() {
    let trusted = vec!["198.51.100.0/24".parse().unwrap()];
    let mut api = Api::new(Conditions { trusted, ..conditions() });
    let text = "credential vault writes require TLS or loopback transport\n";
    let plain = |address: &str| Transport::Plain(address.parse::<IpAddr>().unwrap());
    for (transport, allowed) in [
        (Transport::Tls, true),
        (plain("127.0.0.9"), true),
        (plain("::1"), true),
        (plain("::ffff:127.0.0.1"), true),
        (plain("198.51.100.7"), true),
        (plain("203.0.113.7"), false),
        (plain("2001:db8::1"), false),
    ] {
        let answer = api.from(transport, Method::POST, "/credential-vault", "{}");
        assert_eq!(answer.status.as_u16(), if allowed { 201 } else { 426 }, "{transport:?}");
        assert_eq!(answer.body == text, !allowed);
        api.from(Transport::Tls, Method::DELETE, "/credential-vault", "");
    }
}

#[test]
fn what_is_in_force_is_never_given_away_and_other_paths_are_none() {
    let mut api = Api::new(conditions());
    api.call(
        Method::POST,
        "/credential-vault",
        &create(&[binding("b", json!({"hosts": ["api.example.com"]}))]),
    );
    for method in [Method::GET, Method::POST] {
        assert_eq!(api.call(method, "/credential-vault/_active", "").0, 403);
    }
    assert_eq!(api.call(Method::GET, "/credential-vault/other", "").0, 404);
    assert_eq!(api.call(Method::GET, "/credential-vaults", "").0, 404);
    let answer = api.from(loopback(), Method::PUT, "/credential-vault", "");
    assert_eq!((answer.status.as_u16(), answer.allow), (405, Some("GET, POST, PATCH, DELETE")));
    let answer = api.from(loopback(), Method::DELETE, "/credential-vault/bindings/b", "");
    assert_eq!((answer.status.as_u16(), answer.allow), (405, Some("GET")));
}

#[test]
fn policy_and_vault_check_each_other() {
    let mut api = Api::new(conditions());
    api.call(
        Method::POST,
        "/credential-vault",
        &create(&[binding("b", json!({"hosts": ["api.example.com"]}))]),
    );
    assert!(api.vault.check(&api.world).is_ok());
    api.world.names.lock().unwrap().clear();
    let refusal = api.vault.check(&api.world).unwrap_err();
    assert_eq!(refusal.to_string(), r#"binding "b" host "api.example.com" is not allowed by egress policy"#);
    assert_eq!(refusal.status(), StatusCode::BAD_REQUEST);
}

#[test]
fn state_survives_a_process_and_nothing_else() {
    let mut api = Api::new(conditions());
    api.call(
        Method::POST,
        "/credential-vault",
        &create(&[binding("b", json!({"hosts": ["api.example.com"]}))]),
    );
    api.call(Method::PATCH, "/credential-vault", "{}");
    let before = api.get("/credential-vault");
    let exported = api.vault.export();
    let mut next = Vault::new(conditions());
    assert!(next.lent().now().is_err());
    assert!(next.restore(Some(b"[]")).is_err());
    assert!(next.lent().now().is_err());
    next.restore(Some(exported.expose().as_bytes())).unwrap();
    next.intercepting();
    assert_eq!(next.lent().now().unwrap().unwrap().revision, 2);
    assert!(next.export() == exported);
    api.vault = next;
    assert_eq!(api.get("/credential-vault"), before);
    assert!(!format!("{:?}", api.vault).contains(SECRET));
}

#[test]
fn scoped_matches_can_be_required() {
    let mut api = Api::new(Conditions { scope: Scope::Scoped, ..conditions() });
    let mut try_it =
        |matches: Value| api.call(Method::POST, "/credential-vault", &create(&[binding("b", matches)])).0;
    assert_eq!(try_it(json!({"hosts": ["api.example.com"]})), 400);
    assert_eq!(try_it(json!({"hosts": ["api.example.com"], "methods": ["GET"]})), 400);
    assert_eq!(try_it(json!({"hosts": ["api.example.com"], "methods": ["GET"], "paths": ["/*"]})), 400);
    assert_eq!(try_it(json!({"hosts": ["api.example.com"], "methods": ["GET"], "paths": ["/v1/*"]})), 201);
}
