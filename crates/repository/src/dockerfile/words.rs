//! Words and variables, as the Dockerfile's own small shell language has them.

use std::fmt::Write as _;

/// A value is not expanded beyond this: `ENV a=$b$b` on thirty lines would otherwise fill the memory.
const EXPANDED_LIMIT: usize = 1024 * 1024;

/// Splits at blanks outside quotes; quotes and escapes stay as they are. A quote that does not end takes in the rest.
pub(super) fn raw_words(text: &str, escape: char) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == escape && quote != Some('\'') {
            word.push(c);
            word.extend(chars.next());
            continue;
        }
        match (quote, c) {
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None, c) if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            _ => {}
        }
        word.push(c);
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

/// Expands variables and takes quotes away.
pub(super) fn expand(
    text: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut reader = Reader { chars: text.chars().collect(), at: 0, escape, lookup };
    let mut out = String::new();
    reader.until_end(&mut out, None)?;
    Ok(out)
}

/// Expands variables alone, as in a here-document: quotes are text, an escape protects `$` and itself.
pub(super) fn expand_text(
    text: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut reader = Reader { chars: text.chars().collect(), at: 0, escape, lookup };
    let mut out = String::new();
    while let Some(c) = reader.next() {
        match c {
            c if c == escape && matches!(reader.peek(), Some(next) if next == '$' || next == escape) => {
                out.extend(reader.next())
            }
            '$' => reader.variable(&mut out)?,
            c => out.push(c),
        }
        check_length(&out)?;
    }
    Ok(out)
}

struct Reader<'a> {
    chars: Vec<char>,
    at: usize,
    escape: char,
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += 1;
        Some(c)
    }

    /// Reads to the end of the text, or to `stop`, which is taken too.
    fn until_end(&mut self, out: &mut String, stop: Option<char>) -> Result<(), String> {
        while let Some(c) = self.next() {
            match c {
                c if Some(c) == stop => return Ok(()),
                '\'' => self.single_quoted(out)?,
                '"' => self.double_quoted(out)?,
                '$' => self.variable(out)?,
                // At the end of the text it stands for itself.
                c if c == self.escape => out.push(self.next().unwrap_or(c)),
                c => out.push(c),
            }
            check_length(out)?;
        }
        match stop {
            None => Ok(()),
            Some(_) => Err("a `${` has no `}`".into()),
        }
    }

    fn single_quoted(&mut self, out: &mut String) -> Result<(), String> {
        while let Some(c) = self.next() {
            if c == '\'' {
                return Ok(());
            }
            out.push(c);
        }
        Err("a single quote does not end".into())
    }

    fn double_quoted(&mut self, out: &mut String) -> Result<(), String> {
        while let Some(c) = self.next() {
            match c {
                '"' => return Ok(()),
                '$' => self.variable(out)?,
                c if c == self.escape => match self.next() {
                    Some(next) if next == '"' || next == '$' || next == self.escape => out.push(next),
                    Some(next) => out.extend([c, next]),
                    None => return Err("a double quote does not end".into()),
                },
                c => out.push(c),
            }
        }
        Err("a double quote does not end".into())
    }

    /// After a `$`.
    fn variable(&mut self, out: &mut String) -> Result<(), String> {
        if self.peek() == Some('{') {
            self.at += 1;
            return self.braced(out);
        }
        let name = self.name();
        if name.is_empty() {
            out.push('$');
            return Ok(());
        }
        out.push_str(&(self.lookup)(&name).unwrap_or_default());
        Ok(())
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.peek() {
            if !(c == '_' || c.is_ascii_alphabetic() || (c.is_ascii_digit() && !name.is_empty())) {
                break;
            }
            name.push(c);
            self.at += 1;
        }
        name
    }

    fn braced(&mut self, out: &mut String) -> Result<(), String> {
        let name = self.name();
        if name.is_empty() {
            return Err("a `${` is not followed by a name".into());
        }
        let value = (self.lookup)(&name);
        let operator = self.next().ok_or("a `${` has no `}`")?;
        if operator == '}' {
            out.push_str(&value.unwrap_or_default());
            return Ok(());
        }
        // With the colon, an empty value counts as none.
        let (operator, set) = match operator {
            ':' => (
                self.next().ok_or("a `${` has no `}`")?,
                value.as_ref().is_some_and(|value| !value.is_empty()),
            ),
            other => (other, value.is_some()),
        };
        if !matches!(operator, '-' | '+' | '?') {
            return Err(format!(
                "`${{{name}{operator}…}}` is not supported; of the operators there are - + ? and these with a colon"
            ));
        }
        let mut word = String::new();
        self.until_end(&mut word, Some('}'))?;
        match (operator, set) {
            ('-', true) => out.push_str(&value.unwrap_or_default()),
            ('-', false) | ('+', true) => out.push_str(&word),
            ('?', true) => out.push_str(&value.unwrap_or_default()),
            ('?', false) => {
                let mut message = format!("{name}: ");
                let _ = message.write_str(if word.is_empty() { "the variable is not set" } else { &word });
                return Err(message);
            }
            _ => {}
        }
        Ok(())
    }
}

fn check_length(out: &str) -> Result<(), String> {
    if out.len() > EXPANDED_LIMIT {
        return Err("a value becomes too long when its variables are expanded".into());
    }
    Ok(())
}
