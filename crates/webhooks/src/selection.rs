//! Which events a webhook wants.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ports::{Message, Owner};

/// Families of events; a type is a family, a dot and a word.
pub const EVENT_FAMILIES: [&str; 11] = [
    "sandbox",
    "image",
    "boot",
    "agent",
    "service",
    "activity",
    "pool",
    "snapshot",
    "egress",
    "box",
    "image_build",
];
/// Members of either part.
const MEMBERS: usize = 64;
/// Bytes of a type, of a name and of a value.
const BYTES: usize = 256;

/// Why a selection is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    #[error("events: {0:?} is neither a type such as sandbox.failed nor a family such as image_build.*")]
    Type(String),
    #[error("events and metadata have at most {MEMBERS} members of at most {BYTES} bytes")]
    TooMuch,
}

/// Types or families of which one must fit, none: all; and metadata of which all must.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Selection {
    #[serde(default)]
    events: Vec<String>,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
}

impl Selection {
    /// Checks what was asked for. `family` and `family.*` mean the same.
    ///
    /// # Errors
    /// When a word is no type or family, or there are too many.
    pub fn new(events: Vec<String>, metadata: BTreeMap<String, String>) -> Result<Self, SelectionError> {
        let fits = |(name, value): (&String, &String)| name.len() <= BYTES && value.len() <= BYTES;
        if events.len() > MEMBERS || metadata.len() > MEMBERS || !metadata.iter().all(fits) {
            return Err(SelectionError::TooMuch);
        }
        if let Some(bad) = events.iter().find(|word| !is_type(word)) {
            return Err(SelectionError::Type(bad.chars().take(BYTES).collect()));
        }
        Ok(Self { events, metadata })
    }

    /// As asked for.
    pub fn events(&self) -> &[String] {
        &self.events
    }

    /// As asked for.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the message is wanted by a webhook of this owner.
    pub fn takes(&self, owner: &Owner, message: &Message) -> bool {
        let family = message.kind.split('.').next().unwrap_or_default();
        let named = |word: &String| *word == message.kind || word.trim_end_matches(".*") == family;
        owner.may_see(message)
            && (self.events.is_empty() || self.events.iter().any(named))
            && self.metadata.iter().all(|(name, value)| message.metadata.get(name) == Some(value))
    }
}

fn is_type(word: &str) -> bool {
    let (family, rest) = word.split_once('.').unwrap_or((word, "*"));
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    word.len() <= BYTES && EVENT_FAMILIES.contains(&family) && (rest == "*" || plain(rest))
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::{SandboxId, Timestamp};

    use super::*;
    use crate::ports::Subject;

    fn message(kind: &str, tenant: Option<&str>) -> Message {
        Message {
            seq: 1,
            subject: Subject::Sandbox(SandboxId::random()),
            kind: kind.into(),
            at: Timestamp::clamped(0),
            owner: Owner { tenant: tenant.map(str::to_owned), namespace: None },
            metadata: BTreeMap::from([("team".into(), "a".into())]),
            data: serde_json::Map::new(),
        }
    }

    #[test]
    fn types_families_and_metadata_choose() {
        let chosen = |events: &[&str], metadata: &[(&str, &str)], kind: &str| {
            let events = events.iter().map(|word| (*word).to_owned()).collect();
            let metadata = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            Selection::new(events, metadata).unwrap().takes(&Owner::default(), &message(kind, None))
        };
        assert!(chosen(&[], &[], "sandbox.created"));
        assert!(chosen(&["sandbox"], &[("team", "a")], "sandbox.created"));
        assert!(chosen(&["boot.*", "sandbox.failed"], &[], "sandbox.failed"));
        assert!(!chosen(&["boot.*", "sandbox.failed"], &[], "sandbox.created"));
        assert!(!chosen(&["image"], &[], "image_build.queued"));
        assert!(!chosen(&[], &[("team", "b")], "sandbox.created"));
    }

    #[test]
    fn a_tenant_gets_its_own_and_the_operator_everything() {
        let all = Selection::default();
        let tenant = Owner { tenant: Some("a".into()), namespace: Some("ns".into()) };
        for (owner, seen) in [(None, false), (Some("a"), true), (Some("b"), false)] {
            assert_eq!(all.takes(&tenant, &message("sandbox.created", owner)), seen, "{owner:?}");
            assert!(all.takes(&Owner::default(), &message("sandbox.created", owner)), "{owner:?}");
        }
    }

    #[test]
    fn what_can_never_happen_is_refused() {
        for bad in ["", "sandboxes", "sandbox.", "sandbox.Failed", "*", "sandbox.a.b", "stream.reset"] {
            assert!(Selection::new(vec![bad.into()], BTreeMap::new()).is_err(), "{bad}");
        }
        assert!(Selection::new(vec!["sandbox".into(); 65], BTreeMap::new()).is_err());
    }
}
