//! Users and groups, read from the box's own `/etc/passwd` and `/etc/group`.
//!
//! Never through libc: the agent is static and the box may hold a different libc, or none.
//! Invariant: a missing or damaged file is an empty table, not an error, so numeric ids always work.

use std::io::Read;
use std::path::Path;

use crate::envs::NonblockingOpen;

/// More than any real account file; bounds what a hostile image can make PID 1 read.
const MAX_FILE: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub name: String,
    pub gid: u32,
    pub members: Vec<String>,
}

/// Who a process runs as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: Option<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UnknownAccount {
    #[error("user \"{0}\" does not exist: no such entry in /etc/passwd of the image")]
    User(String),
    #[error("group \"{0}\" does not exist: no such entry in /etc/group of the image")]
    Group(String),
}

#[derive(Debug, Default, Clone)]
pub struct Accounts {
    users: Vec<User>,
    groups: Vec<Group>,
}

impl Accounts {
    /// Reads the tables below `/`. Called per use: the box may edit them at any time.
    pub fn load() -> Self {
        Self::parse(&read_text(Path::new("/etc/passwd")), &read_text(Path::new("/etc/group")))
    }

    pub fn parse(passwd: &str, group: &str) -> Self {
        Accounts {
            users: passwd.lines().filter_map(parse_user).collect(),
            groups: group.lines().filter_map(parse_group).collect(),
        }
    }

    pub fn user_by_name(&self, name: &str) -> Option<&User> {
        self.users.iter().find(|u| u.name == name)
    }

    pub fn user_by_uid(&self, uid: u32) -> Option<&User> {
        self.users.iter().find(|u| u.uid == uid)
    }

    pub fn group_by_name(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|g| g.name == name)
    }

    /// The name of a user id, or the number itself when the image does not name it.
    pub fn user_name(&self, uid: u32) -> String {
        self.user_by_uid(uid).map_or_else(|| uid.to_string(), |u| u.name.clone())
    }

    pub fn group_name(&self, gid: u32) -> String {
        self.groups.iter().find(|g| g.gid == gid).map_or_else(|| gid.to_string(), |g| g.name.clone())
    }

    fn memberships(&self, user: &str) -> Vec<u32> {
        self.groups.iter().filter(|g| g.members.iter().any(|m| m == user)).map(|g| g.gid).collect()
    }

    /// Docker's `USER` syntax: `name[:group]` or `uid[:gid]`. Empty means root.
    pub fn resolve(&self, user: &str) -> Result<Identity, UnknownAccount> {
        let (name, group) = match user.split_once(':') {
            Some((name, group)) => (name, Some(group).filter(|g| !g.is_empty())),
            None => (user, None),
        };
        let name = if name.is_empty() { "0" } else { name };
        let numeric = name.parse::<u32>().ok();
        let entry = self.user_by_name(name).or_else(|| numeric.and_then(|uid| self.user_by_uid(uid)));
        let mut identity = match (entry, numeric) {
            (Some(entry), _) => Identity {
                uid: entry.uid,
                gid: entry.gid,
                groups: self.memberships(&entry.name),
                home: Some(entry.home.clone()).filter(|h| !h.is_empty()),
            },
            (None, Some(uid)) => Identity { uid, ..Identity::default() },
            (None, None) => return Err(UnknownAccount::User(name.to_owned())),
        };
        if let Some(group) = group {
            identity.gid = match (self.group_by_name(group), group.parse::<u32>()) {
                (Some(found), _) => found.gid,
                (None, Ok(gid)) => gid,
                (None, Err(_)) => return Err(UnknownAccount::Group(group.to_owned())),
            };
            // An explicit group replaces the memberships, as in Docker.
            identity.groups.clear();
        }
        Ok(identity)
    }

    /// The identity of a `/command` request: ids only, groups of the named user if there is one.
    pub fn for_ids(&self, uid: u32, gid: Option<u32>) -> Identity {
        let mut identity = match self.user_by_uid(uid) {
            Some(user) => Identity {
                uid,
                gid: user.gid,
                groups: self.memberships(&user.name),
                home: Some(user.home.clone()),
            },
            None => Identity { uid, ..Identity::default() },
        };
        if let Some(gid) = gid {
            identity.gid = gid;
        }
        identity
    }
}

pub(crate) fn read_text(path: &Path) -> String {
    let mut bytes = Vec::new();
    let opened = std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path);
    if let Ok(file) = opened
        && file.metadata().is_ok_and(|meta| meta.is_file())
    {
        // A read error half way leaves the entries read so far, which is the best that can be done.
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parse_user(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next()?.trim();
    let _password = fields.next()?;
    let uid = fields.next()?.trim().parse().ok()?;
    let gid = fields.next()?.trim().parse().ok()?;
    let _gecos = fields.next();
    let home = fields.next().unwrap_or("").to_owned();
    if name.is_empty() || name.starts_with('#') {
        return None;
    }
    Some(User { name: name.to_owned(), uid, gid, home })
}

fn parse_group(line: &str) -> Option<Group> {
    let mut fields = line.split(':');
    let name = fields.next()?.trim();
    let _password = fields.next()?;
    let gid = fields.next()?.trim().parse().ok()?;
    if name.is_empty() || name.starts_with('#') {
        return None;
    }
    let members = fields.next().unwrap_or("");
    let members = members.split(',').map(str::trim).filter(|m| !m.is_empty()).map(str::to_owned).collect();
    Some(Group { name: name.to_owned(), gid, members })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\n\n# note\nbad line\nann:x:1000:1000::/home/ann:/bin/sh\nx:y:z:1\n";
    const GROUP: &str = "root:x:0:\nann:x:1000:\nwheel:x:10:root,ann\n";

    #[test]
    fn docker_user_syntax_resolves() {
        let accounts = Accounts::parse(PASSWD, GROUP);
        let id = |uid, gid, groups: &[u32], home: Option<&str>| Identity {
            uid,
            gid,
            groups: groups.to_vec(),
            home: home.map(str::to_owned),
        };
        assert_eq!(accounts.resolve("").unwrap(), id(0, 0, &[10], Some("/root")));
        assert_eq!(accounts.resolve("ann").unwrap(), id(1000, 1000, &[10], Some("/home/ann")));
        assert_eq!(accounts.resolve("1000").unwrap(), id(1000, 1000, &[10], Some("/home/ann")));
        assert_eq!(accounts.resolve("ann:wheel").unwrap(), id(1000, 10, &[], Some("/home/ann")));
        assert_eq!(accounts.resolve("5:7").unwrap(), id(5, 7, &[], None));
        assert_eq!(accounts.resolve("bob"), Err(UnknownAccount::User("bob".into())));
        assert_eq!(accounts.resolve("ann:nope"), Err(UnknownAccount::Group("nope".into())));
    }

    #[test]
    fn empty_tables_still_resolve_numbers() {
        let accounts = Accounts::default();
        assert_eq!(accounts.resolve("").unwrap(), Identity::default());
        assert_eq!(accounts.for_ids(7, Some(8)).gid, 8);
        assert_eq!(accounts.user_name(3), "3");
    }
}
