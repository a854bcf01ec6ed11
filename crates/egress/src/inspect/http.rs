//! The head of an HTTP/1 request, and the host in it.
//!
//! Strict where servers differ: what two of them may understand differently is broken.
//! Invariant: what is returned for the first bytes of a request stays so however many follow.

use memchr::{memchr, memmem};

use super::first::{First, Protocol};
use super::host::Host;

/// Longer than any method that a server knows.
const METHOD: usize = 32;
/// A request line has ended before.
const LINE: usize = 8192;
const METHODS: [&[u8]; 9] =
    [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH"];

/// What the first line says about the connection.
pub fn read(bytes: &[u8]) -> First {
    // Servers skip empty lines before a request.
    let skipped = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
    let request = &bytes[skipped..];
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

fn sort(request: &[u8]) -> Sort {
    let word = request.iter().take_while(|byte| is_token(**byte)).count();
    if word > METHOD || (word == 0 && !request.is_empty()) && !matches!(request[0], b' ' | b'\t') {
        return Sort::Other;
    }
    match request.get(word) {
        None => return Sort::Unclear,
        // Some servers would skip a space before the method, or take a tab for one behind it.
        Some(b' ' | b'\t') => {}
        Some(_) => return Sort::Other,
    }
    let Some(end) = memchr(b'\n', &request[..request.len().min(LINE)]) else {
        return if request.len() >= LINE { Sort::Broken } else { Sort::Unclear };
    };
    let line = request[..end].strip_suffix(b"\r").unwrap_or(&request[..end]);
    if line == b"PRI * HTTP/2.0" {
        return Sort::Preface(end + 1);
    }
    let method = &request[..word];
    let speaks_http = memmem::find(&line.to_ascii_uppercase(), b"HTTP/").is_some();
    let parts: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    match parts[..] {
        [_, target, version] if word > 0 && is_target(target) && is_version(version) => Sort::Request,
        _ if speaks_http || METHODS.contains(&method) => Sort::Broken,
        _ => Sort::Other,
    }
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
