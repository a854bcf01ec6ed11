//! Tokens by their shape, for the last look at what is about to be kept.

use std::io::{self, Read};
use std::sync::LazyLock;

use regex::bytes::Regex;
use serde::{Deserialize, Serialize};

/// The longest token that is found across two reads.
const OVERLAP: usize = 1024;
const CHUNK: usize = 256 * 1024;
/// More findings say nothing new.
const FINDINGS_LIMIT: usize = 100;

/// Whose token it looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenKind {
    #[serde(rename = "github-token")]
    GitHub,
    #[serde(rename = "gitlab-token")]
    GitLab,
    #[serde(rename = "npm-token")]
    Npm,
    AwsAccessKeyId,
    AwsSecretKey,
    PrivateKey,
    /// User and password in an address.
    UrlPassword,
    #[serde(rename = "slack-token")]
    Slack,
}

impl TokenKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GitHub => "GitHub token",
            Self::GitLab => "GitLab token",
            Self::Npm => "npm token",
            Self::AwsAccessKeyId => "AWS access key id",
            Self::AwsSecretKey => "AWS secret key",
            Self::PrivateKey => "private key",
            Self::UrlPassword => "password in an address",
            Self::Slack => "Slack token",
        }
    }

    /// The stable word, as recipes write it.
    pub fn word(self) -> &'static str {
        match self {
            Self::GitHub => "github-token",
            Self::GitLab => "gitlab-token",
            Self::Npm => "npm-token",
            Self::AwsAccessKeyId => "aws-access-key-id",
            Self::AwsSecretKey => "aws-secret-key",
            Self::PrivateKey => "private-key",
            Self::UrlPassword => "url-password",
            Self::Slack => "slack-token",
        }
    }
}

/// One occurrence. It says where, never what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Bytes from the beginning.
    pub offset: u64,
    pub kind: TokenKind,
}

static SHAPES: LazyLock<Vec<(TokenKind, Regex)>> = LazyLock::new(|| {
    [
        (TokenKind::GitHub, r"(?-u)\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59})"),
        (TokenKind::GitLab, r"(?-u)\bgl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[A-Za-z0-9_-]{20,}"),
        (TokenKind::Npm, r"(?-u)\bnpm_[A-Za-z0-9]{36}\b"),
        (TokenKind::AwsAccessKeyId, r"(?-u)\b(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
        (
            TokenKind::AwsSecretKey,
            r#"(?i-u)aws_?secret_?(?:access_?)?key["']?\s{0,4}[:=]\s{0,4}["']?[A-Za-z0-9/+]{40}(?:[^A-Za-z0-9/+=]|$)"#,
        ),
        // With the beginning of its body: programs and manuals hold the bare header.
        (TokenKind::PrivateKey, r"(?-u)-----BEGIN (?:[A-Z0-9]{2,12} ){0,2}PRIVATE KEY-----(?:\s|\\n|\\r){1,8}[A-Za-z0-9+/=:, -]{24}"),
        (TokenKind::Slack, r"(?-u)\bxox[abeoprs]-(?:[0-9]{1,16}-){1,4}[A-Za-z0-9]{16,64}"),
        (TokenKind::UrlPassword, r"(?-u)\bhttps?://[A-Za-z0-9._~%+-]{1,64}:[A-Za-z0-9._~%+!-]{8,256}@[A-Za-z0-9.-]{3,}"),
    ]
    .map(|(kind, shape)| (kind, Regex::new(shape).expect("the shapes are constants that tests compile")))
    .into()
});

/// Finds tokens in a stream of any length with bounded memory; at most a hundred, by offset.
///
/// # Errors
/// Reading failed.
pub fn scan(mut input: impl Read) -> io::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut window = Vec::with_capacity(CHUNK + OVERLAP);
    let mut base = 0u64;
    loop {
        let before = window.len();
        input.by_ref().take(CHUNK as u64).read_to_end(&mut window)?;
        let ended = window.len() - before < CHUNK;
        for (kind, shape) in SHAPES.iter() {
            let found = shape
                .find_iter(&window)
                .map(|found| Finding { offset: base + found.start() as u64, kind: *kind });
            findings.extend(found.take(FINDINGS_LIMIT));
        }
        // The overlap is looked at twice.
        findings.sort_unstable();
        findings.dedup();
        findings.truncate(FINDINGS_LIMIT);
        if ended || findings.len() == FINDINGS_LIMIT {
            return Ok(findings);
        }
        let cut = window.len().saturating_sub(OVERLAP);
        window.drain(..cut);
        base += cut as u64;
    }
}
