//! How somebody with a browser gets in without a header: by a link that is good for minutes, which is exchanged for a cookie that is good
//! for hours.
//!
//! Both are an expiry and a MAC under the sandbox's own token, so nothing is remembered for them and they end with the sandbox. Each says
//! what it is, of which sandbox and for what: a link is no cookie, and neither opens anything else.

use std::fmt;

use crate::base36::Expiry;
use crate::mac;

/// As long as a MAC in hexadecimal digits.
const MAC: usize = 64;

/// What is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Link,
    Cookie,
}

/// What is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visited<'a> {
    pub sandbox: &'a str,
    pub port: u16,
    /// The path below which, as it is written in requests: empty for all, or beginning with a slash.
    pub below: &'a str,
}

/// An expiry and the MAC over it, as they stand in a link or cookie.
#[derive(Clone, PartialEq, Eq)]
pub struct Visit {
    expires: Expiry,
    mac: String,
}

/// What opens something stays out of logs.
impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Visit").field("expires", &self.expires).finish_non_exhaustive()
    }
}

impl fmt::Display for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.expires.as_str(), self.mac)
    }
}

impl Visit {
    /// `None` for a sandbox without a token of its own, which must not be open to whoever knows that.
    #[must_use]
    pub fn mint(token: &str, pass: Pass, visited: Visited<'_>, expires: u64) -> Option<Self> {
        let expires = Expiry::at(expires);
        (!token.is_empty()).then(|| Self { mac: expected(token, pass, visited, &expires), expires })
    }

    /// From the text of a link or cookie.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (expires, mac) = text.split_once('.')?;
        let hexadecimal = mac.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'));
        let mac = Some(mac).filter(|mac| mac.len() == MAC && hexadecimal)?.to_owned();
        Some(Self { expires: Expiry::parse(expires)?, mac })
    }

    /// Whether it opens this at `now`, in Unix seconds.
    #[must_use]
    pub fn opens(&self, token: &str, pass: Pass, visited: Visited<'_>, now: u64) -> bool {
        !token.is_empty()
            && !self.expires.is_over(now)
            && mac::same(expected(token, pass, visited, &self.expires).as_bytes(), self.mac.as_bytes())
    }
}

fn expected(token: &str, pass: Pass, visited: Visited<'_>, expires: &Expiry) -> String {
    let pass = match pass {
        Pass::Link => "link",
        Pass::Cookie => "cookie",
    };
    let Visited { sandbox, port, below } = visited;
    let text = format!("visit\n{pass}\n{sandbox}\n{port}\n{below}\n{}\n", expires.as_str());
    mac::hex(&mac::hmac(token.as_bytes(), text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Visited<'_> = Visited { sandbox: "a", port: 80, below: "" };

    #[test]
    fn a_visit_opens_what_it_was_made_for_and_nothing_else() {
        let visit = Visit::mint("token", Pass::Link, HERE, 1_000).unwrap();
        let read = Visit::parse(&visit.to_string()).unwrap();
        assert_eq!(read, visit);
        assert!(read.opens("token", Pass::Link, HERE, 999) && read.opens("token", Pass::Link, HERE, 1_000));
        assert!(!read.opens("token", Pass::Link, HERE, 1_001));
        assert!(!read.opens("token", Pass::Cookie, HERE, 999));
        assert!(!read.opens("other", Pass::Link, HERE, 999));
        for elsewhere in [
            Visited { sandbox: "b", ..HERE },
            Visited { port: 81, ..HERE },
            Visited { below: "/pty", ..HERE },
        ] {
            assert!(!read.opens("token", Pass::Link, elsewhere, 999), "{elsewhere:?}");
        }
        assert!(!format!("{visit:?}").contains(&visit.mac));
    }

    #[test]
    fn a_later_expiry_needs_another_mac() {
        let visit = Visit::mint("token", Pass::Cookie, HERE, 1_000).unwrap();
        let later = Visit { expires: Expiry::at(9_000), ..visit };
        assert!(!later.opens("token", Pass::Cookie, HERE, 999));
    }

    #[test]
    fn without_a_token_there_is_none() {
        assert_eq!(Visit::mint("", Pass::Link, HERE, 1_000), None);
        let visit = Visit::mint("x", Pass::Link, HERE, 1_000).unwrap();
        assert!(!visit.opens("", Pass::Link, HERE, 1));
        for wrong in [
            "",
            ".",
            "rs",
            "rs.",
            "rs.00",
            &format!("rs.{}", "g".repeat(64)),
            &format!(".{}", "0".repeat(64)),
        ] {
            assert_eq!(Visit::parse(wrong), None, "{wrong}");
        }
    }
}
