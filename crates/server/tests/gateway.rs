//! What gateways ask the server, and how clients are sent through one.

use axum::body::BodyDataStream;
use futures_util::StreamExt;
use sandglass_server::{
    config::{
        Config, GatewayConfig, IngressConfig, IngressMode, RouteMode, Secret, SecureAccessConfig,
        SecureAccessKey, SignatureChoice,
    },
    tenants::Keyring,
};
use serde_json::{Value, json};

use crate::service::Service;

const KEY: &str = "open-sandbox-api-key";

fn config(route: RouteMode, signature: Option<SignatureChoice>) -> Config {
    let keys = vec![SecureAccessKey { id: 'k', key: b"secret-bytes-0001".to_vec() }];
    let address = if route == RouteMode::Wildcard { "*.example.com" } else { "gw.example.com" }.to_owned();
    Config {
        ingress: IngressConfig {
            mode: IngressMode::Gateway,
            gateway: Some(GatewayConfig { address, route }),
            secure_access: signature.map(|signature| SecureAccessConfig { active_key: 'k', keys, signature }),
            listen: None,
            key: Some(Secret::new("of-gateways")),
            open_gateway: false,
        },
        ..Config::default()
    }
}

async fn service(config: Config) -> Service {
    Service::configured(Keyring::single(Some("api-key")), config).await
}

async fn call(service: &Service, method: &str, path: &str, body: Value) -> crate::service::Answer {
    service.call_with(method, path, &[(KEY, "api-key")], body).await
}

async fn create(service: &Service, extra: Value) -> String {
    let mut body = json!({"image": {"uri": "img"}, "entrypoint": ["sleep", "1d"], "resourceLimits": {}});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let made = call(service, "POST", "/v1/sandboxes", body).await;
    assert_eq!(made.status, 202, "{}", made.body);
    made.body["id"].as_str().unwrap().to_owned()
}

/// JSON values, one a line.
struct Lines {
    pieces: BodyDataStream,
    text: String,
}

impl Lines {
    async fn open(service: &Service, query: &str) -> Self {
        let path = format!("/v1/ingress/sandboxes{query}");
        let (status, pieces) = service.pieces("GET", &path, &[(KEY, "of-gateways")]).await;
        assert_eq!(status, 200);
        Self { pieces, text: String::new() }
    }

    /// `None` at the end.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((line, rest)) = self.text.split_once('\n') {
                let line = serde_json::from_str(line).unwrap();
                self.text = rest.to_owned();
                return Some(line);
            }
            self.text.push_str(std::str::from_utf8(&self.pieces.next().await?.unwrap()).unwrap());
        }
    }
}

#[tokio::test]
async fn gateways_are_told_what_there_is_and_what_changes() {
    let service = service(config(RouteMode::Header, None)).await;
    let open = create(&service, json!({})).await;
    let guarded = json!({"secureAccess": true, "extensions": {"access.wake": "true"}});
    let guarded = create(&service, guarded).await;

    let mut once = Lines::open(&service, "").await;
    let mut told = [once.next().await.unwrap(), once.next().await.unwrap()];
    told.sort_by_key(|line| line["sandbox"]["id"] != open.as_str());
    let [first, second] = told;
    assert_eq!((&first["kind"], &first["sandbox"]["state"]), (&json!("put"), &json!("up")));
    assert_eq!(first["sandbox"]["wakes"], false);
    assert!(first["sandbox"]["address"].is_string() && first["sandbox"]["secureAccess"].is_null());
    assert!(first["sandbox"]["routeToken"].as_str().unwrap().len() > 20);
    assert_eq!((&first["sandbox"]["open"], &second["sandbox"]["routeToken"]), (&json!(false), &Value::Null));
    assert_eq!((&second["sandbox"]["id"], &second["sandbox"]["wakes"]), (&json!(guarded), &json!(true)));
    assert!(second["sandbox"]["secureAccess"].as_str().unwrap().len() > 20);
    assert_eq!(once.next().await, Some(json!({"kind": "whole"})));
    assert_eq!(once.next().await, None);

    let mut watching = Lines::open(&service, "?watch=true").await;
    while watching.next().await.unwrap()["kind"] != "whole" {}
    assert_eq!(call(&service, "POST", &format!("/v1/sandboxes/{open}/pause"), Value::Null).await.status, 202);
    let paused = async {
        loop {
            let line = watching.next().await.unwrap();
            if line["sandbox"]["state"] == "paused" {
                return line;
            }
        }
    };
    assert_eq!(paused.await["sandbox"]["id"], open.as_str());
    assert_eq!(call(&service, "DELETE", &format!("/v1/sandboxes/{open}"), Value::Null).await.status, 204);
    let gone = async {
        loop {
            let line = watching.next().await.unwrap();
            if line["kind"] == "gone" {
                return line;
            }
        }
    };
    assert_eq!(gone.await["id"], open.as_str());
    service.engine.close_streams();
    while watching.next().await.is_some() {}
}

