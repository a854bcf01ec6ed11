//! Sending files: whole, a byte range, or a range of lines. Constant memory whatever the size.

use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderValue,
    IF_MODIFIED_SINCE, IF_RANGE, LAST_MODIFIED, RANGE,
};
use http::{Response, StatusCode};

use super::info::missing_or;
use super::{Scope, blocking};
use crate::envs::NonblockingOpen as _;
use crate::http::body::{Body, ChunkSender};
use crate::http::query::Query;
use crate::http::reply::{self, Code, Failure, Outcome, Reply};

const CHUNK: usize = 256 * 1024;
/// Chunks in flight between the reader and the connection.
const DEPTH: usize = 4;
/// Longest line that a line range may contain; longer ones are refused rather than held in memory.
const MAX_LINE: u64 = 64 << 20;

/// `GET /files/download`
pub(super) async fn download(scope: Scope, query: &Query, headers: &HeaderMap) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let lines = line_range(query)?;
    let range = headers.get(RANGE).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    if lines.is_some() && range.is_some() {
        return Err(Failure::invalid("offset/limit cannot be combined with a Range header"));
    }
    let (path, file, meta) = blocking(move || open(scope.path(&raw)?)).await?;
    if let Some(lines) = lines {
        return Ok(send_lines(file, lines));
    }
    let modified = jiff::Timestamp::from_second(std::os::unix::fs::MetadataExt::mtime(&meta)).ok();
    let stamp = modified.map(http_date).unwrap_or_default();
    let header = |name| headers.get(name).and_then(|v| v.to_str().ok());
    // A range for another version of the file is answered with the whole of this one.
    let range = range.filter(|_| header(IF_RANGE).is_none_or(|wanted| wanted == stamp));
    if range.is_none() && header(IF_MODIFIED_SINCE).is_some_and(|since| since == stamp) {
        return Ok(reply::bare(StatusCode::NOT_MODIFIED));
    }
    match range {
        None => Ok(send_whole(&path, file, meta.len(), &stamp)),
        Some(range) => send_range(&path, file, meta.len(), &range),
    }
}

fn open(path: PathBuf) -> Result<(PathBuf, File, Metadata), Failure> {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags_nonblocking()
        .open(&path)
        .map_err(|e| missing_or(&path, &e))?;
    let meta = file.metadata().map_err(|e| Failure::io("stat", &path, &e))?;
    if meta.is_dir() {
        return Err(Failure::runtime(format!("{} is a directory", path.display())));
    }
    if !meta.is_file() {
        return Err(Failure::runtime(format!("{} is not a regular file", path.display())));
    }
    Ok((path, file, meta))
}

fn attachment(path: &Path, body: Body, status: StatusCode, length: u64) -> Reply {
    let mut reply = reply::with_type(status, "application/octet-stream", body);
    let headers = reply.headers_mut();
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    if let Ok(value) = HeaderValue::try_from(disposition(path)) {
        headers.insert(CONTENT_DISPOSITION, value);
    }
    reply
}

fn disposition(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let plain = name.chars().all(|c| c.is_ascii_graphic() && c != '"' && c != '\\' || c == ' ');
    if plain {
        return format!("attachment; filename=\"{name}\"");
    }
    let encoded: String = name
        .bytes()
        .map(|b| match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(b).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect();
    format!("attachment; filename=\"{encoded}\"; filename*=UTF-8''{encoded}")
}

fn http_date(at: jiff::Timestamp) -> String {
    at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

fn send_whole(path: &Path, file: File, length: u64, stamp: &str) -> Reply {
    let mut reply = attachment(path, stream(file, 0, length), StatusCode::OK, length);
    reply.headers_mut().insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Ok(value) = HeaderValue::from_str(stamp) {
        reply.headers_mut().insert(LAST_MODIFIED, value);
    }
    reply
}

fn send_range(path: &Path, file: File, size: u64, range: &str) -> Outcome {
    match parse_range(range, size) {
        Ok(Some((first, last))) => {
            let length = last - first + 1;
            let mut reply =
                attachment(path, stream(file, first, length), StatusCode::PARTIAL_CONTENT, length);
            if let Ok(value) = HeaderValue::try_from(format!("bytes {first}-{last}/{size}")) {
                reply.headers_mut().insert(CONTENT_RANGE, value);
            }
            Ok(reply)
        }
        unsatisfiable => {
            let why = match unsatisfiable {
                Ok(_) => "the range starts beyond the end of the file".to_owned(),
                Err(()) => "the Range header is malformed".to_owned(),
            };
            let failure = Failure::new(StatusCode::RANGE_NOT_SATISFIABLE, Code::Unknown, why);
            let mut reply: Response<Body> = failure.into_reply();
            if let Ok(value) = HeaderValue::try_from(format!("bytes */{size}")) {
                reply.headers_mut().insert(CONTENT_RANGE, value);
            }
            Ok(reply)
        }
    }
}

/// The first satisfiable range as first and last byte; `None` when none is, an error when the header is malformed.
pub(super) fn parse_range(header: &str, size: u64) -> Result<Option<(u64, u64)>, ()> {
    let list = header.trim().strip_prefix("bytes=").ok_or(())?;
    let mut chosen = None;
    let mut any = false;
    for part in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        any = true;
        let (first, last) = part.split_once('-').ok_or(())?;
        let (first, last) = (first.trim(), last.trim());
        let number = |text: &str| {
            if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
                Err(())
            } else {
                Ok(text.parse().unwrap_or(u64::MAX))
            }
        };
        let range = if first.is_empty() {
            let length = number(last)?.min(size);
            (length > 0).then(|| (size - length, size - 1))
        } else {
            let first: u64 = number(first)?;
            let last = if last.is_empty() { u64::MAX } else { number(last)? };
            if last < first {
                return Err(());
            }
            (first < size).then(|| (first, last.min(size - 1)))
        };
        chosen = chosen.or(range);
    }
    if any { Ok(chosen) } else { Err(()) }
}

