//! The gateway between real sockets on loopback: the "sandboxes" are addresses in 127.0.0.0/8.

mod access;
mod passing;
mod remote;
mod waking;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use http::StatusCode;
use sandglass_ingress::{Door as Access, Expiry, Generation, Key, Keys, Moment, Route};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::ingress::{Lookup, NotWoken, Reach, Target, Waking};

const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

/// Sandboxes by id, and what was done to them.
struct Known {
    targets: Arc<Mutex<HashMap<String, Target>>>,
    changed: watch::Sender<u64>,
    used: Mutex<Vec<(String, u16, Option<String>)>>,
    wakes: AtomicUsize,
    /// A wake takes one of these to succeed.
    may_wake: Arc<Semaphore>,
}

impl Known {
    fn set(&self, id: &str, target: Target) {
        self.targets.lock().unwrap().insert(id.to_owned(), target);
        self.changed.send_modify(|count| *count += 1);
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut Target)) {
        let mut target = self.targets.lock().unwrap()[id].clone();
        change(&mut target);
        self.set(id, target);
    }
}

impl Lookup for Known {
    fn target(&self, id: &str) -> Option<Target> {
        self.targets.lock().unwrap().get(id).cloned()
    }

    fn wake(&self, id: &str) -> Waking {
        self.wakes.fetch_add(1, Relaxed);
        let (may_wake, targets, id) = (self.may_wake.clone(), self.targets.clone(), id.to_owned());
        Box::pin(async move {
            may_wake.acquire().await.map_err(|_| NotWoken::Failed)?.forget();
            if let Some(target) = targets.lock().unwrap().get_mut(&id)
                && let Reach::Paused(address) = target.reach
            {
                target.reach = Reach::Addressable(address);
            }
            Ok(())
        })
    }
}

impl Directory for Known {
    fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn lag(&self) -> Duration {
        Duration::from_secs(10)
    }

    fn told(&self, used: Used<'_>) {
        self.used.lock().unwrap().push((used.id.to_owned(), used.port, used.path.map(str::to_owned)));
    }
}

/// One to which everybody is let through; the tests of access close it.
fn target(reach: Reach) -> Target {
    Target {
        open: true,
        agent_token: "agent-token".to_owned(),
        route_token: "secret".to_owned(),
        ..Target::at(reach)
    }
}

fn key() -> Key {
    Key { id: 'k', secret: b"secret-bytes-0001".to_vec() }
}

/// A signed route that is open for a while.
fn signed(generation: Generation, id: &str, port: u16) -> Route {
    Route::signed(&key(), generation, (id, port), Expiry::at(Moment::now().wall + 1000))
}

struct Stage {
    known: Arc<Known>,
    gateway: SocketAddr,
    /// Where the program of every sandbox listens.
    port: u16,
    stop: CancellationToken,
    door: Door,
}

async fn serve(address: IpAddr, app: Router) -> SocketAddr {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let bound = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    bound
}

/// Answers what it was asked.
fn mirror() -> Router {
    Router::new().fallback(|request: Request| async move {
        let lines: Vec<String> = request
            .headers()
            .iter()
            .map(|(n, v)| format!("{n}: {}", String::from_utf8_lossy(v.as_bytes())))
            .collect();
        let (method, target) = (request.method().clone(), request.uri().to_string());
        let given = [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("location", "/next"), ("server", "app")];
        let mut response = format!("{method} {target}\n{}", lines.join("\n")).into_response();
        for (name, value) in given {
            response.headers_mut().append(name, value.parse().unwrap());
        }
        if target.ends_with("/teapot") {
            *response.status_mut() = StatusCode::IM_A_TEAPOT;
        }
        response
    })
}

impl Stage {
    async fn new(last: u8, route: RouteFrom) -> Self {
        Self::with(last, route, |settings| settings).await
    }

    /// A gateway whose sandboxes are at an address of this test's own.
    async fn with(
        last: u8,
        route: RouteFrom,
        change: impl FnOnce(GatewaySettings) -> GatewaySettings,
    ) -> Self {
        let address = IpAddr::from([127, 78, 0, last]);
        let port = serve(address, mirror()).await.port();
        let running = target(Reach::Addressable(address));
        let guarded = Target { secure_access: true, ..running.clone() };
        let targets = HashMap::from([
            ("box".to_owned(), running.clone()),
            ("box-with-dashes".to_owned(), running.clone()),
            (UUID.to_owned(), guarded.clone()),
            ("guarded".to_owned(), guarded.clone()),
            ("tokenless".to_owned(), Target { route_token: String::new(), ..guarded }),
            ("paused".to_owned(), target(Reach::Paused(address))),
            ("asleep".to_owned(), Target { wakes: true, ..target(Reach::Paused(address)) }),
            ("starting".to_owned(), target(Reach::Starting(None))),
            ("nowhere".to_owned(), target(Reach::Nowhere)),
            ("over".to_owned(), target(Reach::Gone)),
        ]);
        let known = Arc::new(Known {
            targets: Arc::new(Mutex::new(targets)),
            changed: watch::Sender::new(0),
            used: Mutex::default(),
            wakes: AtomicUsize::new(0),
            may_wake: Arc::new(Semaphore::new(0)),
        });
        let settings = change(GatewaySettings {
            route,
            door: Access::new(Keys::new([key()]), Generation::Short),
            park: Some(Park { patience: Duration::from_secs(60), most: 64 }),
            audit: None,
        });
        let carrier = carrier();
        let gateway = Gateway::new(known.clone(), carrier.clone(), settings);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let limits = GatewayLimits { connections: 64, ..GatewayLimits::default() };
        let stop = CancellationToken::new();
        let door = Door::open(listener, (gateway, carrier), (None, limits), stop.clone()).unwrap();
        Self { known, gateway: door.address(), port, stop, door }
    }

    async fn ask(&self, line: &str, headers: &str) -> Answer {
        Answer::of(self.gateway, line, headers).await
    }

    /// A GET of a path with a route in the header.
    async fn to(&self, route: &str, headers: &str) -> Answer {
        self.ask("GET /x", &format!("Host: h\r\nOpenSandbox-Ingress-To: {route}\r\n{headers}")).await
    }
}

/// An answer as it came.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    async fn of(gateway: SocketAddr, line: &str, headers: &str) -> Self {
        let mut stream = TcpStream::connect(gateway).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let text = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{line}: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    /// The value of a header that the program got.
    fn got(&self, name: &str) -> Option<&str> {
        self.body.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }

    fn is_ours(&self) -> bool {
        self.body.starts_with("OpenSandbox Ingress: ")
            && self.body.ends_with('\n')
            && self.head.contains("content-type: text/plain; charset=utf-8")
            && self.head.contains("x-content-type-options: nosniff")
    }
}