#[tokio::test]
async fn the_gateways_key_opens_its_own_routes_only() {
    let service = service(config(RouteMode::Header, None)).await;
    let id = create(&service, json!({})).await;
    let wake = format!("/v1/ingress/sandboxes/{id}/wake");
    for (key, status) in [("of-gateways", 204), ("api-key", 204), ("wrong", 401), ("", 401)] {
        let uses = json!({"sandboxes": [id]});
        let seen = service.call_with("POST", "/v1/ingress/uses", &[(KEY, key)], uses).await;
        assert_eq!(seen.status, status, "{key}");
    }
    for (method, path) in [("GET", "/v1/sandboxes"), ("DELETE", "/v1/sandboxes/x"), ("GET", "/v1/ingress")] {
        let seen = service.call_with(method, path, &[(KEY, "of-gateways")], Value::Null).await;
        assert_eq!(seen.code(), (401, "INVALID_API_KEY"), "{path}");
    }
    let seen = service.call_with("POST", &wake, &[(KEY, "of-gateways")], Value::Null).await;
    assert_eq!(seen.status, 409, "it does not wake on access");
}

#[tokio::test]
async fn only_what_wakes_on_access_is_woken() {
    let service = service(config(RouteMode::Header, None)).await;
    let id = create(&service, json!({"extensions": {"access.wake": "true"}})).await;
    let wake = format!("/v1/ingress/sandboxes/{id}/wake");
    let woken = async || service.call_with("POST", &wake, &[(KEY, "of-gateways")], Value::Null).await.status;
    assert_eq!(woken().await, 204, "it runs");
    assert_eq!(call(&service, "POST", &format!("/v1/sandboxes/{id}/pause"), Value::Null).await.status, 202);
    assert_eq!(woken().await, 204);
    let seen = call(&service, "GET", &format!("/v1/sandboxes/{id}"), Value::Null).await;
    assert_eq!(seen.body["status"]["state"], "Running");
    let unknown = call(&service, "POST", "/v1/ingress/sandboxes/x/wake", Value::Null).await;
    assert_eq!(unknown.code(), (404, "DOCKER::SANDBOX_NOT_FOUND"));
}

