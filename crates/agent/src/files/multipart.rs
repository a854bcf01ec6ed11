//! multipart/form-data cut into parts as its bytes arrive; does no input or output itself.
//!
//! Invariant: whatever the chunking of the input, the same bytes give the same parts. What is held back is one head of
//! at most [`MAX_HEAD`] bytes, or of content no more than a delimiter is long.

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

/// Real heads have a few hundred bytes; a client that sends an endless one must not fill the memory.
pub const MAX_HEAD: usize = 16 << 10;
/// RFC 2046 allows 70 characters; some clients use more.
const MAX_BOUNDARY: usize = 200;
const MAX_PADDING: usize = 1 << 10;

#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum BadForm {
    #[error("request Content-Type isn't multipart/form-data")]
    NotMultipart,
    #[error("no multipart boundary param in Content-Type")]
    NoBoundary,
    #[error("the head of a part has more than {MAX_HEAD} bytes")]
    HeadTooLarge,
    #[error("malformed line after a boundary")]
    Delimiter,
    #[error("the head of a part is malformed")]
    Head,
    #[error("unexpected end of the form")]
    Truncated,
}

/// What a part says about itself.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
pub struct Head {
    pub name: String,
    /// Whether it carries a file name: what makes it a file and not a plain value.
    pub is_file: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Begin(Head),
    Data(Bytes),
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Preamble,
    /// Behind a delimiter, before the end of its line.
    Line,
    Head,
    Content,
    Epilogue,
}

/// Reads one form.
#[derive(Debug)]
pub struct Parser {
    delimiter: Finder<'static>,
    state: State,
    buffer: Bytes,
}

