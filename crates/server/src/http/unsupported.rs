//! Templates, which no runtime on a single host has: the request is validated, then refused with the documented code.

use axum::extract::State;
use http::Uri;

use super::{
    App, decode,
    error::{ApiError, ApiResult, Code},
    filters,
    parse::{QueryString, RawBody},
};

fn lacking(app: &App, code: Code, what: &str) -> ApiError {
    ApiError::new(code, format!("{what} are not available on the {} runtime", app.engine.runtime().name()))
}

/// `GET /templates`
pub async fn list_templates(State(app): State<App>, uri: Uri) -> ApiResult<()> {
    filters::page(&QueryString::parse(uri.query()))?;
    Err(no_templates(State(app)).await)
}

/// Every template route of one template without a body.
pub async fn no_templates(State(app): State<App>) -> ApiError {
    lacking(&app, Code::TemplatesNotSupported, "templates")
}

/// `POST /templates`
pub async fn create_template(State(app): State<App>, body: RawBody) -> ApiResult<()> {
    decode::small::template(&body.required()?)?;
    Err(no_templates(State(app)).await)
}