#[tokio::test]
async fn endpoints_lead_through_the_gateway_on_every_runtime() {
    let service = service(config(RouteMode::Header, Some(SignatureChoice::Short))).await;
    let id = create(&service, json!({"secureAccess": true})).await;
    let ask = async |rest: &str| {
        call(&service, "GET", &format!("/v1/sandboxes/{id}/endpoints/{rest}"), Value::Null).await
    };
    let plain = ask("8080").await.body;
    assert_eq!(plain["endpoint"], "gw.example.com");
    assert_eq!(plain["headers"]["OpenSandbox-Ingress-To"], format!("{id}-8080"));
    assert!(plain["headers"]["OpenSandbox-Secure-Access"].is_string());
    let signed = ask("8080?expires=9999999999").await.body;
    let route = signed["headers"]["OpenSandbox-Ingress-To"].as_str().unwrap();
    assert!(route.starts_with(&format!("{id}-8080-4ldqpdr-")) && route.ends_with('k'), "{route}");
    assert!(signed["headers"].get("OpenSandbox-Secure-Access").is_none());
    let proxied = ask("8080?use_server_proxy=true").await.body;
    assert_eq!(proxied["endpoint"], format!("h/v1/sandboxes/{id}/proxy/8080"));
    assert!(proxied["headers"].get("OpenSandbox-Ingress-To").is_none());

    for (rest, status, code) in [
        ("8080?expires=1&use_server_proxy=true", 400, "SANDBOX::INVALID_PARAMETER"),
        ("0?expires=1", 400, "DOCKER::INVALID_PORT"),
        ("8080?expires=1", 400, "SANDBOX::INVALID_PARAMETER"),
        ("8080?expires=-5", 400, "SANDBOX::INVALID_PARAMETER"),
        ("8080?expires=18446744073709551616", 400, "SANDBOX::INVALID_PARAMETER"),
        ("8080?expires=99999999999999999999999999999999999999999999", 400, "SANDBOX::INVALID_PARAMETER"),
        ("8080?expires=soon", 422, "GENERAL::VALIDATION_ERROR"),
        ("8080?expires=", 422, "GENERAL::VALIDATION_ERROR"),
    ] {
        assert_eq!(ask(rest).await.code(), (status, code), "{rest}");
    }
    assert_eq!(ask("8080?expires=18446744073709551615").await.status, 200);
    let unknown = call(&service, "GET", "/v1/sandboxes/x/endpoints/80?expires=1", Value::Null).await;
    assert_eq!(unknown.code(), (400, "SANDBOX::INVALID_PARAMETER"), "before it is known whether it exists");
}

#[tokio::test]
async fn what_cannot_be_signed_is_said() {
    let full = service(config(RouteMode::Wildcard, Some(SignatureChoice::Full))).await;
    let id = create(&full, json!({})).await;
    let ask = async |service: &Service, query: &str| {
        let path = format!("/v1/sandboxes/{id}/endpoints/44772?expires={query}");
        call(service, "GET", &path, Value::Null).await
    };
    let host = ask(&full, "9999999999").await.body["endpoint"].as_str().unwrap().to_owned();
    let label = host.strip_suffix(".example.com").unwrap();
    assert!(label.len() <= 63 && !label.contains('.'), "{host}");
    assert_eq!(ask(&full, "18446744073709551615").await.code(), (400, "SANDBOX::INVALID_PARAMETER"));

    let silent = service(config(RouteMode::Uri, None)).await;
    assert_eq!(ask(&silent, "9999999999").await.code(), (400, "SANDBOX::INVALID_PARAMETER"));
    let direct = service(Config::default()).await;
    assert_eq!(ask(&direct, "nonsense").await.code(), (422, "GENERAL::VALIDATION_ERROR"));
    assert_eq!(ask(&direct, "1").await.code(), (400, "SANDBOX::API_NOT_SUPPORTED"));
}

#[tokio::test]
async fn the_gateway_is_closed_unless_it_is_configured_to_be_open() {
    for open in [false, true] {
        let mut config = config(RouteMode::Header, None);
        config.ingress.open_gateway = open;
        let service = service(config).await;
        let id = create(&service, json!({})).await;
        let line = Lines::open(&service, "").await.next().await.unwrap();
        assert_eq!(line["sandbox"]["open"], open);
        let told = line["sandbox"]["routeToken"].as_str().map(str::to_owned);
        assert_eq!(told.is_some(), !open);
        let ask = async |rest: &str| {
            call(&service, "GET", &format!("/v1/sandboxes/{id}/endpoints/{rest}"), Value::Null).await.body
        };
        let answer = ask("8080").await;
        assert_eq!(answer["headers"]["X-Sandglass-Access"].as_str().map(str::to_owned), told);
        assert_eq!(answer["headers"]["OpenSandbox-Ingress-To"], format!("{id}-8080"));
        let agent = ask("44772").await;
        assert!(
            agent["headers"]["X-EXECD-ACCESS-TOKEN"].is_string()
                && agent["headers"]["X-Sandglass-Access"].is_null()
        );
    }
}
