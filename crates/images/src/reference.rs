//! The grammar of image references, as Docker's: `[host[:port]/]path[:tag][@sha256:digest]`.
//!
//! A short name means Docker Hub (`python` is `docker.io/library/python:latest`). Invariant: parsing the canonical or
//! the familiar form of a reference gives the same reference again.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::error::ImageError;
use crate::image::ImageDigest;

const DEFAULT_REGISTRY: &str = "docker.io";
const OFFICIAL_PREFIX: &str = "library/";
const DEFAULT_TAG: &str = "latest";
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// A reference with every default filled in.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    target: Target,
}

/// A digest makes a tag meaningless, so a reference has one or the other.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Target {
    Tag(String),
    Digest(ImageDigest),
}

impl Reference {
    /// Returns the registry's `host[:port]`; Docker Hub is `docker.io`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the path within the registry, such as `library/python`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the tag, unless the reference has a digest.
    pub fn tag(&self) -> Option<&str> {
        match &self.target {
            Target::Tag(tag) => Some(tag),
            Target::Digest(_) => None,
        }
    }

    /// Returns the manifest digest, if the reference has one.
    pub fn digest(&self) -> Option<&ImageDigest> {
        match &self.target {
            Target::Tag(_) => None,
            Target::Digest(digest) => Some(digest),
        }
    }

    /// Returns `registry/repository` without tag or digest.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// Returns the short form people type: Docker Hub's defaults are left out, the tag is kept.
    pub fn familiar(&self) -> String {
        let full = self.to_string();
        let Some(rest) = full.strip_prefix("docker.io/") else {
            return full;
        };
        match rest.strip_prefix(OFFICIAL_PREFIX) {
            // `docker.io/library/a/b` is not `a/b`, and `a.b` alone would read as a registry only before a slash.
            Some(short) if !self.repository[OFFICIAL_PREFIX.len()..].contains('/') => short.to_owned(),
            _ if first_component_is_registry(rest) => full,
            _ => rest.to_owned(),
        }
    }

    /// Says whether the registry is on this machine, where plain HTTP is the rule.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(rest),
            None => self.registry.split(':').next().unwrap_or(&self.registry),
        };
        host == "localhost"
            || host.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_loopback())
            || host.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        match &self.target {
            Target::Tag(tag) => write!(f, ":{tag}"),
            Target::Digest(digest) => write!(f, "@{digest}"),
        }
    }
}

impl fmt::Debug for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reference({self})")
    }
}

impl FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        parse(text).map_err(|reason| ImageError::InvalidReference {
            reference: text.chars().take(300).collect(),
            reason: reason.to_owned(),
        })
    }
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    if text.is_empty() {
        return Err("it is empty");
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (
            rest,
            Some(digest.parse::<ImageDigest>().map_err(|_| "the digest is not sha256:<64 hex digits>")?),
        ),
        None => (text, None),
    };
    let (name, tag) = split_tag(rest);
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    if digest.is_none() && tag.is_none() && is_hex(name, 64) {
        return Err("64 hex digits are an image id, not a name");
    }
    let (registry, path) = split_registry(name);
    check_registry(registry)?;
    let registry = if registry == "index.docker.io" { DEFAULT_REGISTRY } else { registry };
    let repository = if registry == DEFAULT_REGISTRY && !path.contains('/') {
        format!("{OFFICIAL_PREFIX}{path}")
    } else {
        path.to_owned()
    };
    check_repository(&repository)?;
    if registry.len() + 1 + repository.len() > MAX_NAME {
        return Err("the name is longer than 255 characters");
    }
    let target = match digest {
        Some(digest) => Target::Digest(digest),
        None => Target::Tag(tag.unwrap_or(DEFAULT_TAG).to_owned()),
    };
    Ok(Reference { registry: registry.to_owned(), repository, target })
}

/// Splits at the last colon that comes after the last slash: an earlier one is a port.
fn split_tag(text: &str) -> (&str, Option<&str>) {
    match text.rfind(':') {
        Some(colon) if !text[colon..].contains('/') => (&text[..colon], Some(&text[colon + 1..])),
        _ => (text, None),
    }
}

fn first_component_is_registry(name: &str) -> bool {
    name.split_once('/').is_some_and(|(first, _)| {
        first.contains(['.', ':']) || first == "localhost" || first.bytes().any(|b| b.is_ascii_uppercase())
    })
}

fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some((first, rest)) if first_component_is_registry(name) => (first, rest),
        _ => (DEFAULT_REGISTRY, name),
    }
}

fn check_registry(registry: &str) -> Result<(), &'static str> {
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or("the registry's address lacks a bracket")?;
            if address.parse::<Ipv6Addr>().is_err() {
                return Err("the registry's address is not IPv6");
            }
            (None, after.strip_prefix(':').or(if after.is_empty() { None } else { Some("") }))
        }
        None => match registry.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(registry), None),
        },
    };
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok();
    if port.is_some_and(|port| !is_port(port)) {
        return Err("the registry's port is not a number up to 65535");
    }
    let label_is_good = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    match host {
        Some(host) if !host.split('.').all(label_is_good) => Err("the registry is not a host name"),
        _ => Ok(()),
    }
}

