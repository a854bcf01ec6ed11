//! Which values are secrets, judged by their names, and by what structured values say inside.

use sandglass_repository::redact::scan;

const WORDS: [&str; 10] =
    ["SECRET", "TOKEN", "PASS", "KEY", "AUTH", "CREDENTIAL", "DSN", "COOKIE", "PRIVATE", "WEBHOOK"];

/// The value, or `***` when its name says that it is secret, or it looks like somebody's token, private key or an address with a password.
pub(super) fn mask<'a>(name: &str, value: &'a str) -> &'a str {
    let name = name.to_ascii_uppercase();
    // A label may hold a whole record, tokens included.
    let record = value.contains("Token\"") || value.contains("_token\"");
    let secret = || WORDS.iter().any(|word| name.contains(word)) || has_password(value) || has_token(value);
    if record || secret() { "***" } else { value }
}

/// `scheme://user:password@host`, of databases for one.
fn has_password(value: &str) -> bool {
    value.match_indices("://").any(|(at, separator)| {
        let rest = &value[at + separator.len()..];
        let authority = rest.split(['/', '?', '#', ' ', ',']).next().unwrap_or_default();
        authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'))
    })
}

fn has_token(value: &str) -> bool {
    // Reading what is in memory does not fail; if it did, the value would stay hidden.
    scan(value.as_bytes()).map_or(true, |found| !found.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_decide() {
        for name in
            ["API_KEY", "aws_secret_access_key", "Token", "DB_PASSWORD", "X-Access-Token", "MONKEY", "PGPASS"]
        {
            assert_eq!(mask(name, "v"), "***", "{name}");
        }
        for name in ["PATH", "HOME", ""] {
            assert_eq!(mask(name, "v"), "v", "{name}");
        }
        let token = format!("x ghp_{}", "a1B2".repeat(9));
        let key = "-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEAxxxxxxxxxxxxxxxx";
        for value in [token.as_str(), key, "postgres://app:hunter2@db/x", "redis://:hunter2@cache:6379"] {
            assert_eq!(mask("HARMLESS", value), "***", "{value}");
        }
        for value in ["https://example.com:8080/a@b", "ssh://git@example.com", "a:b@c", "/usr/bin:/bin"] {
            assert_eq!(mask("HARMLESS", value), value);
        }
        assert_eq!(mask("opensandbox.io/sandglass", r#"{"v":1,"agentToken":"t0p"}"#), "***");
        assert_eq!(mask("opensandbox.io/ossfs-mounts", r#"["/mnt/a"]"#), r#"["/mnt/a"]"#);
    }
}
