//! What a create from a repository brought along that nobody but the server may know.
//!
//! Kept in memory and in a file of mode 0600 beside the sandbox's other files, because a restarted server has to go on building and to
//! answer its agents. Never in the store, in history, in logs or in answers.

use std::{collections::BTreeMap, fmt};

use sandglass_repository::RepositorySpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// See the module documentation.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Confidential {
    /// `repository` of the request as it was sent, credentials included; null without one.
    pub repository: Value,
    /// `imageBuild.secrets`.
    pub build_secrets: BTreeMap<String, String>,
}

impl fmt::Debug for Confidential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Confidential(***)")
    }
}

impl Confidential {
    /// The repository as it was asked for.
    ///
    /// # Errors
    /// When there is none, or it is not readable.
    pub fn repository(&self) -> Result<RepositorySpec, serde_json::Error> {
        serde_json::from_value(self.repository.clone())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_written_whole_and_shown_not_at_all() {
        let secrets = Confidential {
            repository: json!({"url": "https://git.example.com/a/b", "credential": {"token": "hunter2"}}),
            build_secrets: BTreeMap::from([("NPM_TOKEN".into(), "hunter3".into())]),
        };
        assert!(!format!("{secrets:?}").contains("hunter"));
        let again: Confidential = serde_json::from_value(serde_json::to_value(&secrets).unwrap()).unwrap();
        assert_eq!(again, secrets);
        assert!(again.repository().unwrap().credential.is_some());
        assert!(Confidential::default().repository().is_err());
    }
}
