//! What image builds, their images and prebuilds answer when something is wrong.

use http::{HeaderValue, header};
use sandglass_repository::{Code as SpecCode, SpecError};

use super::{
    App,
    error::{ApiError, ApiResult, Code},
};
use crate::builds::{BuildError, Builds, LogError, Refusal, ResolveError, ResolveErrorKind};

/// Seconds after which a full queue may have room.
const QUEUE_RETRY: u32 = 15;

pub(super) fn unavailable(why: impl Into<String>) -> ApiError {
    ApiError::new(Code::ImageBuildUnavailable, why)
}

/// The builds, where there are any.
pub(super) fn builds(app: &App) -> ApiResult<Builds> {
    app.builds.clone().ok_or_else(|| unavailable("this server cannot build images; its log says why"))
}

pub(super) fn of_build(error: BuildError, builds: &Builds) -> ApiError {
    match error {
        BuildError::NotFound => ApiError::new(Code::ImageBuildNotFound, "image build not found"),
        BuildError::ImageNotFound => ApiError::new(Code::ImageNotFound, "image not found"),
        BuildError::PrebuildNotFound => ApiError::new(Code::PrebuildNotFound, "prebuild not found"),
        BuildError::Terminal(_) => ApiError::new(Code::ImageBuildTerminal, error.to_string()),
        BuildError::InUse(_) => ApiError::new(Code::ImageInUse, error.to_string()),
        BuildError::Unusable(_) => ApiError::new(Code::ImageUnusable, error.to_string()),
        BuildError::Refused(Refusal::NotCached) => ApiError::new(Code::ImageNotCached, error.to_string()),
        BuildError::Refused(Refusal::QueueFull(_)) => {
            let full = ApiError::new(Code::QuotaExceeded, error.to_string());
            full.with_header(header::RETRY_AFTER, HeaderValue::from(QUEUE_RETRY))
        }
        BuildError::Refused(Refusal::FailedRecently { until, .. }) => {
            let left = builds.driver().now().until(until).as_secs().max(1);
            ApiError::new(Code::ImageBuildFailedRecently, error.to_string())
                .with_header(header::RETRY_AFTER, HeaderValue::from(left))
        }
        BuildError::Busy | BuildError::Stopping => unavailable(error.to_string()),
        BuildError::Store(_) | BuildError::Illegal(_) => {
            tracing::warn!(%error, "a request about image builds failed");
            unavailable("the server's own records cannot be used at the moment; try again")
        }
    }
}

pub(super) fn of_location(error: ResolveError) -> ApiError {
    let code = match error.kind {
        ResolveErrorKind::Unreachable => Code::RepositoryUnreachable,
        ResolveErrorKind::AuthFailed => Code::RepositoryAuthFailed,
        ResolveErrorKind::RefNotFound => Code::RepositoryRefNotFound,
        ResolveErrorKind::InvalidRecipe => Code::RepositoryInvalidRecipe,
    };
    ApiError::new(code, error.message)
}

pub(super) fn of_specification(error: SpecError) -> ApiError {
    let code = match error.code {
        SpecCode::InvalidUrl => Code::RepositoryInvalidUrl,
        SpecCode::InvalidRef => Code::RepositoryInvalidRef,
        SpecCode::InvalidPath => Code::RepositoryInvalidPath,
        SpecCode::HostNotAllowed => Code::RepositoryHostNotAllowed,
        SpecCode::InvalidParameter => Code::InvalidParameter,
    };
    ApiError::new(code, error.to_string())
}

pub(super) fn of_log(error: LogError) -> ApiError {
    match error {
        LogError::NotFound => ApiError::new(Code::ImageBuildNotFound, "the image build has no log"),
        LogError::Busy => {
            let busy = ApiError::new(Code::QuotaExceeded, error.to_string());
            busy.with_header(header::RETRY_AFTER, HeaderValue::from(QUEUE_RETRY))
        }
        LogError::Io(error) => {
            tracing::warn!(%error, "a build log cannot be read");
            unavailable("the log cannot be read at the moment; try again")
        }
    }
}
