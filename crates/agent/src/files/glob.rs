//! The search dialect: `*`, `**`, `?`, `[a-z]`, `[!x]`/`[^x]`, nested `{a,b}`, `!(x)` and backslash escapes, on one file name.
//!
//! Own code because the usual crates lack `!(x)`. Matching is bounded: work is cut off, not the process, for patterns made to explode.

/// Steps after which a pattern counts as not matching.
const MAX_STEPS: usize = 100_000;
const MAX_DEPTH: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Char(char),
    AnyChar,
    AnyRun,
    Class { negated: bool, ranges: Vec<(char, char)> },
    OneOf(Vec<Vec<Token>>),
    NoneOf(Vec<Vec<Token>>),
}

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Glob(Vec<Token>);

/// Why text is not a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed pattern: {0}")]
pub(super) struct Malformed(&'static str);

impl Glob {
    pub(super) fn parse(text: &str) -> Result<Self, Malformed> {
        let chars: Vec<char> = text.chars().collect();
        let mut at = 0;
        let tokens = sequence(&chars, &mut at, &[], 0)?;
        Ok(Self(tokens))
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        let chars: Vec<char> = name.chars().collect();
        let mut steps = 0;
        ends(&self.0, &chars, 0, &mut steps).contains(&chars.len())
    }
}

/// Parses until one of `stops` (not consumed) or the end.
fn sequence(chars: &[char], at: &mut usize, stops: &[char], depth: usize) -> Result<Vec<Token>, Malformed> {
    if depth > MAX_DEPTH {
        return Err(Malformed("nested too deeply"));
    }
    let mut tokens = Vec::new();
    while let Some(&c) = chars.get(*at) {
        if stops.contains(&c) {
            return Ok(tokens);
        }
        *at += 1;
        tokens.push(match c {
            '?' => Token::AnyChar,
            '*' => {
                while chars.get(*at) == Some(&'*') {
                    *at += 1;
                }
                Token::AnyRun
            }
            '\\' => {
                let escaped = chars.get(*at).ok_or(Malformed("trailing backslash"))?;
                *at += 1;
                Token::Char(*escaped)
            }
            '[' => class(chars, at)?,
            '{' => Token::OneOf(alternatives(chars, at, [',', '}'], depth)?),
            '!' if chars.get(*at) == Some(&'(') => {
                *at += 1;
                Token::NoneOf(alternatives(chars, at, ['|', ')'], depth)?)
            }
            other => Token::Char(other),
        });
    }
    if stops.is_empty() { Ok(tokens) } else { Err(Malformed("a group is not closed")) }
}

fn alternatives(
    chars: &[char],
    at: &mut usize,
    [separator, end]: [char; 2],
    depth: usize,
) -> Result<Vec<Vec<Token>>, Malformed> {
    let mut all = Vec::new();
    loop {
        all.push(sequence(chars, at, &[separator, end], depth + 1)?);
        let closing = chars.get(*at) == Some(&end);
        *at += 1;
        if closing {
            return Ok(all);
        }
    }
}

fn class(chars: &[char], at: &mut usize) -> Result<Token, Malformed> {
    let negated = matches!(chars.get(*at), Some('!' | '^'));
    if negated {
        *at += 1;
    }
    let mut ranges = Vec::new();
    loop {
        let mut next = || {
            let c = *chars.get(*at).ok_or(Malformed("a class is not closed"))?;
            *at += 1;
            if c != '\\' {
                return Ok(c);
            }
            let escaped = *chars.get(*at).ok_or(Malformed("a class is not closed"))?;
            *at += 1;
            Ok(escaped)
        };
        let low = next()?;
        if low == ']' && !ranges.is_empty() {
            return Ok(Token::Class { negated, ranges });
        }
        let is_range = chars.get(*at) == Some(&'-') && chars.get(*at + 1).is_some_and(|c| *c != ']');
        if !is_range {
            ranges.push((low, low));
            continue;
        }
        *at += 1;
        let high = *chars.get(*at).ok_or(Malformed("a class is not closed"))?;
        *at += 1;
        if high < low {
            return Err(Malformed("a range is backwards"));
        }
        ranges.push((low, high));
    }
}

/// Every position at which the tokens can end when they begin at `from`.
fn ends(tokens: &[Token], name: &[char], from: usize, steps: &mut usize) -> Vec<usize> {
    let mut positions = vec![from];
    for token in tokens {
        let mut next: Vec<usize> = Vec::new();
        for &at in &positions {
            *steps += 1;
            if *steps > MAX_STEPS {
                return Vec::new();
            }
            match token {
                Token::Char(c) => next.extend((name.get(at) == Some(c)).then_some(at + 1)),
                Token::AnyChar => next.extend((at < name.len()).then_some(at + 1)),
                Token::AnyRun => next.extend(at..=name.len()),
                Token::Class { negated, ranges } => {
                    let hit = name.get(at).map(|c| ranges.iter().any(|(low, high)| low <= c && c <= high));
                    next.extend((hit.is_some_and(|hit| hit != *negated)).then_some(at + 1));
                }
                Token::OneOf(all) => {
                    for one in all {
                        next.extend(ends(one, name, at, steps));
                    }
                }
                Token::NoneOf(all) => {
                    let refused: Vec<usize> = all.iter().flat_map(|one| ends(one, name, at, steps)).collect();
                    next.extend((at..=name.len()).filter(|end| !refused.contains(end)));
                }
            }
        }
        next.sort_unstable();
        next.dedup();
        positions = next;
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dialect() {
        for (pattern, yes, no) in [
            ("**", vec!["a", ".x", ""], vec![]),
            ("*.py", vec!["a.py", ".py"], vec!["a.pyc", "py"]),
            ("a?c", vec!["abc"], vec!["ac", "abbc"]),
            ("[a-c]x", vec!["ax", "cx"], vec!["dx"]),
            ("[!a-c]x", vec!["dx"], vec!["ax"]),
            ("[^a]", vec!["b"], vec!["a"]),
            ("[]]", vec!["]"], vec!["["]),
            ("{a,b{c,d}}.txt", vec!["a.txt", "bc.txt", "bd.txt"], vec!["b.txt"]),
            ("!(a*).txt", vec!["b.txt"], vec!["a.txt", "ab.txt"]),
            ("\\*", vec!["*"], vec!["a"]),
            ("ä*", vec!["äö"], vec!["a"]),
        ] {
            let glob = Glob::parse(pattern).unwrap();
            for name in yes {
                assert!(glob.matches(name), "{pattern} should match {name}");
            }
            for name in no {
                assert!(!glob.matches(name), "{pattern} should not match {name}");
            }
        }
        for bad in ["[a", "{a", "!(a", "\\", "[z-a]"] {
            assert!(Glob::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_pattern_made_to_explode_ends() {
        let glob = Glob::parse(&"{*,**}".repeat(20)).unwrap();
        glob.matches(&"a".repeat(2000));
    }
}
