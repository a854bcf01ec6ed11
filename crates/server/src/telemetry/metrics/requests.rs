//! How long requests take, by method, route and status: `server.http.request.duration`.
//!
//! Recording takes no lock and allocates nothing once a combination has been seen. How many combinations there can be is
//! bounded by the table of routes, ten methods, and [`STATUSES`] statuses each, whatever programs behind the proxy answer.

use std::{collections::HashMap, sync::OnceLock, time::Duration};

use axum::extract::MatchedPath;
use http::{Method, StatusCode};
use sandglass_api::routes::ROUTES;

use super::{family::Family, sharded::Histogram};

const BOUNDS: &[u32] = &[1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000];
const BUCKETS: usize = BOUNDS.len() + 1;
const METHODS: [&str; 10] =
    ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "OTHER"];
/// Different statuses told apart on one route and method; what comes later is recorded as status 0.
const STATUSES: usize = 24;

/// A route as metrics, traces and the access log name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteName {
    place: usize,
    name: &'static str,
}

impl RouteName {
    /// The template with its mount, or `unknown`.
    pub fn as_str(self) -> &'static str {
        self.name
    }
}

/// The templates, found by what the router matched. Parameters are named as the OpenSandbox server names them.
#[derive(Debug)]
struct Routes {
    names: Vec<&'static str>,
    places: HashMap<u64, usize>,
}

const UNKNOWN: RouteName = RouteName { place: 0, name: "unknown" };

/// The page of templates is made once for the process, so that names can be borrowed for ever.
fn routes() -> &'static Routes {
    static TABLE: OnceLock<Routes> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Routes { names: vec![UNKNOWN.name], places: HashMap::new() };
        for template in ROUTES.iter().flat_map(|route| route.paths()) {
            let name = template.replace("{*full_path}", "{full_path:path}");
            let place = table.names.iter().position(|known| **known == name).unwrap_or_else(|| {
                table.names.push(String::leak(name));
                table.names.len() - 1
            });
            table.places.insert(shape(&template), place);
            if let Some(root) = template.strip_suffix("{*full_path}") {
                // The router has the empty rest as a route of its own.
                table.places.insert(shape(root), place);
            }
        }
        table
    })
}

/// A hash of a template that does not depend on what its parameters are called (FNV-1a).
fn shape(template: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut inside = false;
    for byte in template.bytes() {
        if !inside || matches!(byte, b'*' | b'}') {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        inside = byte == b'{' || (inside && byte != b'}');
    }
    hash
}

/// The name of the route that the router matched, also when the method did not match.
pub fn route_of(matched: Option<&MatchedPath>) -> RouteName {
    named(matched.map(MatchedPath::as_str))
}

/// The route of a path to a port of a sandbox; `None` for every other path. It is as the router would match it.
pub fn port_route_of(path: &str) -> Option<RouteName> {
    static NAMES: OnceLock<[RouteName; 4]> = OnceLock::new();
    let (v1, rest) = match path.strip_prefix("/v1/") {
        Some(rest) => (true, rest),
        None => (false, path.strip_prefix('/')?),
    };
    let (id, rest) = rest.strip_prefix("sandboxes/")?.split_once('/')?;
    let port = rest.strip_prefix("proxy/")?;
    if id.is_empty() || port.is_empty() || port.starts_with('/') {
        return None;
    }
    let names = NAMES.get_or_init(|| {
        let name = |template| named(Some(template));
        [
            name("/sandboxes/{id}/proxy/{port}"),
            name("/sandboxes/{id}/proxy/{port}/"),
            name("/v1/sandboxes/{id}/proxy/{port}"),
            name("/v1/sandboxes/{id}/proxy/{port}/"),
        ]
    });
    Some(names[2 * usize::from(v1) + usize::from(port.contains('/'))])
}

fn named(template: Option<&str>) -> RouteName {
    let table = routes();
    let place = template.and_then(|template| table.places.get(&shape(template)).copied()).unwrap_or(0);
    RouteName { place, name: table.names[place] }
}

/// The attribute `http_method`.
pub fn method_name(method: &Method) -> &'static str {
    METHODS[method_place(method)]
}

fn method_place(method: &Method) -> usize {
    METHODS.iter().position(|name| *name == method.as_str()).unwrap_or(METHODS.len() - 1)
}

#[derive(Debug)]
struct Series {
    status: u16,
    durations: Histogram<BUCKETS>,
}

impl Series {
    fn new(status: u16) -> Self {
        Self { status, durations: Histogram::new(BOUNDS) }
    }
}

/// One route and method. Slots fill from the front and never change again.
#[derive(Debug)]
struct Statuses {
    slots: [OnceLock<Box<Series>>; STATUSES],
    beyond: OnceLock<Box<Series>>,
}

impl Statuses {
    fn new() -> Self {
        Self { slots: std::array::from_fn(|_| OnceLock::new()), beyond: OnceLock::new() }
    }

    fn series(&self, status: u16) -> &Series {
        for slot in &self.slots {
            let series = slot.get_or_init(|| Box::new(Series::new(status)));
            // Another thread may have put another status here in the meantime.
            if series.status == status {
                return series;
            }
        }
        self.beyond.get_or_init(|| Box::new(Series::new(0)))
    }

    fn all(&self) -> impl Iterator<Item = &Series> {
        self.slots.iter().chain([&self.beyond]).filter_map(|slot| slot.get().map(Box::as_ref))
    }
}

/// The durations of all requests.
#[derive(Debug)]
pub struct Requests {
    by_route_and_method: Box<[OnceLock<Box<Statuses>>]>,
}

