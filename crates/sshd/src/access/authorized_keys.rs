//! Lines of an `authorized_keys` file.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::SystemTime;

use ipnet::IpNet;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use russh::keys::PublicKey;

use super::{Grant, Refusal, parse_sources, source_matches};

/// Longer lines are refused before they are looked at.
const MAX_LINE: usize = 16 << 10;

#[derive(Debug, Clone)]
pub struct AuthorizedKey {
    pub(crate) key: PublicKey,
    grant: Grant,
    expires: Option<SystemTime>,
    sources: Option<Vec<(bool, IpNet)>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyLineError {
    #[error("the line is longer than {MAX_LINE} bytes or holds control characters")]
    Line,
    #[error(
        "no public key of a known kind (ed25519, ecdsa, or their security key forms); RSA is not accepted"
    )]
    Key,
    #[error("the options are not closed properly")]
    Options,
    #[error("the option \"{0}\" is not supported, so the key is refused")]
    UnknownOption(String),
    #[error("the value of the option \"{0}\" is not valid")]
    Value(&'static str),
}

impl AuthorizedKey {
    /// All lines of a file. Empty lines and comments are left out; a line that is refused does not spoil the others.
    pub fn parse_file(text: &str) -> Vec<Result<Self, KeyLineError>> {
        let lines = text.lines().map(str::trim);
        lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::parse).collect()
    }

    /// The key alone, without options and comment.
    pub fn key(&self) -> &PublicKey {
        &self.key
    }

    pub(super) fn allows(&self, now: SystemTime, source: Option<IpAddr>) -> Result<Grant, Refusal> {
        if self.expires.is_some_and(|expires| now >= expires) {
            return Err(Refusal::KeyExpired);
        }
        if self.sources.as_ref().is_some_and(|sources| !source_matches(sources, source)) {
            return Err(Refusal::Source);
        }
        Ok(self.grant.clone())
    }

    fn apply(&mut self, name: &str, value: Option<String>) -> Result<(), KeyLineError> {
        let unknown = || KeyLineError::UnknownOption(name.to_owned());
        match (name.to_ascii_lowercase().as_str(), value) {
            ("restrict", None) => {
                self.grant.terminal = false;
                self.grant.forwarding = false;
            }
            ("pty", None) => self.grant.terminal = true,
            ("no-pty", None) => self.grant.terminal = false,
            ("port-forwarding", None) => self.grant.forwarding = true,
            ("no-port-forwarding", None) => self.grant.forwarding = false,
            // What these ask for does not exist here.
            ("no-agent-forwarding" | "no-x11-forwarding" | "no-user-rc", None) => {}
            ("agent-forwarding" | "x11-forwarding" | "user-rc", None) => {}
            ("command", Some(command)) => self.grant.command = Some(command),
            ("expiry-time", Some(text)) => {
                let at = parse_time(&text).ok_or(KeyLineError::Value("expiry-time"))?;
                self.expires = Some(self.expires.map_or(at, |earlier| earlier.min(at)));
            }
            ("from", Some(text)) => {
                self.sources = Some(parse_sources(&text).ok_or(KeyLineError::Value("from"))?);
            }
            _ => return Err(unknown()),
        }
        Ok(())
    }
}

impl FromStr for AuthorizedKey {
    type Err = KeyLineError;

    fn from_str(line: &str) -> Result<Self, KeyLineError> {
        let line = line.trim();
        if line.len() > MAX_LINE || line.chars().any(|c| c.is_control() && c != '\t') {
            return Err(KeyLineError::Line);
        }
        if let Some(key) = parse_key(line) {
            return Ok(AuthorizedKey { key, grant: Grant::EVERYTHING, expires: None, sources: None });
        }
        let (options, rest) = split_options(line)?;
        let key = parse_key(rest.trim_start()).ok_or(KeyLineError::Key)?;
        let mut parsed = AuthorizedKey { key, grant: Grant::EVERYTHING, expires: None, sources: None };
        for (name, value) in options {
            parsed.apply(&name, value)?;
        }
        Ok(parsed)
    }
}

/// `type base64 [comment]`.
fn parse_key(text: &str) -> Option<PublicKey> {
    let mut words = text.split_ascii_whitespace();
    let (kind, data) = (words.next()?, words.next()?);
    let key = PublicKey::from_openssh(&format!("{kind} {data}")).ok()?;
    // Without the means to check them, these would only make clients sign in vain.
    (!key.algorithm().is_rsa() && !key.algorithm().is_dsa()).then_some(key)
}

type Options = Vec<(String, Option<String>)>;

/// The options at the beginning of a line and what follows them. Values are quoted; `\"` is a quote in one.
fn split_options(line: &str) -> Result<(Options, &str), KeyLineError> {
    let mut options = Vec::new();
    let mut rest = line;
    loop {
        let end = rest.find([',', '=', ' ', '\t']).ok_or(KeyLineError::Key)?;
        let name = rest[..end].to_owned();
        if name.is_empty() {
            return Err(KeyLineError::Options);
        }
        rest = &rest[end..];
        let mut value = None;
        if let Some(quoted) = rest.strip_prefix('=') {
            let (text, after) = split_quoted(quoted.strip_prefix('"').ok_or(KeyLineError::Options)?)?;
            value = Some(text);
            rest = after;
        }
        options.push((name, value));
        if let Some(next) = rest.strip_prefix(',') {
            rest = next;
        } else if rest.starts_with([' ', '\t']) {
            return Ok((options, rest));
        } else {
            return Err(KeyLineError::Options);
        }
    }
}

