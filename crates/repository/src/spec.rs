//! The `repository` part of a request, and what it becomes once checked.

use serde::{Deserialize, Serialize};

use crate::error::{Code, SpecError};
use crate::host::HostAllowList;
use crate::path::{WorkspacePath, WorkspaceRoot};
use crate::reference::Reference;
use crate::secret::Secret;
use crate::url::{RepositoryUrl, Scheme};

/// Repositories beside the primary one.
pub const ADDITIONAL_LIMIT: usize = 9;
/// Commits of history that may be asked for; deeper is all of it, which is asked for by leaving `depth` out.
pub const DEPTH_LIMIT: u32 = 1_000_000;
const NAME_LIMIT: usize = 255;

/// `repository` of a request, as sent. Written out again it leaves the credential away.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RepositorySpec {
    pub url: String,
    /// Branch, tag or commit; the remote's default branch when absent.
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Commits of history, at least 1; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    #[serde(default)]
    pub submodules: bool,
    #[serde(default)]
    pub lfs: bool,
    /// Absolute, below the workspace root; `<root>/<repository name>` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing)]
    pub credential: Option<Credential>,
    /// At most [`ADDITIONAL_LIMIT`]; the order is part of what is asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional: Vec<AdditionalSpec>,
}

/// One more repository. Depth, submodules and LFS are those of the primary one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdditionalSpec {
    pub url: String,
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The primary repository's when absent and the host is the same.
    #[serde(default, skip_serializing)]
    pub credential: Option<Credential>,
}

/// How to prove who asks. Write-only.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum Credential {
    /// For https.
    Token { username: Option<String>, token: Secret },
    /// For ssh: a private key without passphrase, and the lines of `known_hosts` that the server's key must match.
    SshKey { private_key: Secret, known_hosts: Option<String> },
    /// A secret that the server keeps; it is resolved before this crate sees the request again.
    SecretRef { secret_ref: String },
}

/// What a deployment allows.
#[derive(Debug, Clone)]
pub struct Policy {
    pub hosts: HostAllowList,
    /// Whether `file:///…` names repositories on the server's own disk.
    pub allow_file: bool,
    /// Whether `http://…` is allowed. For servers on loopback; a token would travel readable.
    pub allow_http: bool,
    pub root: WorkspaceRoot,
}

impl Policy {
    /// Checks an address against the grammar, the schemes and the hosts.
    ///
    /// # Errors
    /// [`Code::InvalidUrl`] or [`Code::HostNotAllowed`].
    pub fn check_url(&self, text: &str) -> Result<RepositoryUrl, SpecError> {
        let url = RepositoryUrl::parse(text)?;
        match url.scheme() {
            Scheme::File if !self.allow_file => {
                return Err(SpecError::new(
                    Code::InvalidUrl,
                    "addresses of files are not enabled on this server",
                ));
            }
            Scheme::Http if !self.allow_http => {
                return Err(SpecError::new(Code::InvalidUrl, "the scheme is not one of https and ssh"));
            }
            Scheme::File => return Ok(url),
            _ => {}
        }
        if !self.hosts.allows(url.host()) {
            let message = format!("repositories of {} are not allowed on this server", url.host());
            return Err(SpecError::new(Code::HostNotAllowed, message));
        }
        Ok(url)
    }
}

/// A checked request: the primary repository first, then the others in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub members: Vec<Member>,
    pub depth: Option<u32>,
    pub submodules: bool,
    pub lfs: bool,
}

/// One checked repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub url: RepositoryUrl,
    pub reference: Reference,
    pub path: WorkspacePath,
    pub credential: Option<Credential>,
}

