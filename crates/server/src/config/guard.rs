//! The question asked before a server starts without an API key.
//!
//! Deciding is a pure function; only [`ask_operator`] touches the terminal. Nothing but the exact word `YES` allows.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Config;
use super::environment::Environment;

/// The variable that permits starting without a key.
pub const INSECURE_VARIABLE: &str = "OPENSANDBOX_INSECURE_SERVER";

/// How long the operator has to answer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(30);

const WORD: &str = "YES";

/// Who may call the API once the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authentication {
    /// A key is set, or tenants bring their own.
    Required,
    Off,
}

impl Authentication {
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let key = config.server.api_key.as_ref().is_some_and(|key| !key.expose().trim().is_empty());
        if key || config.tenants.is_some() { Self::Required } else { Self::Off }
    }
}

/// Whether there is somebody to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    AtTerminal,
    Absent,
}

impl Operator {
    /// Looks at standard input.
    #[must_use]
    pub fn on_stdin() -> Self {
        if rustix::termios::isatty(io::stdin()) { Self::AtTerminal } else { Self::Absent }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allowed,
    Refused(String),
    AskOperator,
}

/// Decides whether the server may start; `insecure` is the value of [`INSECURE_VARIABLE`].
#[must_use]
pub fn startup_guard(authentication: Authentication, insecure: Option<&str>, operator: Operator) -> Verdict {
    match (authentication, insecure, operator) {
        (Authentication::Required, _, _) | (Authentication::Off, Some(WORD), _) => Verdict::Allowed,
        (Authentication::Off, _, Operator::AtTerminal) => Verdict::AskOperator,
        (Authentication::Off, _, Operator::Absent) => Verdict::Refused(refusal()),
    }
}

/// The variable's value for [`startup_guard`].
#[must_use]
pub fn insecure_answer(env: &dyn Environment) -> Option<String> {
    env.get(INSECURE_VARIABLE).and_then(|value| value.into_string().ok())
}

/// Why the server does not start, and what to do.
#[must_use]
pub fn refusal() -> String {
    format!(
        "no API key is set, so anybody who reaches this server could run programs on it; set server.api_key \
         (or OPENSANDBOX_SERVER_API_KEY), or accept the risk with {INSECURE_VARIABLE}={WORD}"
    )
}

/// Asks on `output` and waits for a line on `input`. Silence, end of input and any other word are a no.
///
/// # Errors
///
/// When the terminal cannot be read or written.
pub fn ask_operator(input: impl AsFd, output: &mut dyn Write, limit: Duration) -> io::Result<Verdict> {
    writeln!(output, "No API key is set: anybody who reaches this server can run programs on it.")?;
    write!(output, "Type {WORD} within {} seconds to start it anyway: ", limit.as_secs())?;
    output.flush()?;
    let mut line = Vec::new();
    // A terminal hands over whole lines; the loop is for one in raw mode. Each key restarts the limit.
    while !line.contains(&b'\n') && line.len() < 64 {
        if !is_readable(&input, limit)? {
            writeln!(output)?;
            break;
        }
        let mut chunk = [0; 64];
        let read = rustix::io::retry_on_intr(|| rustix::io::read(&input, &mut chunk))?;
        if read == 0 {
            break;
        }
        line.extend_from_slice(&chunk[..read]);
    }
    let answer = line.strip_suffix(b"\n").unwrap_or(&line);
    let answer = answer.strip_suffix(b"\r").unwrap_or(answer);
    if answer == WORD.as_bytes() { Ok(Verdict::Allowed) } else { Ok(Verdict::Refused(refusal())) }
}

fn is_readable(input: &impl AsFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let ready = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&limit)))?;
    Ok(ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Secret;

    #[test]
    fn only_a_key_the_exact_word_or_the_operator_lets_the_server_start() {
        use Authentication::{Off, Required};
        use Operator::{Absent, AtTerminal};
        assert_eq!(startup_guard(Required, None, Absent), Verdict::Allowed);
        assert_eq!(startup_guard(Off, Some("YES"), Absent), Verdict::Allowed);
        assert_eq!(startup_guard(Off, None, AtTerminal), Verdict::AskOperator);
        for word in [None, Some(""), Some("yes"), Some("YES "), Some("1"), Some("true")] {
            assert!(matches!(startup_guard(Off, word, Absent), Verdict::Refused(_)), "{word:?}");
            assert_eq!(startup_guard(Off, word, AtTerminal), Verdict::AskOperator, "{word:?}");
        }
    }

    #[test]
    fn a_blank_key_is_no_key_and_tenants_bring_their_own() {
        let mut config = Config::default();
        assert_eq!(Authentication::of(&config), Authentication::Off);
        config.server.api_key = Some(Secret::new("  "));
        assert_eq!(Authentication::of(&config), Authentication::Off);
        config.server.api_key = Some(Secret::new("k"));
        assert_eq!(Authentication::of(&config), Authentication::Required);
        config.server.api_key = None;
        config.tenants = Some(crate::config::TenantsConfig::default());
        assert_eq!(Authentication::of(&config), Authentication::Required);
    }

    fn answer(text: &[u8]) -> Verdict {
        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, text).unwrap();
        drop(write);
        ask_operator(read, &mut Vec::new(), Duration::from_secs(5)).unwrap()
    }

    #[test]
    fn the_operator_must_type_the_word() {
        assert_eq!(answer(b"YES\n"), Verdict::Allowed);
        assert_eq!(answer(b"YES\r\n"), Verdict::Allowed);
        for text in [&b""[..], b"\n", b"yes\n", b"YES!\n", b" YES\n", b"NO\n", &[b'Y'; 200]] {
            assert!(matches!(answer(text), Verdict::Refused(_)), "{text:?}");
        }
    }

    #[test]
    fn silence_is_a_no() {
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let verdict = ask_operator(read, &mut Vec::new(), Duration::from_millis(10)).unwrap();
        assert!(matches!(verdict, Verdict::Refused(_)));
    }
}
