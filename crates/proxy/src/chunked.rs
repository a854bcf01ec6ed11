//! The chunked transfer coding of answers, taken apart.
//!
//! Strict where two readers could disagree: sizes are hexadecimal digits and nothing else, lines end in CRLF. Extensions belong to one hop
//! and are dropped. Lines and trailers are bounded.

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

/// A size with its extensions.
const LINE_MOST: usize = 4096;
const TRAILERS_MOST: usize = 16 << 10;
const TRAILER_FIELDS: usize = 64;

/// Not the chunked coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidChunk {
    #[error("a chunk's size is not a number")]
    Size,
    #[error("a chunk does not end where its size says")]
    End,
    #[error("a line of the chunked coding is too long")]
    TooLong,
    #[error("the trailers are not header fields")]
    Trailers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    Data(u64),
    DataEnd,
    Trailers,
    Done,
}

#[derive(Debug)]
pub(crate) struct Chunked {
    state: State,
}

/// What the next bytes were.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Data(Bytes),
    Trailers(HeaderMap),
    End,
    /// More has to be read first.
    More,
}

impl Chunked {
    pub(crate) fn new() -> Self {
        Self { state: State::Size }
    }

    /// Takes the next piece off `unread`.
    pub(crate) fn next(&mut self, unread: &mut BytesMut) -> Result<Piece, InvalidChunk> {
        loop {
            match self.state {
                State::Size => match take_line(unread)? {
                    None => return Ok(Piece::More),
                    Some(line) => {
                        self.state = match size(&line)? {
                            0 => State::Trailers,
                            size => State::Data(size),
                        };
                    }
                },
                State::Data(0) => self.state = State::DataEnd,
                State::Data(_) if unread.is_empty() => return Ok(Piece::More),
                State::Data(left) => {
                    let count = usize::try_from(left).map_or(unread.len(), |left| left.min(unread.len()));
                    self.state = State::Data(left - count as u64);
                    return Ok(Piece::Data(unread.split_to(count).freeze()));
                }
                State::DataEnd if unread.len() < 2 => return Ok(Piece::More),
                State::DataEnd if unread.starts_with(b"\r\n") => {
                    unread.advance(2);
                    self.state = State::Size;
                }
                State::DataEnd => return Err(InvalidChunk::End),
                State::Trailers => return self.trailers(unread),
                State::Done => return Ok(Piece::End),
            }
        }
    }

    fn trailers(&mut self, unread: &mut BytesMut) -> Result<Piece, InvalidChunk> {
        if unread.starts_with(b"\r\n") {
            unread.advance(2);
            self.state = State::Done;
            return Ok(Piece::End);
        }
        let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") else {
            return if unread.len() > TRAILERS_MOST { Err(InvalidChunk::TooLong) } else { Ok(Piece::More) };
        };
        let text = unread.split_to(end + 4);
        self.state = State::Done;
        parse_trailers(&text).map(Piece::Trailers)
    }
}

fn take_line(unread: &mut BytesMut) -> Result<Option<BytesMut>, InvalidChunk> {
    let Some(end) = unread.iter().take(LINE_MOST).position(|byte| *byte == b'\n') else {
        return if unread.len() >= LINE_MOST { Err(InvalidChunk::TooLong) } else { Ok(None) };
    };
    let mut line = unread.split_to(end + 1);
    if !line.ends_with(b"\r\n") {
        return Err(InvalidChunk::Size);
    }
    line.truncate(end - 1);
    Ok(Some(line))
}

fn size(line: &[u8]) -> Result<u64, InvalidChunk> {
    let digits = line.iter().position(|byte| !byte.is_ascii_hexdigit()).unwrap_or(line.len());
    let rest = line[digits..].trim_ascii_start();
    if digits == 0 || digits > 16 || !(rest.is_empty() || rest[0] == b';') || rest.contains(&b'\r') {
        return Err(InvalidChunk::Size);
    }
    let text = std::str::from_utf8(&line[..digits]).map_err(|_| InvalidChunk::Size)?;
    u64::from_str_radix(text, 16).map_err(|_| InvalidChunk::Size)
}

