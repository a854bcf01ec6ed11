//! `POST /files/replace`: literal replace-all in place of a stream editor.
//!
//! Two passes over the file, one to learn how large the result gets and one to write it into a stage.
//! Invariant: memory grows neither with the file nor with the result, only with the request.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use memchr::memmem::Finder;
use serde_json::{Map, Value, json};

use super::Scope;
use super::edit::{Permission, entries};
use super::stage::Stage;
use crate::envs::NonblockingOpen;
use crate::http::reply::{self, Failure, Outcome};

/// A larger file is not one that anybody edits this way, and nothing that is left behind may be larger either:
/// a short request could otherwise fill the disk.
const MAX_FILE: u64 = 1 << 30;
const CHUNK: usize = 256 << 10;

pub(super) async fn replace(scope: Scope, body: Value, verbose: bool) -> Outcome {
    let mut counts = Map::new();
    for (raw, change) in entries(body)? {
        let old = change.string("old")?.unwrap_or_default();
        let new = change.string("new")?.unwrap_or_default();
        if old.is_empty() {
            return Err(Failure::invalid(format!("{raw}: old must not be empty")));
        }
        let (view, path) = (scope.clone(), scope.path(&raw)?);
        let work = move || replace_in(&view, &path, old.as_bytes(), new.as_bytes());
        let count = scope.blocking(work).await?;
        counts.insert(raw, json!({ "replacedCount": count }));
    }
    Ok(if verbose { reply::json(&counts) } else { reply::empty() })
}

fn replace_in(scope: &Scope, path: &Path, old: &[u8], new: &[u8]) -> Result<u64, Failure> {
    let mut file = open(path)?;
    let size = result_size(&mut file, path, old, new.len() as u64)?;
    if size > MAX_FILE {
        return Err(Failure::invalid(format!(
            "{}: the result would be {size} bytes, over the limit of {MAX_FILE}",
            path.display()
        )));
    }
    file.rewind().map_err(|e| Failure::io("read", path, &e).as_runtime())?;
    let mut stage = Stage::create(scope, path)?;
    let count = write_result(&mut file, path, old, new, |bytes| stage.write(bytes))?;
    stage.commit(&Permission::default())?;
    Ok(count)
}

fn open(path: &Path) -> Result<File, Failure> {
    let failed = |e: io::Error| Failure::io("open", path, &e);
    let file: File =
        std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(Failure::runtime(format!("{}: not a regular file", path.display())));
    }
    if meta.len() > MAX_FILE {
        return Err(too_large(path));
    }
    Ok(file)
}

fn too_large(path: &Path) -> Failure {
    Failure::runtime(format!("{}: too large to edit, over {MAX_FILE} bytes", path.display()))
}

fn result_size(file: impl Read, path: &Path, old: &[u8], new_len: u64) -> Result<u64, Failure> {
    let (mut kept, mut matches) = (0_u64, 0_u64);
    scan(file, path, old, |piece| {
        match piece {
            Piece::Text(text) => kept += text.len() as u64,
            Piece::Match => matches += 1,
        }
        Ok(())
    })?;
    Ok(matches.saturating_mul(new_len).saturating_add(kept))
}

/// Returns the number of replacements. The file may have changed since it was measured, so the limit is kept here too.
fn write_result(
    file: impl Read,
    path: &Path,
    old: &[u8],
    new: &[u8],
    mut write: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let (mut count, mut size) = (0_u64, 0_u64);
    let mut pending = Vec::with_capacity(CHUNK);
    scan(file, path, old, |piece| {
        let bytes = match piece {
            Piece::Text(text) => text,
            Piece::Match => {
                count += 1;
                new
            }
        };
        size += bytes.len() as u64;
        if size > MAX_FILE {
            return Err(too_large(path));
        }
        if pending.len() + bytes.len() > CHUNK {
            write(&pending)?;
            pending.clear();
        }
        if bytes.len() >= CHUNK {
            return write(bytes);
        }
        pending.extend_from_slice(bytes);
        Ok(())
    })?;
    write(&pending)?;
    Ok(count)
}

/// What a scan finds, in the order of the text.
enum Piece<'a> {
    Text(&'a [u8]),
    Match,
}

