//! Why a call was refused, and what the agent makes of it.

use serde::{Deserialize, Serialize};

/// A refusal of the server. Its status and code are what travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("the agent token is not valid")]
    BadToken,
    #[error("the agent token belongs to another sandbox or generation")]
    WrongSandbox,
    #[error("a newer generation, boot or attachment of this sandbox has taken over")]
    Superseded,
    #[error("the sandbox is gone")]
    Gone,
    /// No lease, or one that ended: attach again.
    #[error("there is no lease; attach first")]
    NotAttached,
    /// The sandbox is stopping: what it had to say is still taken, nothing new is handed out.
    #[error("the sandbox is stopping")]
    Draining,
    /// An earlier batch is still being stored.
    #[error("an earlier batch of events is still being stored; send it again")]
    Busy,
    #[error("the sandbox does not declare this repository")]
    NotDeclared,
    /// What is asked for is there for the boot alone.
    #[error("the boot is over, and the key of this repository was for that alone")]
    BootOver,
    #[error("too many commands wait for a result")]
    TooManyCommands,
    /// Attached again and again: wait before the next time.
    #[error("the agent attaches too often; attach again in a second")]
    TooOften,
    #[error("the sandbox is not known here")]
    Unknown,
    #[error("the command is larger than an agent accepts")]
    TooLarge,
}

/// Body of every refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub code: String,
    pub message: String,
}

impl Refusal {
    const ALL: [Refusal; 13] = [
        Refusal::BadToken,
        Refusal::WrongSandbox,
        Refusal::Superseded,
        Refusal::Gone,
        Refusal::NotAttached,
        Refusal::Draining,
        Refusal::Busy,
        Refusal::NotDeclared,
        Refusal::BootOver,
        Refusal::TooManyCommands,
        Refusal::TooOften,
        Refusal::Unknown,
        Refusal::TooLarge,
    ];

    pub fn status(self) -> u16 {
        match self {
            Refusal::BadToken => 401,
            Refusal::WrongSandbox => 403,
            Refusal::NotDeclared | Refusal::BootOver | Refusal::Unknown => 404,
            Refusal::Superseded => 409,
            Refusal::Gone => 410,
            Refusal::NotAttached => 412,
            Refusal::TooLarge => 413,
            Refusal::Draining => 423,
            Refusal::TooManyCommands | Refusal::TooOften => 429,
            Refusal::Busy => 503,
        }
    }

    pub fn code(self) -> &'static str {
        match self {
            Refusal::BadToken => "AGENT::BAD_TOKEN",
            Refusal::WrongSandbox => "AGENT::WRONG_SANDBOX",
            Refusal::Superseded => "AGENT::SUPERSEDED",
            Refusal::Gone => "SANDBOX::GONE",
            Refusal::NotAttached => "AGENT::NOT_ATTACHED",
            Refusal::Draining => "AGENT::DRAINING",
            Refusal::Busy => "AGENT::BUSY",
            Refusal::NotDeclared => "CREDENTIAL::NOT_DECLARED",
            Refusal::BootOver => "CREDENTIAL::BOOT_OVER",
            Refusal::TooManyCommands => "AGENT::TOO_MANY_COMMANDS",
            Refusal::TooOften => "AGENT::TOO_OFTEN",
            Refusal::Unknown => "SANDBOX::NOT_FOUND",
            Refusal::TooLarge => "AGENT::TOO_LARGE",
        }
    }

    /// Whether the agent has nothing left to say here, ever. Everything else is worth a retry.
    pub fn ends_the_bridge(self) -> bool {
        matches!(self, Refusal::BadToken | Refusal::WrongSandbox | Refusal::Superseded | Refusal::Gone)
    }

    pub fn body(self) -> ErrorBody {
        ErrorBody { code: self.code().to_owned(), message: self.to_string() }
    }

    /// Reads an answer. The four statuses that end the bridge do so with any body, as a proxy in between may have replaced it;
    /// the others need their code.
    pub fn of_answer(status: u16, body: &[u8]) -> Option<Self> {
        let ends =
            Self::ALL.into_iter().find(|refusal| refusal.status() == status && refusal.ends_the_bridge());
        ends.or_else(|| {
            let body: ErrorBody = serde_json::from_slice(body).ok()?;
            Self::ALL.into_iter().find(|refusal| refusal.status() == status && refusal.code() == body.code)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_read_back_as_it_was_said() {
        for refusal in Refusal::ALL {
            let body = serde_json::to_vec(&refusal.body()).unwrap();
            assert_eq!(Refusal::of_answer(refusal.status(), &body), Some(refusal));
        }
        assert_eq!(Refusal::of_answer(410, b"<html>"), Some(Refusal::Gone));
        assert_eq!(
            Refusal::of_answer(404, b"<html>"),
            None,
            "some proxy's own 404 does not speak for the server"
        );
        assert_eq!(Refusal::of_answer(500, b"{}"), None);
    }

    #[test]
    fn four_statuses_end_the_bridge() {
        let mut ending: Vec<u16> =
            Refusal::ALL.into_iter().filter(|r| r.ends_the_bridge()).map(Refusal::status).collect();
        ending.sort_unstable();
        assert_eq!(ending, [401, 403, 409, 410]);
    }
}
