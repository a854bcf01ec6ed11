//! The environment of user processes: layers, the persistent env file, `$VAR` and `~` expansion.
//!
//! Does not decide who sees what beyond dropping the agent's own secret.
//! Invariant: the access token is in no map this module returns.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Deref;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

pub type Env = BTreeMap<String, String>;

pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What is the agent's alone; the hooks in it were read at the start.
const SECRETS: [&str; 5] = [
    "EXECD_ACCESS_TOKEN",
    "OPENSANDBOX_LIFECYCLE",
    "OPEN_SANDBOX_LIFECYCLE",
    "EXECD_LIFECYCLE_CONFIG",
    "EXECD_RUNTIME_INIT",
];
/// What configures the agent beside the secrets and is nobody else's business; `/command` alone must see the path of the env file.
const PRIVATE: [&str; 4] = ["JUPYTER_HOST", "JUPYTER_TOKEN", "EXECD_ISOLATION_CONFIG", "EXECD_ENVS"];
/// A box may write anything into its env file; reading stops here.
const MAX_FILE: u64 = 4 << 20;

/// The environment of user processes as long as the agent lives: replaced at most once, when the box becomes somebody's.
#[derive(Debug)]
pub struct LiveEnv {
    first: Env,
    bound: OnceLock<Env>,
}

impl LiveEnv {
    pub fn new(first: Env) -> Self {
        LiveEnv { first, bound: OnceLock::new() }
    }

    /// Takes effect once; processes that run keep what they were started with.
    pub fn bind(&self, env: Env) {
        let _ = self.bound.set(env);
    }
}

impl Deref for LiveEnv {
    type Target = Env;

    fn deref(&self) -> &Env {
        self.bound.get().unwrap_or(&self.first)
    }
}

pub fn strip_secrets(env: &mut Env) {
    env.retain(|name, _| !SECRETS.iter().any(|secret| name.eq_ignore_ascii_case(secret)));
}

/// The environment of interactive shells: the agent's and the env file's, without what configures the agent.
pub fn for_shells(daemon: &Env, file: &Path) -> Env {
    let mut env = daemon.clone();
    env.extend(read_file(file, daemon));
    strip_secrets(&mut env);
    env.retain(|name, _| !PRIVATE.iter().any(|private| name.eq_ignore_ascii_case(private)));
    env
}

pub fn search_path(env: &Env) -> &str {
    env.get("PATH").map_or(DEFAULT_PATH, String::as_str)
}