fn split_quoted(text: &str) -> Result<(String, &str), KeyLineError> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' if text[at + 1..].starts_with('"') => {
                value.push('"');
                characters.next();
            }
            other => value.push(other),
        }
    }
    Err(KeyLineError::Options)
}

/// `YYYYMMDD[HHMM[SS]][Z]`. There is no zone but UTC in a sandbox.
fn parse_time(text: &str) -> Option<SystemTime> {
    let digits = text.strip_suffix(['Z', 'z']).unwrap_or(text);
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number = |from: usize, to: usize| digits.get(from..to)?.parse::<i16>().ok();
    let small = |from: usize, to: usize| i8::try_from(number(from, to)?).ok();
    let (hour, minute, second) = match digits.len() {
        8 => (0, 0, 0),
        12 => (small(8, 10)?, small(10, 12)?, 0),
        14 => (small(8, 10)?, small(10, 12)?, small(12, 14)?),
        _ => return None,
    };
    let time = DateTime::new(number(0, 4)?, small(4, 6)?, small(6, 8)?, hour, minute, second, 0).ok()?;
    Some(SystemTime::from(time.to_zoned(TimeZone::UTC).ok()?.timestamp()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS ann@example";

    fn parse(options: &str) -> Result<Grant, KeyLineError> {
        let line: AuthorizedKey = format!("{options}{KEY}").parse()?;
        Ok(line.allows(UNIX_EPOCH, None).unwrap())
    }

    #[test]
    fn a_bare_key_allows_everything() {
        assert_eq!(parse("").unwrap(), Grant::EVERYTHING);
    }

    #[test]
    fn restrict_takes_all_and_later_options_give_back() {
        let grant = |terminal, forwarding| Grant { terminal, forwarding, command: None };
        assert_eq!(parse("restrict ").unwrap(), grant(false, false));
        assert_eq!(parse("restrict,pty ").unwrap(), grant(true, false));
        assert_eq!(parse("no-pty ").unwrap(), grant(false, true));
        assert_eq!(parse("no-port-forwarding,no-user-rc,no-X11-forwarding ").unwrap(), grant(true, false));
    }

    #[test]
    fn a_command_may_hold_spaces_commas_and_quotes() {
        let grant = parse(r#"no-pty,command="echo \"a, b\" $SSH_ORIGINAL_COMMAND" "#).unwrap();
        assert_eq!(grant.command.as_deref(), Some(r#"echo "a, b" $SSH_ORIGINAL_COMMAND"#));
        assert!(!grant.terminal && grant.forwarding);
    }

    #[test]
    fn what_is_not_understood_refuses_the_line() {
        for option in [
            "cert-authority",
            "tunnel=\"0\"",
            "permitopen=\"a:1\"",
            "environment=\"A=b\"",
            "principals=\"a\"",
        ] {
            let name = option.split('=').next().unwrap().to_owned();
            assert_eq!(parse(&format!("{option} ")), Err(KeyLineError::UnknownOption(name)), "{option}");
        }
        assert_eq!(parse("command=\"open "), Err(KeyLineError::Options));
        assert_eq!(parse("command=x "), Err(KeyLineError::Options));
        assert_eq!(parse("pty=\"x\" "), Err(KeyLineError::UnknownOption("pty".into())));
        assert_eq!(parse("restrict,, "), Err(KeyLineError::Options));
        assert_eq!(parse("expiry-time=\"soon\" "), Err(KeyLineError::Value("expiry-time")));
        assert_eq!(parse("from=\"*.example.com\" "), Err(KeyLineError::Value("from")));
        assert_eq!("ssh-ed25519 AAAA".parse::<AuthorizedKey>().unwrap_err(), KeyLineError::Key);
        assert_eq!("".parse::<AuthorizedKey>().unwrap_err(), KeyLineError::Key);
        assert_eq!("a\u{1b}b".parse::<AuthorizedKey>().unwrap_err(), KeyLineError::Line);
    }

    #[test]
    fn a_key_expires_and_is_bound_to_its_source() {
        let line: AuthorizedKey = format!("expiry-time=\"19700102\" {KEY}").parse().unwrap();
        let day = UNIX_EPOCH + Duration::from_secs(86400);
        assert!(line.allows(day - Duration::from_secs(1), None).is_ok());
        assert_eq!(line.allows(day, None), Err(Refusal::KeyExpired));
        let line: AuthorizedKey = format!("from=\"127.0.0.0/8\" {KEY}").parse().unwrap();
        assert!(line.allows(day, Some([127, 0, 0, 2].into())).is_ok());
        assert_eq!(line.allows(day, None), Err(Refusal::Source));
        assert_eq!(parse_time("20260230"), None);
        assert_eq!(parse_time("197001010001Z"), Some(UNIX_EPOCH + Duration::from_secs(60)));
    }

    #[test]
    fn one_bad_line_does_not_spoil_a_file() {
        let lines = AuthorizedKey::parse_file(&format!("# note\n\n{KEY}\nunknown-option {KEY}\n"));
        assert_eq!(lines.len(), 2);
        assert!(lines[0].is_ok() && lines[1].is_err());
    }
}