fn check_repository(repository: &str) -> Result<(), &'static str> {
    if repository.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("the name must be lower case");
    }
    if repository.split('/').all(component_is_good) {
        Ok(())
    } else {
        Err("the name may have lower-case letters and digits, separated by one of . _ __ or dashes")
    }
}

/// `[a-z0-9]+` parts with `.`, `_`, `__` or any number of dashes between them.
fn component_is_good(component: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if !component.starts_with(is_word) || !component.ends_with(is_word) {
        return false;
    }
    component
        .split(is_word)
        .all(|separator| matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|b| b == b'-'))
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let good = tag.len() <= MAX_TAG
        && tag.bytes().next().is_some_and(is_word)
        && tag.bytes().all(|b| is_word(b) || b == b'.' || b == b'-');
    if good {
        Ok(())
    } else {
        Err("the tag may have up to 128 letters, digits, dots, dashes and underscores")
    }
}

pub(crate) fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn canonical(text: &str) -> String {
        text.parse::<Reference>().map(|r| r.to_string()).unwrap_or_else(|e| e.to_string())
    }

    #[test]
    fn defaults_are_dockers() {
        for (given, expected) in [
            ("python", "docker.io/library/python:latest"),
            ("python:3.12", "docker.io/library/python:3.12"),
            ("user/app", "docker.io/user/app:latest"),
            ("docker.io/python", "docker.io/library/python:latest"),
            ("index.docker.io/user/app:1", "docker.io/user/app:1"),
            ("localhost/app", "localhost/app:latest"),
            ("localhost:5000/app:x", "localhost:5000/app:x"),
            ("127.0.0.1:5000/a/b/c", "127.0.0.1:5000/a/b/c:latest"),
            ("[::1]:5000/app", "[::1]:5000/app:latest"),
            ("ghcr.io/o/p__q-r--s.t:V_1.2-x", "ghcr.io/o/p__q-r--s.t:V_1.2-x"),
            ("FOO/bar", "FOO/bar:latest"),
        ] {
            assert_eq!(canonical(given), expected, "{given}");
        }
    }

    #[test]
    fn a_digest_replaces_the_tag() {
        let reference: Reference = format!("python:3.12@sha256:{HEX}").parse().unwrap();
        assert_eq!(reference.to_string(), format!("docker.io/library/python@sha256:{HEX}"));
        assert_eq!(reference.tag(), None);
    }

    #[test]
    fn what_docker_refuses_is_refused() {
        for given in [
            "",
            "Python",
            "a//b",
            "/a",
            "a/",
            "a:",
            "a:b:c",
            "a@sha256:12",
            "a@md5:d41d8cd98f00b204e9800998ecf8427e",
            "-a",
            "a-",
            "a___b",
            "a..b",
            "a b",
            "a\0b",
            "../etc",
            "host:99999/a",
            "host.:/a",
            "-x.io/a",
            "[zz]:1/a",
            "[::1]x/a",
            HEX,
            "é",
            "a:é",
        ] {
            assert!(given.parse::<Reference>().is_err(), "{given:?} was accepted");
        }
        assert!("a".repeat(300).parse::<Reference>().is_err());
        assert!(format!("a:{}", "t".repeat(129)).parse::<Reference>().is_err());
    }

    #[test]
    fn only_this_machine_is_loopback() {
        for (given, expected) in [
            ("localhost:5000/a", true),
            ("127.9.0.1/a", true),
            ("[::1]:1/a", true),
            ("localhost.evil.com/a", false),
            ("10.0.0.1:5000/a", false),
            ("python", false),
        ] {
            assert_eq!(given.parse::<Reference>().unwrap().is_loopback(), expected, "{given}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_form_reads_back(
            registry in prop::option::of("[a-z][a-z0-9]{0,5}(\\.[a-z]{2,3})(:[1-9][0-9]{0,3})?|localhost(:[1-9][0-9]{0,3})?"),
            // A dot in the first component would make it a registry.
            first in "[a-z0-9]{1,4}((_|__|-|--)[a-z0-9]{1,3}){0,2}",
            path in prop::collection::vec("[a-z0-9]{1,4}((\\.|_|__|-|--)[a-z0-9]{1,3}){0,2}", 0..3),
            tag in prop::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,10}"),
            digest in prop::option::of("[0-9a-f]{64}"),
        ) {
            let mut text = registry.map(|r| r + "/").unwrap_or_default();
            text += &first;
            for component in path { text += "/"; text += &component; }
            if let Some(tag) = tag { text += ":"; text += &tag; }
            if let Some(digest) = digest { text += "@sha256:"; text += &digest; }
            let reference: Reference = text.parse().unwrap();
            prop_assert_eq!(&reference.to_string().parse::<Reference>().unwrap(), &reference);
            prop_assert_eq!(&reference.familiar().parse::<Reference>().unwrap(), &reference);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,80}") {
            let _ = text.parse::<Reference>();
        }
    }
}
