//! The process environment behind a trait, so that tests pass a map instead of changing the real one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

/// Read access to environment variables.
pub trait Environment {
    /// The raw value; `None` when the variable is not defined.
    fn get(&self, name: &str) -> Option<OsString>;

    /// The names of all variables (those that are not UTF-8 can be left out).
    fn names(&self) -> Vec<String>;

    /// What `~` stands for.
    fn home(&self) -> Option<PathBuf> {
        self.get("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
    }
}

/// The real environment.
#[derive(Clone, Copy, Debug)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    fn get(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    fn names(&self) -> Vec<String> {
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect()
    }

    /// `HOME`, else the password file: system services are often started without `HOME`.
    fn home(&self) -> Option<PathBuf> {
        let from_variable = self.get("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        from_variable.or_else(|| {
            let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
            home_in_passwd(&passwd, rustix::process::getuid().as_raw())
        })
    }
}

fn home_in_passwd(passwd: &str, uid: u32) -> Option<PathBuf> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let matches = fields.get(2)?.parse() == Ok(uid);
        let home = fields.get(5).filter(|home| home.starts_with('/'))?;
        matches.then(|| PathBuf::from(home))
    })
}

impl Environment for BTreeMap<String, String> {
    fn get(&self, name: &str) -> Option<OsString> {
        BTreeMap::get(self, name).map(OsString::from)
    }

    fn names(&self) -> Vec<String> {
        self.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_of_a_service_without_home_comes_from_the_password_file() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nsand:x:7:7::/home/sand:/bin/sh\n";
        assert_eq!(home_in_passwd(passwd, 7), Some(PathBuf::from("/home/sand")));
        assert_eq!(home_in_passwd(passwd, 8), None);
    }
}
