//! The variables of a session: the sandbox's, the account's, the peer's wishes as far as they are allowed, the session's.

use std::collections::BTreeMap;
use std::ffi::OsString;

use crate::launch::Account;
use crate::settings::Peer;

/// Bounds of what a peer may wish for in one session.
const MAX_VARIABLES: usize = 128;
const MAX_BYTES: usize = 32 << 10;
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What programs take as told by the server, which is why a peer cannot set them.
const OURS: [&str; 6] =
    ["SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "SSH_ORIGINAL_COMMAND", "SSH_AUTH_SOCK", "SSH_USER_AUTH"];

/// Variables that the peer has asked for.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    variables: BTreeMap<String, String>,
    bytes: usize,
}

impl Wishes {
    /// Whether the variable is taken.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> bool {
        let bytes = self.bytes + name.len() + value.len();
        if !is_allowed(name)
            || value.contains('\0')
            || bytes > MAX_BYTES
            || self.variables.len() >= MAX_VARIABLES
        {
            return false;
        }
        self.bytes = bytes;
        self.variables.insert(name.to_owned(), value.to_owned());
        true
    }
}

fn is_allowed(name: &str) -> bool {
    let known = matches!(name, "LANG" | "TERM" | "COLORTERM")
        || ["LC_", "SSH_"]
            .iter()
            .any(|prefix| name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()));
    known && !OURS.contains(&name) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// What only this session has.
pub(crate) struct Own<'a> {
    pub peer: &'a Peer,
    /// The terminal's kind and the name of its file.
    pub terminal: Option<(&'a str, Option<&'a OsString>)>,
    pub original: Option<OsString>,
}

pub(crate) fn build(account: &Account, wishes: &Wishes, own: Own<'_>) -> BTreeMap<OsString, OsString> {
    let mut env = account.env.clone();
    for name in OURS {
        env.remove(&OsString::from(name));
    }
    env.entry("PATH".into()).or_insert_with(|| DEFAULT_PATH.into());
    env.insert("HOME".into(), account.home.clone().into());
    env.insert("USER".into(), account.name.clone().into());
    env.insert("LOGNAME".into(), account.name.clone().into());
    env.insert("SHELL".into(), account.shell.clone().into());
    for (name, value) in &wishes.variables {
        env.insert(name.into(), value.into());
    }
    env.insert("SSH_CONNECTION".into(), own.peer.connection_variable().into());
    env.insert("SSH_CLIENT".into(), own.peer.client_variable().into());
    if let Some((kind, file)) = own.terminal {
        env.insert("TERM".into(), kind.into());
        if let Some(file) = file {
            env.insert("SSH_TTY".into(), file.clone());
        }
    }
    if let Some(original) = own.original {
        env.insert("SSH_ORIGINAL_COMMAND".into(), original);
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_variables_are_taken_from_a_peer() {
        let mut wishes = Wishes::default();
        for name in ["LANG", "LC_ALL", "TERM", "SSH_ASKPASS_REQUIRE"] {
            assert!(wishes.set(name, "x"), "{name}");
        }
        for name in ["PATH", "LD_PRELOAD", "LC_", "SSH_", "LC_A=B", "LC_A B", "BASH_ENV", "", "lang"] {
            assert!(!wishes.set(name, "x"), "{name}");
        }
        for name in OURS {
            assert!(!wishes.set(name, "x"), "{name}");
        }
        assert!(!wishes.set("LC_X", "a\0b"));
        assert!(!wishes.set("LC_X", &"a".repeat(MAX_BYTES)));
    }

    #[test]
    fn the_number_of_variables_is_bounded() {
        let mut wishes = Wishes::default();
        let taken = (0..MAX_VARIABLES * 2).filter(|n| wishes.set(&format!("LC_{n}"), "")).count();
        assert_eq!(taken, MAX_VARIABLES);
    }

    #[test]
    fn the_session_has_the_last_word() {
        let account = Account {
            name: "ann".into(),
            uid: 1,
            gid: 1,
            groups: vec![],
            home: "/home/ann".into(),
            shell: "/bin/sh".into(),
            env: BTreeMap::from([
                ("HOME".into(), "/".into()),
                ("PATH".into(), "/bin".into()),
                ("SSH_AUTH_SOCK".into(), "/host".into()),
            ]),
        };
        let mut wishes = Wishes::default();
        wishes.set("TERM", "wish");
        let own =
            Own { peer: &Peer::default(), terminal: Some(("vt100", None)), original: Some("ls".into()) };
        let env = build(&account, &wishes, own);
        let get = |name: &str| env.get(&OsString::from(name)).and_then(|value| value.to_str());
        assert_eq!(get("HOME"), Some("/home/ann"));
        assert_eq!(get("PATH"), Some("/bin"));
        assert_eq!(get("TERM"), Some("vt100"));
        assert_eq!(get("SSH_ORIGINAL_COMMAND"), Some("ls"));
        assert_eq!(get("SSH_AUTH_SOCK"), None);
    }
}
