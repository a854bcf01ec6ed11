//! What answers on the API's listener: the routes of the API, and beside them the ports of sandboxes.
//!
//! Requests to ports are many and small, and need little of what the API's routes need: their id, their place in metrics and traces, the
//! rules for other origins. So they are told apart by their path before there is any routing, and pass no layer that leaves them alone.

use std::{sync::Arc, time::Duration};

use axum::{Router, extract::Request, response::Response};
use futures_util::{FutureExt as _, future::BoxFuture};
use http::{HeaderValue, Method, header::STRICT_TRANSPORT_SECURITY};

use super::middleware::{cors, request_id};
use crate::{
    ingress::{self, IngressState},
    listener::{Answers, whole_head},
    telemetry::{
        Telemetry,
        metrics::{RouteName, port_route_of},
    },
};

/// See the module documentation.
pub struct Front {
    ingress: IngressState,
    telemetry: Telemetry,
    /// Everything else.
    router: Router,
    strictly_over_tls: Option<HeaderValue>,
}

impl std::fmt::Debug for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Front").field("ingress", &self.ingress).finish_non_exhaustive()
    }
}

impl Front {
    /// Ports of sandboxes in front of the router that answers everything else.
    #[must_use]
    pub fn new(ingress: IngressState, telemetry: Telemetry, router: Router) -> Self {
        Self { ingress, telemetry, router, strictly_over_tls: None }
    }

    /// Over TLS only: browsers are told not to come back without, if that is wanted.
    #[must_use]
    pub fn strictly_over_tls(self, max_age: Option<Duration>) -> Self {
        let told = |age: Duration| {
            let text = format!("max-age={}", age.as_secs());
            HeaderValue::try_from(text).expect("a number is a header value")
        };
        Self { strictly_over_tls: max_age.map(told), ..self }
    }

    /// The same as a router, for whoever serves one.
    pub fn into_router(self) -> Router {
        let front = Arc::new(self);
        Router::new().fallback(move |request: Request| async move { front.answer(request).await })
    }

    /// A request to a port. Admission is the ingress's own: the key, or the sandbox's token.
    async fn pass(&self, route: RouteName, request: Request) -> Response {
        let bodiless = request.method() == Method::HEAD;
        let handle = |request| {
            // In a box, because every wrapper around it would move all of it.
            cors::around(request, |request| Box::pin(self.proxy(request, bodiless)))
        };
        let mut response = request_id::around(&self.telemetry, route, request, handle).await;
        self.tell(&mut response);
        response
    }

    async fn proxy(&self, request: Request, bodiless: bool) -> Response {
        let mut response = ingress::answer(&self.ingress, request).await;
        whole_head(&mut response, bodiless);
        response
    }

    fn tell(&self, response: &mut Response) {
        if let Some(told) = &self.strictly_over_tls {
            // Also over whatever a program in a sandbox says: the host is the server's, not the program's.
            response.headers_mut().insert(STRICT_TRANSPORT_SECURITY, told.clone());
        }
    }
}

impl Answers for Front {
    fn answer(&self, request: Request) -> BoxFuture<'_, Response> {
        let Some(route) = port_route_of(request.uri().path()) else {
            let answered = self.router.answer(request);
            let Some(_) = &self.strictly_over_tls else { return answered };
            return answered
                .map(|mut response| {
                    self.tell(&mut response);
                    response
                })
                .boxed();
        };
        self.pass(route, request).boxed()
    }
}
