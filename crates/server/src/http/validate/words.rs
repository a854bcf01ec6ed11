//! Splitting a command line into words as a POSIX shell would, without expanding anything.

use std::str::Chars;

/// The words of a line; `None` when a quote or an escape is left open.
pub(super) fn split(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\r' | '\n' => words.extend(word.take()),
            '\'' => single_quoted(&mut letters, word.get_or_insert_default())?,
            '"' => double_quoted(&mut letters, word.get_or_insert_default())?,
            '\\' => word.get_or_insert_default().push(letters.next()?),
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Some(words)
}

fn single_quoted(letters: &mut Chars<'_>, word: &mut String) -> Option<()> {
    loop {
        match letters.next()? {
            '\'' => return Some(()),
            inside => word.push(inside),
        }
    }
}

/// A backslash escapes only a quote and itself.
fn double_quoted(letters: &mut Chars<'_>, word: &mut String) -> Option<()> {
    loop {
        match letters.next()? {
            '"' => return Some(()),
            '\\' => match letters.next()? {
                escaped @ ('"' | '\\') => word.push(escaped),
                other => word.extend(['\\', other]),
            },
            inside => word.push(inside),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::split;

    #[test]
    fn words_are_those_of_a_shell() {
        let cases: [(&str, &[&str]); 7] = [
            ("python -m http.server", &["python", "-m", "http.server"]),
            ("  a \t b\n", &["a", "b"]),
            (r#"sh -c 'echo "x" y'"#, &["sh", "-c", r#"echo "x" y"#]),
            (r#"a"b c"'d' e"#, &["ab cd", "e"]),
            (r#"a\ b "c\d\"""#, &["a b", r#"c\d""#]),
            ("a '' b", &["a", "", "b"]),
            (" ", &[]),
        ];
        for (line, words) in cases {
            assert_eq!(split(line).unwrap(), words, "{line}");
        }
        for open in ["a 'b", "a \"b", "a b\\"] {
            assert_eq!(split(open), None, "{open}");
        }
    }

    proptest! {
        #[test]
        fn quoted_words_come_back(words in prop::collection::vec("[^']{0,6}", 0..5)) {
            let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
            prop_assert_eq!(split(&line), Some(words));
        }

        #[test]
        fn no_text_panics(line in "\\PC{0,30}") {
            let _ = split(&line);
        }
    }
}