impl RepositorySpec {
    /// Checks everything that needs neither network nor disk.
    ///
    /// # Errors
    /// The first field that is refused, with its code.
    pub fn validate(&self, policy: &Policy) -> Result<Source, SpecError> {
        if self.depth.is_some_and(|depth| depth == 0 || depth > DEPTH_LIMIT) {
            return Err(invalid("repository.depth", format!("the depth is not between 1 and {DEPTH_LIMIT}")));
        }
        if self.additional.len() > ADDITIONAL_LIMIT {
            let message = format!("there are more than {ADDITIONAL_LIMIT} additional repositories");
            return Err(invalid("repository.additional", message));
        }
        let primary = Asked {
            url: &self.url,
            reference: self.reference.as_deref(),
            path: self.path.as_deref(),
            credential: self.credential.as_ref(),
        };
        let mut members = vec![primary.check(policy, "repository")?];
        for (index, other) in self.additional.iter().enumerate() {
            let field = format!("repository.additional[{index}]");
            let asked = Asked {
                url: &other.url,
                reference: other.reference.as_deref(),
                path: other.path.as_deref(),
                credential: other.credential.as_ref(),
            };
            let mut member = asked.check(policy, &field)?;
            inherit_credential(&members[0], &mut member);
            if let Some(taken) = members.iter().find(|earlier| earlier.path.overlaps(&member.path)) {
                let message =
                    format!("the path is, holds or lies in that of another repository, {}", taken.path);
                return Err(SpecError::new(Code::InvalidPath, message).at(format!("{field}.path")));
            }
            members.push(member);
        }
        Ok(Source { members, depth: self.depth, submodules: self.submodules, lfs: self.lfs })
    }
}

/// A token is for the host that it was given for; another host must not see it.
fn inherit_credential(primary: &Member, member: &mut Member) {
    let same =
        primary.url.scheme() == member.url.scheme() && primary.url.authority() == member.url.authority();
    if member.credential.is_none() && same {
        member.credential.clone_from(&primary.credential);
    }
}

struct Asked<'a> {
    url: &'a str,
    reference: Option<&'a str>,
    path: Option<&'a str>,
    credential: Option<&'a Credential>,
}

impl Asked<'_> {
    fn check(&self, policy: &Policy, field: &str) -> Result<Member, SpecError> {
        let url = policy.check_url(self.url).map_err(|error| error.at(format!("{field}.url")))?;
        let reference = match self.reference {
            Some(text) => Reference::parse(text).map_err(|error| error.at(format!("{field}.ref")))?,
            None => Reference::Head,
        };
        let path = match self.path {
            Some(text) => policy.root.place(text),
            None => policy.root.place_named(url.name()),
        };
        let path = path.map_err(|error| error.at(format!("{field}.path")))?;
        if let Some(credential) = self.credential {
            credential.check(&url).map_err(|message| invalid(&format!("{field}.credential"), message))?;
        }
        Ok(Member { url, reference, path, credential: self.credential.cloned() })
    }
}

impl Credential {
    fn check(&self, url: &RepositoryUrl) -> Result<(), String> {
        match (self, url.scheme()) {
            (Self::Token { username, token }, Scheme::Https | Scheme::Http) => {
                let name = username.as_deref().unwrap_or("x-access-token");
                // Both travel to git a line each.
                let clean = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
                if !clean(name) || name.len() > NAME_LIMIT || name.contains(':') || !name.is_ascii() {
                    return Err(
                        "the user name is empty, too long, or holds a colon or control character".into()
                    );
                }
                if !clean(token.expose()) {
                    return Err("the token is empty or holds a control character".into());
                }
                Ok(())
            }
            (Self::SshKey { private_key, known_hosts }, Scheme::Ssh) => {
                if !private_key.expose().contains("PRIVATE KEY-----") {
                    return Err("the private key is not in PEM form".into());
                }
                if known_hosts.as_ref().is_some_and(|lines| lines.contains('\0')) {
                    return Err("the known hosts hold a zero byte".into());
                }
                Ok(())
            }
            (Self::SecretRef { secret_ref }, _) if !secret_ref.is_empty() => Ok(()),
            (Self::SecretRef { .. }, _) => Err("the secret's name is empty".into()),
            (Self::Token { .. }, _) => {
                Err("a token is for https; this address needs a private key or none".into())
            }
            (Self::SshKey { .. }, _) => {
                Err("a private key is for ssh; this address needs a token or none".into())
            }
        }
    }
}

fn invalid(field: &str, message: String) -> SpecError {
    SpecError::new(Code::InvalidParameter, message).at(field)
}
