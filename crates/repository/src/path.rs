//! Where repositories are put in a sandbox.

use std::fmt;
use std::path::Path;

use crate::error::{Code, SpecError};

/// Bytes of a path and of one component, as the kernel has them.
const PATH_LIMIT: usize = 4095;
const COMPONENT_LIMIT: usize = 255;

/// The folder under which every repository goes, `/workspace` unless configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkspaceRoot(String);

impl Default for WorkspaceRoot {
    fn default() -> Self {
        Self("/workspace".into())
    }
}

impl WorkspaceRoot {
    /// # Errors
    /// The text is not an absolute path in its shortest form, or is the file system's root.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        check(text)?;
        Ok(Self(text.trim_end_matches('/').to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A path for a repository: absolute and below the root.
    ///
    /// # Errors
    /// [`Code::InvalidPath`].
    pub fn place(&self, text: &str) -> Result<WorkspacePath, SpecError> {
        check(text)?;
        let path = text.trim_end_matches('/');
        let below = path.strip_prefix(self.0.as_str()).is_some_and(|rest| rest.starts_with('/'));
        if !below {
            return Err(refuse(format!("the path is not below {}", self.0)));
        }
        Ok(WorkspacePath(path.to_owned()))
    }

    /// The default place of a repository of this name.
    ///
    /// # Errors
    /// [`Code::InvalidPath`]: the name cannot be a folder's; a path has to be given.
    pub fn place_named(&self, name: &str) -> Result<WorkspacePath, SpecError> {
        if name.contains('%') || name.starts_with('.') {
            return Err(refuse("the repository's name does not make a folder; give a path".into()));
        }
        self.place(&format!("{}/{name}", self.0))
    }
}

/// A checked absolute path below the workspace root, without trailing slash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkspacePath(String);

impl WorkspacePath {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether one of the two is the other or lies in it.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (mine, theirs) = (Path::new(&self.0), Path::new(&other.0));
        mine.starts_with(theirs) || theirs.starts_with(mine)
    }
}

impl fmt::Display for WorkspacePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check(text: &str) -> Result<(), SpecError> {
    if text.len() > PATH_LIMIT {
        return Err(refuse(format!("the path is longer than {PATH_LIMIT} bytes")));
    }
    let Some(components) = text.strip_prefix('/') else {
        return Err(refuse("the path is not absolute".into()));
    };
    let components = components.strip_suffix('/').unwrap_or(components);
    for component in components.split('/') {
        if component.is_empty() || component == "." || component == ".." {
            return Err(refuse("the path has an empty component or one of dots".into()));
        }
        if component.len() > COMPONENT_LIMIT {
            return Err(refuse(format!("a component of the path is longer than {COMPONENT_LIMIT} bytes")));
        }
        if component.starts_with('-') {
            return Err(refuse("a component of the path starts with a dash".into()));
        }
        if component.eq_ignore_ascii_case(".git") {
            return Err(refuse("a component of the path is `.git`".into()));
        }
        if component.chars().any(char::is_control) {
            return Err(refuse("the path holds a control character".into()));
        }
    }
    Ok(())
}

fn refuse(message: String) -> SpecError {
    SpecError::new(Code::InvalidPath, message)
}
