//! The managed services of sandboxes that are made from repositories.

use std::time::Duration;

use axum::{
    Json,
    extract::{OriginalUri, Path, State},
};
use http::{HeaderMap, StatusCode, Uri};
use sandglass_api::lifecycle::{SandboxService, SandboxServices};
use sandglass_bridge::wire::Command;
use sandglass_sandbox::{lifecycle::state::State as Lifecycle, source::RepositorySource};

use super::{
    App,
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    parse::RawBody,
    present, sandboxes,
};
use crate::{
    engine::index::Entry,
    ingress::EndpointQuery,
    tenants::Principal,
    workspace::{BRIDGE, NotCommanded, ServiceView, Workspaces},
};

/// How long an agent may take to carry a command out.
const PATIENCE: Duration = Duration::from_secs(20);

/// A sandbox with services.
pub(super) struct Served<'a> {
    pub(super) entry: Entry,
    pub(super) workspaces: &'a Workspaces,
}

impl<'a> Served<'a> {
    /// # Errors
    /// 404 for a sandbox that there is not, or that has no services.
    pub(super) fn find(app: &'a App, principal: &Principal, id: &str) -> ApiResult<Self> {
        let entry = app.find(principal, id)?;
        match app.workspaces() {
            Some(workspaces) if entry.spec().is_some_and(|spec| spec.source.is_some()) => {
                Ok(Self { entry, workspaces })
            }
            _ => Err(not_found()),
        }
    }

    fn source(&self) -> ApiResult<&RepositorySource> {
        self.entry.spec().and_then(|spec| spec.source.as_deref()).ok_or_else(not_found)
    }

    fn all(&self) -> ApiResult<Vec<ServiceView>> {
        Ok(self.workspaces.services(self.entry.id, self.source()?))
    }

    /// # Errors
    /// 404 for a service that there is not.
    pub(super) fn one(&self, name: &str) -> ApiResult<ServiceView> {
        self.all()?.into_iter().find(|service| service.name == name).ok_or_else(not_found)
    }

    /// Tells the agent, which has to be there to hear it.
    async fn command(&self, name: &str, command: Command) -> ApiResult<()> {
        if self.one(name)?.kind == BRIDGE {
            return Err(ApiError::invalid_parameter(
                "the channel to the agent cannot be switched or restarted",
            ));
        }
        let state = self.entry.status().map(|status| status.state);
        if state != Some(Lifecycle::Running) && state != Some(Lifecycle::Pending) {
            let word = state.map_or("unknown", Lifecycle::word);
            let message = format!("the sandbox is not running (its state is {word})");
            return Err(ApiError::new(Code::InvalidState, message));
        }
        self.workspaces.command(self.entry.id, &command, PATIENCE).await.map(drop).map_err(|e| refused(&e))
    }
}

/// From where services are looked at, which decides how they are reached.
struct Viewer<'a> {
    app: &'a App,
    uri: &'a Uri,
    headers: &'a HeaderMap,
}

impl Viewer<'_> {
    /// Adds what `GET …/endpoints/{port}` answers without a query, where it answers.
    fn see(&self, entry: &Entry, service: SandboxService) -> SandboxService {
        let endpoint = service.port.and_then(|port| {
            let asked = EndpointQuery { port: port.into(), use_server_proxy: false, expires: None };
            sandboxes::endpoint_of(self.app, entry, asked, (self.uri, self.headers)).ok()
        });
        SandboxService { endpoint, ..service }
    }

    fn one(&self, served: &Served<'_>, name: &str) -> ApiResult<Json<SandboxService>> {
        Ok(Json(self.see(&served.entry, present::service(&served.one(name)?))))
    }
}

fn not_found() -> ApiError {
    ApiError::new(Code::ServiceNotFound, "the sandbox has no such service")
}

fn refused(why: &NotCommanded) -> ApiError {
    let code = match why {
        NotCommanded::NoAgent | NotCommanded::Failed { .. } => Code::InvalidState,
        NotCommanded::NotConnected | NotCommanded::Refused(_) => Code::Unavailable,
    };
    ApiError::new(code, why.to_string())
}

/// `GET /sandboxes/{id}/services`
pub async fn list(
    State(app): State<App>,
    principal: Principal,
    Path(id): Path<String>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> ApiResult<Json<SandboxServices>> {
    let entry = app.find(&principal, &id)?;
    let viewer = Viewer { app: &app, uri: &uri, headers: &headers };
    let services = app.show(&entry).services.unwrap_or_default();
    let items = services.into_iter().map(|service| viewer.see(&entry, service)).collect();
    Ok(Json(SandboxServices { items }))
}

/// `GET /sandboxes/{id}/services/{name}`
pub async fn get(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> ApiResult<Json<SandboxService>> {
    let served = Served::find(&app, &principal, &id)?;
    Viewer { app: &app, uri: &uri, headers: &headers }.one(&served, &name)
}

/// `PUT /sandboxes/{id}/services/{name}`
pub async fn switch(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    body: RawBody,
) -> ApiResult<Json<SandboxService>> {
    let value = body.required()?;
    let mut findings = Findings::new("body");
    let enabled =
        findings.object(&value).and_then(|object| findings.required(object, "enabled", Findings::boolean));
    let enabled = findings.finish(enabled)?;
    let served = Served::find(&app, &principal, &id)?;
    let command = if enabled {
        Command::ServiceStart { name: name.clone() }
    } else {
        Command::ServiceStop { name: name.clone() }
    };
    served.command(&name, command).await?;
    Viewer { app: &app, uri: &uri, headers: &headers }.one(&served, &name)
}

/// `POST /sandboxes/{id}/services/{name}/restart`
pub async fn restart(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
) -> ApiResult<StatusCode> {
    let served = Served::find(&app, &principal, &id)?;
    served.command(&name, Command::ServiceRestart { name: name.clone() }).await?;
    Ok(StatusCode::ACCEPTED)
}
