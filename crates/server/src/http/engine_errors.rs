//! What the engine refuses or cannot do, as clients see it.

use sandglass_sandbox::{
    lifecycle::{intent::StoredError, request::Refused},
    ports::{RuntimeErrorKind as Kind, StoreError, runtime::RuntimeError},
};
use tracing::error;

use super::error::{ApiError, Code};
use crate::engine::{commit::EngineError, pools::PoolError, snapshots::SnapshotError};

impl From<EngineError> for ApiError {
    fn from(e: EngineError) -> Self {
        match &e {
            EngineError::NotFound(_) | EngineError::Refused(Refused::Gone) => Self::sandbox_not_found(),
            EngineError::Refused(Refused::NotRunning(_)) => Self::new(Code::NotRunning, e.to_string()),
            EngineError::Refused(Refused::NotPaused(_)) => Self::new(Code::NotPaused, e.to_string()),
            EngineError::ManualCleanup => Self::new(Code::NoExpiration, e.to_string()),
            EngineError::NotInFuture => Self::new(Code::InvalidExpiration, e.to_string()),
            EngineError::CreateFailed(StoredError { kind, phase, .. }) => {
                create_failed(*kind, phase, e.to_string())
            }
            EngineError::OperationFailed { operation, error } => {
                Self::new(operation_code(operation, error.kind), e.to_string())
            }
            EngineError::KeyReused => Self::new(Code::IdempotencyKeyReused, e.to_string()),
            EngineError::KeySpent => Self::new(Code::IdempotencyKeySpent, e.to_string()),
            EngineError::TooMany(_) => Self::exhausted(e.to_string(), 5),
            EngineError::NoRepositories => Self::new(Code::ApiNotSupported, e.to_string()),
            EngineError::NotCached => Self::new(Code::ImageNotCached, e.to_string()),
            EngineError::CircuitOpen(after) => {
                let seconds = u32::try_from(after.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1);
                Self::new(Code::CircuitOpen, e.to_string())
                    .with_header(http::header::RETRY_AFTER, http::HeaderValue::from(seconds))
            }
            EngineError::Contended => Self::new(Code::Unavailable, e.to_string()),
            EngineError::SnapshotNotReady => Self::new(Code::SnapshotNotReady, e.to_string()),
            EngineError::Pool(why) => of_pool(why),
            EngineError::Snapshot(why) => of_snapshot(why),
            EngineError::Store(source) => store_failed(source),
        }
    }
}

impl From<SnapshotError> for ApiError {
    fn from(why: SnapshotError) -> Self {
        of_snapshot(&why)
    }
}

impl From<PoolError> for ApiError {
    fn from(why: PoolError) -> Self {
        of_pool(&why)
    }
}

fn of_pool(why: &PoolError) -> ApiError {
    match why {
        PoolError::NotFound(_) => ApiError::new(Code::PoolNotFound, why.to_string()),
        PoolError::Exists(_) => ApiError::new(Code::PoolAlreadyExists, why.to_string()),
        PoolError::Store(source) => store_failed(source),
    }
}

fn store_failed(source: &StoreError) -> ApiError {
    error!(error = %source, "the store failed");
    ApiError::new(
        Code::Unavailable,
        "the server's store cannot be used at the moment; look before you try again",
    )
}

fn of_snapshot(why: &SnapshotError) -> ApiError {
    let code = match why {
        SnapshotError::NotFound => Code::SnapshotNotFound,
        SnapshotError::SourceState(_) => Code::SnapshotInvalidSourceState,
        SnapshotError::NotImplemented(_) => Code::SnapshotNotImplemented,
        SnapshotError::Busy => return ApiError::exhausted(why.to_string(), 10),
        SnapshotError::State(_) | SnapshotError::Changed => Code::SnapshotInvalidState,
        SnapshotError::InUse(_) => Code::SnapshotDeleteConflict,
        SnapshotError::NotReady(_) => Code::SnapshotNotReady,
        SnapshotError::RestoreConfig(_) => Code::SnapshotInvalidRestoreConfig,
        SnapshotError::RemoveFailed(_) => Code::SnapshotRemoveFailed,
        SnapshotError::Unreachable(_) => Code::SnapshotRemoveUnavailable,
        SnapshotError::SourceUnreachable(_) => Code::QueryUnavailable,
        SnapshotError::Store(source) => return store_failed(source),
    };
    ApiError::new(code, why.to_string())
}

fn operation_code(operation: &str, kind: Kind) -> Code {
    match operation {
        "pause" => Code::PauseFailed,
        "resume" => Code::ResumeFailed,
        "remove" => Code::DeleteFailed,
        // Nothing was accepted, and nothing was begun.
        "create" if kind == Kind::Unavailable => Code::Unavailable,
        _ if kind == Kind::Unavailable => Code::QueryUnavailable,
        _ => Code::SandboxInternal,
    }
}

