//! `.dockerignore`: which files of the context a build does not see.

/// Patterns of an ignore file, in order; the last one that matches decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IgnoreFile {
    patterns: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Pattern {
    includes: bool,
    components: Vec<String>,
}

impl IgnoreFile {
    pub fn parse(text: &str) -> Self {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let patterns = text
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.starts_with('#'))
            .filter_map(Pattern::parse)
            .collect();
        Self { patterns }
    }

    /// Whether a path, relative to the context and without leading slash, is left out. What lies in a folder that is left out is left
    /// out too, unless a later pattern takes it in again.
    pub fn excludes(&self, path: &str) -> bool {
        let components: Vec<&str> =
            path.split('/').filter(|component| !component.is_empty() && *component != ".").collect();
        let mut excluded = false;
        for pattern in &self.patterns {
            if pattern.includes == excluded && pattern.matches_or_holds(&components) {
                excluded = !pattern.includes;
            }
        }
        excluded
    }

    /// Whether something below a folder that is left out may be taken in again, so that the folder has to be walked.
    pub fn may_include_below(&self, folder: &str) -> bool {
        self.patterns.iter().any(|pattern| {
            let literal: Vec<&str> = pattern
                .components
                .iter()
                .map(String::as_str)
                .take_while(|part| !part.contains(['*', '?', '[', '\\']))
                .collect();
            let components: Vec<&str> = folder.split('/').collect();
            pattern.includes && literal.iter().zip(&components).all(|(part, component)| part == component)
        })
    }
}

impl Pattern {
    fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        let (includes, rest) = match line.strip_prefix('!') {
            Some(rest) => (true, rest.trim_start()),
            None => (false, line),
        };
        // As a path would be cleaned: no empty component, no `.`, and `..` takes one away.
        let mut components: Vec<String> = Vec::new();
        for component in rest.split('/') {
            match component {
                "" | "." => {}
                ".." => {
                    components.pop();
                }
                other => components.push(other.to_owned()),
            }
        }
        (!components.is_empty()).then_some(Self { includes, components })
    }

    /// Whether the pattern matches the path or one of the folders it lies in.
    fn matches_or_holds(&self, path: &[&str]) -> bool {
        (1..=path.len()).any(|end| matches(&self.components, &path[..end]))
    }
}

fn matches(pattern: &[String], path: &[&str]) -> bool {
    match (pattern.split_first(), path.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "**" => {
            matches(rest, path) || path.split_first().is_some_and(|(_, below)| matches(pattern, below))
        }
        (Some((first, rest)), Some((component, below))) => {
            let first: Vec<char> = first.chars().collect();
            let component: Vec<char> = component.chars().collect();
            matches_component(&first, &component) && matches(rest, below)
        }
        _ => false,
    }
}

/// `*`, `?`, `[a-z]`, `[^a]` and `\` within one component.
fn matches_component(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on when a later part does not match: after the last star, one character further.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if p < pattern.len() && pattern[p] == '*' {
            retry = Some((p + 1, t));
            p += 1;
            continue;
        }
        if t == text.len() {
            return p == pattern.len();
        }
        match step(&pattern[p..], text[t]) {
            Some(length) => {
                p += length;
                t += 1;
            }
            None => {
                let Some((after_star, from)) = retry else { return false };
                retry = Some((after_star, from + 1));
                (p, t) = (after_star, from + 1);
            }
        }
    }
}

/// How much of the pattern matches one character.
fn step(pattern: &[char], c: char) -> Option<usize> {
    match *pattern.first()? {
        '?' => Some(1),
        '\\' => (pattern.get(1) == Some(&c)).then_some(2),
        '[' => class(pattern, c),
        literal => (literal == c).then_some(1),
    }
}

fn class(pattern: &[char], c: char) -> Option<usize> {
    let end = pattern.iter().skip(2).position(|next| *next == ']')? + 2;
    let (negated, members) = match pattern[1] {
        '^' | '!' => (true, &pattern[2..end]),
        _ => (false, &pattern[1..end]),
    };
    let mut found = false;
    let mut at = 0;
    while at < members.len() {
        if at + 2 < members.len() && members[at + 1] == '-' {
            found |= (members[at]..=members[at + 2]).contains(&c);
            at += 3;
        } else {
            found |= members[at] == c;
            at += 1;
        }
    }
    (found != negated).then_some(end + 1)
}
