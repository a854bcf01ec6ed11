//! Which values are secrets, judged by their names, and by what structured values say inside.

const WORDS: [&str; 7] = ["SECRET", "TOKEN", "PASS", "KEY", "AUTH", "CREDENTIAL", "DSN"];

/// The value, or `***` when the name says that it is secret.
pub(super) fn mask<'a>(name: &str, value: &'a str) -> &'a str {
    let name = name.to_ascii_uppercase();
    // A label may hold a whole record, tokens included.
    let record = value.contains("Token\"") || value.contains("_token\"");
    if record || WORDS.iter().any(|word| name.contains(word)) { "***" } else { value }
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
        assert_eq!(mask("opensandbox.io/sandglass", r#"{"v":1,"agentToken":"t0p"}"#), "***");
        assert_eq!(mask("opensandbox.io/ossfs-mounts", r#"["/mnt/a"]"#), r#"["/mnt/a"]"#);
    }
}