/// What a failed create answers, by the kind of the failure and the phase in which it happened. The first line that fits
/// counts; `None` and an empty list fit everything.
const CREATE: &[(Option<Kind>, &[&str], Code)] = &[
    (Some(Kind::Invalid), &["entrypoint"], Code::InvalidEntrypoint),
    (Some(Kind::Invalid), &["volume-driver"], Code::VolumeSubPathUnsupported),
    (Some(Kind::Invalid), &["volume-host"], Code::VolumeHostPathNotAllowed),
    (None, &["volume-host"], Code::VolumeHostPathCreateFailed),
    (Some(Kind::Invalid), &["volume-sub-path"], Code::VolumeInvalidSubPath),
    (None, &["volume-missing"], Code::VolumeNotFound),
    (None, &["volume-inspect"], Code::VolumeInspectFailed),
    (None, &["ossfs-root"], Code::VolumeOssfsMountRoot),
    (None, &["ossfs"], Code::VolumeOssfsMountFailed),
    // The request itself is at fault, wherever that was found out.
    (Some(Kind::Invalid), &[], Code::InvalidParameter),
    (Some(Kind::ImagePull), &[], Code::ImagePullFailed),
    // Ports are a setting of the operator's, not a load that will pass.
    (Some(Kind::Exhausted), &["ports"], Code::StartFailed),
    (Some(Kind::Exhausted), &[], Code::Exhausted),
    (None, &["image"], Code::ImagePullFailed),
    (None, &["agent-copy"], Code::ExecdDistributionFailed),
    (None, &["agent"], Code::ExecdStartFailed),
    (Some(Kind::Unavailable), &[], Code::StartUnavailable),
    // `create`, `start`, `sidecar`, `network`, `cgroup`, …
    (None, &[], Code::StartFailed),
];

fn create_code(kind: Kind, phase: &str) -> Code {
    let fits = |(wanted, phases, _): &&(Option<Kind>, &[&str], Code)| {
        wanted.is_none_or(|wanted| wanted == kind) && (phases.is_empty() || phases.contains(&phase))
    };
    CREATE.iter().find(fits).map_or(Code::StartFailed, |(_, _, code)| *code)
}

fn create_failed(kind: Kind, phase: &str, message: String) -> ApiError {
    match create_code(kind, phase) {
        Code::Exhausted => ApiError::exhausted(message, 10),
        code => ApiError::new(code, message),
    }
}

/// What the runtime finds wrong with a create before it is accepted.
pub(super) fn of_admission(refused: &RuntimeError) -> ApiError {
    create_failed(refused.kind, &refused.phase, refused.message.clone())
}

/// A read that the runtime could not answer.
pub(super) fn of_query(what: &str, failed: &RuntimeError) -> ApiError {
    let code = if failed.kind == Kind::Unavailable { Code::QueryUnavailable } else { Code::QueryFailed };
    ApiError::new(code, format!("{what}: {}", failed.message))
}