impl Parser {
    /// `content_type` is the request's header.
    pub fn new(content_type: &str) -> Result<Self, BadForm> {
        let (kind, parameters) = content_type.split_once(';').unwrap_or((content_type, ""));
        if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
            return Err(BadForm::NotMultipart);
        }
        let boundary = parameter(parameters, "boundary")
            .filter(|b| !b.is_empty() && b.len() <= MAX_BOUNDARY)
            .ok_or(BadForm::NoBoundary)?;
        let delimiter = Finder::new(&format!("\r\n--{boundary}")).into_owned();
        // The first delimiter needs no line end before it; with this one there is no difference to the others.
        Ok(Parser { delimiter, state: State::Preamble, buffer: Bytes::from_static(b"\r\n") })
    }

    /// Takes the next bytes. Everything there was should have been taken out with `next` before.
    pub fn push(&mut self, bytes: Bytes) {
        if self.buffer.is_empty() {
            self.buffer = bytes;
            return;
        }
        let mut joined = BytesMut::with_capacity(self.buffer.len() + bytes.len());
        joined.extend_from_slice(&self.buffer);
        joined.extend_from_slice(&bytes);
        self.buffer = joined.freeze();
    }

    /// The next thing that the bytes so far tell, or `None` when more of them are needed.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator would be taken to have ended at the first None"
    )]
    pub fn next(&mut self) -> Result<Option<Event>, BadForm> {
        loop {
            match self.state {
                State::Preamble => {
                    let (_, found) = self.content();
                    if !found {
                        return Ok(None);
                    }
                    self.take_delimiter();
                }
                State::Line => match self.line()? {
                    None => return Ok(None),
                    Some(next) => self.state = next,
                },
                State::Head => {
                    let Some(head) = self.head()? else { return Ok(None) };
                    self.state = State::Content;
                    return Ok(Some(Event::Begin(head)));
                }
                State::Content => {
                    let (data, found) = self.content();
                    if !data.is_empty() {
                        return Ok(Some(Event::Data(data)));
                    }
                    if !found {
                        return Ok(None);
                    }
                    self.take_delimiter();
                    return Ok(Some(Event::End));
                }
                State::Epilogue => {
                    self.buffer = Bytes::new();
                    return Ok(None);
                }
            }
        }
    }

    /// Whether the form may end here.
    pub fn finish(&self) -> Result<(), BadForm> {
        if self.state == State::Epilogue { Ok(()) } else { Err(BadForm::Truncated) }
    }

    fn take_delimiter(&mut self) {
        let _ = self.buffer.split_to(self.delimiter.needle().len());
        self.state = State::Line;
    }

    /// Takes content up to the next delimiter, or as much as is certainly content.
    fn content(&mut self) -> (Bytes, bool) {
        let length = self.delimiter.needle().len();
        let mut from = 0;
        while let Some(at) = self.delimiter.find(&self.buffer[from..]).map(|at| at + from) {
            match self.buffer.get(at + length) {
                // Not known yet whether this is a delimiter or text that begins like one.
                None => return (self.buffer.split_to(at), false),
                Some(b'-' | b'\r' | b' ' | b'\t') => {
                    return (self.buffer.split_to(at), true);
                }
                Some(_) => from = at + 1,
            }
        }
        let keep = self.partial_delimiter(from);
        let sure = self.buffer.len() - keep;
        (self.buffer.split_to(sure), false)
    }

    /// How many bytes at the end may be the beginning of a delimiter.
    fn partial_delimiter(&self, from: usize) -> usize {
        let needle = self.delimiter.needle();
        let tail_from = self.buffer.len().saturating_sub(needle.len() - 1).max(from);
        let tail = &self.buffer[tail_from..];
        memchr::memchr_iter(b'\r', tail)
            .find(|at| needle.starts_with(&tail[*at..]))
            .map_or(0, |at| tail.len() - at)
    }

    /// The rest of a delimiter's line.
    fn line(&mut self) -> Result<Option<State>, BadForm> {
        if self.buffer.starts_with(b"--") {
            return Ok(Some(State::Epilogue));
        }
        if &self.buffer[..] == b"-" {
            return Ok(None);
        }
        let padding = self.buffer.iter().take_while(|b| matches!(b, b' ' | b'\t')).count();
        if padding > MAX_PADDING {
            return Err(BadForm::Delimiter);
        }
        match &self.buffer[padding..] {
            [] | [b'\r'] => Ok(None),
            // The line end stays: a head that is empty is told by two of them.
            [b'\r', b'\n', ..] => {
                let _ = self.buffer.split_to(padding);
                Ok(Some(State::Head))
            }
            _ => Err(BadForm::Delimiter),
        }
    }

    fn head(&mut self) -> Result<Option<Head>, BadForm> {
        let searched = &self.buffer[..self.buffer.len().min(MAX_HEAD)];
        let Some(end) = memchr::memmem::find(searched, b"\r\n\r\n") else {
            return if self.buffer.len() >= MAX_HEAD { Err(BadForm::HeadTooLarge) } else { Ok(None) };
        };
        let head = self.buffer.split_to(end + 4);
        parse_head(&String::from_utf8_lossy(&head[..end])).map(Some)
    }
}

fn parse_head(text: &str) -> Result<Head, BadForm> {
    let mut head = Head::default();
    for line in text.split("\r\n").filter(|line| !line.is_empty()) {
        // A line that continues the one before belongs to a header that is of no interest.
        if line.starts_with([' ', '\t']) {
            continue;
        }
        let (name, value) = line.split_once(':').ok_or(BadForm::Head)?;
        if name.trim().eq_ignore_ascii_case("content-disposition") {
            let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
            if kind.trim().eq_ignore_ascii_case("form-data") {
                head.name = parameter(parameters, "name").unwrap_or_default();
                head.is_file = ["filename", "filename*"]
                    .iter()
                    .any(|name| parameter(parameters, name).is_some_and(|value| !value.is_empty()));
            }
        }
    }
    Ok(head)
}

/// The value of one `name=value` or `name="value"` among parameters separated by semicolons.
fn parameter(text: &str, wanted: &str) -> Option<String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        let (name, after) = rest.split_once('=')?;
        let (value, next) = match after.trim_start().strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = next;
    }
}

