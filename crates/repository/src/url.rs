//! Addresses of repositories.
//!
//! Accepted are `https://host/path`, `ssh://user@host/path`, `user@host:path` and, where the policy says so, `file:///path`. The
//! grammar is narrower than git's: what git would read as an option, a helper or a second address does not get past it.

use std::fmt;

use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::error::{Code, SpecError};
use crate::host::normalise_host;

/// Bytes of an address.
const URL_LIMIT: usize = 2048;

/// How a repository is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    Https,
    /// Without encryption: never from a request, only where a policy allows it (loopback servers of tests).
    Http,
    Ssh,
    File,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
            Self::Ssh => "ssh",
            Self::File => "file",
        }
    }

    fn default_port(self) -> Option<u16> {
        match self {
            Self::Https => Some(443),
            Self::Http => Some(80),
            Self::Ssh => Some(22),
            Self::File => None,
        }
    }
}

/// A checked address in normal form: host in lower case, no default port, no trailing slash, `.git` as it was given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepositoryUrl {
    scheme: Scheme,
    /// Only for ssh.
    user: Option<String>,
    /// Empty for files.
    host: String,
    port: Option<u16>,
    /// With its leading slash, except that `~user` and relative scp paths have none.
    path: String,
}

impl RepositoryUrl {
    /// Reads an address by the grammar alone; which schemes and hosts are allowed is the policy's business.
    ///
    /// # Errors
    /// [`Code::InvalidUrl`] with what is wrong; the address itself is not repeated, because it may hold a password.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        Self::read(text).map_err(|message| SpecError::new(Code::InvalidUrl, message))
    }

    fn read(text: &str) -> Result<Self, String> {
        check_text(text)?;
        let Some((scheme, rest)) = text.split_once("://") else {
            return scp_like(text);
        };
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "https" => Scheme::Https,
            "http" => Scheme::Http,
            "ssh" | "git+ssh" | "ssh+git" => Scheme::Ssh,
            "file" => Scheme::File,
            _ => return Err("the scheme is not one of https and ssh".into()),
        };
        if scheme == Scheme::File {
            return Ok(Self {
                scheme,
                user: None,
                host: String::new(),
                port: None,
                path: normalise_path(rest)?,
            });
        }
        let slash = rest.find('/').ok_or("the path of the repository is missing")?;
        let (authority, path) = rest.split_at(slash);
        let (user, host) = match authority.rsplit_once('@') {
            None => (None, authority),
            Some((user, host)) if scheme == Scheme::Ssh => (Some(ssh_user(user)?), host),
            Some(_) => {
                return Err("user and password do not belong in the address; use `credential`".into());
            }
        };
        let (host, port) = split_port(host)?;
        let port = port.filter(|port| Some(*port) != scheme.default_port());
        // `ssh://host/~user/x` means a path that starts at the home folder.
        let path = match path.strip_prefix("/~") {
            Some(rest) if scheme == Scheme::Ssh => normalise_path(&format!("~{rest}"))?,
            _ => normalise_path(path)?,
        };
        Ok(Self { scheme, user, host: normalise_host(host)?, port, path })
    }

    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Lower case; empty for files.
    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// Host with its port, when that is not the scheme's own.
    pub fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.host),
            None => self.host.clone(),
        }
    }

    /// The path without its leading slash.
    pub fn path(&self) -> &str {
        self.path.trim_start_matches('/')
    }

    /// The last component of the path without `.git`: the name of the default folder.
    pub fn name(&self) -> &str {
        let last = self.path.rsplit('/').next().unwrap_or_default();
        last.strip_suffix(".git").unwrap_or(last)
    }

    /// What names the repository whichever way it is reached: `github.com/acme/web`. The case of the path is kept, because most
    /// hosts tell it apart.
    pub fn repository_key(&self) -> String {
        let path = self.path();
        let path = path.strip_suffix(".git").unwrap_or(path);
        match self.scheme {
            Scheme::File => format!("file/{path}"),
            _ => format!("{}/{path}", self.authority()),
        }
    }

    /// A short name for files and database keys: 32 hexadecimal digits of the normal form's digest.
    pub fn slug(&self) -> String {
        let digest = Sha256::digest(self.to_string().as_bytes());
        digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for RepositoryUrl {
    /// The normal form, which is also what `git` is given.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme.as_str())?;
        if let Some(user) = &self.user {
            write!(f, "{user}@")?;
        }
        f.write_str(&self.authority())?;
        if !self.path.starts_with('/') {
            f.write_str("/")?;
        }
        f.write_str(&self.path)
    }
}

