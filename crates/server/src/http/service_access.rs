//! Being let into a service: something that opens it for a few minutes, and the tunnel to its port.

use axum::{
    Json,
    body::Body,
    extract::{OriginalUri, Path, Request, State},
    response::{IntoResponse, Response},
};
use http::{Extensions, HeaderMap, HeaderValue, StatusCode, Uri, header};
use sandglass_api::lifecycle::{Endpoint, ServiceAccess, ServiceAccessRequest, ServiceCredential};
use sandglass_sandbox::{Timestamp, lifecycle::state::State as Lifecycle};
use tracing::info;

use super::{
    App, engine_errors,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    parse::RawBody,
    present_workspace, sandboxes,
    services::Served,
};
use crate::{
    ingress::{AGENT_PORT, EndpointQuery, Observed, Target, Tunnelled, answer_endpoint, invite},
    tenants::Principal,
    workspace::{BRIDGE, NotCertified, ServiceView},
};

/// How long a route through a gateway is open, in seconds: the browser goes on with it, so it is as long as a visit.
const ROUTE_LASTS: u64 = 12 * 3600;
/// Kinds of services, as views name them.
const SSH: &str = "ssh";
const TERMINAL: &str = "terminal";

/// `POST /sandboxes/{id}/services/{name}/access`
pub async fn open(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    extensions: Extensions,
    body: RawBody,
) -> ApiResult<Response> {
    let asked = asked(&body)?;
    let served = Served::find(&app, &principal, &id)?;
    let view = reachable(&served, &name)?;
    let (id, target) = served_at(&app, &served)?;
    let scheme = Observed::of(&headers, &extensions).scheme;
    let from = Visitor { app: &app, uri: &uri, headers: &headers, scheme };
    let access = match (view.kind, view.port) {
        (SSH, Some(_)) => by_certificate(&served, &view, &from, &id, asked.public_key.as_deref())?,
        _ if asked.public_key.is_some() => {
            return Err(ApiError::invalid_parameter("publicKey is for ssh"));
        }
        (TERMINAL, _) => from.by_link(&id, &target, AGENT_PORT)?,
        (_, Some(port)) => match from.by_gateway(&id, &target, port)? {
            Some(access) => access,
            None => from.by_link(&id, &target, port)?,
        },
        (_, None) => return Err(no_port(&view)),
    };
    app.used(&headers, &id);
    info!(sandbox = id, service = view.name, "access to a service was given");
    let told = [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    Ok((told, Json(access)).into_response())
}

/// `GET /sandboxes/{id}/services/{name}/tunnel`
pub async fn tunnel(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
    request: Request,
) -> ApiResult<Response> {
    let served = Served::find(&app, &principal, &id)?;
    let view = served.one(&name)?;
    if view.port.is_none() {
        return Err(no_port(&view));
    }
    running_or_asleep(&served)?;
    let (id, target) = served_at(&app, &served)?;
    let to = Tunnelled { sandbox: &id, service: &view.name };
    let answer = app.ingress.tunnel(to, &target, request).await.map_err(engine_errors::of_refusal)?;
    match answer.status() {
        StatusCode::SWITCHING_PROTOCOLS => Ok(answer.map(Body::new)),
        StatusCode::BAD_GATEWAY => {
            let message = format!("nothing accepts connections on the port of {} yet or any more", view.name);
            Err(ApiError::new(Code::BackendConnectionFailed, message))
        }
        StatusCode::SERVICE_UNAVAILABLE => {
            Err(ApiError::new(Code::Unavailable, "too many tunnels lead into the sandbox; close some"))
        }
        StatusCode::BAD_REQUEST => {
            Err(ApiError::new(Code::BadRequest, "the request is no WebSocket handshake of version 13"))
        }
        // An agent of an earlier version, or one that does not know the service yet.
        _ => Err(ApiError::new(
            Code::BackendResponseFailed,
            "the sandbox's agent opens no tunnel to the service",
        )),
    }
}

fn asked(body: &RawBody) -> ApiResult<ServiceAccessRequest> {
    let Some(value) = body.optional()? else { return Ok(ServiceAccessRequest::default()) };
    let mut findings = Findings::new("body");
    let asked = findings.object(&value).map(|object| {
        let public_key = findings.optional(object, "publicKey", Findings::string);
        ServiceAccessRequest { public_key }
    });
    findings.finish(asked)
}

/// A service that somebody may be let into.
fn reachable(served: &Served<'_>, name: &str) -> ApiResult<ServiceView> {
    let view = served.one(name)?;
    if view.kind == BRIDGE {
        return Err(ApiError::invalid_parameter("nobody is let into the channel to the agent"));
    }
    let state = served.entry.status().map(|status| status.state);
    if state != Some(Lifecycle::Running) {
        return Err(not_running(state));
    }
    if matches!(view.state.as_str(), "Disabled" | "Failed" | "Stopped") {
        let why = view.last_error.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        let message = format!("the service {name} is {}{why}", view.state);
        return Err(ApiError::new(Code::InvalidState, message));
    }
    Ok(view)
}

/// A tunnel may wake its sandbox, as a request to a port does.
fn running_or_asleep(served: &Served<'_>) -> ApiResult<()> {
    let state = served.entry.status().map(|status| status.state);
    match state {
        Some(Lifecycle::Running) => Ok(()),
        Some(Lifecycle::Paused | Lifecycle::Pausing | Lifecycle::Resuming) if served.entry.wakes() => Ok(()),
        state => Err(not_running(state)),
    }
}

fn not_running(state: Option<Lifecycle>) -> ApiError {
    let word = state.map_or("unknown", Lifecycle::word);
    ApiError::new(Code::InvalidState, format!("the sandbox is not running (its state is {word})"))
}

fn no_port(view: &ServiceView) -> ApiError {
    ApiError::invalid_parameter(format!("the service {} has no port", view.name))
}

fn served_at(app: &App, served: &Served<'_>) -> ApiResult<(String, Target)> {
    let target = app.target(&served.entry).ok_or_else(ApiError::sandbox_not_found)?;
    Ok((served.entry.id.to_string(), target))
}

/// From where it is asked.
struct Visitor<'a> {
    app: &'a App,
    uri: &'a Uri,
    headers: &'a HeaderMap,
    scheme: &'static str,
}

