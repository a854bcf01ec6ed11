//! The last pass over a build sandbox: what must not become part of an image goes, and an image with a secret in it does not come to be.

use std::collections::BTreeSet;

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::redact::TokenKind;
use sandglass_sandbox::sealing::{self, Found, Search, TOKENS_MOST};

use super::{
    attempt::{Attempt, OWN, Workshop, of_disk, user_failure},
    engine::SandboxEngine,
    inside::InsideError,
    redaction,
};

/// A folder in memory that every sandbox has, so that values never touch what is captured.
const IN_MEMORY: &str = "/dev/shm";
/// Files that keep what somebody typed, or how to log in.
const TRACES: &str = r#"for home in /root /home/*; do
  [ -d "$home" ] || continue
  for name in .bash_history .ash_history .sh_history .zsh_history .python_history .node_repl_history .lesshst .psql_history \
    .mysql_history .git-credentials .netrc; do rm -f "$home/$name" 2>/dev/null; done
  rm -rf "$home/.cache/git/credential" "$home/.git-credential-cache" 2>/dev/null
  if [ -f "$home/.gitconfig" ] && command -v git >/dev/null 2>&1 &&
    git config --file "$home/.gitconfig" --get-all credential.helper >/dev/null 2>&1; then
    owner=$(stat -c %u:%g "$home/.gitconfig")
    git config --file "$home/.gitconfig" --unset-all credential.helper
    chown "$owner" "$home/.gitconfig"
  fi
done
if command -v git >/dev/null 2>&1; then git config --system --unset-all credential.helper 2>/dev/null; fi
true"#;
/// Hits that a message names.
const NAMED_MOST: usize = 20;

impl SandboxEngine {
    pub(super) async fn sanitise(&self, job: &Job, attempt: &mut Attempt) -> Result<(), EngineError> {
        let workshop = self.workshop(job, attempt).await?;
        self.purge(job, attempt, &workshop, StepName::Sanitize).await
    }

    /// Takes traces away, ends what was left running, and fails when something secret is left. Afterwards nothing runs there but the agent, and
    /// the folder of the build's own is gone.
    pub(super) async fn purge(
        &self,
        job: &Job,
        attempt: &Attempt,
        workshop: &Workshop,
        step: StepName,
    ) -> Result<(), EngineError> {
        self.quietly(job, workshop, &["/bin/sh", "-c", TRACES]).await?;
        self.quietly(job, workshop, &["rm", "-rf", OWN]).await?;
        // From here on no program of the image runs: what one that was left running writes later would be found by nobody, and the values
        // are for nobody else's eyes.
        self.quietly(job, workshop, &[sealing::PROGRAM, sealing::WORD, sealing::END]).await?;
        let left = self.search(job, attempt, workshop).await?;
        if let Some(note) = left.note {
            job.log.write(step, format!("{note}\n").as_bytes()).await;
        }
        let message = if !left.secrets.is_empty() {
            format!("a build secret is left in {}", left.secrets.join(", "))
        } else if !left.tokens.is_empty() {
            of_tokens(&left.tokens)
        } else {
            return Ok(());
        };
        job.log.write(step, format!("{message}\n").as_bytes()).await;
        Err(user_failure(step, None, message))
    }

    /// What the build left, as the agent finds it.
    async fn search(&self, job: &Job, attempt: &Attempt, workshop: &Workshop) -> Result<Left, EngineError> {
        let task = Search { values: redaction::values(&job.confidential), since: workshop.began };
        let has_values = !task.values.is_empty();
        let file = tempfile::NamedTempFile::new_in(attempt.scratch.path());
        let file = file.map_err(of_disk("write down what to look for"))?;
        serde_json::to_writer(&file, &task)
            .map_err(|_| EngineError::Rejected("what to look for cannot be written down".into()))?;
        let there = format!("{IN_MEMORY}/.sandglass-{}", job.build);
        self.uncancelled(job, async {
            let put = self.inside.put(&workshop.door, file.path(), &there, 0o600).await;
            put.map_err(|error: InsideError| EngineError::transient(error.to_string()))
        })
        .await?;
        let argv = [sealing::PROGRAM, sealing::WORD, sealing::SEARCH, &there];
        let lines = self.quietly(job, workshop, &argv).await?;
        Left::read(&lines, &attempt.recipe.allow_tokens, has_values)
    }
}

/// What a build left behind.
#[derive(Debug, Default)]
struct Left {
    /// Where its secrets are.
    secrets: Vec<String>,
    /// Where tokens are, each with the first kind that is not allowed.
    tokens: Vec<(String, TokenKind)>,
    /// What was not looked at.
    note: Option<String>,
}

