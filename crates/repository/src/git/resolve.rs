//! From a ref to a commit, by asking the remote.

use super::access::{Access, Scope};
use super::failure::{FailureClass, GitError};
use super::process::Call;
use super::{Control, Git, Remote};
use crate::reference::{Reference, is_object_id};

const OPERATION: &str = "resolve";

/// What a ref turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResolvedKind {
    Branch,
    Tag,
    /// A full ref that is neither, as that of a pull request.
    Other,
    Commit,
}

impl ResolvedKind {
    fn of_name(full_name: &str) -> Self {
        match full_name {
            name if name.starts_with("refs/heads/") => Self::Branch,
            name if name.starts_with("refs/tags/") => Self::Tag,
            _ => Self::Other,
        }
    }
}

/// A commit, and the remote's word that the credential may read the repository.
///
/// Only [`Git::resolve`] and [`Git::resolve_pinned`] give one away, so that a mirror, which many share, is read by nobody whom the remote did
/// not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    commit: String,
    kind: ResolvedKind,
    name: Option<String>,
}

impl Resolved {
    /// On somebody else's word. Not to leave this crate before the remote was asked.
    pub(super) fn pinned(commit: &str, full_name: Option<&str>) -> Result<Self, GitError> {
        let malformed = |what| {
            GitError::new(FailureClass::RefNotFound, OPERATION, format!("{what} is not a complete one"))
        };
        let Ok(Reference::Commit(commit)) = Reference::parse(commit) else {
            return Err(malformed("the commit"));
        };
        match full_name.map(Reference::parse) {
            None => Ok(Self { commit, kind: ResolvedKind::Commit, name: None }),
            Some(Ok(Reference::Full(name))) => {
                Ok(Self { commit, kind: ResolvedKind::of_name(&name), name: Some(name) })
            }
            Some(_) => Err(malformed("the ref's name")),
        }
    }

    /// The complete object id, in lower case; of a tag, what it points to.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    pub fn kind(&self) -> ResolvedKind {
        self.kind
    }

    /// The full name of the ref; absent for commits.
    pub fn full_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The short name of the branch, if it is one.
    pub fn branch(&self) -> Option<&str> {
        self.name.as_deref()?.strip_prefix("refs/heads/")
    }
}

/// What `ls-remote` lists.
#[derive(Debug, Default)]
struct Listing {
    /// The branch that `HEAD` stands for.
    head: Option<String>,
    refs: Vec<(String, String)>,
}

impl Git {
    /// Asks the remote what a ref is. The remote is always asked, also for a complete commit.
    ///
    /// # Errors
    /// The class says why; [`FailureClass::RefNotFound`] also for an empty repository.
    pub async fn resolve(
        &self,
        remote: Remote<'_>,
        reference: &Reference,
        control: Control<'_>,
    ) -> Result<Resolved, GitError> {
        let access = Access::prepare(&self.settings, remote, Scope::Repository)?;
        let patterns = match reference {
            Reference::Head | Reference::Commit(_) => vec!["HEAD".to_owned()],
            Reference::Full(name) => vec![name.clone(), format!("{name}^{{}}")],
            // The beginning of a commit may be that of any branch.
            Reference::Name(_) if reference.abbreviated_commit().is_some() => Vec::new(),
            Reference::Name(name) => {
                vec![
                    format!("refs/heads/{name}"),
                    format!("refs/tags/{name}"),
                    format!("refs/tags/{name}^{{}}"),
                ]
            }
        };
        let listing = self.list(remote, &access, &patterns, control).await?;
        if let Reference::Commit(commit) = reference {
            return Ok(Resolved { commit: commit.clone(), kind: ResolvedKind::Commit, name: None });
        }
        if let Some(found) = listing.find(reference) {
            return Ok(found);
        }
        let Some(beginning) = reference.abbreviated_commit() else {
            return Err(not_found(reference));
        };
        match listing.commit_that_begins(&beginning)? {
            Some(commit) => Ok(Resolved { commit, kind: ResolvedKind::Commit, name: None }),
            None => self.resolve_in_history(remote, &beginning, control).await,
        }
    }

    /// Takes a commit for that of a ref which may have moved on since, as when one machine has resolved it and another checks it out. The
    /// remote is asked whether it lets this credential in, not what the ref is now.
    ///
    /// # Errors
    /// The class says why. [`FailureClass::RefNotFound`]: the commit is not a complete one, or the ref not a full name.
    pub async fn resolve_pinned(
        &self,
        remote: Remote<'_>,
        commit: &str,
        full_name: Option<&str>,
        control: Control<'_>,
    ) -> Result<Resolved, GitError> {
        let pinned = Resolved::pinned(commit, full_name)?;
        self.resolve(remote, &Reference::Commit(pinned.commit.clone()), control).await?;
        Ok(pinned)
    }

