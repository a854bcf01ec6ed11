//! What the server tells the agent to do, and how it went.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CommandId, Secret};

/// One command as it travels on the stream. The identifier is also the stream's position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommandFrame {
    pub command_id: CommandId,
    #[serde(rename = "type")]
    pub kind: String,
    /// When the server stops waiting, by its own clock: for display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_at: Option<Timestamp>,
    /// The same, counted from when this was sent, which holds whatever the box's clock says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining_ms: Option<u64>,
    #[serde(default)]
    pub data: Secret<Value>,
}

/// A command that was understood.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// End the box: hooks and services get this long.
    Shutdown {
        grace_seconds: u64,
        reason: String,
    },
    ServiceStart {
        name: String,
    },
    ServiceStop {
        name: String,
    },
    ServiceRestart {
        name: String,
    },
    /// The value, if any, is the credential to use from now on.
    ServiceRotateCredentials {
        name: String,
        credential: Option<Secret<String>>,
    },
    /// Hold still: a copy of the box is about to be made.
    SnapshotQuiesce,
    SnapshotThaw,
    /// Variables for what starts from now on; `None` removes one.
    EnvUpdate {
        env: Secret<BTreeMap<String, Option<String>>>,
    },
    /// `None`: no expiry.
    ExpirationChanged {
        expires_at: Option<Timestamp>,
    },
    Ping,
    /// Of a newer server. Answered as unsupported, never guessed at.
    Unknown {
        kind: String,
    },
}

/// A known command whose data does not fit.
#[derive(Debug, thiserror::Error)]
#[error("the data of command {kind} is not understood")]
pub struct MalformedCommand {
    pub kind: String,
    #[source]
    source: serde_json::Error,
}

/// How a command ended. `POST /internal/agent/v1/commands/{commandId}/result`, idempotent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WrittenOutcome", into = "WrittenOutcome")]
pub enum Outcome {
    Done(Value),
    Failed(CommandError),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandError {
    pub code: String,
    pub message: String,
}

#[derive(Serialize, Deserialize)]
struct WrittenOutcome {
    ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<CommandError>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shutdown {
    grace_seconds: u64,
    #[serde(default)]
    reason: String,
}

#[derive(Serialize, Deserialize)]
struct Named {
    name: String,
}

#[derive(Serialize, Deserialize)]
struct Rotation {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    credential: Option<Secret<String>>,
}

#[derive(Serialize, Deserialize)]
struct Environment {
    env: Secret<BTreeMap<String, Option<String>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Expiration {
    expires_at: Option<Timestamp>,
}

impl Command {
    /// The type as it travels.
    pub fn kind(&self) -> &str {
        match self {
            Command::Shutdown { .. } => "shutdown",
            Command::ServiceStart { .. } => "service.start",
            Command::ServiceStop { .. } => "service.stop",
            Command::ServiceRestart { .. } => "service.restart",
            Command::ServiceRotateCredentials { .. } => "service.rotateCredentials",
            Command::SnapshotQuiesce => "snapshot.quiesce",
            Command::SnapshotThaw => "snapshot.thaw",
            Command::EnvUpdate { .. } => "env.update",
            Command::ExpirationChanged { .. } => "expiration.changed",
            Command::Ping => "ping",
            Command::Unknown { kind } => kind,
        }
    }

    /// The data as it travels.
    pub fn data(&self) -> Value {
        match self {
            Command::Shutdown { grace_seconds, reason } => {
                json!({"graceSeconds": grace_seconds, "reason": reason})
            }
            Command::ServiceStart { name }
            | Command::ServiceStop { name }
            | Command::ServiceRestart { name } => {
                json!({"name": name})
            }
            Command::ServiceRotateCredentials { name, credential } => {
                json!({"name": name, "credential": credential})
            }
            Command::EnvUpdate { env } => json!({"env": env}),
            Command::ExpirationChanged { expires_at } => json!({"expiresAt": expires_at}),
            Command::SnapshotQuiesce | Command::SnapshotThaw | Command::Ping | Command::Unknown { .. } => {
                json!({})
            }
        }
    }
}

impl CommandFrame {
    /// What is to be done. A type that is not known is [`Command::Unknown`], not an error.
    pub fn command(&self) -> Result<Command, MalformedCommand> {
        Ok(match self.kind.as_str() {
            "shutdown" => {
                let Shutdown { grace_seconds, reason } = self.read()?;
                Command::Shutdown { grace_seconds, reason }
            }
            "service.start" => Command::ServiceStart { name: self.read::<Named>()?.name },
            "service.stop" => Command::ServiceStop { name: self.read::<Named>()?.name },
            "service.restart" => Command::ServiceRestart { name: self.read::<Named>()?.name },
            "service.rotateCredentials" => {
                let Rotation { name, credential } = self.read()?;
                Command::ServiceRotateCredentials { name, credential }
            }
            "snapshot.quiesce" => Command::SnapshotQuiesce,
            "snapshot.thaw" => Command::SnapshotThaw,
            "env.update" => Command::EnvUpdate { env: self.read::<Environment>()?.env },
            "expiration.changed" => {
                Command::ExpirationChanged { expires_at: self.read::<Expiration>()?.expires_at }
            }
            "ping" => Command::Ping,
            kind => Command::Unknown { kind: kind.to_owned() },
        })
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, MalformedCommand> {
        T::deserialize(self.data.reveal())
            .map_err(|source| MalformedCommand { kind: self.kind.clone(), source })
    }
}

impl Outcome {
    /// Done, with nothing to tell.
    pub fn done() -> Self {
        Outcome::Done(Value::Null)
    }

