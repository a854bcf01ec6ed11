//! The search pattern dialect, matched against one file name.
//!
//! A pattern is run over the set of all positions it can have reached, so that no pattern, however hostile,
//! takes more than polynomial time. What a negation reaches from one position is remembered, or nested ones would
//! multiply.

use std::collections::HashMap;

/// One step of a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Char(char),
    One,
    Many,
    Class { negated: bool, ranges: Vec<(char, char)> },
    Any(Vec<Vec<Step>>),
    Not(Vec<Vec<Step>>),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("syntax error in pattern: {0}")]
pub(super) struct BadPattern(&'static str);

const MAX_PATTERN: usize = 1024;
const MAX_DEPTH: usize = 16;

#[derive(Debug)]
pub(super) struct Glob(Vec<Step>);

impl Glob {
    pub(super) fn parse(pattern: &str) -> Result<Self, BadPattern> {
        if pattern.len() > MAX_PATTERN {
            return Err(BadPattern("too long"));
        }
        let chars: Vec<char> = pattern.chars().collect();
        let mut parser = Parser { chars: &chars, at: 0 };
        let steps = parser.sequence(&[], 0)?;
        Ok(Glob(steps))
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        let text: Vec<char> = name.chars().collect();
        let mut start = vec![false; text.len() + 1];
        start[0] = true;
        run(&self.0, &text, start, &mut Seen::default())[text.len()]
    }
}

struct Parser<'a> {
    chars: &'a [char],
    at: usize,
}

impl Parser<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    /// Reads up to one of `ends`, which is left for the caller, or to the end of the pattern.
    fn sequence(&mut self, ends: &[char], depth: usize) -> Result<Vec<Step>, BadPattern> {
        if depth > MAX_DEPTH {
            return Err(BadPattern("nested too deeply"));
        }
        let mut steps = Vec::new();
        while let Some(c) = self.peek(0) {
            if ends.contains(&c) {
                return Ok(steps);
            }
            self.at += 1;
            steps.push(match c {
                '\\' => {
                    let escaped = self.peek(0).ok_or(BadPattern("trailing backslash"))?;
                    self.at += 1;
                    Step::Char(escaped)
                }
                '*' => Step::Many,
                '?' => Step::One,
                '[' => self.class()?,
                '{' => Step::Any(self.alternatives(',', '}', depth)?),
                '!' if self.peek(0) == Some('(') => {
                    self.at += 1;
                    Step::Not(self.alternatives('|', ')', depth)?)
                }
                c => Step::Char(c),
            });
        }
        if ends.is_empty() { Ok(steps) } else { Err(BadPattern("missing closing bracket")) }
    }

    fn alternatives(&mut self, between: char, end: char, depth: usize) -> Result<Vec<Vec<Step>>, BadPattern> {
        let mut all = Vec::new();
        loop {
            all.push(self.sequence(&[between, end], depth + 1)?);
            let found = self.peek(0);
            self.at += 1;
            if found == Some(end) {
                return Ok(all);
            }
        }
    }

    fn class(&mut self) -> Result<Step, BadPattern> {
        let negated = matches!(self.peek(0), Some('!' | '^'));
        self.at += usize::from(negated);
        let mut ranges = Vec::new();
        loop {
            let low = match self.peek(0) {
                None => return Err(BadPattern("missing ]")),
                Some(']') if !ranges.is_empty() => {
                    self.at += 1;
                    return Ok(Step::Class { negated, ranges });
                }
                Some(_) => self.class_char()?,
            };
            let is_range = self.peek(0) == Some('-') && self.peek(1).is_some_and(|c| c != ']');
            let high = if is_range {
                self.at += 1;
                self.class_char()?
            } else {
                low
            };
            if low > high {
                return Err(BadPattern("reversed range"));
            }
            ranges.push((low, high));
        }
    }

    fn class_char(&mut self) -> Result<char, BadPattern> {
        if self.peek(0) == Some('\\') {
            self.at += 1;
        }
        let c = self.peek(0).ok_or(BadPattern("missing ]"))?;
        self.at += 1;
        Ok(c)
    }
}

/// What a negation, known by where it is in memory, reaches from one position. Good for one pattern and one name.
type Seen = HashMap<(*const Step, usize), Vec<bool>>;

/// Every position reachable from `from` by matching all the steps.
fn run(steps: &[Step], text: &[char], from: Vec<bool>, seen: &mut Seen) -> Vec<bool> {
    let mut at = from;
    for step in steps {
        at = advance(step, text, &at, seen);
    }
    at
}

fn advance(step: &Step, text: &[char], at: &[bool], seen: &mut Seen) -> Vec<bool> {
    let mut next = vec![false; at.len()];
    match step {
        Step::Many => {
            let mut reached = false;
            for (i, slot) in next.iter_mut().enumerate() {
                reached |= at[i];
                *slot = reached;
            }
        }
        Step::Any(alternatives) => next = any(alternatives, text, at, seen),
        Step::Not(alternatives) => {
            for start in (0..at.len()).filter(|i| at[*i]) {
                let key = (std::ptr::from_ref(step), start);
                if !seen.contains_key(&key) {
                    let mut only = vec![false; at.len()];
                    only[start] = true;
                    let hit = any(alternatives, text, &only, seen);
                    seen.insert(key, hit);
                }
                for end in start..at.len() {
                    next[end] |= !seen[&key][end];
                }
            }
        }
        single => {
            for (i, c) in text.iter().enumerate() {
                next[i + 1] = at[i] && one(single, *c);
            }
        }
    }
    next
}

fn any(alternatives: &[Vec<Step>], text: &[char], at: &[bool], seen: &mut Seen) -> Vec<bool> {
    let mut next = vec![false; at.len()];
    for alternative in alternatives {
        for (slot, hit) in next.iter_mut().zip(run(alternative, text, at.to_vec(), seen)) {
            *slot |= hit;
        }
    }
    next
}

fn one(step: &Step, c: char) -> bool {
    match step {
        Step::Char(wanted) => *wanted == c,
        Step::Class { negated, ranges } => {
            ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dialect() {
        let cases = [
            ("**", "anything", true),
            ("*.py", "a.py", true),
            ("*.py", "a.pyc", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("[]]", "]", true),
            ("{a,b{1,2}}.t", "b2.t", true),
            ("{a,b{1,2}}.t", "b3.t", false),
            ("{,x}y", "y", true),
            ("!(*.txt)", "a.md", true),
            ("!(*.txt)", "a.txt", false),
            ("!(a|b)", "b", false),
            (r"\*", "*", true),
            (r"\*", "a", false),
            ("héllo*", "héllo wörld", true),
            ("!x", "!x", true),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(Glob::parse(pattern).unwrap().matches(name), expected, "{pattern} {name}");
        }
        for bad in ["[a", "{a", "!(a", "a\\", "[z-a]", "[]"] {
            assert!(Glob::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hostile_pattern_is_quick() {
        let glob = Glob::parse(&"*a".repeat(100)).unwrap();
        assert!(!glob.matches(&format!("{}b", "a".repeat(250))));
        assert!(Glob::parse(&"{".repeat(100)).is_err());
        let nested = Glob::parse(&format!("{}x{}", "!(*".repeat(15), ")".repeat(15))).unwrap();
        assert!(nested.matches(&"a".repeat(250)));
    }

    proptest::proptest! {
        #[test]
        fn no_pattern_panics(pattern in r"[a-c*?\[\]{},!()|\\^-]{0,24}", name in "[a-c]{0,8}") {
            if let Ok(glob) = Glob::parse(&pattern) {
                glob.matches(&name);
            }
        }
    }
}
