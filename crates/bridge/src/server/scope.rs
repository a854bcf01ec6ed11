//! Which repositories a sandbox may ask credentials for.
//!
//! Host and path are compared in one normal form, the path as the bytes that its escapes stand for: addresses are written with
//! escapes, and git asks without. A path keeps its case: hosts differ in whether it matters, and the careful answer is right for all
//! of them.

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use crate::wire::GitCredentialRequest;

/// One declared repository.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct RepositoryScope {
    host: String,
    path: String,
}

#[derive(Serialize, Deserialize)]
struct Written {
    host: String,
    path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a repository is a host with an optional port, and a path without empty, '.' or '..' parts, control characters and escaped slashes"
)]
pub struct InvalidScope;

impl RepositoryScope {
    /// The repository of an address, with the path as it is written there.
    pub fn new(host: &str, path: &str) -> Result<Self, InvalidScope> {
        Self::decoded(host, &decode(path).ok_or(InvalidScope)?)
    }

    /// With a path whose escapes are decoded: what then looks like one is none, and a second decoding would name another repository.
    fn decoded(host: &str, path: &str) -> Result<Self, InvalidScope> {
        Ok(Self {
            host: normal_host(host).ok_or(InvalidScope)?,
            path: normal_path(path).ok_or(InvalidScope)?,
        })
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    /// Without escapes.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What git would ask about it.
    pub fn request(&self) -> GitCredentialRequest {
        GitCredentialRequest { host: self.host.clone(), path: self.path.clone() }
    }

    /// Whether a request is about this repository. What has no normal form is about none.
    pub fn covers(&self, request: &GitCredentialRequest) -> bool {
        Self::decoded(&request.host, &request.path).as_ref() == Ok(self)
    }
}

impl TryFrom<Written> for RepositoryScope {
    type Error = InvalidScope;

    fn try_from(written: Written) -> Result<Self, InvalidScope> {
        Self::decoded(&written.host, &written.path)
    }
}

impl From<RepositoryScope> for Written {
    fn from(scope: RepositoryScope) -> Self {
        Written { host: scope.host, path: scope.path }
    }
}

/// Lower case, without the port of https and without the dot of the root.
fn normal_host(host: &str) -> Option<String> {
    let host = host.to_ascii_lowercase();
    let host = host.strip_suffix(":443").unwrap_or(&host);
    let host = host.strip_suffix('.').unwrap_or(host);
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    (!host.is_empty() && host.bytes().all(allowed)).then(|| host.to_owned())
}

/// What the escapes of a path stand for. A slash among them would make one part into two.
fn decode(path: &str) -> Option<String> {
    let parts = path.split('/').map(|part| {
        let part = percent_decode_str(part).decode_utf8().ok()?;
        (!part.contains('/')).then_some(part)
    });
    Some(parts.collect::<Option<Vec<_>>>()?.join("/"))
}

/// Without slashes around it, `.git`, and what git-lfs appends.
fn normal_path(path: &str) -> Option<String> {
    let path = path.trim_matches('/');
    let path = path.strip_suffix("/info/lfs").unwrap_or(path).trim_end_matches('/');
    let path = path.strip_suffix(".git").unwrap_or(path);
    let part = |part: &str| !matches!(part, "" | "." | "..") && !part.chars().any(char::is_control);
    path.split('/').all(part).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_recognised_however_it_is_written_and_no_other_is() {
        let scope = RepositoryScope::new("GitHub.com", "/acme/web.git").unwrap();
        let covers = |host: &str, path: &str| {
            scope.covers(&GitCredentialRequest { host: host.to_owned(), path: path.to_owned() })
        };
        for (host, path) in [
            ("github.com", "acme/web"),
            ("GITHUB.COM:443", "/acme/web.git/"),
            ("github.com.", "acme/web.git/info/lfs"),
        ] {
            assert!(covers(host, path), "{host} {path}");
        }
        for (host, path) in [
            ("github.com", ""),
            ("github.com", "acme"),
            ("github.com", "acme/web2"),
            ("github.com", "acme/web/../secret"),
            ("github.com", "acme/other/../web"),
            ("github.com", "acme/./web"),
            ("github.com", "acme//web"),
            ("github.com", "acme/%77eb"),
            ("github.com", "acme/web.git.git"),
            ("github.com", "Acme/web"),
            ("github.com:8443", "acme/web"),
            ("github.com.evil.org", "acme/web"),
            ("user@github.com", "acme/web"),
            ("evil.org/github.com", "acme/web"),
            ("", "acme/web"),
        ] {
            assert!(!covers(host, path), "{host} {path}");
        }
    }

    #[test]
    fn an_address_is_decoded_once_and_a_question_never() {
        let asked =
            |path: &str| GitCredentialRequest { host: "git.example".to_owned(), path: path.to_owned() };
        for (address, decoded, other) in [
            ("my%20org/web%40home.git", "my org/web@home.git", "my%20org/web%40home.git"),
            ("acme/%77eb", "acme/web", "acme/%77eb"),
            ("~acme/100%25", "~acme/100%", "~acme/100%25"),
            ("acme/a%2541", "acme/a%41", "acme/aA"),
            ("acme/caf%C3%A9", "acme/café", "acme/cafe"),
            ("acme/a%3Fb%23c%5Cd", "acme/a?b#c\\d", "acme/a"),
            ("acme/w@b", "acme/w@b", "acme/w%40b"),
        ] {
            let scope = RepositoryScope::new("git.example", address).unwrap();
            assert!(
                scope.covers(&scope.request())
                    && scope.covers(&asked(decoded))
                    && !scope.covers(&asked(other)),
                "{address}"
            );
            let written = serde_json::to_string(&scope).unwrap();
            assert_eq!(serde_json::from_str::<RepositoryScope>(&written).unwrap(), scope);
        }
        for address in [
            "acme%2Fweb",
            "acme/%2e%2e/web",
            "acme/%2E",
            "acme/%2e.git",
            "acme/we%0Ab",
            "acme/we%00b",
            "acme/%C2%85",
            "acme/%ff",
            "acme//web",
        ] {
            assert_eq!(RepositoryScope::new("git.example", address), Err(InvalidScope), "{address}");
        }
    }
}