fn parse_trailers(text: &[u8]) -> Result<HeaderMap, InvalidChunk> {
    let mut fields = [httparse::EMPTY_HEADER; TRAILER_FIELDS];
    let parsed = httparse::parse_headers(text, &mut fields).map_err(|_| InvalidChunk::Trailers)?;
    let httparse::Status::Complete((read, fields)) = parsed else { return Err(InvalidChunk::Trailers) };
    if read != text.len() {
        // A bare LF ended them for one reader and not for the other.
        return Err(InvalidChunk::Trailers);
    }
    let mut trailers = HeaderMap::with_capacity(fields.len());
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| InvalidChunk::Trailers)?;
        let value = HeaderValue::from_bytes(field.value).map_err(|_| InvalidChunk::Trailers)?;
        trailers.append(name, value);
    }
    Ok(trailers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds the text in pieces of `step` bytes.
    fn decode(text: &[u8], step: usize) -> Result<(Vec<u8>, Option<HeaderMap>, bool), InvalidChunk> {
        let (mut decoder, mut unread) = (Chunked::new(), BytesMut::new());
        let (mut body, mut trailers) = (Vec::new(), None);
        let mut parts = text.chunks(step);
        loop {
            match decoder.next(&mut unread)? {
                Piece::Data(data) => body.extend_from_slice(&data),
                Piece::Trailers(found) => trailers = Some(found),
                Piece::End => return Ok((body, trailers, unread.is_empty() && parts.next().is_none())),
                Piece::More => match parts.next() {
                    Some(part) => unread.extend_from_slice(part),
                    None => return Ok((body, trailers, false)),
                },
            }
        }
    }

    #[test]
    fn whole_bodies_are_put_together() {
        let text =
            b"5\r\nhello\r\n6;a=\"b\"\r\n world\r\n00A \r\n0123456789\r\n0\r\nx-sum: 1\r\nX-Sum: 2\r\n\r\n";
        for step in [1, 2, 3, 7, 1000] {
            let (body, trailers, whole) = decode(text, step).unwrap();
            assert_eq!(body, b"hello world0123456789");
            let trailers = trailers.unwrap();
            assert_eq!(trailers.get_all("x-sum").iter().collect::<Vec<_>>(), ["1", "2"]);
            assert!(whole, "{step}");
            assert_eq!(decode(b"0\r\n\r\n", step).unwrap(), (Vec::new(), None, true));
        }
    }

    #[test]
    fn what_is_cut_short_is_not_whole() {
        let text = b"5\r\nhello\r\n0\r\nx: y\r\n\r\n";
        for end in 0..text.len() {
            assert!(!decode(&text[..end], 1000).unwrap().2, "{end}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let long = [b"1;".as_slice(), &[b'x'; LINE_MOST]].concat();
        let cases: &[(&[u8], InvalidChunk)] = &[
            (b"\r\n", InvalidChunk::Size),
            (b"x\r\n", InvalidChunk::Size),
            (b"+1\r\na\r\n", InvalidChunk::Size),
            (b"0x1\r\na\r\n", InvalidChunk::Size),
            (b"1 1\r\na\r\n", InvalidChunk::Size),
            (b"1\na\r\n", InvalidChunk::Size),
            (b"1;a\rb\r\na\r\n", InvalidChunk::Size),
            (b"10000000000000000\r\n", InvalidChunk::Size),
            (b"1\r\nab\r\n", InvalidChunk::End),
            (b"1\r\na\n\r\n", InvalidChunk::End),
            (b"0\r\nbad header\r\n\r\n", InvalidChunk::Trailers),
            (b"0\r\na: b\n\nHTTP/1.1 200 OK\r\n\r\n", InvalidChunk::Trailers),
            (&long, InvalidChunk::TooLong),
        ];
        for (text, error) in cases {
            assert_eq!(decode(text, 1000), Err(*error), "{}", String::from_utf8_lossy(text));
        }
        let endless = [b"0\r\n".as_slice(), &[b'x'; TRAILERS_MOST + 1]].concat();
        assert_eq!(decode(&endless, 1000), Err(InvalidChunk::TooLong));
    }
}