/// Replaces `$NAME` and `${NAME}` with what `value` returns.
pub fn expand(text: &str, mut value: impl FnMut(&str) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(braced) = rest.strip_prefix('{') {
            // An unclosed brace is text, not an error: paths with such names exist.
            let Some(end) = braced.find('}') else {
                out.push('$');
                continue;
            };
            out.push_str(&value(&braced[..end]));
            rest = &braced[end + 1..];
        } else {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let end = if rest.starts_with(|c: char| c.is_ascii_digit()) { 1 } else { end };
            if end == 0 {
                out.push('$');
            } else {
                out.push_str(&value(&rest[..end]));
                rest = &rest[end..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("path references undefined environment variables: {0}")]
pub struct Undefined(String);

/// Expands variables, then a leading `~`.
pub fn expand_path(raw: &str, env: &Env, home: &str) -> Result<String, Undefined> {
    let mut missing = Vec::new();
    let expanded = expand(raw, |name| match env.get(name) {
        Some(value) => value.clone(),
        None => {
            missing.push(name.to_owned());
            String::new()
        }
    });
    if !missing.is_empty() {
        missing.sort();
        missing.dedup();
        return Err(Undefined(missing.join(",")));
    }
    match expanded.strip_prefix('~') {
        Some("") => Ok(home.to_owned()),
        Some(rest) if rest.starts_with('/') => Ok(format!("{}{rest}", home.trim_end_matches('/'))),
        _ => Ok(expanded),
    }
}

/// Makes a path absolute below `base` and removes `.`, `..` and double slashes, without touching the disk.
pub fn clean(base: &Path, raw: &str) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in base.join(raw).components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    out
}

/// Reads the persistent env file; a missing or unreadable one is empty.
pub fn read_file(path: &Path, daemon: &Env) -> Env {
    let mut bytes = Vec::new();
    let opened = std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path);
    if let Ok(file) = opened
        && file.metadata().is_ok_and(|m| m.is_file())
    {
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    parse(&String::from_utf8_lossy(&bytes), daemon)
}

/// A FIFO in place of a file must not block PID 1.
pub trait NonblockingOpen {
    fn custom_flags_nonblocking(&mut self) -> &mut Self;
}

impl NonblockingOpen for std::fs::OpenOptions {
    fn custom_flags_nonblocking(&mut self) -> &mut Self {
        use std::os::unix::fs::OpenOptionsExt;
        self.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
    }
}

/// `KEY=raw`, `KEY="escaped and expanded"`, `KEY='literal'`; quoted values may span lines, the last one wins.
pub fn parse(text: &str, daemon: &Env) -> Env {
    let mut env = Env::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let trimmed = line.trim();
        let key_value = line.split_once('=').map(|(key, value)| (key.trim(), value));
        let Some((key, value)) = key_value.filter(|(key, _)| !key.is_empty() && !trimmed.starts_with('#'))
        else {
            rest = after;
            continue;
        };
        // `export ` is what people write by hand.
        let key = key.strip_prefix("export ").map_or(key, str::trim);
        let value_text = value.trim_start();
        let Some(quote) = value_text.chars().next().filter(|c| matches!(c, '"' | '\'')) else {
            insert(&mut env, key, expand(value.trim(), |name| daemon.get(name).cloned().unwrap_or_default()));
            rest = after;
            continue;
        };
        let body = &rest[offset_of(rest, value_text) + 1..];
        match closing_quote(body, quote) {
            Some(end) => {
                let (tail, next) = body[end + 1..].split_once('\n').unwrap_or((&body[end + 1..], ""));
                if tail.trim().is_empty() {
                    let value = match quote {
                        '\'' => body[..end].to_owned(),
                        _ => expand(&unescape(&body[..end]), |n| daemon.get(n).cloned().unwrap_or_default()),
                    };
                    insert(&mut env, key, value);
                }
                rest = next;
            }
            // An unterminated quote costs its own line only, not the rest of the file.
            None => rest = after,
        }
    }
    env
}

/// Where `part`, a slice of `whole`, begins in it.
fn offset_of(whole: &str, part: &str) -> usize {
    part.as_ptr() as usize - whole.as_ptr() as usize
}

fn insert(env: &mut Env, key: &str, value: String) {
    if !key.contains('\0') && !value.contains('\0') {
        env.insert(key.to_owned(), value);
    }
}

fn closing_quote(body: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        if escaped {
            escaped = false;
        } else if c == '\\' && quote == '"' {
            escaped = true;
        } else if c == quote {
            return Some(at);
        }
    }
    None
}

fn unescape(body: &str) -> String {
    let mut out = String::with_capacity(body.len());
    let mut chars = body.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('r') => out.push('\r'),
            Some('t') => out.push('\t'),
            Some(c @ ('\\' | '"')) => out.push(c),
            Some(c) => out.extend(['\\', c]),
            None => out.push('\\'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon() -> Env {
        Env::from([("HOME".into(), "/root".into()), ("X".into(), "1".into())])
    }

    #[test]
    fn every_form_of_the_env_file() {
        let text = "# note\nA=raw $X\n\nB=\"q\\n\\\"${X}\\z\"\nC='lit $X\nsecond'\nnoequals\nD='open\nE='x' tail\nexport F=f\nA= last \nG='it'";
        let env = parse(text, &daemon());
        let expected = [("A", "last"), ("B", "q\n\"1\\z"), ("C", "lit $X\nsecond"), ("F", "f"), ("G", "it")];
        for (key, value) in expected {
            assert_eq!(env.get(key).map(String::as_str), Some(value), "{key}");
        }
        assert!(!env.contains_key("noequals"));
    }

    #[test]
    fn paths_expand_and_clean() {
        let env = daemon();
        assert_eq!(expand_path("~/a$X/${X}b", &env, "/root").unwrap(), "/root/a1/1b");
        assert_eq!(expand_path("a~", &env, "/root").unwrap(), "a~");
        assert_eq!(expand_path("100$", &env, "/").unwrap(), "100$");
        let missing = expand_path("$Q/${P}/$Q", &env, "/").unwrap_err();
        assert_eq!(missing.to_string(), "path references undefined environment variables: P,Q");
        assert_eq!(clean(Path::new("/w"), "a/../b//c/."), Path::new("/w/b/c"));
        assert_eq!(clean(Path::new("/w"), "/../etc"), Path::new("/etc"));
    }

    #[test]
    fn the_token_is_stripped_in_any_case() {
        let mut env = Env::from([("execd_access_token".into(), "s".into()), ("A".into(), "b".into())]);
        strip_secrets(&mut env);
        assert_eq!(env.len(), 1);
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(text in ".{0,200}|([A-C'\"=\\\\\n $]{0,60})") {
            parse(&text, &daemon());
            let _ = expand_path(&text, &daemon(), "/root");
        }
    }
}
