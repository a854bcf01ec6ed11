//! `GET /files/download`: whole files, byte ranges, conditional requests and line windows, all streamed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderName, HeaderValue,
    IF_MODIFIED_SINCE, IF_RANGE, IF_UNMODIFIED_SINCE, LAST_MODIFIED, RANGE,
};
use http::{Response, StatusCode};
use jiff::Timestamp;

use super::{Scope, blocking};
use crate::envs::NonblockingOpen;
use crate::http::body::{Body, ChunkSender};
use crate::http::query::Query;
use crate::http::reply::{self, Code, Failure, Outcome};

const CHUNK: u64 = 256 << 10;
const DATE: &str = "%a, %d %b %Y %H:%M:%S GMT";
const OCTETS: &str = "application/octet-stream";
/// How much of a file that claims to be empty (as those of /proc do) is read to find out.
const PROBE: usize = 1 << 20;

struct Source {
    file: Arc<File>,
    size: u64,
    modified: i64,
    /// The content of a file whose size says nothing.
    probed: Option<Vec<u8>>,
}

pub(super) async fn download(scope: Scope, query: &Query, headers: &HeaderMap) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let lines = line_window(query)?;
    let range = headers.get(RANGE).and_then(|v| v.to_str().ok()).map(str::to_owned);
    if lines.is_some() && range.is_some() {
        return Err(Failure::invalid("offset and limit cannot be combined with a Range header"));
    }
    let path = scope.path(&raw)?;
    let opened = path.clone();
    let source = blocking(move || open(&opened)).await?;
    if let Some((offset, limit)) = lines {
        return Ok(window(source, offset, limit));
    }
    Ok(content(source, &path, range.as_deref(), headers))
}

fn line_window(query: &Query) -> Result<Option<(u64, u64)>, Failure> {
    let number = |name: &str| match query.get(name).filter(|v| !v.is_empty()) {
        None => Ok(None),
        Some(text) => match text.parse::<u64>() {
            Ok(value) if value > 0 => Ok(Some(value)),
            _ => Err(Failure::invalid(format!("{name} must be a positive integer, not {text:?}"))),
        },
    };
    match (number("offset")?, number("limit")?) {
        (None, None) => Ok(None),
        (offset, limit) => Ok(Some((offset.unwrap_or(1), limit.unwrap_or(u64::MAX)))),
    }
}

fn open(path: &Path) -> Result<Source, Failure> {
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::NotADirectory => Failure::not_found(format!("{}: file not found", path.display())),
        _ => Failure::io("open", path, &e),
    };
    let file =
        std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "is a directory" } else { "not a regular file" };
        return Err(Failure::runtime(format!("open {}: {what}", path.display())));
    }
    let (mut size, mut probed) = (meta.size(), None);
    if size == 0 {
        let bytes = probe(&file).map_err(failed)?;
        size = bytes.len() as u64;
        probed = Some(bytes);
    }
    Ok(Source { file: Arc::new(file), size, modified: meta.mtime(), probed })
}