    pub fn failed(code: &str, message: impl Into<String>) -> Self {
        Outcome::Failed(CommandError { code: code.to_owned(), message: message.into() })
    }
}

impl TryFrom<WrittenOutcome> for Outcome {
    type Error = &'static str;

    fn try_from(written: WrittenOutcome) -> Result<Self, &'static str> {
        match (written.ok, written.error) {
            (true, None) => Ok(Outcome::Done(written.result.unwrap_or_default())),
            (false, Some(error)) => Ok(Outcome::Failed(error)),
            (true, Some(_)) => Err("a result that is ok has no error"),
            (false, None) => Err("a result that is not ok needs an error"),
        }
    }
}

impl From<Outcome> for WrittenOutcome {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done(value) => {
                WrittenOutcome { ok: true, result: (!value.is_null()).then_some(value), error: None }
            }
            Outcome::Failed(error) => WrittenOutcome { ok: false, result: None, error: Some(error) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: &str, data: Value) -> CommandFrame {
        serde_json::from_value(json!({"commandId": "c-1", "type": kind, "data": data, "new": 1})).unwrap()
    }

    #[test]
    fn commands_are_read_back_as_they_were_written() {
        let name = || "ssh".to_owned();
        let env = BTreeMap::from([("A".to_owned(), Some("1".to_owned())), ("B".to_owned(), None)]);
        let all = [
            Command::Shutdown { grace_seconds: 10, reason: "user_delete".into() },
            Command::ServiceStart { name: name() },
            Command::ServiceStop { name: name() },
            Command::ServiceRestart { name: name() },
            Command::ServiceRotateCredentials { name: name(), credential: Some(Secret::new("s".into())) },
            Command::SnapshotQuiesce,
            Command::SnapshotThaw,
            Command::EnvUpdate { env: Secret::new(env) },
            Command::ExpirationChanged { expires_at: None },
            Command::Ping,
        ];
        for command in all {
            assert_eq!(frame(command.kind(), command.data()).command().unwrap(), command);
        }
    }

    #[test]
    fn an_unknown_type_is_carried_and_wrong_data_is_named() {
        let unknown = frame("service.paint", json!({"colour": "red"})).command().unwrap();
        assert_eq!(unknown, Command::Unknown { kind: "service.paint".into() });
        let error = frame("service.start", json!({"nom": "x"})).command().unwrap_err();
        assert_eq!(error.to_string(), "the data of command service.start is not understood");
    }

    #[test]
    fn secrets_of_commands_are_not_shown() {
        let frame = frame("env.update", json!({"env": {"TOKEN": "hunter2"}}));
        let shown = format!("{frame:?} {:?}", frame.command().unwrap());
        assert!(!shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn an_outcome_is_one_of_two() {
        let read = |value: Value| serde_json::from_value::<Outcome>(value);
        assert_eq!(read(json!({"ok": true})).unwrap(), Outcome::done());
        assert_eq!(read(json!({"ok": true, "result": 3})).unwrap(), Outcome::Done(json!(3)));
        let failed = Outcome::failed("SERVICE::NOT_FOUND", "no such service");
        assert_eq!(read(serde_json::to_value(&failed).unwrap()).unwrap(), failed);
        assert!(read(json!({"ok": false})).is_err());
        assert!(read(json!({"ok": true, "error": {"code": "X", "message": "y"}})).is_err());
    }
}
