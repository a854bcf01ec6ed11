//! Secrets that requests name instead of carrying them: one file each, in a folder of the operator's.
//!
//! On a server with tenants every tenant has a folder of its name, and nobody reaches another's. What is read goes the way of a secret that
//! came with the request: whoever may name it can read it in the sandbox. A file `NAME.hosts` beside it lists the hosts that it may be sent to.
//! Invariant: neither a value nor a path is in an error.

use std::{fs::File, io, io::Read, path::Path};

use sandglass_repository::{HostAllowList, RepositoryUrl};
use serde_json::Value as Json;

/// Longer names are none.
const MAX_NAME: usize = 128;
/// Keys are a few KiB.
const MAX_BYTES: u64 = 64 << 10;
/// What the list of a secret's hosts is named, after the secret.
const HOSTS: &str = ".hosts";

/// Why there is no such secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SecretError {
    #[error("this server keeps no secrets by name; send the token")]
    NoFolder,
    #[error(
        "must be of 1 to {MAX_NAME} letters, digits, `_`, `.` and `-`, not begin with a dot and not end with `{HOSTS}`"
    )]
    Name,
    #[error("there is no secret of that name")]
    Absent,
    #[error("the secret cannot be used: {0}")]
    Unusable(&'static str),
    #[error("the secret is not for the host {0}; the server's operator lists those that it is for")]
    Host(String),
}

/// Which repository names a secret that it cannot have, and why.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}.credential.secretRef: {error}")]
pub(crate) struct Unresolved {
    at: String,
    error: SecretError,
}

/// The value of a secret, by what it is.
#[derive(PartialEq, Eq)]
pub(crate) enum Value {
    Token(String),
    /// Of ssh, as PEM.
    PrivateKey(String),
}

impl std::fmt::Debug for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Value(***)")
    }
}

/// The folder. `None` where there is none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SecretFiles<'a>(pub Option<&'a Path>);

impl SecretFiles<'_> {
    /// Reads the secret `name` of a tenant, for the repository at `url`. Blocking.
    pub(crate) fn read(self, tenant: Option<&str>, name: &str, url: &str) -> Result<Value, SecretError> {
        let folder = self.0.ok_or(SecretError::NoFolder)?;
        if !is_name(name) || name.ends_with(HOSTS) {
            return Err(SecretError::Name);
        }
        let folder = match tenant {
            None => folder.to_path_buf(),
            Some(tenant) if is_name(tenant) => folder.join(tenant),
            Some(_) => return Err(SecretError::Absent),
        };
        let text = text_of(&folder.join(name))?;
        is_for(&folder.join(format!("{name}{HOSTS}")), url)?;
        match text.trim() {
            "" => Err(SecretError::Unusable("it is empty")),
            // A key ends with a line break.
            key if key.starts_with("-----BEGIN ") => Ok(Value::PrivateKey(format!("{key}\n"))),
            token if token.contains(['\n', '\0']) => {
                Err(SecretError::Unusable("it has more than one line and is no private key"))
            }
            token => Ok(Value::Token(token.to_owned())),
        }
    }
}

/// A repository, and those beside it, as a request has them, with what the names of secrets stand for in their places. Blocking.
///
/// # Errors
/// The first that there is no such secret for.
pub(crate) fn resolved(
    mut repository: Json,
    files: SecretFiles<'_>,
    tenant: Option<&str>,
) -> Result<Json, Unresolved> {
    let unresolved = |at: String| move |error| Unresolved { at, error };
    resolve(&mut repository, files, tenant).map_err(unresolved("repository".into()))?;
    let additional = repository.get_mut("additional").and_then(Json::as_array_mut);
    for (index, additional) in additional.into_iter().flatten().enumerate() {
        let at = format!("repository.additional[{index}]");
        resolve(additional, files, tenant).map_err(unresolved(at))?;
    }
    Ok(repository)
}