fn probe(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(PROBE as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn content(source: Source, path: &Path, range: Option<&str>, headers: &HeaderMap) -> reply::Reply {
    let since = |name: HeaderName| headers.get(name).and_then(parse_date);
    if since(IF_UNMODIFIED_SINCE).is_some_and(|limit| source.modified > limit) {
        return reply::bare(StatusCode::PRECONDITION_FAILED);
    }
    if range.is_none() && since(IF_MODIFIED_SINCE).is_some_and(|limit| source.modified <= limit) {
        let mut reply = Response::new(Body::Empty);
        *reply.status_mut() = StatusCode::NOT_MODIFIED;
        set_date(&mut reply, source.modified);
        return reply;
    }
    // A range of an older version is of no use: the whole file is sent instead.
    let fresh = headers.get(IF_RANGE).is_none_or(|v| parse_date(v) == Some(source.modified));
    let wanted = match range.filter(|_| fresh) {
        None => Wanted::All,
        Some(text) => parse_range(text, source.size),
    };
    let size = source.size;
    let (status, from, len) = match wanted {
        Wanted::All => (StatusCode::OK, 0, size),
        Wanted::Part { from, len } => (StatusCode::PARTIAL_CONTENT, from, len),
        Wanted::Malformed => {
            return Failure::new(StatusCode::RANGE_NOT_SATISFIABLE, Code::Unknown, "malformed Range header")
                .into_reply();
        }
        Wanted::Beyond => {
            let mut reply = Failure::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                Code::Unknown,
                format!("range starts beyond the end of the file ({size} bytes)"),
            )
            .into_reply();
            set(&mut reply, CONTENT_RANGE, &format!("bytes */{size}"));
            return reply;
        }
    };
    let modified = source.modified;
    let mut reply = reply::with_type(status, OCTETS, bytes_body(source, from, len));
    set(&mut reply, CONTENT_LENGTH, &len.to_string());
    set(&mut reply, CONTENT_DISPOSITION, &disposition(path));
    set(&mut reply, ACCEPT_RANGES, "bytes");
    set_date(&mut reply, modified);
    if status == StatusCode::PARTIAL_CONTENT {
        set(&mut reply, CONTENT_RANGE, &format!("bytes {from}-{}/{size}", from + len - 1));
    }
    reply
}

fn set(reply: &mut reply::Reply, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

fn set_date(reply: &mut reply::Reply, seconds: i64) {
    if let Ok(at) = Timestamp::from_second(seconds) {
        set(reply, LAST_MODIFIED, &at.to_zoned(jiff::tz::TimeZone::UTC).strftime(DATE).to_string());
    }
}

fn parse_date(value: &HeaderValue) -> Option<i64> {
    let civil = jiff::civil::DateTime::strptime(DATE, value.to_str().ok()?.trim()).ok()?;
    Some(civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp().as_second())
}

fn disposition(path: &Path) -> String {
    let name = path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '%') || c == ' ';
    if name.chars().all(plain) {
        return format!("attachment; filename=\"{name}\"");
    }
    let unreserved = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~');
    let encoded: String = name
        .bytes()
        .map(|b| if unreserved(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect();
    format!("attachment; filename=\"{encoded}\"; filename*=UTF-8''{encoded}")
}

/// What part of a file a Range header asks for.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    All,
    Part { from: u64, len: u64 },
    Malformed,
    Beyond,
}

/// Of several ranges the first that can be served counts.
fn parse_range(text: &str, size: u64) -> Wanted {
    let Some(list) = text.trim().strip_prefix("bytes=") else { return Wanted::Malformed };
    let digits = |text: &str| {
        let text = text.trim();
        // `parse` alone would accept a plus sign.
        text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten()
    };
    let mut first = None;
    let mut any = false;
    for part in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        any = true;
        let Some((start, end)) = part.split_once('-') else { return Wanted::Malformed };
        let part = match (start.trim(), end.trim()) {
            ("", suffix) => match digits(suffix) {
                None => return Wanted::Malformed,
                Some(count) => {
                    let len = count.min(size);
                    (size - len, len)
                }
            },
            (start, end) => {
                let Some(from) = digits(start) else { return Wanted::Malformed };
                let last = match end {
                    "" => u64::MAX,
                    end => match digits(end) {
                        Some(last) if last >= from => last,
                        _ => return Wanted::Malformed,
                    },
                };
                (from, size.saturating_sub(from).min(last.saturating_sub(from).saturating_add(1)))
            }
        };
        if part.1 > 0 && first.is_none() {
            first = Some(part);
        }
    }
    match first {
        Some((from, len)) => Wanted::Part { from, len },
        None if any => Wanted::Beyond,
        None => Wanted::Malformed,
    }
}

fn bytes_body(source: Source, from: u64, len: u64) -> Body {
    if len == 0 {
        return Body::Empty;
    }
    if let Some(bytes) = source.probed {
        let (from, len) = (usize::try_from(from).unwrap_or(0), usize::try_from(len).unwrap_or(0));
        return Body::Full(Bytes::from(bytes).slice(from..from + len));
    }
    let (tx, body) = Body::channel(2, Some(len));
    tokio::spawn(async move {
        let (mut at, end) = (from, from + len);
        while at < end {
            let file = Arc::clone(&source.file);
            let want = usize::try_from((end - at).min(CHUNK)).unwrap_or(0);
            let read = tokio::task::spawn_blocking(move || read_piece(&file, at, want)).await;
            let chunk = read.unwrap_or_else(|e| Err(io::Error::other(e)));
            at += chunk.as_ref().map_or(end, |c| c.len() as u64);
            if tx.send(chunk).await.is_err() {
                return;
            }
        }
    });
    body
}

/// A file that got shorter breaks the answer off: its length has been promised.
fn read_piece(file: &File, at: u64, want: usize) -> io::Result<Bytes> {
    let mut buffer = vec![0; want];
    match file.read_at(&mut buffer, at)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => {
            buffer.truncate(count);
            Ok(buffer.into())
        }
    }
}

/// Lines `offset..offset+limit`, joined by newlines, without a last one.
fn window(source: Source, offset: u64, limit: u64) -> reply::Reply {
    if let Some(bytes) = source.probed {
        let mut out = Vec::new();
        // Reading from memory into memory cannot fail.
        let _ = copy_lines(&bytes[..], offset, limit, |piece| {
            out.extend_from_slice(piece);
            true
        });
        return reply::with_type(
            StatusCode::OK,
            reply::TEXT,
            if out.is_empty() { Body::Empty } else { Body::Full(out.into()) },
        );
    }
    let (tx, body) = Body::channel(2, None);
    tokio::task::spawn_blocking(move || {
        let reader = BufReader::with_capacity(64 << 10, WhileWanted { file: &source.file, tx: &tx });
        let mut out = Vec::new();
        let copied = copy_lines(reader, offset, limit, |piece| {
            out.extend_from_slice(piece);
            out.len() < CHUNK as usize || flush(&tx, &mut out)
        });
        let _ = match copied {
            Ok(()) => flush(&tx, &mut out),
            Err(error) => tx.blocking_send(Err(error)).is_ok(),
        };
    });
    reply::with_type(StatusCode::OK, reply::TEXT, body)
}

