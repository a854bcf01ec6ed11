//! Against a real collector on loopback, read by a protobuf reader of the tests' own.

use std::{
    collections::VecDeque,
    io::Read as _,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, extract::State, routing::any};
use http::{HeaderMap, Method, StatusCode, Uri};
use tokio::sync::mpsc;

use super::*;
use crate::telemetry::{
    metrics::{Proxied, Sdk, route_of},
    traces::{Sampler, child, scoped},
};

/// One field of a message.
#[derive(Debug, Clone, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

/// A message that was read without knowing what it is.
#[derive(Debug, Clone, Default)]
struct Read(Vec<(u64, Field)>);

impl Read {
    fn of(mut bytes: &[u8]) -> Self {
        let varint = |bytes: &mut &[u8]| {
            let (mut value, mut shift) = (0_u64, 0);
            loop {
                let (first, rest) = bytes.split_first().expect("a whole number");
                *bytes = rest;
                value |= u64::from(first & 0x7f) << shift;
                shift += 7;
                if first & 0x80 == 0 {
                    return value;
                }
            }
        };
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let take = |length: usize, bytes: &mut &[u8]| {
                let (taken, rest) = bytes.split_at(length);
                *bytes = rest;
                taken.to_vec()
            };
            let little = |bytes: Vec<u8>| {
                Field::Number(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
            };
            let field = match tag & 7 {
                0 => Field::Number(varint(&mut bytes)),
                1 => little(take(8, &mut bytes)),
                5 => little(take(4, &mut bytes)),
                2 => {
                    let length = usize::try_from(varint(&mut bytes)).unwrap();
                    Field::Bytes(take(length, &mut bytes))
                }
                other => panic!("wire type {other}"),
            };
            fields.push((tag >> 3, field));
        }
        Self(fields)
    }

    fn bytes(&self, field: u64) -> Vec<Vec<u8>> {
        let of = |(number, value): &(u64, Field)| match value {
            Field::Bytes(bytes) if *number == field => Some(bytes.clone()),
            _ => None,
        };
        self.0.iter().filter_map(of).collect()
    }

    fn all(&self, field: u64) -> Vec<Self> {
        self.bytes(field).iter().map(|bytes| Self::of(bytes)).collect()
    }

    fn one(&self, field: u64) -> Self {
        let all = self.all(field);
        assert_eq!(all.len(), 1, "field {field} of {self:?}");
        all[0].clone()
    }

    fn text(&self, field: u64) -> String {
        String::from_utf8(self.bytes(field).concat()).unwrap()
    }

    fn number(&self, field: u64) -> u64 {
        let found = self.0.iter().find(|(number, _)| *number == field);
        match found {
            Some((_, Field::Number(number))) => *number,
            other => panic!("field {field}: {other:?}"),
        }
    }

    fn words(&self, field: u64) -> Vec<u64> {
        let packed = self.bytes(field).concat();
        packed.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// `KeyValue`s as `name=value`.
    fn attributes(&self, field: u64) -> Vec<String> {
        let of = |pair: Self| {
            let value = pair.one(2);
            let text = match &value.0[..] {
                [(1, Field::Bytes(text))] => String::from_utf8(text.clone()).unwrap(),
                [(2, Field::Number(flag))] => (*flag == 1).to_string(),
                [(3, Field::Number(number))] => number.to_string(),
                other => panic!("{other:?}"),
            };
            format!("{}={text}", pair.text(1))
        };
        self.all(field).into_iter().map(of).collect()
    }
}

struct Seen {
    path: String,
    headers: HeaderMap,
    body: Read,
}

/// Answers with what it is told to, then with 200.
struct Collector {
    address: SocketAddr,
    seen: mpsc::UnboundedReceiver<Seen>,
}

#[derive(Clone)]
struct Script {
    answers: Arc<Mutex<VecDeque<StatusCode>>>,
    tell: mpsc::UnboundedSender<Seen>,
}

async fn collect_one(
    State(script): State<Script>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    assert_eq!(method, Method::POST);
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let body = match headers.get("content-encoding") {
        Some(_) => {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
            plain
        }
        None => body.to_vec(),
    };
    let seen = Seen { path: uri.path().to_owned(), headers, body: Read::of(&body) };
    let _ = script.tell.send(seen);
    script.answers.lock().unwrap().pop_front().unwrap_or(StatusCode::OK)
}

impl Collector {
    async fn start(answers: &[u16]) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, seen) = mpsc::unbounded_channel();
        let answers = answers.iter().map(|status| StatusCode::from_u16(*status).unwrap()).collect();
        let script = Script { answers: Arc::new(Mutex::new(answers)), tell };
        let router = Router::new().fallback(any(collect_one)).with_state(script);
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, seen }
    }

    fn destination(&self, path: &str) -> Destination {
        destination(self.address, path)
    }
}