/// What the ingress refuses, for look-ups that answer in the API's own shape.
pub(super) fn of_refusal(refusal: crate::ingress::Refusal) -> ApiError {
    let mut error = ApiError::new(Code::Internal, refusal.to_string());
    error.status = refusal.status();
    error.code = refusal.code();
    error
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_table_of_failed_creates() {
        for (kind, phase, status, code) in [
            (Kind::ImagePull, "image", 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
            (Kind::NotFound, "image", 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
            (Kind::Failed, "image", 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
            (Kind::Invalid, "image", 400, "SANDBOX::INVALID_PARAMETER"),
            (Kind::Exhausted, "image", 429, "SANDBOX::RESOURCES_EXHAUSTED"),
            (Kind::Invalid, "volume-missing", 400, "VOLUME::PVC_NOT_FOUND"),
            (Kind::NotFound, "volume-missing", 400, "VOLUME::PVC_NOT_FOUND"),
            (Kind::Invalid, "volume-host", 400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            (Kind::Failed, "volume-host", 500, "VOLUME::HOST_PATH_CREATE_FAILED"),
            (Kind::Invalid, "volume-sub-path", 400, "VOLUME::INVALID_SUB_PATH"),
            (Kind::Failed, "volume-inspect", 500, "VOLUME::PVC_INSPECT_FAILED"),
            (Kind::Invalid, "volume-driver", 400, "VOLUME::PVC_SUBPATH_UNSUPPORTED_DRIVER"),
            (Kind::Failed, "ossfs-root", 500, "VOLUME::INVALID_OSSFS_MOUNT_ROOT"),
            (Kind::Failed, "ossfs", 500, "VOLUME::OSSFS_MOUNT_FAILED"),
            (Kind::Invalid, "network", 400, "SANDBOX::INVALID_PARAMETER"),
            (Kind::Failed, "network", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Exhausted, "network", 429, "SANDBOX::RESOURCES_EXHAUSTED"),
            (Kind::Exhausted, "ports", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Invalid, "entrypoint", 400, "DOCKER::INVALID_ENTRYPOINT"),
            (Kind::Failed, "entrypoint", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Failed, "agent", 503, "DOCKER::SANDBOX_EXECD_START_FAILED"),
            (Kind::Unavailable, "agent", 503, "DOCKER::SANDBOX_EXECD_START_FAILED"),
            (Kind::Failed, "agent-copy", 500, "DOCKER::SANDBOX_EXECD_DISTRIBUTION_FAILED"),
            (Kind::Failed, "create", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Exists, "create", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Invalid, "create", 400, "SANDBOX::INVALID_PARAMETER"),
            (Kind::Failed, "start", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Failed, "sidecar", 500, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Unavailable, "engine", 503, "DOCKER::SANDBOX_START_FAILED"),
            (Kind::Failed, "rootfs", 500, "DOCKER::SANDBOX_START_FAILED"),
        ] {
            let seen = of_admission(&RuntimeError::new(kind, phase, "why"));
            assert_eq!((seen.status.as_u16(), seen.code), (status, code), "{kind:?} {phase}");
        }
    }

    #[test]
    fn the_table_of_failed_operations() {
        for (operation, kind, status, code) in [
            ("pause", Kind::Failed, 500, "DOCKER::SANDBOX_PAUSE_FAILED"),
            ("resume", Kind::Unavailable, 500, "DOCKER::SANDBOX_RESUME_FAILED"),
            ("remove", Kind::Unavailable, 500, "DOCKER::SANDBOX_DELETE_FAILED"),
            ("update", Kind::Unavailable, 503, "DOCKER::SANDBOX_QUERY_FAILED"),
            ("update", Kind::Failed, 500, "SANDBOX::INTERNAL_ERROR"),
        ] {
            let error = Arc::new(RuntimeError::new(kind, "engine", "why"));
            let seen = ApiError::from(EngineError::OperationFailed { operation, error });
            assert_eq!((seen.status.as_u16(), seen.code), (status, code), "{operation} {kind:?}");
        }
    }

    #[test]
    fn the_table_of_snapshot_errors() {
        use sandglass_sandbox::{lifecycle::state::State, snapshot::SnapshotState};
        let engine = || Arc::new(RuntimeError::new(Kind::Unavailable, "engine", "gone"));
        for (why, status, code) in [
            (SnapshotError::NotFound, 404, "SNAPSHOT::NOT_FOUND"),
            (SnapshotError::SourceState(State::Paused), 409, "SNAPSHOT::INVALID_SOURCE_STATE"),
            (SnapshotError::NotImplemented("x"), 501, "SNAPSHOT::NOT_IMPLEMENTED"),
            (SnapshotError::Busy, 429, "SANDBOX::RESOURCES_EXHAUSTED"),
            (SnapshotError::State(SnapshotState::Creating), 409, "SNAPSHOT::INVALID_STATE"),
            (SnapshotError::Changed, 409, "SNAPSHOT::INVALID_STATE"),
            (SnapshotError::InUse("x".into()), 409, "SNAPSHOT::DELETE_CONFLICT"),
            (SnapshotError::NotReady(SnapshotState::Failed), 409, "SNAPSHOT::NOT_READY"),
            (SnapshotError::RestoreConfig("x".into()), 409, "SNAPSHOT::INVALID_RESTORE_CONFIG"),
            (SnapshotError::RemoveFailed(engine()), 500, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED"),
            (SnapshotError::Unreachable(engine()), 503, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED"),
            (SnapshotError::SourceUnreachable(engine()), 503, "DOCKER::SANDBOX_QUERY_FAILED"),
        ] {
            let seen = ApiError::from(why.clone());
            assert_eq!((seen.status.as_u16(), seen.code), (status, code), "{why:?}");
        }
    }

    #[test]
    fn reads_tell_an_absent_engine_from_a_failed_one() {
        let of = |kind| of_query("the logs cannot be read", &RuntimeError::new(kind, "engine", "gone"));
        assert_eq!(of(Kind::Unavailable).status, 503);
        assert_eq!(of(Kind::Failed).status, 500);
        assert_eq!(of(Kind::Failed).code, of(Kind::Unavailable).code);
        assert_eq!(of(Kind::Failed).message, "the logs cannot be read: gone");
    }
}