impl Default for Requests {
    fn default() -> Self {
        let places = routes().names.len() * METHODS.len();
        Self { by_route_and_method: (0..places).map(|_| OnceLock::new()).collect() }
    }
}

impl Requests {
    /// Records one answered request.
    pub fn record(&self, method: &Method, route: RouteName, status: StatusCode, duration: Duration) {
        let place = route.place * METHODS.len() + method_place(method);
        let Some(cell) = self.by_route_and_method.get(place) else { return };
        let statuses = cell.get_or_init(|| Box::new(Statuses::new()));
        statuses.series(status.as_u16()).durations.record(duration);
    }

    /// What was recorded so far.
    pub fn family(&self) -> Family {
        let mut points = Vec::new();
        for (place, cell) in self.by_route_and_method.iter().enumerate() {
            for series in cell.get().into_iter().flat_map(|statuses| statuses.all()) {
                let labels = vec![
                    ("http_method", METHODS[place % METHODS.len()].into()),
                    ("http_route", routes().names[place / METHODS.len()].into()),
                    ("http_status_code", series.status.into()),
                ];
                points.push((labels, series.durations.read()));
            }
        }
        let about = "Time from a request's head to its answer's head. WebSockets are not in it.";
        Family::durations("server.http.request.duration", about, BOUNDS, points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::family::{Label, Points};

    #[test]
    fn templates_are_found_whatever_their_parameters_are_called() {
        let cases = [
            ("/sandboxes", "/sandboxes"),
            ("/v1/sandboxes/{id}", "/v1/sandboxes/{sandbox_id}"),
            ("/sandboxes/{x}/proxy/{y}", "/sandboxes/{sandbox_id}/proxy/{port}"),
            ("/v1/sandboxes/{id}/proxy/{port}/", "/v1/sandboxes/{sandbox_id}/proxy/{port}/{full_path:path}"),
            ("/sandboxes/{id}/proxy/{port}/{*path}", "/sandboxes/{sandbox_id}/proxy/{port}/{full_path:path}"),
            ("/health", "/health"),
            ("/v1/health", "unknown"),
            ("/sandboxes/{id}/nothing", "unknown"),
        ];
        for (matched, name) in cases {
            assert_eq!(named(Some(matched)).as_str(), name, "{matched}");
        }
        assert_eq!(named(None), UNKNOWN);
        // Different routes have different shapes.
        let all: std::collections::HashSet<_> = ROUTES.iter().flat_map(|route| route.paths()).collect();
        for template in &all {
            let name = template.replace("{*full_path}", "{full_path:path}");
            assert_eq!(named(Some(template)).as_str(), name);
        }
    }

    #[test]
    fn ports_are_told_apart_by_their_path() {
        let bare = "/sandboxes/{sandbox_id}/proxy/{port}";
        let rest = "/sandboxes/{sandbox_id}/proxy/{port}/{full_path:path}";
        for (path, mount, name) in [
            ("/sandboxes/a/proxy/80", "", bare),
            ("/v1/sandboxes/a/proxy/80", "/v1", bare),
            ("/sandboxes/a/proxy/80/", "", rest),
            ("/v1/sandboxes/a/proxy/http/x", "/v1", rest),
            ("/v1/sandboxes/a%2Fb/proxy/80//", "/v1", rest),
            ("/sandboxes/v1/proxy/80/sandboxes/a/proxy/80", "", rest),
        ] {
            let found = port_route_of(path).map(RouteName::as_str);
            assert_eq!(found, Some(&*format!("{mount}{name}")), "{path}");
        }
        for path in [
            "",
            "*",
            "/",
            "/sandboxes",
            "/sandboxes//proxy/80",
            "/sandboxes/a/proxy",
            "/sandboxes/a/proxy/",
            "/sandboxes/a/proxy//x",
            "/sandboxes/a/b/proxy/80",
            "/v1sandboxes/a/proxy/80",
            "/v1//sandboxes/a/proxy/80",
            "/v1/v1/sandboxes/a/proxy/80",
            "/x/sandboxes/a/proxy/80",
        ] {
            assert_eq!(port_route_of(path), None, "{path}");
        }
    }

    #[test]
    fn methods_are_known_or_other() {
        assert_eq!(method_name(&Method::PATCH), "PATCH");
        assert_eq!(method_name(&Method::from_bytes(b"PURGE").unwrap()), "OTHER");
        assert_eq!(method_name(&Method::from_bytes(b"get").unwrap()), "OTHER");
    }

    #[test]
    fn combinations_are_told_apart_and_bounded() {
        let requests = Requests::default();
        let route = named(Some("/sandboxes/{id}"));
        let took = Duration::from_millis(3);
        for status in 200..300 {
            requests.record(&Method::GET, route, StatusCode::from_u16(status).unwrap(), took);
        }
        requests.record(&Method::GET, route, StatusCode::OK, took);
        requests.record(&Method::POST, UNKNOWN, StatusCode::NOT_FOUND, took);
        let family = requests.family();
        let Points::Histogram { points, bounds } = family.points else { panic!("a histogram") };
        assert_eq!(bounds.len(), 14);
        assert_eq!(points.len(), STATUSES + 2);
        let count = |status: i64| {
            let found = points.iter().find(|(labels, _)| labels[2].1 == Label::Int(status)).unwrap();
            found.1.count()
        };
        assert_eq!((count(200), count(201), count(404)), (2, 1, 1));
        assert_eq!(count(0), 100 - STATUSES as u64);
    }
}
