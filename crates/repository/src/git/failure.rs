//! Why git failed, in the classes that callers decide by.

use std::fmt;

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureClass {
    /// No connection, an answer of the server's own failure, or no such repository for anyone who asks like this.
    Unreachable,
    AuthFailed,
    /// The server's certificate cannot be verified; asking again does not help.
    Untrusted,
    RefNotFound,
    Timeout,
    Cancelled,
    DiskFull,
    Other,
}

impl FailureClass {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::AuthFailed => "auth_failed",
            Self::Untrusted => "untrusted",
            Self::RefNotFound => "ref_not_found",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::DiskFull => "disk_full",
            Self::Other => "other",
        }
    }

    /// Whether the same call may succeed a moment later.
    pub fn is_transient(self) -> bool {
        match self {
            Self::Unreachable | Self::Timeout => true,
            Self::AuthFailed
            | Self::Untrusted
            | Self::RefNotFound
            | Self::Cancelled
            | Self::DiskFull
            | Self::Other => false,
        }
    }

    /// Reads what git wrote. It runs with untranslated messages.
    pub(crate) fn of_output(stderr: &str) -> Self {
        // The server speaks in lines that begin so; what it says does not decide.
        let said: String = stderr
            .lines()
            .filter(|line| !line.trim_start().starts_with("remote:"))
            .fold(String::new(), |text, line| text + line + "\n");
        MARKS
            .iter()
            .find(|(_, marks)| marks.iter().any(|mark| said.contains(mark)))
            .map_or(Self::Other, |(class, _)| *class)
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// In the order in which they decide: ssh reports a refused key and a lost connection in one breath.
const MARKS: &[(FailureClass, &[&str])] = &[
    (FailureClass::DiskFull, &["No space left on device", "Disk quota exceeded", "no space left on device"]),
    (
        FailureClass::AuthFailed,
        &[
            "Authentication failed",
            "could not read Username",
            "could not read Password",
            "terminal prompts disabled",
            "Permission denied (",
            "Host key verification failed",
            "returned error: 401",
            "returned error: 403",
            "HTTP Basic: Access denied",
            "Authorization error",
            "Authentication required",
            "Bad credentials",
            "Load key",
        ],
    ),
    (
        FailureClass::Untrusted,
        &[
            // As GnuTLS says it, then OpenSSL, for one's own file of authorities as well.
            "certificate verification failed",
            "certificate problem",
            "certificate subject name",
            "certificate verify failed",
            "certificate verify locations",
            "error setting certificate",
            "certificate has expired",
        ],
    ),
    (
        FailureClass::RefNotFound,
        &[
            "couldn't find remote ref",
            "not our ref",
            "unadvertised object",
            "reference is not a tree",
            "did not match any",
            "unknown revision",
            "ambiguous argument",
            "bad object",
        ],
    ),
    (
        FailureClass::Unreachable,
        &[
            "Could not resolve",
            "Failed to connect",
            "Couldn't connect",
            "Connection refused",
            "Connection timed out",
            "Connection reset",
            "Connection closed",
            "Operation timed out",
            "No route to host",
            "Network is unreachable",
            "unable to access",
            "early EOF",
            "hung up",
            "unexpected disconnect",
            "RPC failed",
            "SSL",
            "does not appear to be a git repository",
            "Could not read from remote repository",
            "not found",
            "not valid: is this a git repository",
        ],
    ),
];

/// A failed call.
#[derive(Debug, Clone, thiserror::Error)]
#[error("git {operation}: {message}")]
pub struct GitError {
    pub class: FailureClass,
    /// What was being done: `resolve`, `fetch`, `checkout`, `submodules`, `lfs`.
    pub operation: &'static str,
    /// What to do about it, without secrets.
    pub message: String,
    /// The end of what git wrote: at most 60 lines and 8 KiB, secrets replaced. Empty when git was not reached.
    pub tail: String,
}

impl GitError {
    pub(crate) fn new(class: FailureClass, operation: &'static str, message: impl Into<String>) -> Self {
        Self { class, operation, message: message.into(), tail: String::new() }
    }

    /// A failure of the machine around git.
    pub(crate) fn io(operation: &'static str, what: &str, error: &std::io::Error) -> Self {
        let full =
            matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
        let class = if full { FailureClass::DiskFull } else { FailureClass::Other };
        Self::new(class, operation, format!("{what}: {error}"))
    }

    pub(crate) fn of_output(operation: &'static str, tail: String) -> Self {
        let class = FailureClass::of_output(&tail);
        let message = match class {
            FailureClass::Unreachable => {
                "the repository could not be reached or does not exist for this credential"
            }
            FailureClass::AuthFailed => {
                "the remote did not accept the credential, or its own key is not the known one"
            }
            FailureClass::Untrusted => {
                "the certificate of the git server cannot be verified: no known authority signed it, or it is for another name or time"
            }
            FailureClass::RefNotFound => "the remote has no such ref or commit",
            FailureClass::DiskFull => "the disk is full",
            _ => tail
                .lines()
                .rev()
                .find(|line| !line.trim().is_empty())
                .unwrap_or("git failed and wrote nothing"),
        };
        Self { class, operation, message: message.to_owned(), tail }
    }
}

#[cfg(test)]
mod tests {
    use super::FailureClass;

    #[test]
    fn what_git_writes_is_classed() {
        for (written, class) in [
            ("fatal: unable to access 'https://x/': Could not resolve host: x", FailureClass::Unreachable),
            (
                "fatal: unable to access 'https://x/': server certificate verification failed. CAfile: none CRLfile: none",
                FailureClass::Untrusted,
            ),
            (
                "fatal: unable to access 'https://x/': SSL certificate problem: unable to get local issuer certificate",
                FailureClass::Untrusted,
            ),
            (
                "fatal: unable to access 'https://x/': SSL: no alternative certificate subject name matches target host name 'x'",
                FailureClass::Untrusted,
            ),
            (
                "fatal: unable to access 'https://x/': error setting certificate verify locations:  CAfile: /none",
                FailureClass::Untrusted,
            ),
            (
                "fatal: unable to access 'https://x/': gnutls_handshake() failed: The TLS connection was non-properly terminated. SSL",
                FailureClass::Unreachable,
            ),
            (
                "ssh: connect to host x port 22: Connection refused\nfatal: Could not read from remote repository.",
                FailureClass::Unreachable,
            ),
            (
                "git@x: Permission denied (publickey).\nfatal: Could not read from remote repository.",
                FailureClass::AuthFailed,
            ),
            (
                "Host key verification failed.\nfatal: Could not read from remote repository.",
                FailureClass::AuthFailed,
            ),
            (
                "fatal: could not read Username for 'https://x': terminal prompts disabled",
                FailureClass::AuthFailed,
            ),
            (
                "fatal: unable to access 'https://x/': The requested URL returned error: 403",
                FailureClass::AuthFailed,
            ),
            (
                "fatal: unable to access 'https://x/': The requested URL returned error: 503",
                FailureClass::Unreachable,
            ),
            ("fatal: remote error: upload-pack: not our ref abc", FailureClass::RefNotFound),
            ("fatal: couldn't find remote ref refs/heads/x", FailureClass::RefNotFound),
            (
                "error: file write error: No space left on device\nfatal: unable to access",
                FailureClass::DiskFull,
            ),
            ("fatal: transport 'ext' not allowed", FailureClass::Other),
            // The server's own words do not decide.
            (
                "remote: Permission denied (publickey)\nfatal: couldn't find remote ref x",
                FailureClass::RefNotFound,
            ),
            ("", FailureClass::Other),
        ] {
            assert_eq!(FailureClass::of_output(written), class, "{written}");
        }
    }
}
