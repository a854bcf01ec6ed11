//! Whether every reader of Dockerfiles sees the same in one.
//!
//! Builders differ, with their age, in which lines they join, which comments they skip and whether they know here-documents. Text that is a
//! command's to one of them is an instruction to another. What is decided here about instructions that bring files and images in is only
//! worth something before a builder that sees just those instructions.

use super::instruction::{Copy, CopySource, Instruction};
use super::{ArgDeclaration, Dockerfile};

/// Instructions that bring something in.
const WATCHED: &[&str] = &["ADD", "COPY", "FROM"];
const TRIGGER: &str = "ONBUILD";

impl Dockerfile {
    /// Whether no reader sees other files and images brought in than this one; `text` is what the file was read from. Errs to the safe side:
    /// a file that is merely unusual is not certain.
    pub fn is_certain(&self, text: &str) -> bool {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let Some(written) = watched_lines(text) else { return false };
        let expected: Vec<(usize, String)> = self.watched().collect();
        let instructions = || self.stages.iter().flat_map(|stage| &stage.instructions);
        self.escape == '\\'
            && written.iter().map(|line| (line.number, line.keyword.clone())).eq(expected)
            && written.iter().all(WatchedLine::is_plain)
            && instructions().all(|located| is_plain(&located.instruction))
            && self.has_certain_images(text)
    }

    /// Lines and keywords of the instructions that bring something in.
    fn watched(&self) -> impl Iterator<Item = (usize, String)> {
        self.stages.iter().flat_map(|stage| {
            let instructions = stage.instructions.iter().filter_map(|located| {
                let keyword = match &located.instruction {
                    Instruction::Onbuild { instruction, .. } => {
                        format!("{TRIGGER} {}", instruction.keyword())
                    }
                    other => other.keyword().to_owned(),
                };
                let first = keyword.split(' ').next().unwrap_or_default();
                (first == TRIGGER || WATCHED.contains(&first)).then_some((located.line, keyword))
            });
            [(stage.line, "FROM".to_owned())].into_iter().chain(instructions)
        })
    }

    /// Whether what `FROM` names with variables is the same to everybody.
    fn has_certain_images(&self, text: &str) -> bool {
        if !self.stages.iter().any(|stage| stage.image.contains('$')) {
            return true;
        }
        let is_from =
            |line: &str| line.split_whitespace().next().is_some_and(|word| word.eq_ignore_ascii_case("FROM"));
        let before = text.split('\n').take_while(|line| !is_from(line));
        before.into_iter().all(|line| !line.contains('\\')) && self.global_args.iter().all(is_plain_default)
    }
}

/// A line that begins like an instruction which brings something in.
struct WatchedLine<'a> {
    number: usize,
    keyword: String,
    arguments: &'a str,
}

impl WatchedLine<'_> {
    fn is_plain(&self) -> bool {
        match self.keyword.split(' ').next_back() {
            Some("FROM") => self.arguments.chars().all(|c| c == ' ' || c == '\t' || names_images(c)),
            // It may go on over several lines: only its flags matter.
            Some("COPY") => flags(self.arguments).all(|flag| !flag.contains(['"', '\'', '\\'])),
            Some("ADD") => {
                !self.arguments.contains(['\\', '\''])
                    && flags(self.arguments).all(|flag| !flag.contains('"'))
                    && (!self.arguments.contains('"') || is_array(self.arguments))
            }
            _ => true,
        }
    }
}

fn flags(arguments: &str) -> impl Iterator<Item = &str> {
    arguments.split_whitespace().take_while(|word| word.starts_with("--"))
}

fn is_array(text: &str) -> bool {
    serde_json::from_str::<Vec<String>>(text).is_ok()
}

/// In references, with variables.
fn names_images(c: char) -> bool {
    c.is_ascii_alphanumeric() || "._/:@+-${}".contains(c)
}

