//! From the text of a Dockerfile to its logical lines: directives, comments, continuation, here-documents.

use super::DockerfileError;
use super::instruction::Heredoc;
use super::words::raw_words;

/// More than any Dockerfile that a person wrote.
const LINES_LIMIT: usize = 20_000;
const HEREDOC_NAME_LIMIT: usize = 128;

/// `# key=value` before anything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Directives {
    pub(super) syntax: Option<String>,
    pub(super) escape: char,
}

/// An instruction on one line, whatever number of lines it was written on.
#[derive(Debug)]
pub(super) struct LogicalLine {
    /// Where it begins, from 1.
    pub(super) number: usize,
    pub(super) text: String,
    pub(super) heredocs: Vec<Heredoc>,
}

pub(super) fn split(text: &str) -> Result<(Directives, Vec<LogicalLine>), DockerfileError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.contains('\0') {
        return Err(DockerfileError::new(0, "the file holds a zero byte"));
    }
    let physical: Vec<&str> = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)).collect();
    if physical.len() > LINES_LIMIT {
        return Err(DockerfileError::new(0, format!("the file has more than {LINES_LIMIT} lines")));
    }
    let (directives, from) = read_directives(&physical)?;
    let mut lines = Vec::new();
    let mut at = from;
    while at < physical.len() {
        let number = at + 1;
        let first = physical[at].trim_start();
        at += 1;
        if first.is_empty() || first.starts_with('#') {
            continue;
        }
        let (mut logical, mut continues) = continuation(first, directives.escape);
        while continues && at < physical.len() {
            let line = physical[at];
            at += 1;
            // Comments and empty lines may stand between the parts of an instruction.
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let (part, more) = continuation(line, directives.escape);
            logical.push_str(&part);
            continues = more;
        }
        if logical.trim().is_empty() {
            continue;
        }
        let heredocs = read_heredocs(&logical, directives.escape, &physical, &mut at, number)?;
        lines.push(LogicalLine { number, text: logical.trim_end().to_owned(), heredocs });
    }
    Ok((directives, lines))
}

fn read_directives(lines: &[&str]) -> Result<(Directives, usize), DockerfileError> {
    let mut directives = Directives { syntax: None, escape: '\\' };
    let mut seen = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some((name, value)) = line.trim_start().strip_prefix('#').and_then(|rest| rest.split_once('='))
        else {
            return Ok((directives, index));
        };
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
        if !matches!(name.as_str(), "syntax" | "escape" | "check") {
            return Ok((directives, index));
        }
        if seen.contains(&name) {
            return Err(DockerfileError::new(index + 1, format!("the directive `{name}` stands here twice")));
        }
        match (name.as_str(), value) {
            ("syntax", "") => return Err(DockerfileError::new(index + 1, "the directive `syntax` is empty")),
            ("syntax", value) => directives.syntax = Some(value.to_owned()),
            ("escape", "\\") => directives.escape = '\\',
            ("escape", "`") => directives.escape = '`',
            ("escape", _) => {
                return Err(DockerfileError::new(index + 1, "the directive `escape` is neither \\ nor `"));
            }
            // For linters alone.
            _ => {}
        }
        seen.push(name);
    }
    Ok((directives, lines.len()))
}

/// Takes off an escape at the end that joins the next line; a doubled one is text.
fn continuation(line: &str, escape: char) -> (String, bool) {
    let trimmed = line.trim_end_matches([' ', '\t']);
    match trimmed.strip_suffix(escape) {
        Some(rest) if !rest.ends_with(escape) => (rest.to_owned(), true),
        _ => (line.to_owned(), false),
    }
}

fn read_heredocs(
    logical: &str,
    escape: char,
    physical: &[&str],
    at: &mut usize,
    number: usize,
) -> Result<Vec<Heredoc>, DockerfileError> {
    if !takes_heredocs(logical) {
        return Ok(Vec::new());
    }
    let mut heredocs = Vec::new();
    for mut heredoc in raw_words(logical, escape).iter().filter_map(|word| parse_heredoc(word)) {
        if heredoc.name.len() > HEREDOC_NAME_LIMIT {
            return Err(DockerfileError::new(number, "the name of a here-document is too long"));
        }
        loop {
            let Some(line) = physical.get(*at) else {
                let message = format!("the here-document `{}` does not end", heredoc.name);
                return Err(DockerfileError::new(number, message));
            };
            *at += 1;
            let line = if heredoc.chomp { line.trim_start_matches('\t') } else { line };
            if line == heredoc.name {
                break;
            }
            heredoc.content.push_str(line);
            heredoc.content.push('\n');
        }
        heredocs.push(heredoc);
    }
    Ok(heredocs)
}

fn takes_heredocs(logical: &str) -> bool {
    let mut words = logical.split_whitespace().map(str::to_ascii_uppercase);
    let first = words.next();
    let keyword = if first.as_deref() == Some("ONBUILD") { words.next() } else { first };
    matches!(keyword.as_deref(), Some("RUN" | "COPY" | "ADD"))
}

/// Reads a word like `<<EOF`, `<<-"EOF"` or `3<<EOF`.
pub(super) fn parse_heredoc(word: &str) -> Option<Heredoc> {
    let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
    let (chomp, rest) = match rest.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    if rest.is_empty() || rest.contains('<') {
        return None;
    }
    let quoted = rest.contains(['"', '\'', '\\']);
    let name: String = rest.chars().filter(|c| !"\"'\\".contains(*c)).collect();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return None;
    }
    Some(Heredoc { name, expand: !quoted, chomp, content: String::new() })
}
