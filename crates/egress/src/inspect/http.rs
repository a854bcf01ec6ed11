//! The head of an HTTP/1 request, and the host in it.
//!
//! Strict where servers differ: what two of them may understand differently is broken.
//! Invariant: what is returned for the first bytes of a request stays so however many follow.

use memchr::{memchr, memmem};

use super::first::{First, Protocol};
use super::host::Host;

/// A request line has ended before.
const LINE: usize = 8192;
const METHODS: [&[u8]; 9] =
    [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH"];

/// What the first line says about the connection.
pub fn read(bytes: &[u8]) -> First {
    // Servers skip empty lines before a request.
    let request = without_empty_lines(bytes);
    let skipped = bytes.len() - request.len();
    match sort(request) {
        Sort::Unclear => First::More,
        Sort::Other => First::Foreign,
        Sort::Broken => First::Broken(Protocol::Http),
        Sort::Preface(length) => First::Unnamed { protocol: Protocol::Http2, length: skipped + length },
        Sort::Request => match head_length(request) {
            None => First::More,
            Some(length) => match host(&request[..length]) {
                Some(Named::Host(host)) => {
                    First::Named { protocol: Protocol::Http, host, length: skipped + length }
                }
                Some(Named::Nobody) => First::Unnamed { protocol: Protocol::Http, length: skipped + length },
                None => First::Broken(Protocol::Http),
            },
        },
    }
}

enum Sort {
    Unclear,
    Request,
    /// HTTP/2 without an upgrade; its first line has so many bytes.
    Preface(usize),
    Other,
    Broken,
}

/// Whether the first line is a request's, whatever the rest of the head may be.
pub fn begins_request(bytes: &[u8]) -> bool {
    matches!(sort(without_empty_lines(bytes)), Sort::Request | Sort::Preface(_))
}

fn without_empty_lines(bytes: &[u8]) -> &[u8] {
    let skipped = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    &bytes[skipped..]
}

fn sort(request: &[u8]) -> Sort {
    let end = memchr(b'\n', &request[..request.len().min(LINE)]);
    let line = &request[..end.unwrap_or(request.len().min(LINE))];
    let word = line.iter().take_while(|byte| is_token(**byte)).count();
    // Some servers would skip a space before the method, or take a tab for one behind it.
    match line.get(word) {
        Some(b' ' | b'\t') => {}
        // The word may go on.
        None if end.is_none() => return if request.len() >= LINE { Sort::Broken } else { Sort::Unclear },
        _ => return odd(line, word, end.is_some(), request.len() >= LINE),
    }
    let Some(end) = end else {
        return if request.len() >= LINE { Sort::Broken } else { Sort::Unclear };
    };
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if line == b"PRI * HTTP/2.0" {
        return Sort::Preface(end + 1);
    }
    let parts: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    match parts[..] {
        [_, target, version] if word > 0 && is_target(target) && is_version(version) => Sort::Request,
        _ if speaks_http(line) || METHODS.contains(&&line[..word]) => Sort::Broken,
        _ => Sort::Other,
    }
}

/// A first line that does not begin with a word and a space. Some servers take other bytes for spaces, or skip them: up to its end it may
/// still become something that they would read. A control character that no server skips tells other protocols apart at once: they may
/// wait for an answer, and never send the end of a line.
fn odd(line: &[u8], word: usize, complete: bool, too_long: bool) -> Sort {
    let never = line.iter().position(|byte| matches!(byte, 0..=8 | 14..=27 | 127));
    let text = &line[..never.unwrap_or(line.len())];
    if METHODS.contains(&&line[..word]) || speaks_http(text) {
        Sort::Broken
    } else if never.is_some() || complete {
        Sort::Other
    } else if too_long {
        Sort::Broken
    } else {
        Sort::Unclear
    }
}

fn speaks_http(line: &[u8]) -> bool {
    memmem::find(&line.to_ascii_uppercase(), b"HTTP/").is_some()
}

fn is_target(target: &[u8]) -> bool {
    !target.is_empty() && target.iter().all(|byte| byte.is_ascii_graphic() || !byte.is_ascii())
}

fn is_version(version: &[u8]) -> bool {
    matches!(version, b"HTTP/1.0" | b"HTTP/1.1")
}

/// Up to and with the empty line.
fn head_length(request: &[u8]) -> Option<usize> {
    let mut start = 0;
    while let Some(end) = memchr(b'\n', &request[start..]) {
        let line = &request[start..start + end];
        start += end + 1;
        if line.is_empty() || line == b"\r" {
            return Some(start);
        }
    }
    None
}

enum Named {
    Host(Host),
    Nobody,
}

/// Nothing if there is doubt.
fn host(head: &[u8]) -> Option<Named> {
    let mut lines = head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let target = lines.next()?.split(|byte| *byte == b' ').nth(1)?;
    let mut found = None;
    for line in lines.filter(|line| !line.is_empty()) {
        let colon = memchr(b':', line)?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        let odd = |byte: &u8| matches!(byte, b'\r' | 0);
        if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) || value.iter().any(odd) {
            return None;
        }
        if name.eq_ignore_ascii_case(b"host") {
            if found.is_some() {
                return None;
            }
            found = Some(value.trim_ascii());
        }
    }
    let asked = found.filter(|value| !value.is_empty()).map(Host::parse_authority);
    match (asked, authority(target)) {
        (Some(None), _) => None,
        (Some(Some(host)), None) => Some(Named::Host(host)),
        (None, None) => Some(Named::Nobody),
        // Servers differ in which of the two they heed.
        (Some(Some(host)), Some(target)) => {
            (Host::parse_authority(target)? == host).then_some(Named::Host(host))
        }
        (None, Some(_)) => None,
    }
}

/// The host in a target that is more than a path.
fn authority(target: &[u8]) -> Option<&[u8]> {
    if target.starts_with(b"/") || target == b"*" {
        return None;
    }
    let rest = memmem::find(target, b"://").map_or(target, |at| &target[at + 3..]);
    let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?' | b'#' | b'\\')).unwrap_or(rest.len());
    Some(&rest[..end])
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