/// Every line that begins like something watched; `None` when that is not clear.
fn watched_lines(text: &str) -> Option<Vec<WatchedLine<'_>>> {
    let mut lines = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix('#') {
            let comment = comment.trim_start().to_ascii_lowercase();
            if comment.starts_with("escape") && comment.contains('=') {
                return None;
            }
            continue;
        }
        let (word, arguments) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let (word, arguments) = (word.to_ascii_uppercase(), arguments.trim_start());
        // A keyword that goes on in the next line.
        if let Some(begun) = word.strip_suffix('\\')
            && WATCHED.iter().chain([&TRIGGER]).any(|keyword| keyword.starts_with(begun))
            && !begun.is_empty()
        {
            return None;
        }
        let number = index + 1;
        if word == TRIGGER {
            let (inner, arguments) = arguments.split_once(char::is_whitespace).unwrap_or((arguments, ""));
            let keyword = format!("{TRIGGER} {}", inner.to_ascii_uppercase());
            lines.push(WatchedLine { number, keyword, arguments: arguments.trim_start() });
        } else if WATCHED.contains(&word.as_str()) {
            lines.push(WatchedLine { number, keyword: word, arguments });
        }
    }
    Some(lines)
}

fn is_plain(instruction: &Instruction) -> bool {
    match instruction {
        Instruction::Add(copy, _) | Instruction::Copy(copy) => {
            copy.from.as_ref().is_none_or(|from| from.chars().all(|c| c != '$' && names_images(c)))
                && !has_texts(copy)
        }
        Instruction::Run(run) => run.heredocs.is_empty(),
        Instruction::Onbuild { instruction, .. } => is_plain(instruction),
        _ => true,
    }
}

fn has_texts(copy: &Copy) -> bool {
    copy.sources.iter().any(|source| matches!(source, CopySource::Inline(_)))
}

fn is_plain_default(arg: &ArgDeclaration) -> bool {
    let Some(text) = arg.default.as_deref() else { return true };
    let bare = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    bare.chars().all(names_images)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_certain(text: &str) -> bool {
        Dockerfile::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}")).is_certain(text)
    }

    #[test]
    fn usual_files_are_certain() {
        for text in [
            "# syntax=docker/dockerfile:1\nARG V=\"22\"\nFROM node:${V}-slim AS build\nCOPY --chown=1:1 a b \\\n  /c/\n",
            "FROM a\nRUN x && \\\n  # why\n  y\nADD a-$V.tar.gz /x\nADD [\"a b\", \"/x\"]\n",
            "from a as b\nONBUILD COPY --from=b . /x\nONBUILD RUN x \\\n  y\n",
            "FROM a\r\nCOPY --from=registry.example.com:5000/x:1@sha256:00 /a /b\r\n",
        ] {
            assert!(is_certain(text), "{text}");
        }
    }

    #[test]
    fn what_another_reader_may_see_is_not_certain() {
        for text in [
            // The content of a here-document, and what looks like one in an array.
            "FROM a\nRUN <<E\nADD http://h/x /x\nE\n",
            "FROM a\nRUN cat <<#E\nADD\\\n http://h/x /x\n#E\n",
            "FROM a\nCOPY <<#E /x\nRUN y\n#E\n",
            // Other escapes, other joins, other comments.
            "# escape=`\nFROM a\nRUN x\n",
            "# syntax=docker/dockerfile:1\n# escape = `\nFROM a\nRUN x\n",
            "FROM a\nRUN x \\\nADD http://h/x /x\n",
            "FROM a\nRUN x \\\n # c\nAD\\\nD http://h/x /x\n",
            "FROM a\nRUN x \\\n\nONBUILD ADD http://h/x /x\n",
            "FROM a\nADD a \\\n # http://h/x \\\n /x/\n",
            "FROM a\nONBUILD \\\nADD a /x\n",
            // Quotes and escapes in names and flags.
            "FROM a\nADD 'http'://h/x /x\n",
            "FROM a\nADD [\"\\u0068ttp://h/x\", \"/x\"]\n",
            "FROM a\nADD [\"http://h/x\", \"/x\"] x\n",
            "FROM a\nADD --chown=\"1 http://h/x\" a /x\n",
            "FROM a\nCOPY --from='b' /x /x\n",
            "FROM a\nCOPY --from=$B /x /x\n",
            "FROM \"a\"\nRUN x\n",
            "ARG A='a'\nFROM $A\nRUN x\n",
            "ARG A=\\a\nFROM $A\nRUN x\n",
            "ARG A=\\\n # c\n b\nFROM $A\nRUN x\n",
        ] {
            assert!(!is_certain(text), "{text}");
        }
    }
}
