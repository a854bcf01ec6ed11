//! Against a real little HTTP server on loopback.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, extract::Request, response::IntoResponse};
use tokio::net::TcpListener;

use super::*;
use crate::config::{Endpoint, Secret};

/// What the service answers, by key; and what it was asked.
#[derive(Default)]
struct Little {
    answers: Mutex<HashMap<&'static str, (u16, String)>>,
    asked: Mutex<Vec<(String, HeaderMap)>>,
    count: AtomicUsize,
}

impl Little {
    async fn start() -> (Arc<Self>, SocketAddr) {
        let little = Arc::<Self>::default();
        let shared = Arc::clone(&little);
        let app = Router::new().fallback(move |request: Request| {
            let shared = Arc::clone(&shared);
            async move { shared.answer(&request) }
        });
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (little, address)
    }

    fn answer(&self, request: &Request) -> axum::response::Response {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.asked.lock().unwrap().push((request.uri().to_string(), request.headers().clone()));
        let key = request.headers()[&API_KEY].to_str().unwrap_or_default();
        let (status, body) = self.answers.lock().unwrap().get(key).cloned().unwrap_or((401, String::new()));
        let location = [("location", "/elsewhere")];
        (StatusCode::from_u16(status).unwrap(), location, body).into_response()
    }

    fn say(&self, key: &'static str, status: u16, body: &str) {
        self.answers.lock().unwrap().insert(key, (status, body.to_owned()));
    }
}

fn config(endpoint: String) -> TenantsConfig {
    TenantsConfig { endpoint: Some(Endpoint::new(endpoint)), ..TenantsConfig::default() }
}

fn tenant(name: &str) -> Outcome {
    Ok(Some(Arc::new(Tenant { name: name.to_owned(), namespace: name.to_owned() })))
}

type Outcome = Result<Option<Arc<Tenant>>, ProviderUnavailable>;

