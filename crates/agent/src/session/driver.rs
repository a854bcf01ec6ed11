//! The loop that a session's shell runs, in the shell's own language, and what it needs to become another shell.
//!
//! The shell is told on one private descriptor that a run begins and tells on another how it ended. User code sees
//! neither: they are closed while it runs, its input is at its end, and its output is not looked at for marks.
//! Invariant: nothing the loop itself does reaches the output, also with `set -x` or a `DEBUG` trap of the user.

use std::os::fd::RawFd;
use std::path::Path;

/// Where the loop finds its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Input at its end; also where the loop's own output goes.
    pub null: RawFd,
    /// The text to run.
    pub code: RawFd,
    /// A line for each text: `s` for the agent's own, `r` for a run.
    pub go: RawFd,
    /// Status, then after a run directory, short state and full state, each closed by a NUL.
    pub report: RawFd,
    /// What the user sees.
    pub out: RawFd,
}

/// The dialects that a session's shell may speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Bash,
    /// Only what POSIX has: descriptors of one digit, no way to print functions.
    Posix,
}

const BASH_BOOT: &str = r#"IFS= read -r -d '' _sandglass <&21; eval "$_sandglass""#;

/// One line, so that an error message counts the lines of the user's text only.
const BASH_LOOP: &str = "\
    while IFS= read -r _sandglass <&22 && [[ $_sandglass ]]; do \
    if [[ $_sandglass == s ]]; then \
    IFS= read -r -d '' _sandglass <&21 || break; \
    if eval \"$_sandglass\"; then _sandglass=0; else _sandglass=$?; fi; \
    builtin printf '%s\\0' \"$_sandglass\" >&23; \
    else \
    IFS= read -r -d '' _sandglass <&21 || break; \
    eval \"$_sandglass\" <&20 >&24 2>&24 20<&- 21<&- 22<&- 23>&- 24>&-; _sandglass=$?; \
    builtin printf '%s\\0' \"$_sandglass\" >&23; \
    builtin pwd >&23; builtin printf '\\0' >&23; \
    umask -p >&23; export -p >&23; builtin printf '\\0' >&23; \
    umask -p >&23; declare -p >&23; declare -f >&23; declare -Fx >&23; alias -p >&23; shopt -p >&23; set +o >&23; \
    builtin printf '\\0' >&23; \
    fi; done >&20 2>&20";

/// `command` keeps a syntax error in the user's text from ending the shell.
const POSIX_LOOP: &str = "\
    while read -r _sandglass <&7 && test -n \"$_sandglass\"; do \
    if test \"$_sandglass\" = s; then \
    if command . /proc/self/fd/6; then _sandglass=0; else _sandglass=$?; fi; \
    printf '%s\\0' \"$_sandglass\" >&8; \
    else \
    command . /proc/self/fd/6 <&0 >&9 2>&9 7<&- 8>&- 9>&-; _sandglass=$?; \
    printf '%s\\0' \"$_sandglass\" >&8; \
    pwd >&8; printf '\\0' >&8; \
    printf 'umask ' >&8; umask >&8; export -p >&8; printf '\\0' >&8; \
    printf 'umask ' >&8; umask >&8; export -p >&8; set >&8; set +o >&8; printf '\\0' >&8; \
    fi; done >&0 2>&0";

impl Dialect {
    pub(super) fn of(shell: &str) -> Self {
        if shell == "bash" { Dialect::Bash } else { Dialect::Posix }
    }

    pub(super) fn numbers(self) -> Numbers {
        match self {
            Dialect::Bash => Numbers { null: 20, code: 21, go: 22, report: 23, out: 24 },
            Dialect::Posix => Numbers { null: 0, code: 6, go: 7, report: 8, out: 9 },
        }
    }

    pub(super) fn argv(self, program: &Path) -> Vec<String> {
        let words: &[&str] = match self {
            Dialect::Bash => &["--noprofile", "--norc", "-c", BASH_BOOT, "bash"],
            Dialect::Posix => &["-c", POSIX_LOOP, "sh"],
        };
        let program = program.to_string_lossy().into_owned();
        std::iter::once(program).chain(words.iter().map(|word| (*word).to_owned())).collect()
    }

    /// What has to be in the code descriptor before the first text: the loop, where it does not come by argument.
    pub(super) fn prefix(self) -> Vec<u8> {
        match self {
            Dialect::Bash => [BASH_LOOP.as_bytes(), b"\0"].concat(),
            Dialect::Posix => Vec::new(),
        }
    }

    /// What ends a text; without one it ends with the file.
    pub(super) fn terminator(self) -> &'static [u8] {
        match self {
            Dialect::Bash => b"\0",
            Dialect::Posix => b"",
        }
    }

    /// The text that makes a fresh shell continue where another one was.
    pub(super) fn setup(self, state: &[u8]) -> Vec<u8> {
        let own: &[u8] = match self {
            // Aliases that survive are of no use to a shell that does not expand them.
            Dialect::Bash => b"shopt -s expand_aliases\nunset BASH_EXECUTION_STRING\n",
            Dialect::Posix => b"\n",
        };
        [own, state].concat()
    }
}

/// A word that the shell reads as exactly these bytes.
pub(super) fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Reports each variable as `x` and its value, or as nothing when it is not set.
pub(super) fn query(names: &[String], dialect: Dialect) -> String {
    let report = dialect.numbers().report;
    names.iter().map(|name| format!("printf '%s\\0' \"${{{name}+x}}${{{name}-}}\" >&{report}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::RESERVED;

    #[test]
    fn the_loops_use_reserved_numbers() {
        for dialect in [Dialect::Bash, Dialect::Posix] {
            let Numbers { null, code, go, report, out } = dialect.numbers();
            assert!([code, go, report, out].iter().all(|number| RESERVED.contains(number)));
            assert!(null == 0 || RESERVED.contains(&null));
            assert!(!dialect.prefix().contains(&b'\n'));
        }
    }

    proptest::proptest! {
        #[test]
        fn a_quoted_word_is_one_word(text in "[^\\x00]{0,40}") {
            let out = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", quote(&text))])
                .output()
                .unwrap();
            proptest::prop_assert_eq!(out.stdout, text.as_bytes());
        }
    }
}