/// Cuts what `reader` gives at every match of `old`, from left to right and without overlaps.
fn scan(
    mut reader: impl Read,
    path: &Path,
    old: &[u8],
    mut sink: impl FnMut(Piece<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let finder = Finder::new(old);
    // At least half of the buffer is new in every round, however long `old` is.
    let mut buffer = vec![0; CHUNK.max(old.len().saturating_mul(2))];
    let (mut filled, mut total) = (0, 0_u64);
    loop {
        let (count, ended) = fill(&mut reader, &mut buffer[filled..])
            .map_err(|e| Failure::io("read", path, &e).as_runtime())?;
        filled += count;
        total += count as u64;
        if total > MAX_FILE {
            return Err(too_large(path));
        }
        let text = &buffer[..filled];
        let mut from = 0;
        while let Some(at) = finder.find(&text[from..]) {
            if at > 0 {
                sink(Piece::Text(&text[from..from + at]))?;
            }
            sink(Piece::Match)?;
            from += at + old.len();
        }
        if ended {
            return sink(Piece::Text(&text[from..]));
        }
        // A match may begin in the last bytes and end in what has not been read yet.
        let keep = from.max(filled.saturating_sub(old.len() - 1));
        sink(Piece::Text(&text[from..keep]))?;
        buffer.copy_within(keep..filled, 0);
        filled -= keep;
    }
}

/// Reads until the buffer is full or, which the flag tells, the file has ended.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<(usize, bool)> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => return Ok((filled, true)),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok((filled, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn substitute(text: &[u8], old: &[u8], new: &[u8]) -> (Vec<u8>, u64) {
        let mut out = Vec::new();
        let count = write_result(text, Path::new("/f"), old, new, |bytes| {
            out.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        assert_eq!(result_size(text, Path::new("/f"), old, new.len() as u64).unwrap(), out.len() as u64);
        (out, count)
    }

    #[test]
    fn matches_do_not_overlap() {
        assert_eq!(substitute(b"aaaa", b"aa", b"b"), (b"bb".to_vec(), 2));
        assert_eq!(substitute(b"aaaaa", b"aa", b""), (b"a".to_vec(), 2));
        assert_eq!(substitute(b"abc", b"x", b"y"), (b"abc".to_vec(), 0));
        assert_eq!(substitute(b"", b"x", b"y"), (b"".to_vec(), 0));
    }

    #[test]
    fn matches_across_chunks_are_found() {
        for shift in 0..8 {
            let mut text = vec![b'.'; CHUNK - shift];
            text.extend_from_slice(b"needle");
            text.resize(2 * CHUNK - shift, b'.');
            text.extend_from_slice(b"needleneedle");
            let plain = String::from_utf8(text.clone()).unwrap();
            assert_eq!(substitute(&text, b"needle", b"-"), (plain.replace("needle", "-").into_bytes(), 3));
            let (out, count) = substitute(&text, b".", b"::");
            assert_eq!(
                (out, count),
                (plain.replace('.', "::").into_bytes(), 2 * CHUNK as u64 - shift as u64 - 6)
            );
        }
        // Longer than a chunk, and repeating itself at the border.
        let long = "ab".repeat(CHUNK);
        let text = format!("ab{long}x{long}{long}y");
        assert_eq!(
            substitute(text.as_bytes(), long.as_bytes(), b"!"),
            (text.replace(&long, "!").into_bytes(), 3)
        );
        let big = "n".repeat(CHUNK + 1);
        assert_eq!(substitute(b"a.b.", b".", big.as_bytes()).0, format!("a{big}b{big}").into_bytes());
    }

    #[test]
    fn more_than_the_limit_is_refused() {
        let endless = || io::repeat(b'a');
        assert!(result_size(endless(), Path::new("/f"), b"x", 1).is_err());
        let mut written = 0;
        let new = vec![b'b'; 1 << 20];
        let grown = write_result(endless(), Path::new("/f"), b"a", &new, |bytes| {
            written += bytes.len() as u64;
            Ok(())
        });
        assert!(grown.is_err() && written <= MAX_FILE);
    }
}