fn resolve(repository: &mut Json, files: SecretFiles<'_>, tenant: Option<&str>) -> Result<(), SecretError> {
    let url = repository.get("url").and_then(Json::as_str).unwrap_or_default().to_owned();
    let Some(credential) = repository.get_mut("credential").and_then(Json::as_object_mut) else {
        return Ok(());
    };
    // Two at once are refused by whoever reads the result.
    if CARRIED.iter().any(|name| credential.contains_key(*name)) {
        return Ok(());
    }
    let Some(Json::String(name)) = credential.remove("secretRef") else { return Ok(()) };
    let (name, value) = match files.read(tenant, &name, &url)? {
        Value::Token(token) => ("token", token),
        Value::PrivateKey(key) => ("privateKey", key),
    };
    credential.insert(name.into(), value.into());
    Ok(())
}

/// Whether a repository, or one beside it, carries a secret instead of naming one.
pub(crate) fn carries(repository: &Json) -> bool {
    let additional = repository.get("additional").and_then(Json::as_array);
    let all = std::iter::once(repository).chain(additional.into_iter().flatten());
    let mut credentials = all.filter_map(|repository| repository.get("credential")?.as_object());
    credentials.any(|credential| CARRIED.iter().any(|name| credential.contains_key(*name)))
}

/// A repository as it may be shown: no request is answered with how to prove who asks, not even by name.
pub(crate) fn without_credentials(mut repository: Json) -> Json {
    let hide = |repository: &mut Json| repository.as_object_mut().map(|members| members.remove("credential"));
    hide(&mut repository);
    let additional = repository.get_mut("additional").and_then(Json::as_array_mut);
    additional.into_iter().flatten().for_each(|additional| drop(hide(additional)));
    repository
}

/// What a credential may hold that is secret itself.
const CARRIED: [&str; 2] = ["token", "privateKey"];

fn text_of(path: &Path) -> Result<String, SecretError> {
    // To open anything but a file could keep the request waiting.
    if !path.metadata().is_ok_and(|about| about.is_file()) {
        return Err(SecretError::Absent);
    }
    let file = File::open(path).map_err(|_| SecretError::Absent)?;
    let mut text = String::new();
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    if read.is_err() {
        return Err(SecretError::Unusable("it is not text"));
    }
    if text.len() as u64 > MAX_BYTES {
        return Err(SecretError::Unusable("it is larger than 64 KiB"));
    }
    Ok(text)
}