#[tokio::test]
async fn every_kind_of_answer() {
    let (little, address) = Little::start().await;
    let provider = HttpProvider::new(&config(format!("http://{address}/who"))).unwrap();
    let long = format!("{{\"namespace\": \"x\", \"more\": \"{}\"}}", "y".repeat(MOST_BYTES));
    let down: Outcome = Err(ProviderUnavailable);
    let cases: Vec<(&'static str, u16, &str, Outcome)> = vec![
        ("plain", 200, r#"{"namespace": "team-a"}"#, tenant("team-a")),
        ("ttl", 200, r#"{"namespace": "team-a", "ttl": 1.5}"#, tenant("team-a")),
        ("null ttl", 200, r#"{"namespace": " team-a ", "ttl": null, "more": {}}"#, tenant("team-a")),
        ("huge ttl", 200, r#"{"namespace": "team-a", "ttl": 1e300}"#, tenant("team-a")),
        ("nobody", 401, "", Ok(None)),
        ("forbidden", 403, "", down.clone()),
        ("not found", 404, "", down.clone()),
        ("error", 500, r#"{"namespace": "team-a"}"#, down.clone()),
        ("created", 201, r#"{"namespace": "team-a"}"#, down.clone()),
        ("redirect", 307, "", down.clone()),
        ("not json", 200, "namespace", down.clone()),
        ("a list", 200, r#"["namespace"]"#, down.clone()),
        ("no namespace", 200, r#"{"ttl": 1}"#, down.clone()),
        ("blank", 200, r#"{"namespace": " "}"#, down.clone()),
        ("number", 200, r#"{"namespace": 7}"#, down.clone()),
        ("control", 200, r#"{"namespace": "a\u001fb"}"#, down.clone()),
        ("negative", 200, r#"{"namespace": "a", "ttl": -1}"#, down.clone()),
        ("text", 200, r#"{"namespace": "a", "ttl": "30"}"#, down.clone()),
        ("long", 200, &long, down.clone()),
    ];
    for (key, status, body, expected) in cases {
        little.say(key, status, body);
        assert_eq!(provider.tenant(key.as_bytes()).await, expected, "{key}");
    }
    let paths: Vec<_> = little.asked.lock().unwrap().iter().map(|(path, _)| path.clone()).collect();
    assert!(paths.iter().all(|path| path == "/who"), "no redirect is followed");
    let remembered = little.count.load(Ordering::SeqCst);
    assert_eq!(provider.tenant(b"plain").await, tenant("team-a"));
    assert_eq!(little.count.load(Ordering::SeqCst), remembered, "a fresh answer is not asked for again");
    assert_eq!(provider.tenant(b"line\nbreak").await, Ok(None), "no key that a header could carry");
}

#[tokio::test]
async fn a_key_that_was_good_stays_good_while_the_service_fails_and_no_longer_when_it_says_so() {
    let (little, address) = Little::start().await;
    let provider = HttpProvider::new(&config(format!("http://{address}/"))).unwrap();
    little.say("k", 200, r#"{"namespace": "team-a", "ttl": 0}"#);
    assert_eq!(provider.tenant(b"k").await, tenant("team-a"));
    little.say("k", 503, "");
    assert_eq!(provider.tenant(b"k").await, tenant("team-a"));
    // Another provider remembers nothing of it.
    let strict = TenantsConfig { max_stale: Duration::ZERO, ..config(format!("http://{address}/")) };
    let provider = HttpProvider::new(&strict).unwrap();
    little.say("k", 200, r#"{"namespace": "team-a", "ttl": 0}"#);
    assert_eq!(provider.tenant(b"k").await, tenant("team-a"));
    little.say("k", 503, "");
    assert_eq!(provider.tenant(b"k").await, Err(ProviderUnavailable));
    little.say("k", 401, "");
    assert_eq!(provider.tenant(b"k").await, Ok(None));
}

#[tokio::test]
async fn the_service_is_told_the_key_and_the_servers_own_secret_and_nothing_else() {
    let (little, address) = Little::start().await;
    little.say("k", 200, r#"{"namespace": "n"}"#);
    let with_auth = TenantsConfig {
        auth_header: Some("X-Service-Auth".to_owned()),
        auth_token: Some(Secret::new("hunter2")),
        ..config(format!("http://user:pass@{address}/a?b=c"))
    };
    HttpProvider::new(&with_auth).unwrap().tenant(b"k").await.unwrap();
    // Half a header is none.
    let half = TenantsConfig { auth_token: None, ..with_auth.clone() };
    HttpProvider::new(&half).unwrap().tenant(b"k").await.unwrap();
    let asked = little.asked.lock().unwrap();
    let (path, headers) = &asked[0];
    assert_eq!(path, "/a?b=c");
    assert_eq!(
        (&headers["x-service-auth"], &headers[&API_KEY]),
        (&"hunter2".parse().unwrap(), &"k".parse().unwrap())
    );
    assert!(headers["authorization"].to_str().unwrap().starts_with("Basic "));
    assert!(!asked[1].1.contains_key("x-service-auth"));

    for (name, token) in [("no header", "x"), ("x", "line\nbreak")] {
        let bad = TenantsConfig {
            auth_header: Some(name.to_owned()),
            auth_token: Some(Secret::new(token)),
            ..config("http://h".to_owned())
        };
        assert!(matches!(HttpProvider::new(&bad), Err(OpenError::AuthHeader)), "{name}");
    }
    let none = TenantsConfig { endpoint: None, ..TenantsConfig::default() };
    assert!(matches!(HttpProvider::new(&none), Err(OpenError::NoEndpoint)));
}

#[tokio::test]
async fn silence_and_a_closed_door_are_failures() {
    let silent = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = silent.local_addr().unwrap();
    let quick = TenantsConfig {
        timeout: Duration::from_millis(20),
        ..config(format!("http://user:hunter2@{address}/"))
    };
    let provider = HttpProvider::new(&quick).unwrap();
    assert_eq!(provider.tenant(b"k").await, Err(ProviderUnavailable));
    drop(silent);
    let service = Service {
        client: Client::builder().no_proxy().build().unwrap(),
        endpoint: format!("http://user:hunter2@{address}/"),
    };
    let Fetched::Failed(why) = service.fetch(b"hunter3").await else { panic!("nobody listens there") };
    assert!(!why.contains("hunter"), "{why}");
}
