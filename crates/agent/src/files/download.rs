//! `GET /files/download`: whole files, byte ranges, conditional requests and line windows, all streamed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
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

use super::Scope;
use super::pieces::{self, Piece, Pieces};
use super::range::{self, Wanted};
use crate::envs::NonblockingOpen;
use crate::http::body::Body;
use crate::http::query::Query;
use crate::http::reply::{self, Code, Failure, Outcome};

const CHUNK: u64 = 256 << 10;
const DATE: &str = "%a, %d %b %Y %H:%M:%S GMT";
const OCTETS: &str = "application/octet-stream";
/// A file that says it is no larger is read at once: it takes one trip less, and those of /proc and /sys, which do not
/// know their size, are told from others.
const SMALL: u64 = 64 << 10;
/// Looking for a far line lets others have their turn after so many bytes.
const SCAN: usize = 4 << 20;

struct Source {
    file: File,
    size: u64,
    modified: i64,
    held: Held,
}

/// How much of a file has been read already.
enum Held {
    Nothing,
    All(Vec<u8>),
    /// The beginning of one that goes on beyond its size.
    Beginning(Vec<u8>),
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
    let source = scope.blocking(move || open(&opened)).await?;
    if let Some((offset, limit)) = lines {
        let window = Window::new(source, offset, limit)?;
        return pieces::answer(scope, window, reply::TEXT).await;
    }
    let source = match source {
        Source { held: Held::Beginning(bytes), file, .. } => {
            let mut reply = pieces::answer(scope, Endless { at: 0, file, first: bytes }, OCTETS).await?;
            set(&mut reply, CONTENT_DISPOSITION, &disposition(&path));
            return Ok(reply);
        }
        source => source,
    };
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
    let (mut size, mut held) = (meta.size(), Held::Nothing);
    if size <= SMALL {
        let mut bytes = Vec::new();
        (&file).take(SMALL + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > SMALL {
            held = Held::Beginning(bytes);
        } else {
            size = bytes.len() as u64;
            held = Held::All(bytes);
        }
    }
    Ok(Source { file, size, modified: meta.mtime(), held })
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
        Some(text) => range::parse(text, source.size),
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

fn bytes_body(source: Source, from: u64, len: u64) -> Body {
    if len == 0 {
        return Body::Empty;
    }
    if let Held::All(bytes) = source.held {
        let (from, len) = (usize::try_from(from).unwrap_or(0), usize::try_from(len).unwrap_or(0));
        return Body::Full(Bytes::from(bytes).slice(from..from + len));
    }
    let (tx, body) = Body::channel(2, Some(len));
    let file = Arc::new(source.file);
    // Ends with the file or with its reader. Who may read it was decided when it was opened.
    tokio::spawn(async move {
        let (mut at, end) = (from, from + len);
        while at < end {
            let file = Arc::clone(&file);
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

/// A file that goes on for as long as it does.
struct Endless {
    file: File,
    at: u64,
    first: Vec<u8>,
}

impl Pieces for Endless {
    fn step(&mut self) -> Result<Piece, Failure> {
        let mut bytes = std::mem::take(&mut self.first);
        if bytes.is_empty() {
            bytes.resize(CHUNK as usize, 0);
            let count = self.file.read_at(&mut bytes, self.at).map_err(unreadable)?;
            bytes.truncate(count);
        }
        self.at += bytes.len() as u64;
        Ok(if bytes.is_empty() { Piece::Last(bytes) } else { Piece::More(bytes) })
    }
}

fn unreadable(error: io::Error) -> Failure {
    Failure::runtime(format!("read: {}", reply::plain(&error)))
}

/// Lines `offset..offset+limit` of a file, joined by newlines, without a last one.
struct Window {
    reader: Reader,
    lines: Lines,
}

/// A file, or what has been read of it.
enum Reader {
    File(BufReader<File>),
    Memory(io::Cursor<Vec<u8>>),
}

impl Window {
    fn new(mut source: Source, offset: u64, limit: u64) -> Result<Self, Failure> {
        let reader = match source.held {
            Held::All(bytes) => Reader::Memory(io::Cursor::new(bytes)),
            Held::Beginning(_) | Held::Nothing => {
                source.file.rewind().map_err(unreadable)?;
                Reader::File(BufReader::with_capacity(64 << 10, source.file))
            }
        };
        Ok(Window { reader, lines: Lines::new(offset, limit) })
    }
}

impl Pieces for Window {
    fn step(&mut self) -> Result<Piece, Failure> {
        let mut out = Vec::new();
        let more = match &mut self.reader {
            Reader::File(reader) => self.lines.copy(reader, &mut out),
            Reader::Memory(reader) => self.lines.copy(reader, &mut out),
        };
        Ok(if more.map_err(unreadable)? { Piece::More(out) } else { Piece::Last(out) })
    }
}

/// Which lines are wanted, and where in them a reader is. Memory does not grow with the lines.
struct Lines {
    line: u64,
    offset: u64,
    last: u64,
    started: bool,
    /// Carriage returns are held back: at the end of a line they are dropped, elsewhere they are text.
    returns: usize,
}

impl Lines {
    fn new(offset: u64, limit: u64) -> Self {
        let last = offset.saturating_add(limit - 1);
        Lines { line: 1, offset, last, started: false, returns: 0 }
    }

    /// Copies until about a chunk is in `out` or a good deal has been read; false at the end of the window.
    fn copy(&mut self, reader: &mut impl BufRead, out: &mut Vec<u8>) -> io::Result<bool> {
        let mut scanned = 0;
        while out.len() < CHUNK as usize && scanned < SCAN {
            let buffer = reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(false);
            }
            let newline = memchr::memchr(b'\n', buffer);
            let piece = &buffer[..newline.unwrap_or(buffer.len())];
            if self.line >= self.offset && !self.take(piece, out) {
                return Ok(true);
            }
            let used = piece.len() + usize::from(newline.is_some());
            reader.consume(used);
            scanned += used;
            if newline.is_some() {
                self.line += 1;
                (self.started, self.returns) = (false, 0);
                if self.line > self.last {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// False when there is more to be written before the piece than fits; it is to be taken again then.
    fn take(&mut self, piece: &[u8], out: &mut Vec<u8>) -> bool {
        if !std::mem::replace(&mut self.started, true) && self.line > self.offset {
            out.push(b'\n');
        }
        let text = piece.iter().rposition(|b| *b != b'\r').map_or(0, |at| at + 1);
        if text > 0 {
            let now = self.returns.min(CHUNK as usize);
            out.resize(out.len() + now, b'\r');
            self.returns -= now;
            if self.returns > 0 {
                return false;
            }
            out.extend_from_slice(&piece[..text]);
        }
        self.returns += piece.len() - text;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_windows() {
        let cut = |text: &str, offset, limit, capacity| {
            let mut out = Vec::new();
            let mut reader = BufReader::with_capacity(capacity, text.as_bytes());
            let mut lines = Lines::new(offset, limit);
            while lines.copy(&mut reader, &mut out).unwrap() {}
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
