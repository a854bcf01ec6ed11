//! What the services and hooks of a sandbox wrote, as the server has it: also when its agent is silent or its box is gone.

use axum::{
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use http::{Uri, header};

use super::{
    App,
    error::{ApiError, ApiResult, Code},
    parse::QueryString,
};
use crate::tenants::Principal;

/// Lines that are asked for at once.
const MOST_LINES: usize = 100_000;
/// No service has a dot in its name.
const HOOKS: &str = "boot.";

/// `GET /sandboxes/{id}/services/{name}/logs`
pub async fn read(
    State(app): State<App>,
    principal: Principal,
    Path((id, name)): Path<(String, String)>,
    uri: Uri,
) -> ApiResult<Response> {
    let entry = app.find(&principal, &id)?;
    let source = entry.spec().and_then(|spec| spec.source.as_deref());
    let not_found = || ApiError::new(Code::ServiceNotFound, "the sandbox has no such service");
    let (Some(workspaces), Some(source)) = (app.workspaces(), source) else { return Err(not_found()) };
    let is_service = workspaces.services(entry.id, source).iter().any(|service| service.name == name);
    let source = match (is_service, name.starts_with(HOOKS)) {
        (true, _) => format!("service.{name}"),
        (false, true) => name,
        (false, false) => return Err(not_found()),
    };
    let query = QueryString::parse(uri.query());
    let number = |name: &str, most: u64| match query.last(name) {
        None => Ok(None),
        Some(text) => {
            text.parse::<u64>().ok().filter(|number| *number <= most).map(Some).ok_or_else(|| {
                ApiError::invalid_parameter(format!("{name} must be a number from 0 to {most}"))
            })
        }
    };
    let read = match number("tail", MOST_LINES as u64)? {
        Some(lines) => {
            let lines = usize::try_from(lines).unwrap_or(MOST_LINES);
            workspaces.output_tail(entry.id, &source, lines).await
        }
        None => workspaces.output(entry.id, &source, number("from", u64::MAX)?.unwrap_or(0)).await,
    };
    let output = match read {
        Ok(Some(output)) => output,
        // It may be about to write its first word.
        Ok(None) if is_service => Default::default(),
        Ok(None) => return Err(not_found()),
        Err(error) => {
            tracing::warn!(sandbox = %entry.id, %error, "the output of a service cannot be read");
            return Err(ApiError::new(Code::Unavailable, "the output cannot be read at the moment"));
        }
    };
    let headers = [
        (header::CONTENT_TYPE.as_str(), "text/plain; charset=utf-8".to_owned()),
        (header::CACHE_CONTROL.as_str(), "no-store".to_owned()),
        ("x-log-offset", output.offset.to_string()),
        ("x-log-next", output.next.to_string()),
    ];
    Ok((headers, output.text).into_response())
}
