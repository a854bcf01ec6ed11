//! Connection strings of PostgreSQL in both of its spellings: `postgres://…` and `host=… dbname=…`.
//!
//! Errors never repeat any part of the text: it holds a password, perhaps in the wrong place.

use std::{collections::BTreeMap, str::FromStr};

use sqlx::postgres::{PgConnectOptions, PgSslMode};

/// Why a connection string is of no use.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DsnError {
    #[error(
        "the connection string cannot be read; write postgres://user:password@host:port/database or host=… dbname=…"
    )]
    Unreadable,
    #[error("the connection string has a parameter that is not supported; supported are: {}", KEPT.join(", "))]
    Parameter,
    #[error("the connection string has a bad {0}")]
    Value(&'static str),
}

/// Parameters with an effect.
const KEPT: [&str; 11] = [
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "options",
];

/// Parameters of the C library that have a setting of ours instead, or nothing to do here.
const IDLE: [&str; 12] = [
    "application_name",
    "fallback_application_name",
    "connect_timeout",
    "client_encoding",
    "channel_binding",
    "gssencmode",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
    "target_session_attrs",
];

/// Reads a connection string.
pub(super) fn parse(text: &str) -> Result<PgConnectOptions, DsnError> {
    let text = text.trim();
    if text.starts_with("postgres://") || text.starts_with("postgresql://") {
        from_url(text)
    } else {
        from_url(&address(&pairs(text)?))
    }
}

/// The driver reads addresses itself, but it prints parameters that it does not know, values included.
fn from_url(text: &str) -> Result<PgConnectOptions, DsnError> {
    let (base, query) = text.split_once('?').unwrap_or((text, ""));
    let mut kept = Vec::new();
    for parameter in query.split('&').filter(|p| !p.is_empty()) {
        let (key, value) = parameter.split_once('=').ok_or(DsnError::Unreadable)?;
        match known(key)? {
            Some("sslmode") if PgSslMode::from_str(value).is_err() => return Err(DsnError::Value("sslmode")),
            Some(_) => kept.push(parameter),
            None => {}
        }
    }
    PgConnectOptions::from_str(&format!("{base}?{}", kept.join("&"))).map_err(|_| DsnError::Unreadable)
}

/// The parameter when it has an effect.
fn known(key: &str) -> Result<Option<&str>, DsnError> {
    if KEPT.contains(&key) {
        Ok(Some(key))
    } else if IDLE.contains(&key) {
        Ok(None)
    } else {
        Err(DsnError::Parameter)
    }
}

/// The other spelling as an address, so that each parameter is read in one place.
fn address(pairs: &BTreeMap<String, String>) -> String {
    let parameters: Vec<_> =
        pairs.iter().map(|(key, value)| format!("{}={}", escaped(key), escaped(value))).collect();
    format!("postgres:///?{}", parameters.join("&"))
}

fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        if byte.is_ascii_alphanumeric() || byte == b'_' {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
        escaped
    })
}

/// `key = value` with single quotes and backslashes, as the C library reads it.
fn pairs(text: &str) -> Result<BTreeMap<String, String>, DsnError> {
    let mut pairs = BTreeMap::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=').ok_or(DsnError::Unreadable)?;
        let (value, after) = value(after.trim_start())?;
        pairs.insert(key.trim().to_owned(), value);
        rest = after.trim_start();
    }
    if pairs.is_empty() { Err(DsnError::Unreadable) } else { Ok(pairs) }
}

fn value(text: &str) -> Result<(String, &str), DsnError> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut characters = text.char_indices().skip(usize::from(quoted));
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.push(characters.next().ok_or(DsnError::Unreadable)?.1),
            '\'' if quoted => return Ok((value, &text[at + 1..])),
            space if !quoted && space.is_whitespace() => return Ok((value, &text[at..])),
            other => value.push(other),
        }
    }
    if quoted { Err(DsnError::Unreadable) } else { Ok((value, "")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_name_the_same_database() {
        for text in [
            "postgresql://me:p%20w@db.example:6432/things?sslmode=disable&connect_timeout=3",
            " host=db.example port = 6432 dbname='things' user=me password='p w' sslmode=disable keepalives=1 ",
        ] {
            let options = parse(text).unwrap();
            assert_eq!(
                (options.get_host(), options.get_port(), options.get_username(), options.get_database()),
                ("db.example", 6432, "me", Some("things")),
                "{text}"
            );
            assert!(matches!(options.get_ssl_mode(), PgSslMode::Disable));
        }
        let socket = parse("host=/run/postgresql dbname=x").unwrap();
        assert_eq!(socket.get_socket().and_then(|p| p.to_str()), Some("/run/postgresql"));
        assert_eq!(pairs(r"password='a\'b\\c' user=x\ y").unwrap()["password"], r"a'b\c");
        assert_eq!(pairs(r"password='a\'b\\c' user=x\ y").unwrap()["user"], "x y");
    }

    #[test]
    fn errors_do_not_repeat_the_text() {
        for text in [
            "hunter2",
            "",
            "postgres://u:hunter2?x@h/db",
            "postgres://u@h/db?hunter2=1",
            "postgres://u@h/db?sslmode=hunter2",
            "postgres://u:hunter2@h:port/db",
            "host=h port=hunter2",
            "host=h hunter2=1",
            "host=h password='hunter2",
            "host=h sslmode=hunter2",
        ] {
            let error = parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{text}: {error}");
        }
    }
}
