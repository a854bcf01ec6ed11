//! How files look to the peer: their attributes, and a line like that of `ls -l`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::fs::{FileType, Stat};

use super::wire::Attributes;

pub(super) fn attributes(stat: &Stat) -> Attributes {
    let seconds = |time: i64| u32::try_from(time.max(0)).unwrap_or(u32::MAX);
    Attributes {
        size: u64::try_from(stat.st_size).ok(),
        owner: Some((stat.st_uid, stat.st_gid)),
        permissions: Some(stat.st_mode),
        times: Some((seconds(stat.st_atime), seconds(stat.st_mtime))),
    }
}

/// Names of users and groups, where the sandbox has any.
#[derive(Debug, Default)]
pub(super) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    pub(super) fn load() -> Self {
        let table = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let entry = |line: &str| {
                let mut fields = line.split(':');
                let name = fields.next()?.to_owned();
                Some((fields.nth(1)?.parse().ok()?, name))
            };
            text.lines().filter_map(entry).collect()
        };
        Names { users: table("/etc/passwd"), groups: table("/etc/group") }
    }

    pub(super) fn line(&self, name: &OsStr, stat: &Stat) -> Vec<u8> {
        let named =
            |names: &HashMap<u32, String>, id: u32| names.get(&id).cloned().unwrap_or_else(|| id.to_string());
        let (user, group) = (named(&self.users, stat.st_uid), named(&self.groups, stat.st_gid));
        let (mode, links, size) = (permissions(stat), stat.st_nlink, stat.st_size);
        let date = date(stat.st_mtime);
        let mut line = format!("{mode} {links:>4} {user:<8} {group:<8} {size:>8} {date} ").into_bytes();
        // A line that does not end where it should could pretend to be two.
        line.extend(name.as_bytes().iter().map(|byte| if byte.is_ascii_control() { b'?' } else { *byte }));
        line
    }
}

fn date(seconds: i64) -> String {
    let Ok(time) = Timestamp::from_second(seconds) else { return "Jan  1  1970".to_owned() };
    let age = Timestamp::now().as_second() - seconds;
    let recent = (0..182 * 86400).contains(&age);
    let time = time.to_zoned(TimeZone::UTC);
    time.strftime(if recent { "%b %e %H:%M" } else { "%b %e  %Y" }).to_string()
}

fn permissions(stat: &Stat) -> String {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => '-',
        FileType::Directory => 'd',
        FileType::Symlink => 'l',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::CharacterDevice => 'c',
        FileType::BlockDevice => 'b',
        FileType::Unknown => '?',
    };
    let mut text = String::from(kind);
    for (shift, special, mark) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = stat.st_mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, stat.st_mode & special != 0) {
            (true, true) => mark,
            (false, true) => mark.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_line_looks_like_that_of_ls() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "abc").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4751)).unwrap();
        let stat = rustix::fs::stat(&path).unwrap();
        let names = Names {
            users: HashMap::from([(stat.st_uid, "ann".into())]),
            groups: HashMap::from([(stat.st_gid, "staff".into())]),
        };
        let line = String::from_utf8(names.line(OsStr::new("a\nb"), &stat)).unwrap();
        assert!(line.starts_with("-rwsr-x--x    1 ann      staff           3 "), "{line}");
        assert!(line.ends_with(" a?b"), "{line}");
    }
}