fn destination(address: SocketAddr, path: &str) -> Destination {
    Destination {
        url: format!("http://{address}{path}"),
        headers: vec![("authorization".into(), "Basic eDp5".into())],
        timeout: Duration::from_secs(10),
        gzip: false,
        certificate: None,
    }
}

const ALL: Sampler = Sampler { follow_parent: true, ratio: 1.0 };
const BATCHING: Batching = Batching { delay: Duration::from_millis(10), queue: 64, batch: 16 };

fn resource() -> Vec<(String, String)> {
    vec![("service.name".into(), "opensandbox-server".into())]
}

fn start(settings: Settings, metrics: &Arc<Metrics>) -> Exporter {
    let source = metrics.clone();
    Exporter::start(settings, metrics, Box::new(move || source.families(None)))
}

#[tokio::test]
async fn the_documented_metrics_arrive_as_documented() {
    let mut collector = Collector::start(&[]).await;
    let metrics = Arc::new(Metrics::default());
    let took = Duration::from_millis(7);
    metrics.requests.record(&Method::GET, route_of(None), StatusCode::NOT_FOUND, took);
    let sdk = Sdk::of(Some("OpenSandbox-Python-SDK/1.2.3"));
    metrics.creates.record(sdk, false, Duration::from_millis(600));
    metrics.count_proxied(false, Proxied::Answered);
    let destination = Destination { gzip: true, ..collector.destination("/my/metrics") };
    let every = Duration::from_secs(3600);
    let settings = Settings { metrics: Some((destination, every)), traces: None, resource: resource() };
    // Nothing is due yet; the end sends what there is.
    start(settings, &metrics).stop(Duration::from_secs(30)).await;

    let seen = collector.seen.recv().await.unwrap();
    assert_eq!(
        (seen.path.as_str(), &seen.headers["authorization"]),
        ("/my/metrics", &"Basic eDp5".parse().unwrap())
    );
    let resource = seen.body.one(1);
    assert_eq!(resource.one(1).attributes(1), ["service.name=opensandbox-server"]);
    let scopes = resource.all(2);
    let names: Vec<String> = scopes.iter().map(|scope| scope.one(1).text(1)).collect();
    assert_eq!(names, ["opensandbox.server", "sandglass"]);

    let documented = scopes[0].all(2);
    assert_eq!(documented.len(), 2);
    let (requests, creates) = (&documented[0], &documented[1]);
    assert_eq!((requests.text(1), requests.text(3)), ("server.http.request.duration".into(), "ms".into()));
    let histogram = requests.one(9);
    assert_eq!(histogram.number(2), 2, "cumulative");
    let point = histogram.one(1);
    assert_eq!(point.attributes(9), ["http_method=GET", "http_route=unknown", "http_status_code=404"]);
    assert_eq!((point.number(4), f64::from_bits(point.number(5))), (1, 7.0));
    assert_eq!(point.words(6), [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let bounds: Vec<f64> = point.words(7).into_iter().map(f64::from_bits).collect();
    let expected = [1., 5., 10., 25., 50., 100., 250., 500., 1e3, 2500., 5e3, 1e4, 3e4, 6e4];
    assert_eq!(bounds, expected);
    assert!(point.number(2) <= point.number(3));

    assert_eq!(
        (creates.text(1), creates.text(3)),
        ("opensandbox.sandbox.create.duration".into(), "ms".into())
    );
    let point = creates.one(9).one(1);
    assert_eq!(point.attributes(9), ["sdk.language=python", "sdk.version=1.2.3", "success=false"]);
    assert_eq!(point.words(6), [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(point.words(7).len(), 9);

    let own = scopes[1].all(2);
    let proxied = own.iter().find(|metric| metric.text(1) == "sandglass.proxy.requests").unwrap();
    let sum = proxied.one(7);
    assert_eq!((sum.number(2), sum.number(3)), (2, 1), "cumulative and monotonic");
    let answered = sum.all(1).into_iter().find(|p| p.attributes(7) == ["kind=http", "outcome=answered"]);
    assert_eq!(answered.unwrap().number(6), 1);
    assert_eq!(metrics.exports(Signal::Metrics, Export::Sent), 1);
}

#[tokio::test]
async fn metrics_come_again_and_again_and_survive_refusals() {
    let mut collector = Collector::start(&[503, 400]).await;
    let metrics = Arc::new(Metrics::default());
    let every = Duration::from_millis(5);
    let settings = Settings {
        metrics: Some((collector.destination("/v1/metrics"), every)),
        traces: None,
        resource: resource(),
    };
    let exporter = start(settings, &metrics);
    for _ in 0..4 {
        collector.seen.recv().await.unwrap();
    }
    exporter.stop(Duration::from_secs(30)).await;
    assert_eq!(metrics.exports(Signal::Metrics, Export::Failed), 2);
    assert!(metrics.exports(Signal::Metrics, Export::Sent) >= 2);
}

#[tokio::test]
async fn spans_arrive_with_their_parents_after_a_retry() {
    let mut collector = Collector::start(&[503]).await;
    let metrics = Arc::new(Metrics::default());
    let destination = collector.destination("/v1/traces");
    let settings =
        Settings { metrics: None, traces: Some((destination, BATCHING, ALL)), resource: resource() };
    let exporter = start(settings, &metrics);
    let mut span = exporter.tracer().request(&HeaderMap::new(), || "POST /sandboxes".to_owned()).unwrap();
    span.text("http.route", "/sandboxes");
    span.number("http.response.status_code", 500);
    span.fail("500");
    scoped(Some(&span), async { drop(child("sandbox.prepare")) }).await;
    drop(span);
    let (refused, taken) = (collector.seen.recv().await.unwrap(), collector.seen.recv().await.unwrap());
    assert_eq!(refused.path, "/v1/traces");
    exporter.stop(Duration::from_secs(30)).await;
    while let Ok(more) = collector.seen.try_recv() {
        drop(more);
    }

    let mut spans = taken.body.one(1).one(2).all(2);
    if spans.len() == 1 {
        // The two ended in different batches.
        return;
    }
    let request = spans.pop().unwrap();
    let prepare = spans.pop().unwrap();
    assert_eq!((prepare.text(5), prepare.number(6)), ("sandbox.prepare".into(), 1));
    assert_eq!((request.text(5), request.number(6)), ("POST /sandboxes".into(), 2));
    assert_eq!(prepare.bytes(1), request.bytes(1));
    assert_eq!(prepare.bytes(4), request.bytes(2));
    assert_eq!((request.bytes(1)[0].len(), request.bytes(2)[0].len(), request.bytes(4).len()), (16, 8, 0));
    assert_eq!(request.attributes(9), ["http.route=/sandboxes", "http.response.status_code=500"]);
    assert_eq!((request.one(15).text(2), request.one(15).number(3)), ("500".into(), 2));
    assert!(request.number(7) <= prepare.number(7) && prepare.number(8) <= request.number(8));
    assert_eq!(request.number(16), 1);
    assert_eq!(metrics.exports(Signal::Traces, Export::Failed), 1);
    assert_eq!(metrics.exports(Signal::Traces, Export::Dropped), 0);
}

/// Nobody waits for a collector that is not there, that hangs, or that refuses for good; what cannot be sent is counted.
#[tokio::test]
async fn a_collector_that_is_of_no_use_holds_up_nothing() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hanging = free.local_addr().unwrap();
    let absent = {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        closed.local_addr().unwrap()
    };
    let refusing = Collector::start(&[400; 16]).await;
    for address in [absent, hanging, refusing.address] {
        let metrics = Arc::new(Metrics::default());
        let settings = Settings {
            metrics: Some((destination(address, "/v1/metrics"), Duration::from_millis(5))),
            traces: Some((destination(address, "/v1/traces"), BATCHING, ALL)),
            resource: resource(),
        };
        let exporter = start(settings, &metrics);
        for _ in 0..1000 {
            drop(exporter.tracer().request(&HeaderMap::new(), || "GET /x".to_owned()));
        }
        assert!(metrics.exports(Signal::Traces, Export::Dropped) >= 1000 - BATCHING.queue as u64 - 1);
        exporter.stop(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn a_destination_that_is_none_is_left_out() {
    let metrics = Arc::new(Metrics::default());
    let wrong = Destination { url: "not a url".into(), ..destination(([127, 0, 0, 1], 1).into(), "/") };
    let header = Destination {
        headers: vec![("a b".into(), "c".into())],
        ..destination(([127, 0, 0, 1], 1).into(), "/")
    };
    let settings = Settings {
        metrics: Some((wrong, Duration::from_secs(60))),
        traces: Some((header, BATCHING, ALL)),
        resource: Vec::new(),
    };
    let exporter = start(settings, &metrics);
    assert!(exporter.tasks.is_empty());
    assert!(exporter.tracer().request(&HeaderMap::new(), || "x".to_owned()).is_none());
    exporter.stop(Duration::ZERO).await;
}
