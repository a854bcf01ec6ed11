//! `POST /files/replace`: literal replace-all in place of a stream editor.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use memchr::memmem;
use serde_json::{Map, Value, json};

use super::edit::entries;
use super::stage::Stage;
use super::{Scope, blocking};
use crate::envs::NonblockingOpen;
use crate::http::reply::{self, Failure, Outcome};

/// A text is edited in memory; a larger file is not one that anybody edits this way.
const MAX_FILE: u64 = 256 << 20;

pub(super) async fn replace(scope: Scope, body: Value, verbose: bool) -> Outcome {
    let entries = entries(body)?;
    let counts = blocking(move || {
        let mut counts = Map::new();
        for (raw, change) in entries {
            let old = change.string("old")?.unwrap_or_default();
            let new = change.string("new")?.unwrap_or_default();
            if old.is_empty() {
                return Err(Failure::invalid(format!("{raw}: old must not be empty")));
            }
            let path = scope.path(&raw)?;
            let (text, count) = substitute(&read(&path)?, old.as_bytes(), new.as_bytes());
            let mut stage = Stage::create(&scope, &path)?;
            stage.write(&text)?;
            stage.commit()?;
            counts.insert(raw, json!({ "replacedCount": count }));
        }
        Ok(counts)
    })
    .await?;
    Ok(if verbose { reply::json(&counts) } else { reply::empty() })
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: std::io::Error| Failure::io("open", path, &e);
    let file: File =
        std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(Failure::runtime(format!("{}: not a regular file", path.display())));
    }
    if meta.len() > MAX_FILE {
        return Err(Failure::runtime(format!(
            "{}: too large to edit, over {MAX_FILE} bytes",
            path.display()
        )));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn substitute(text: &[u8], old: &[u8], new: &[u8]) -> (Vec<u8>, usize) {
    let mut out = Vec::with_capacity(text.len());
    let (mut from, mut count) = (0, 0);
    for at in memmem::find_iter(text, old) {
        out.extend_from_slice(&text[from..at]);
        out.extend_from_slice(new);
        from = at + old.len();
        count += 1;
    }
    out.extend_from_slice(&text[from..]);
    (out, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_do_not_overlap() {
        assert_eq!(substitute(b"aaaa", b"aa", b"b"), (b"bb".to_vec(), 2));
        assert_eq!(substitute(b"abc", b"x", b"y"), (b"abc".to_vec(), 0));
    }
}