impl Left {
    /// Of what the agent said. A search that did not reach its end, or for values could not look into something, is none.
    fn read(lines: &[String], allowed: &BTreeSet<TokenKind>, has_values: bool) -> Result<Self, EngineError> {
        let (mut left, mut ended, mut looked_into) = (Self::default(), false, 0);
        let mut unread = None;
        // What is no line of the agent's says nothing.
        for found in lines.iter().filter_map(|line| serde_json::from_str::<Found>(line).ok()) {
            match found {
                Found::Secret { path } if left.secrets.len() < NAMED_MOST => left.secrets.push(path),
                Found::Tokens { path, kinds } => {
                    looked_into += 1;
                    let kinds = kinds.into_iter().map(|word| serde_json::from_value(word.into()));
                    // Addresses with passwords are in every manual.
                    let refused =
                        |kind: &TokenKind| *kind != TokenKind::UrlPassword && !allowed.contains(kind);
                    let refused = kinds.filter_map(Result::ok).find(refused);
                    left.tokens.extend(refused.map(|kind| (path, kind)));
                }
                Found::Unread { path, message } => unread = Some(format!("{path}: {message}")),
                Found::TokensGivenUp { seconds } => {
                    left.note = Some(format!("the search for tokens was given up after {seconds} s"));
                }
                Found::Done { .. } => ended = true,
                Found::Secret { .. } => {}
            }
        }
        if looked_into >= TOKENS_MOST {
            left.note =
                Some(format!("only the first {TOKENS_MOST} files that may hold tokens are looked at"));
        }
        match unread {
            _ if !left.secrets.is_empty() => Ok(left),
            _ if !ended => {
                Err(EngineError::Rejected("the search for secrets did not come to its end".into()))
            }
            Some(unread) if has_values => {
                let message = format!("the search for build secrets could not look into {unread}");
                Err(user_failure(StepName::Sanitize, None, message))
            }
            Some(unread) => {
                left.note
                    .get_or_insert_with(|| format!("the search for tokens could not look into {unread}"));
                Ok(left)
            }
            None => Ok(left),
        }
    }
}

fn of_tokens(found: &[(String, TokenKind)]) -> String {
    let named: Vec<String> =
        found.iter().take(NAMED_MOST).map(|(path, kind)| format!("{path} ({})", kind.as_str())).collect();
    let mut kinds: Vec<&str> = found.iter().map(|(_, kind)| kind.word()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    format!(
        "what looks like a secret was left by the build in {}; remove it at the end of the setup, or allow it with \
         `allowTokens: [{}]` in .sandbox.yml",
        named.join(", "),
        kinds.join(", "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str], has_values: bool) -> Result<Left, EngineError> {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        Left::read(&lines, &BTreeSet::from([TokenKind::Npm]), has_values)
    }

    const DONE: &str = r#"{"found":"done","changed":3}"#;

    #[test]
    fn a_search_counts_only_when_it_came_to_its_end() {
        assert!(matches!(read(&[], false), Err(EngineError::Rejected(_))));
        assert!(matches!(read(&["not json", "{}"], true), Err(EngineError::Rejected(_))));
        let unread = r#"{"found":"unread","path":"/x","message":"no"}"#;
        assert!(matches!(read(&[unread, DONE], true), Err(EngineError::User(_))));
        assert!(read(&[unread, DONE], false).unwrap().note.unwrap().contains("/x: no"));
        assert!(read(&[DONE], true).unwrap().secrets.is_empty());
        // What was found is enough.
        assert_eq!(read(&[r#"{"found":"secret","path":"/x"}"#], true).unwrap().secrets, ["/x"]);
    }

    #[test]
    fn tokens_that_are_allowed_and_passwords_in_addresses_fail_nothing() {
        let tokens = |kinds: &str| format!(r#"{{"found":"tokens","path":"/x","kinds":{kinds}}}"#);
        let clean = tokens(r#"["npm-token","url-password","of-the-future"]"#);
        assert!(read(&[&clean, DONE], false).unwrap().tokens.is_empty());
        let found = read(&[&tokens(r#"["npm-token","github-token"]"#), DONE], false).unwrap().tokens;
        assert_eq!(found, [("/x".to_owned(), TokenKind::GitHub)]);
        assert!(
            of_tokens(&found).contains("/x (GitHub token)") && of_tokens(&found).contains("[github-token]")
        );
    }
}