impl Visitor<'_> {
    /// The address of a port for clients; without the headers that open it for good.
    fn endpoint(&self, id: &str, target: &Target, asked: EndpointQuery) -> ApiResult<String> {
        let public_host = self.app.public_host();
        let vantage = sandboxes::vantage(self.app, self.uri, self.headers, &public_host)?;
        let answer = answer_endpoint(asked, vantage, id, target).map_err(engine_errors::of_refusal)?;
        Ok(answer.endpoint)
    }

    fn proxied(&self, id: &str, target: &Target, port: u16) -> ApiResult<String> {
        self.endpoint(id, target, EndpointQuery { port: port.into(), use_server_proxy: true, expires: None })
    }

    /// Through the server, with a link that becomes a cookie.
    fn by_link(&self, id: &str, target: &Target, port: u16) -> ApiResult<ServiceAccess> {
        let proxied = self.proxied(id, target, port)?;
        let now = u64::try_from(self.app.engine.clock().now().as_millis() / 1000).unwrap_or(0);
        let invitation = invite(target, id, port, now).ok_or_else(|| {
            let message = "the sandbox has no access token of its own, so no link to it can be signed";
            ApiError::new(Code::InvalidState, message)
        })?;
        let path = invitation.path_and_query.split('?').next().unwrap_or_default();
        let url = format!("{}://{proxied}{}", self.scheme, invitation.path_and_query);
        Ok(of_url(format!("{proxied}{path}"), url, invitation.expires))
    }

    /// By a signed route that is all in the address, where there is a gateway that reads such.
    fn by_gateway(&self, id: &str, target: &Target, port: u16) -> ApiResult<Option<ServiceAccess>> {
        if !self.app.minting.as_deref().is_some_and(|minting| minting.signs_addresses()) {
            return Ok(None);
        }
        let now = u64::try_from(self.app.engine.clock().now().as_millis() / 1000).unwrap_or(0);
        let expires = now.saturating_add(ROUTE_LASTS);
        let asked =
            EndpointQuery { port: port.into(), use_server_proxy: false, expires: Some(expires.into()) };
        let endpoint = format!("{}/", self.endpoint(id, target, asked)?);
        let url = format!("{}://{endpoint}", self.scheme);
        Ok(Some(of_url(endpoint, url, expires)))
    }
}

fn of_url(endpoint: String, url: String, expires: u64) -> ServiceAccess {
    let millis = i64::try_from(expires.saturating_mul(1000)).unwrap_or(i64::MAX);
    ServiceAccess {
        endpoint: Endpoint { endpoint, headers: Default::default() },
        credential: ServiceCredential::Url { url },
        expires_at: Timestamp::clamped(millis).into(),
    }
}

fn by_certificate(
    served: &Served<'_>,
    view: &ServiceView,
    from: &Visitor<'_>,
    id: &str,
    public_key: Option<&str>,
) -> ApiResult<ServiceAccess> {
    let public_key = public_key.ok_or_else(|| {
        ApiError::invalid_parameter("publicKey is needed: the key to be certified, as OpenSSH writes it")
    })?;
    let certificate = served.workspaces.certify(served.entry.id, public_key).map_err(|why| match why {
        NotCertified::Key => ApiError::invalid_parameter(why.to_string()),
        NotCertified::Internal(message) => {
            tracing::error!(sandbox = id, error = message, "a key cannot be certified");
            ApiError::internal()
        }
    })?;
    let public_host = from.app.public_host();
    let vantage = sandboxes::vantage(from.app, from.uri, from.headers, &public_host)?;
    let endpoint = format!("{}/sandboxes/{id}/services/{}/tunnel", vantage.base(), view.name);
    Ok(ServiceAccess {
        endpoint: Endpoint { endpoint, headers: Default::default() },
        credential: ServiceCredential::SshCertificate {
            certificate: certificate.certificate,
            host_key: view.host_key.as_ref().map(present_workspace::host_key),
        },
        expires_at: certificate.expires_at.into(),
    })
}
