//! What a file is: the FileInfo shape, and modes spelled as octal digits in decimal.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::Scope;
use crate::accounts::Accounts;
use crate::http::reply::{self, Failure, Outcome};

#[derive(Debug, Serialize)]
pub(super) struct FileInfo {
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    modified_at: String,
    created_at: String,
    owner: String,
    group: String,
    mode: u32,
}

impl FileInfo {
    pub(super) fn new(path: String, meta: &Metadata, accounts: &Accounts) -> Self {
        let kind = match meta.file_type() {
            t if t.is_symlink() => "symlink",
            t if t.is_dir() => "directory",
            t if t.is_file() => "file",
            _ => "other",
        };
        FileInfo {
            path,
            kind,
            size: meta.size(),
            modified_at: time(meta.mtime(), meta.mtime_nsec()),
            created_at: time(meta.ctime(), meta.ctime_nsec()),
            owner: accounts.user_name(meta.uid()),
            group: accounts.group_name(meta.gid()),
            mode: mode_as_decimal(meta.mode()),
        }
    }
}

fn time(seconds: i64, nanos: i64) -> String {
    let nanos = i32::try_from(nanos).unwrap_or(0);
    // Outside jiff's range only on a damaged file system; a client needs some parsable time there too.
    jiff::Timestamp::new(seconds, nanos).unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string()
}

/// 0o755 becomes 755.
pub(super) fn mode_as_decimal(mode: u32) -> u32 {
    (mode >> 6 & 7) * 100 + (mode >> 3 & 7) * 10 + (mode & 7)
}

/// 755 becomes 0o755; `None` for anything that is not octal digits.
pub(super) fn mode_from_decimal(mode: i64) -> Option<u32> {
    let digits = u32::try_from(mode).ok().filter(|m| *m <= 7777)?;
    let mut value = 0;
    for divisor in [1000, 100, 10, 1] {
        let digit = digits / divisor % 10;
        if digit > 7 {
            return None;
        }
        value = value * 8 + digit;
    }
    Some(value)
}

/// `GET /files/info`: every path asked for, keyed as asked; the first missing one fails the request.
pub(super) async fn info(scope: Scope, paths: Vec<String>) -> Outcome {
    let view = scope.clone();
    let work = move || {
        let accounts = Accounts::load();
        let mut map = Map::new();
        for raw in paths {
            let path = scope.path(&raw)?;
            let meta = path.symlink_metadata().map_err(|e| missing_or(&path, &e))?;
            let info = FileInfo::new(path.to_string_lossy().into_owned(), &meta, &accounts);
            map.insert(raw, serde_json::to_value(info).unwrap_or(Value::Null));
        }
        Ok(map)
    };
    Ok(reply::json(&view.blocking(work).await?))
}

/// A path below a plain file is missing too, as far as a client is concerned.
pub(super) fn missing_or(path: &Path, error: &std::io::Error) -> Failure {
    if error.kind() == std::io::ErrorKind::NotADirectory {
        return Failure::not_found(format!("{}: file not found", path.display()));
    }
    Failure::io("stat", path, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_digits_in_decimal() {
        assert_eq!(mode_as_decimal(0o100_644), 644);
        assert_eq!(mode_as_decimal(0o4755), 755);
        assert_eq!(mode_from_decimal(755), Some(0o755));
        assert_eq!(mode_from_decimal(1777), Some(0o1777));
        assert_eq!(mode_from_decimal(688), None);
        assert_eq!(mode_from_decimal(-1), None);
        assert_eq!(mode_from_decimal(77777), None);
    }
}