/// A file that cannot be read on once the client has left: finding a far line may take long and send nothing.
struct WhileWanted<'a> {
    file: &'a File,
    tx: &'a ChunkSender,
}

impl Read for WhileWanted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.tx.is_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.file.read(buffer)
    }
}

fn flush(tx: &ChunkSender, out: &mut Vec<u8>) -> bool {
    out.is_empty() || tx.blocking_send(Ok(std::mem::take(out).into())).is_ok()
}

/// Hands the window to `sink` in pieces until it returns false. Memory does not grow with the lines.
fn copy_lines(
    mut reader: impl BufRead,
    offset: u64,
    limit: u64,
    mut sink: impl FnMut(&[u8]) -> bool,
) -> io::Result<()> {
    let (mut line, mut started) = (1_u64, false);
    let last = offset.saturating_add(limit - 1);
    // Carriage returns are held back: at the end of a line they are dropped, elsewhere they are text.
    let mut returns = 0_usize;
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(());
        }
        let newline = memchr::memchr(b'\n', buffer);
        let piece = &buffer[..newline.unwrap_or(buffer.len())];
        if line >= offset {
            if !started && line > offset && !sink(b"\n") {
                return Ok(());
            }
            started = true;
            let text = piece.iter().rposition(|b| *b != b'\r').map_or(0, |at| at + 1);
            if text > 0 {
                for _ in 0..std::mem::take(&mut returns) {
                    if !sink(b"\r") {
                        return Ok(());
                    }
                }
                if !sink(&piece[..text]) {
                    return Ok(());
                }
            }
            returns += piece.len() - text;
        }
        let used = piece.len() + usize::from(newline.is_some());
        reader.consume(used);
        if newline.is_some() {
            (line, started, returns) = (line + 1, false, 0);
            if line > last {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let part = |from, len| Wanted::Part { from, len };
        assert_eq!(parse_range("bytes=0-4", 10), part(0, 5));
        assert_eq!(parse_range("bytes=5-", 10), part(5, 5));
        assert_eq!(parse_range("bytes=-3", 10), part(7, 3));
        assert_eq!(parse_range("bytes=-30", 10), part(0, 10));
        assert_eq!(parse_range("bytes=8-99", 10), part(8, 2));
        assert_eq!(parse_range("bytes=20-30, 1-2", 10), part(1, 2));
        assert_eq!(parse_range("bytes=10-", 10), Wanted::Beyond);
        assert_eq!(parse_range("bytes=0-18446744073709551615", 10), part(0, 10));
        for bad in
            ["bytes=", "bytes=a-b", "lines=1-2", "bytes=5-4", "bytes=1", "bytes=-", "bytes=+1-2", "bytes=--1"]
        {
            assert_eq!(parse_range(bad, 10), Wanted::Malformed, "{bad}");
        }
    }

    #[test]
    fn line_windows() {
        let cut = |text: &str, offset, limit, capacity| {
            let mut out = Vec::new();
            let reader = BufReader::with_capacity(capacity, text.as_bytes());
            copy_lines(reader, offset, limit, |piece| {
                out.extend_from_slice(piece);
                true
            })
            .unwrap();
            String::from_utf8(out).unwrap()
        };
        for capacity in [1, 2, 3, 100] {
            assert_eq!(cut("a\r\nb\n\nc\n", 1, u64::MAX, capacity), "a\nb\n\nc");
            assert_eq!(cut("a\r\nb\n\nc\n", 2, 2, capacity), "b\n");
            assert_eq!(cut("a\rb\r\r\nc", 1, 1, capacity), "a\rb");
            assert_eq!(cut("a\n", 5, 5, capacity), "");
            assert_eq!(cut("a\nb", 2, 1, capacity), "b");
        }
    }

    #[test]
    fn names_in_headers() {
        assert_eq!(disposition(Path::new("/a/b c.txt")), "attachment; filename=\"b c.txt\"");
        assert_eq!(
            disposition(Path::new("/é\".x")),
            "attachment; filename=\"%C3%A9%22.x\"; filename*=UTF-8''%C3%A9%22.x"
        );
    }

    #[test]
    fn dates_round_trip() {
        let value = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(parse_date(&value), Some(784_111_777));
        let mut reply = reply::empty();
        set_date(&mut reply, 784_111_777);
        assert_eq!(reply.headers()[LAST_MODIFIED], value);
    }
}