/// Reads on a blocking thread, one chunk ahead of the client at most by the channel's depth.
fn stream(file: File, from: u64, length: u64) -> Body {
    let (tx, body) = Body::channel(DEPTH, Some(length));
    tokio::task::spawn_blocking(move || {
        let mut at = from;
        let end = from + length;
        while at < end {
            let want = usize::try_from((end - at).min(CHUNK as u64)).unwrap_or(CHUNK);
            let mut chunk = vec![0; want];
            match file.read_at(&mut chunk, at) {
                // Shorter than promised: the file was cut meanwhile. The client must see a broken body.
                Ok(0) => return send(&tx, Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => {
                    chunk.truncate(n);
                    at += n as u64;
                    if tx.blocking_send(Ok(Bytes::from(chunk))).is_err() {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return send(&tx, Err(e)),
            }
        }
    });
    body
}

fn send(tx: &ChunkSender, last: io::Result<Bytes>) {
    // The client may have left; nothing else is to be done.
    let _ = tx.blocking_send(last);
}

/// One-based first line, and how many.
#[derive(Clone, Copy)]
struct Lines {
    offset: u64,
    limit: Option<u64>,
}

fn line_range(query: &Query) -> Result<Option<Lines>, Failure> {
    let number = |name: &str| match query.get(name) {
        None | Some("") => Ok(None),
        Some(text) => match text.parse::<u64>() {
            Ok(n) if n >= 1 => Ok(Some(n)),
            _ => Err(Failure::invalid(format!("{name} must be an integer of at least 1, not {text:?}"))),
        },
    };
    let (offset, limit) = (number("offset")?, number("limit")?);
    Ok((offset.is_some() || limit.is_some()).then(|| Lines { offset: offset.unwrap_or(1), limit }))
}

fn send_lines(file: File, lines: Lines) -> Reply {
    let (tx, body) = Body::channel(DEPTH, None);
    tokio::task::spawn_blocking(move || {
        if let Err(error) = feed_lines(file, lines, &tx) {
            send(&tx, Err(error));
        }
    });
    reply::with_type(StatusCode::OK, reply::TEXT, body)
}

/// Lines joined by one newline, without their own endings.
fn feed_lines(mut file: File, lines: Lines, tx: &ChunkSender) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::with_capacity(CHUNK, file);
    let mut out = Vec::with_capacity(CHUNK);
    let mut number = 0;
    let last = lines.limit.map_or(u64::MAX, |n| lines.offset.saturating_add(n - 1));
    let mut line = Vec::new();
    while number < last {
        line.clear();
        if reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        number += 1;
        if number < lines.offset {
            continue;
        }
        while line.last().is_some_and(|b| matches!(b, b'\n' | b'\r')) {
            line.pop();
        }
        if number > lines.offset {
            out.push(b'\n');
        }
        out.extend_from_slice(&line);
        if out.len() >= CHUNK && tx.blocking_send(Ok(Bytes::from(std::mem::take(&mut out)))).is_err() {
            return Ok(());
        }
    }
    if !out.is_empty() {
        send(tx, Ok(Bytes::from(out)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(parse_range("bytes=0-9", 100), Ok(Some((0, 9))));
        assert_eq!(parse_range("bytes=90-", 100), Ok(Some((90, 99))));
        assert_eq!(parse_range("bytes=-10", 100), Ok(Some((90, 99))));
        assert_eq!(parse_range("bytes=-1000", 100), Ok(Some((0, 99))));
        assert_eq!(parse_range("bytes=0-1000", 100), Ok(Some((0, 99))));
        assert_eq!(parse_range("bytes=200-,5-6", 100), Ok(Some((5, 6))));
        assert_eq!(parse_range("bytes=100-", 100), Ok(None));
        assert_eq!(parse_range("bytes=-0", 100), Ok(None));
        assert_eq!(parse_range("bytes=0-0", 0), Ok(None));
        for bad in ["", "bytes", "bytes=", "lines=1-2", "bytes=a-b", "bytes=5-3", "bytes=5", "bytes=--5"] {
            assert_eq!(parse_range(bad, 100), Err(()), "{bad}");
        }
    }

    #[test]
    fn names_in_headers() {
        assert_eq!(disposition(Path::new("/a/b c.txt")), "attachment; filename=\"b c.txt\"");
        assert_eq!(
            disposition(Path::new("/ä\".txt")),
            "attachment; filename=\"%C3%A4%22.txt\"; filename*=UTF-8''%C3%A4%22.txt"
        );
    }
}