impl Serialize for RepositoryUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn check_text(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("the address is empty".into());
    }
    if text.len() > URL_LIMIT {
        return Err(format!("the address is longer than {URL_LIMIT} bytes"));
    }
    if text.starts_with('-') {
        return Err("the address starts with a dash".into());
    }
    if let Some(bad) = text.chars().find(|c| !c.is_ascii_graphic()) {
        let name = if bad.is_ascii() { "a space or control character" } else { "a character outside ASCII" };
        return Err(format!("the address holds {name}; percent-encode it"));
    }
    if text.contains("::") && !text.contains('[') {
        return Err("remote helpers (`helper::address`) are not allowed".into());
    }
    if let Some(bad) = text.chars().find(|c| "\\\"'`<>{}|^$;&()*!?#".contains(*c)) {
        return Err(format!("the address holds `{bad}`; percent-encode it"));
    }
    Ok(())
}

/// `user@host:path`, the form without a scheme. The user is required: without one, `C:x` and `host:x` could be anything.
fn scp_like(text: &str) -> Result<RepositoryUrl, String> {
    const EXPECTED: &str =
        "the address is neither https://host/path, ssh://user@host/path nor user@host:path";
    let (user, rest) = text.split_once('@').ok_or(EXPECTED)?;
    let (host, path) = match rest.strip_prefix('[') {
        Some(_) => rest.find("]:").map(|end| (&rest[..=end], &rest[end + 2..])).ok_or(EXPECTED)?,
        None => rest.split_once(':').ok_or(EXPECTED)?,
    };
    if path.is_empty() {
        return Err("the path of the repository is missing".into());
    }
    // `ssh://git@host/~` is the home folder, so an absolute path like that has no normal form.
    if path.starts_with("/~") {
        return Err("a path of the repository that begins with `/~` is ambiguous; leave the slash out for the home folder".into());
    }
    // `git@host:acme/web` is relative to the home folder, where hosting services and `ssh://git@host/acme/web` mean the same.
    let rooted = if path.starts_with(['/', '~']) { path.to_owned() } else { format!("/{path}") };
    Ok(RepositoryUrl {
        scheme: Scheme::Ssh,
        user: Some(ssh_user(user)?),
        host: normalise_host(host)?,
        port: None,
        path: normalise_path(&rooted)?,
    })
}

fn ssh_user(user: &str) -> Result<String, String> {
    if user.contains(':') {
        return Err("a password does not belong in the address; use `credential`".into());
    }
    let plain = user.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if user.is_empty() || user.len() > 64 || !plain || user.starts_with('-') {
        return Err("the user in the address holds a character that user names do not have".into());
    }
    Ok(user.to_owned())
}

fn split_port(authority: &str) -> Result<(&str, Option<u16>), String> {
    let after_address = authority.rfind(']').map_or(0, |end| end + 1);
    let Some(colon) = authority[after_address..].find(':') else {
        return Ok((authority, None));
    };
    let (host, port) = authority.split_at(after_address + colon);
    match port[1..].parse() {
        Ok(number) if number > 0 && port[1..].bytes().all(|byte| byte.is_ascii_digit()) => {
            Ok((host, Some(number)))
        }
        _ => Err("the port is not a number between 1 and 65535".into()),
    }
}

fn normalise_path(path: &str) -> Result<String, String> {
    let trimmed = path.trim_end_matches('/');
    let components = trimmed.strip_prefix('/').unwrap_or(trimmed);
    if components.is_empty() || (!trimmed.starts_with('/') && !trimmed.starts_with('~')) {
        return Err("the path of the repository is missing".into());
    }
    for component in components.split('/') {
        let decoded = percent_encoding::percent_decode_str(component).collect::<Vec<u8>>();
        if component.is_empty() || decoded == b"." || decoded == b".." {
            return Err("the path has an empty component or one of dots".into());
        }
        if component.starts_with('-') || decoded.first() == Some(&b'-') {
            return Err("a component of the path starts with a dash".into());
        }
        let text = String::from_utf8(decoded);
        if !text.is_ok_and(|text| !text.contains(|c: char| c.is_control() || c == '/')) {
            return Err(
                "the path hides a slash, a control character or what is no UTF-8 in percent-encoding".into(),
            );
        }
    }
    let last = components.rsplit('/').next().unwrap_or_default();
    let last = percent_encoding::percent_decode_str(last).decode_utf8_lossy();
    // Without `.git` it is the same repository, and has to have a name all the same.
    if matches!(last.strip_suffix(".git"), Some("" | "." | "..")) {
        return Err("the repository has no name".into());
    }
    Ok(trimmed.to_owned())
}