/// Refuses an address whose host is not in the list. Only where no list exists there is none: one that cannot be read allows nothing.
fn is_for(list: &Path, url: &str) -> Result<(), SecretError> {
    match list.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ => {}
    }
    let unusable = SecretError::Unusable("the list of its hosts cannot be read");
    let text = text_of(list).map_err(|_| unusable.clone())?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let hosts = HostAllowList::parse(lines).map_err(|_| unusable)?;
    match RepositoryUrl::parse(url) {
        Ok(url) if hosts.allows(url.host()) => Ok(()),
        Ok(url) => Err(SecretError::Host(url.host().to_owned())),
        Err(_) => Err(SecretError::Unusable("the address of its repository is not understood")),
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    const URL: &str = "https://git.example.com/acme/web.git";

    #[test]
    fn a_secret_is_read_by_its_name_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let (path, files) = (dir.path(), SecretFiles(Some(dir.path())));
        fs::write(path.join("token"), "hunter2\n").unwrap();
        fs::write(path.join("key"), "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n-----END").unwrap();
        fs::write(path.join("lines"), "a\nb").unwrap();
        fs::write(path.join("empty"), "\n").unwrap();
        fs::write(path.join("binary"), [0xff, 0xfe]).unwrap();
        fs::write(path.join("large"), "x".repeat(70 << 10)).unwrap();
        fs::create_dir(path.join("acme")).unwrap();
        fs::write(path.join("acme/token"), "hunter3").unwrap();
        assert_eq!(files.read(None, "token", URL), Ok(Value::Token("hunter2".into())));
        assert_eq!(files.read(Some("acme"), "token", URL), Ok(Value::Token("hunter3".into())));
        assert!(
            matches!(files.read(None, "key", URL), Ok(Value::PrivateKey(key)) if key.ends_with("-----END\n"))
        );
        for (tenant, name, error) in [
            (None, "none", SecretError::Absent),
            (None, "acme", SecretError::Absent),
            (Some("acme"), "key", SecretError::Absent),
            (Some("other"), "token", SecretError::Absent),
            (Some(".."), "token", SecretError::Absent),
            (None, "acme/token", SecretError::Name),
            (None, "..", SecretError::Name),
            (None, "", SecretError::Name),
            (None, "empty", SecretError::Unusable("it is empty")),
            (None, "binary", SecretError::Unusable("it is not text")),
            (None, "large", SecretError::Unusable("it is larger than 64 KiB")),
            (None, "lines", SecretError::Unusable("it has more than one line and is no private key")),
        ] {
            assert_eq!(files.read(tenant, name, URL), Err(error), "{tenant:?} {name}");
        }
        assert_eq!(SecretFiles(None).read(None, "token", URL), Err(SecretError::NoFolder));
        assert!(!format!("{:?}", files.read(None, "token", URL)).contains("hunter"));
    }

    #[test]
    fn a_secret_with_a_list_of_hosts_is_sent_to_these_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (path, files) = (dir.path(), SecretFiles(Some(dir.path())));
        fs::create_dir(path.join("acme")).unwrap();
        fs::write(path.join("token"), "hunter2\n").unwrap();
        fs::write(path.join("acme/token"), "hunter3").unwrap();
        fs::write(path.join("token.hosts"), "# ours\ngit.example.com\n\n*.corp.example\n").unwrap();
        let read = |url| files.read(None, "token", url);
        for url in [
            URL,
            "https://GIT.example.com:8443/a/b",
            "git@git.example.com:a/b.git",
            "https://x.corp.example/a",
        ] {
            assert_eq!(read(url), Ok(Value::Token("hunter2".into())), "{url}");
        }
        for (url, host) in [
            ("https://evil.example.org/a/b", "evil.example.org"),
            ("https://git.example.com.evil.org/a/b", "git.example.com.evil.org"),
            ("ssh://git@corp.example/a/b", "corp.example"),
        ] {
            assert_eq!(read(url), Err(SecretError::Host(host.into())), "{url}");
        }
        assert!(matches!(read("nothing"), Err(SecretError::Unusable(_))));
        assert_eq!(files.read(None, "token.hosts", URL), Err(SecretError::Name), "the list is no secret");
        assert!(files.read(Some("acme"), "token", "https://evil.example.org/a").is_ok(), "it has no list");
        let unusable = Err(SecretError::Unusable("the list of its hosts cannot be read"));
        for list in ["not a host", "*.\n"] {
            fs::write(path.join("token.hosts"), list).unwrap();
            assert_eq!(read(URL), unusable, "{list}");
        }
        fs::write(path.join("token.hosts"), "").unwrap();
        assert_eq!(read(URL), Err(SecretError::Host("git.example.com".into())), "an empty list is for none");
        fs::remove_file(path.join("token.hosts")).unwrap();
        fs::create_dir(path.join("token.hosts")).unwrap();
        assert_eq!(read(URL), unusable);
    }

    #[test]
    fn a_named_secret_takes_the_place_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("bot"), "hunter2\n").unwrap();
        let files = SecretFiles(Some(dir.path()));
        let named =
            |name: &str| json!({"url": "https://h/u", "credential": {"username": "me", "secretRef": name}});
        let known = json!({"url": "https://h/u", "credential": {"username": "me", "token": "hunter2"}});
        assert_eq!(resolved(named("bot"), files, None).unwrap(), known);
        let both = json!({"url": "u", "additional": [named("bot"), named("other")]});
        let refused = resolved(both, files, None).unwrap_err().to_string();
        assert!(refused.starts_with("repository.additional[1].credential.secretRef: "), "{refused}");
        for as_it_is in
            [json!({"url": "u"}), json!({"url": "u", "credential": {"token": "t", "secretRef": "bot"}})]
        {
            assert_eq!(resolved(as_it_is.clone(), files, None).unwrap(), as_it_is);
        }
        // Another tenant's folder is another one.
        assert!(resolved(named("bot"), files, Some("red")).is_err());
    }

    #[test]
    fn carried_secrets_are_told_from_named_ones() {
        assert!(!carries(&json!({"credential": {"secretRef": "bot"}, "additional": [{}, null]})));
        assert!(carries(&json!({"credential": {"token": null}})));
        assert!(carries(&json!({"additional": [{}, {"credential": {"privateKey": "k"}}]})));
    }
}
