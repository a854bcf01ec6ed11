//! Where a chunked body ends, and whether its framing has one meaning.

use super::malformed::Malformed;

/// Bytes of one line with a chunk's size, its extensions included, and of all trailer fields together.
const MAX_LINE: usize = 4 << 10;
const MAX_TRAILERS: usize = 16 << 10;

/// The place in a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Size {
        digits: u8,
    },
    Extension,
    SizeEnd,
    Data,
    DataCr,
    DataEnd,
    /// At the start of a line of the trailers.
    LineStart,
    Line,
    LineEnd,
    LastEnd,
}

/// Follows a chunked body without keeping any of it.
#[derive(Debug)]
pub(super) struct Chunks {
    at: At,
    size: u64,
    /// Bytes of the current size line, or of the trailers.
    overhead: usize,
}

impl Chunks {
    pub(super) fn new() -> Self {
        Self { at: At::Size { digits: 0 }, size: 0, overhead: 0 }
    }

    /// How many of these bytes belong to the body, and whether it ends with them.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> Result<(usize, bool), Malformed> {
        let mut read = 0;
        while read < bytes.len() {
            if self.at == At::Data {
                let here = usize::try_from(self.size).unwrap_or(usize::MAX).min(bytes.len() - read);
                self.size -= here as u64;
                read += here;
                if self.size == 0 {
                    self.at = At::DataCr;
                }
                continue;
            }
            let ended = self.step(bytes[read])?;
            read += 1;
            if ended {
                return Ok((read, true));
            }
        }
        Ok((read, false))
    }

    /// One byte outside of the data; true at the end.
    fn step(&mut self, byte: u8) -> Result<bool, Malformed> {
        self.overhead += 1;
        self.at = match (self.at, byte) {
            (At::Size { digits }, b) if b.is_ascii_hexdigit() && digits < 15 => {
                let digit = (b as char).to_digit(16).map_or(0, u64::from);
                self.size = self.size << 4 | digit;
                At::Size { digits: digits + 1 }
            }
            (At::Size { digits: 1.. }, b'\r') => At::SizeEnd,
            (At::Size { digits: 1.. }, b';' | b' ' | b'\t') => At::Extension,
            (At::Extension, b'\r') => At::SizeEnd,
            (At::Extension, b) if b == b'\t' || (b >= b' ' && b != 0x7f) => At::Extension,
            (At::SizeEnd, b'\n') => self.sized(),
            (At::DataCr, b'\r') => At::DataEnd,
            (At::DataEnd, b'\n') => self.next_chunk(),
            (At::LineStart, b'\r') => At::LastEnd,
            (At::LineStart, b) if super::head::is_token(b) => At::Line,
            (At::Line, b'\r') => At::LineEnd,
            (At::Line, b) if b == b'\t' || (b >= b' ' && b != 0x7f) => At::Line,
            (At::LineEnd, b'\n') => At::LineStart,
            (At::LastEnd, b'\n') => return Ok(true),
            _ => return Err(Malformed::Chunk),
        };
        let limit =
            if matches!(self.at, At::LineStart | At::Line | At::LineEnd) { MAX_TRAILERS } else { MAX_LINE };
        if self.overhead > limit { Err(Malformed::Chunk) } else { Ok(false) }
    }

    fn sized(&mut self) -> At {
        self.overhead = 0;
        if self.size == 0 { At::LineStart } else { At::Data }
    }

    fn next_chunk(&mut self) -> At {
        self.overhead = 0;
        At::Size { digits: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same whatever pieces the bytes come in.
    fn follow(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        let whole = run(bytes, bytes.len().max(1));
        for piece in 1..=bytes.len() {
            assert_eq!(
                run(bytes, piece),
                whole,
                "{:?} in pieces of {piece}",
                bytes.escape_ascii().to_string()
            );
        }
        whole
    }

    fn run(bytes: &[u8], piece: usize) -> Result<Option<usize>, Malformed> {
        let mut chunks = Chunks::new();
        let mut total = 0;
        for part in bytes.chunks(piece) {
            let (read, ended) = chunks.advance(part)?;
            total += read;
            if ended {
                return Ok(Some(total));
            }
        }
        Ok(None)
    }

    #[test]
    fn bodies_end_where_they_say() {
        for (body, rest) in [
            (&b"0\r\n\r\n"[..], &b""[..]),
            (b"3\r\nabc\r\n0\r\n\r\n", b"GET"),
            (b"3;x=\"y\"\r\n\r\nc\r\n000\r\na: b\r\nc:\r\n\r\n", b"\r\n"),
            (b"A \r\n0123456789\r\n0\r\n\r\n", b"0\r\n\r\n"),
        ] {
            assert_eq!(follow(&[body, rest].concat()), Ok(Some(body.len())));
        }
        assert_eq!(follow(b"5\r\nabc"), Ok(None));
    }

    #[test]
    fn what_has_two_meanings_is_refused() {
        for body in [
            &b"\r\n"[..],
            b"x\r\n",
            b"-1\r\n",
            b"+3\r\nabc",
            b"0x3\r\nabc",
            b" 3\r\nabc",
            b"3\nabc",
            b"3\rabc",
            b"3;a\nb\r\n",
            b"3;\x00\r\n",
            b"3\r\nabcd\r\n",
            b"3\r\nabc\n0\r\n\r\n",
            b"0\r\n\n",
            b"0\r\na: b\n\r\n",
            b"0\r\n a: b\r\n\r\n",
            b"0\r\n: b\r\n\r\n",
            b"10000000000000000\r\n",
            b"fffffffffffffffffff\r\n",
        ] {
            assert_eq!(follow(body), Err(Malformed::Chunk), "{}", body.escape_ascii());
        }
        let long = [&b"1;"[..], &[b'x'; MAX_LINE], b"\r\n"].concat();
        assert_eq!(run(&long, 1000), Err(Malformed::Chunk));
        let trailers = [&b"0\r\n"[..], &b"a: b\r\n".repeat(MAX_TRAILERS / 6 + 1)].concat();
        assert_eq!(run(&trailers, 1000), Err(Malformed::Chunk));
    }
}