/// A quoted string without its opening quote, and what follows the closing one.
fn unquote(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            // Only what must be escaped is: a Windows path in a file name keeps its backslashes.
            '\\' if text[at + 1..].starts_with(['"', '\\']) => {
                value.extend(chars.next().map(|(_, escaped)| escaped));
            }
            c => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TYPE: &str = "multipart/form-data; boundary=B";

    /// Every part with its content, or the error.
    fn parse(chunks: &[&[u8]]) -> Result<Vec<(Head, Vec<u8>)>, BadForm> {
        let mut parser = Parser::new(TYPE)?;
        let mut parts = Vec::new();
        let mut open: Option<(Head, Vec<u8>)> = None;
        for chunk in chunks {
            parser.push(Bytes::copy_from_slice(chunk));
            while let Some(event) = parser.next()? {
                match event {
                    Event::Begin(head) => assert!(open.replace((head, Vec::new())).is_none()),
                    Event::Data(data) => open.as_mut().unwrap().1.extend_from_slice(&data),
                    Event::End => parts.push(open.take().unwrap()),
                }
            }
            assert!(parser.buffer.len() <= MAX_HEAD + MAX_PADDING);
        }
        parser.finish().map(|()| parts)
    }

    fn file(name: &str) -> Head {
        Head { name: name.into(), is_file: true }
    }

    #[test]
    fn parts_preamble_and_epilogue() {
        let form =
            b"ignored\r\n--B \t\r\nContent-Disposition: form-data; name=\"a\"; filename=\"x;\\\"y\"\r\n\
            Content-Type: text/plain\r\n\r\n\r\n--Bx\r\n--\r\r\n--B\r\n\r\n\r\n--B\r\n\
            content-disposition:form-data;filename*=UTF-8''z;name=b\r\n\r\n\r\n--B--ignored\r\n--B\r\n";
        let parts = parse(&[form]).unwrap();
        assert_eq!(
            parts,
            [
                (file("a"), b"\r\n--Bx\r\n--\r".to_vec()),
                (Head::default(), b"".to_vec()),
                (file("b"), b"".to_vec())
            ]
        );
        assert_eq!(parse(&[b"--B--"]).unwrap(), []);
    }

    #[test]
    fn bad_forms() {
        assert_eq!(parse(&[b"--B\r\n\r\nx\r\n--B"]), Err(BadForm::Truncated));
        assert_eq!(parse(&[b""]), Err(BadForm::Truncated));
        assert_eq!(parse(&[b"--B x\r\n"]), Err(BadForm::Delimiter));
        assert_eq!(parse(&[b"--B\r\nno colon\r\n\r\n"]), Err(BadForm::Head));
        let endless = [b"--B\r\nX: ".to_vec(), vec![b'a'; MAX_HEAD]].concat();
        assert_eq!(parse(&[&endless]), Err(BadForm::HeadTooLarge));
        assert_eq!(Parser::new("text/plain").err(), Some(BadForm::NotMultipart));
        for none in
            ["multipart/form-data", "multipart/form-data; boundary=", "Multipart/Form-Data; x=\"boundary=y\""]
        {
            assert_eq!(Parser::new(none).err(), Some(BadForm::NoBoundary), "{none}");
        }
        assert!(Parser::new("multipart/form-data; charset=x; boundary=\"a b\"").is_ok());
    }

    proptest! {
        #[test]
        fn chunking_never_changes_the_parts(
            pieces in proptest::collection::vec(
                prop_oneof![
                    Just("\r\n--B"), Just("\r\n"), Just("--"), Just("\r"), Just("B"), Just(" "), Just("x"),
                    Just("Content-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n"),
                ],
                0..24,
            ),
            cuts in proptest::collection::vec(0usize..400, 0..12),
        ) {
            let form = pieces.concat().into_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(form.len())).collect();
            cuts.extend([0, form.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|w| &form[w[0]..w[1]]).collect();
            let single: Vec<&[u8]> = form.chunks(1).collect();
            let whole = parse(&[&form]);
            prop_assert_eq!(parse(&chunks), whole.clone());
            prop_assert_eq!(parse(&single), whole);
        }

        #[test]
        fn any_content_comes_out_as_it_went_in(content in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assume!(memchr::memmem::find(&content, b"\r\n--B").is_none());
            let form = [b"--B\r\n\r\n", &content[..], b"\r\n--B--"].concat();
            prop_assert_eq!(parse(&[&form]).unwrap(), [(Head::default(), content)]);
        }
    }
}
