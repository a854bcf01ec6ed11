//! What can go wrong between this process and the engine, and what it means to the caller.
//!
//! Invariant: no message carries a request's headers or body, because both may hold secrets.

use std::error::Error as _;

use bollard::errors::Error;
use sandglass_sandbox::ports::{RuntimeErrorKind, runtime::RuntimeError};

/// One failed call of the engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// The engine answered, and refused.
    #[error("{message}")]
    Refused { status: u16, message: String },
    /// It told of a failure in the middle of a stream.
    #[error("{0}")]
    Midway(String),
    #[error("the Docker engine cannot be reached: {0}")]
    Unreachable(String),
    #[error("the Docker engine did not answer in time")]
    TimedOut,
    #[error("the Docker engine's answer is not understood: {0}")]
    Unreadable(String),
}

impl Failure {
    pub(super) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Midway(_) | Self::Unreachable(_) | Self::TimedOut | Self::Unreadable(_) => None,
        }
    }

    pub(super) fn is_absent(&self) -> bool {
        self.status() == Some(404)
    }

    /// Whether nothing is known about what the engine did with the call.
    pub(super) fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::TimedOut)
            || matches!(self, Self::Refused { status: 503, .. })
    }

    /// The failure as the caller's user should read it. What the engine could not be asked is always phase `engine`.
    pub(super) fn during(&self, phase: &str) -> RuntimeError {
        let message = self.to_string();
        match self {
            Self::Unreachable(_) | Self::TimedOut | Self::Refused { status: 503, .. } => {
                RuntimeError::new(RuntimeErrorKind::Unavailable, "engine", message)
            }
            _ if is_full(&message) => RuntimeError::new(RuntimeErrorKind::Exhausted, phase, message),
            Self::Refused { status, .. } => {
                let kind = match status {
                    400 => RuntimeErrorKind::Invalid,
                    404 => RuntimeErrorKind::NotFound,
                    409 => RuntimeErrorKind::Exists,
                    _ => RuntimeErrorKind::Failed,
                };
                RuntimeError::new(kind, phase, message)
            }
            Self::Midway(_) | Self::Unreadable(_) => {
                RuntimeError::new(RuntimeErrorKind::Failed, phase, message)
            }
        }
    }
}

fn is_full(message: &str) -> bool {
    message.contains("no space left on device") || message.contains("disk quota exceeded")
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::DockerResponseServerError { status_code, message } => {
                // Some messages end in a line feed or carry the whole help text of runc after it.
                Self::Refused { status: status_code, message: message.trim().to_owned() }
            }
            Error::DockerStreamError { error } => Self::Midway(error.trim().to_owned()),
            Error::DockerContainerWaitError { error, .. } => Self::Midway(error),
            Error::RequestTimeoutError => Self::TimedOut,
            Error::JsonDataError { message, .. } => Self::Unreadable(message),
            Error::JsonSerdeError { err } => Self::Unreadable(err.to_string()),
            Error::APIVersionParseError {} => Self::Unreadable("it names no API version".into()),
            Error::SocketNotFoundError(path) => Self::Unreachable(format!("there is no socket {path}")),
            other => Self::Unreachable(innermost(&other)),
        }
    }
}

/// The innermost cause: it says what happened ("connection refused"), the outer ones only that something did.
fn innermost(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    text
}

/// Whether a create or start failed because somebody took a host port first, so that other ports may do.
pub(super) fn is_port_clash(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    let taken = ["port is already allocated", "ports are not available", "address already in use"];
    taken.iter().any(|text| message.contains(text))
        || (message.contains("bind:")
            && (message.contains("forbidden") || message.contains("permission denied")))
}

/// A failure on this side, not the engine's.
pub(super) fn failed(phase: &str, message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, phase, message)
}

/// A request that can never succeed as asked.
pub(super) fn invalid(phase: &str, message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Invalid, phase, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_answers_become_kinds() {
        use RuntimeErrorKind as Kind;
        let table = [
            (404, "No such image: nope:latest", Kind::NotFound, "create"),
            (
                409,
                "Conflict. The container name \"/sandbox-x\" is already in use by container \"abc\". You have to remove (or rename) that container to be able to reuse that name.",
                Kind::Exists,
                "create",
            ),
            (
                400,
                "invalid mount config for type \"bind\": bind source path does not exist: /nope",
                Kind::Invalid,
                "create",
            ),
            (
                500,
                "driver failed programming external connectivity on endpoint x: Bind for 0.0.0.0:40000 failed: port is already allocated",
                Kind::Failed,
                "create",
            ),
            (
                500,
                "failed to create overlay: mkdir /var/lib/docker: no space left on device",
                Kind::Exhausted,
                "create",
            ),
            (503, "the daemon is shutting down", Kind::Unavailable, "engine"),
        ];
        for (status_code, message, kind, phase) in table {
            let failure = Failure::from(Error::DockerResponseServerError {
                status_code,
                message: format!("{message}\n"),
            });
            let error = failure.during("create");
            assert_eq!((error.kind, error.phase.as_str()), (kind, phase), "{message}");
            assert_eq!(error.message, message);
        }
    }

    #[test]
    fn an_engine_that_is_not_there_is_unavailable_whatever_was_asked() {
        for error in [
            Error::SocketNotFoundError("/run/docker.sock".into()),
            Error::RequestTimeoutError,
            Error::IOError { err: std::io::ErrorKind::ConnectionRefused.into() },
        ] {
            let error = Failure::from(error).during("create");
            assert_eq!((error.kind, error.phase.as_str()), (RuntimeErrorKind::Unavailable, "engine"));
            assert!(error.retryable());
        }
    }

    #[test]
    fn clashes_of_ports_are_recognised() {
        for text in [
            "Bind for 0.0.0.0:40000 failed: port is already allocated",
            "Ports are not available: exposing port TCP 0.0.0.0:40000",
            "listen tcp4 0.0.0.0:40000: bind: address already in use",
            "listen tcp4 0.0.0.0:80: bind: permission denied",
            "bind: An attempt was made to access a socket in a way forbidden by its access permissions",
        ] {
            assert!(is_port_clash(text), "{text}");
        }
        for text in ["permission denied", "no such image", "bind source path does not exist: /x"] {
            assert!(!is_port_clash(text), "{text}");
        }
    }
}
