//! What the engine refuses or cannot do, as clients see it.

use sandglass_sandbox::{
    lifecycle::{intent::StoredError, request::Refused},
    ports::RuntimeErrorKind,
};
use tracing::error;

use super::error::{ApiError, Code};
use crate::engine::commit::EngineError;

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> Self {
        match &e {
            EngineError::NotFound(_) | EngineError::Refused(Refused::Gone) => Self::sandbox_not_found(),
            EngineError::Refused(Refused::NotRunning(_)) => Self::new(Code::NotRunning, e.to_string()),
            EngineError::Refused(Refused::NotPaused(_)) => Self::new(Code::NotPaused, e.to_string()),
            EngineError::ManualCleanup => Self::new(Code::NoExpiration, e.to_string()),
            EngineError::NotInFuture => Self::new(Code::InvalidExpiration, e.to_string()),
            EngineError::CreateFailed(why) => create_failed(why, e.to_string()),
            EngineError::OperationFailed { operation, .. } => {
                let code = match *operation {
                    "pause" => Code::PauseFailed,
                    "resume" => Code::ResumeFailed,
                    "remove" => Code::DeleteFailed,
                    _ => Code::SandboxInternal,
                };
                Self::new(code, e.to_string())
            }
            EngineError::KeyReused => Self::new(Code::IdempotencyKeyReused, e.to_string()),
            EngineError::KeySpent => Self::new(Code::IdempotencyKeySpent, e.to_string()),
            EngineError::TooMany(_) => Self::exhausted(e.to_string(), 5),
            EngineError::Contended => Self::new(Code::Unavailable, e.to_string()),
            EngineError::Store(source) => {
                error!(error = %source, "the store failed");
                Self::new(
                    Code::Unavailable,
                    "the server's store cannot be used at the moment; nothing was changed",
                )
            }
        }
    }
}

fn create_failed(why: &StoredError, message: String) -> ApiError {
    match (why.kind, why.phase.as_str()) {
        (RuntimeErrorKind::Exhausted, _) => ApiError::exhausted(message, 10),
        (RuntimeErrorKind::ImagePull, _) => ApiError::new(Code::ImagePullFailed, message),
        (RuntimeErrorKind::Invalid, "entrypoint") => ApiError::new(Code::InvalidEntrypoint, message),
        (RuntimeErrorKind::Invalid, _) => ApiError::invalid_parameter(message),
        _ => ApiError::new(Code::StartFailed, message),
    }
}

/// What the ingress refuses, for look-ups that answer in the API's own shape.
pub(super) fn of_refusal(refusal: crate::ingress::Refusal) -> ApiError {
    let mut error = ApiError::new(Code::Internal, refusal.to_string());
    error.status = refusal.status();
    error.code = refusal.code();
    error
}