    async fn list(
        &self,
        remote: Remote<'_>,
        access: &Access,
        patterns: &[String],
        control: Control<'_>,
    ) -> Result<Listing, GitError> {
        let call = Call::new(OPERATION, remote, access, access.path());
        let url = remote.url.to_string();
        let mut arguments = vec!["ls-remote", "--symref", "--", url.as_str()];
        arguments.extend(patterns.iter().map(String::as_str));
        Ok(Listing::parse(&self.run(&call, &arguments, control).await?))
    }

    /// Finds the beginning of a commit that no ref points to, which takes the whole history.
    async fn resolve_in_history(
        &self,
        remote: Remote<'_>,
        beginning: &str,
        control: Control<'_>,
    ) -> Result<Resolved, GitError> {
        let mirror = self.fetch_mirror(remote, None, control).await?;
        let access = Access::prepare(&self.settings, remote, Scope::Repository)?;
        let call = Call::new(OPERATION, remote, &access, mirror.path());
        let wanted = format!("{beginning}^{{commit}}");
        let commit = self
            .run(&call, &["rev-parse", "--verify", "--end-of-options", &wanted], control)
            .await
            .map_err(|error| {
                if error.tail.contains("is ambiguous") {
                    return ambiguous(beginning);
                }
                match error.class {
                    FailureClass::Timeout | FailureClass::Cancelled => error,
                    _ => GitError::new(
                        FailureClass::RefNotFound,
                        OPERATION,
                        format!("no branch, tag or commit is called {beginning}"),
                    ),
                }
            })?;
        Ok(Resolved { commit: commit.trim().to_owned(), kind: ResolvedKind::Commit, name: None })
    }
}

impl Listing {
    fn parse(output: &str) -> Self {
        let mut listing = Self::default();
        for line in output.lines() {
            let Some((value, name)) = line.split_once('\t') else { continue };
            if let Some(target) = value.strip_prefix("ref: ") {
                if name == "HEAD" {
                    listing.head = Some(target.to_owned());
                }
            } else if is_object_id(value) {
                listing.refs.push((name.to_owned(), value.to_ascii_lowercase()));
            }
        }
        listing
    }

    /// A pattern also lists refs that merely end like it, so names are compared whole here.
    fn get(&self, name: &str) -> Option<&str> {
        self.refs.iter().find(|(listed, _)| listed == name).map(|(_, commit)| commit.as_str())
    }

    /// An annotated tag is an object of its own; what it points to is listed beside it.
    fn peeled(&self, name: &str) -> Option<&str> {
        self.get(&format!("{name}^{{}}")).or_else(|| self.get(name))
    }

    fn find(&self, reference: &Reference) -> Option<Resolved> {
        let named = |name: String| {
            let kind = ResolvedKind::of_name(&name);
            self.peeled(&name).map(|commit| Resolved {
                commit: commit.to_owned(),
                kind,
                name: Some(name.clone()),
            })
        };
        match reference {
            Reference::Head => {
                let commit = self.get("HEAD")?.to_owned();
                let kind = if self.head.is_some() { ResolvedKind::Branch } else { ResolvedKind::Commit };
                // The remote names its branch; it becomes an argument later.
                let name = self.head.clone().filter(|name| Reference::parse(name).is_ok());
                Some(Resolved { commit, kind, name })
            }
            Reference::Full(name) => named(name.clone()),
            Reference::Name(name) => {
                named(format!("refs/heads/{name}")).or_else(|| named(format!("refs/tags/{name}")))
            }
            Reference::Commit(_) => None,
        }
    }

    fn commit_that_begins(&self, beginning: &str) -> Result<Option<String>, GitError> {
        let mut commits: Vec<&str> = self
            .refs
            .iter()
            .map(|(_, commit)| commit.as_str())
            .filter(|commit| commit.starts_with(beginning))
            .collect();
        commits.sort_unstable();
        commits.dedup();
        match commits[..] {
            [] => Ok(None),
            [commit] => Ok(Some(commit.to_owned())),
            _ => Err(ambiguous(beginning)),
        }
    }
}

fn ambiguous(beginning: &str) -> GitError {
    GitError::new(
        FailureClass::RefNotFound,
        OPERATION,
        format!("several commits begin with {beginning}; give more of it"),
    )
}

fn not_found(reference: &Reference) -> GitError {
    let message = match reference {
        Reference::Head => "the repository is empty: its default branch has no commit".to_owned(),
        other => format!("the remote has no branch or tag {other}"),
    };
    GitError::new(FailureClass::RefNotFound, OPERATION, message)
}
