//! `COPY` and `ADD`: which files are meant, and where they go.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use sandglass_repository::dockerfile::{Copy, CopySource, IgnoreFile};
use tempfile::NamedTempFile;

use super::archive::{Archive, Dress};

/// Why files cannot be copied, in words for whoever wrote the Dockerfile.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    #[error("{0}")]
    Asked(String),
    #[error("cannot read the files: {0}")]
    Disk(#[from] std::io::Error),
}

/// Where files come from: the context with its ignore file, or what another stage has.
pub(super) struct Ground {
    pub(super) root: PathBuf,
    pub(super) ignore: Option<IgnoreFile>,
}

/// One copy, with everything about its destination known.
pub(super) struct Wanted<'a> {
    pub(super) copy: &'a Copy,
    /// Absolute.
    pub(super) destination: String,
    /// Whether a folder is there already.
    pub(super) is_folder: bool,
    pub(super) dress: Dress,
}

/// Packs the files for the destination. Blocking.
pub(super) fn pack(ground: &Ground, wanted: &Wanted<'_>, scratch: &Path) -> Result<NamedTempFile, CopyError> {
    let mut archive = Archive::begin(scratch)?;
    let destination = Path::new(&wanted.destination);
    let into_folder = wanted.is_folder || wanted.destination.ends_with('/');
    let mut sources = 0;
    let mut found = Vec::new();
    for source in &wanted.copy.sources {
        match source {
            CopySource::Inline(heredoc) => {
                let target =
                    if into_folder { destination.join(&heredoc.name) } else { destination.to_owned() };
                archive.text(&target, &heredoc.content, wanted.dress)?;
                sources += 1;
            }
            CopySource::Path(pattern) => found.extend(ground.find(pattern)?),
        }
    }
    if sources + found.len() > 1 && !into_folder {
        let message = "several sources need a destination that ends with a slash";
        return Err(CopyError::Asked(message.into()));
    }
    for path in found {
        let place = ground.place(&path)?;
        let keep = |below: &Path| ground.keeps(&path.join(below));
        let target = match path.file_name() {
            // Of a folder, what is in it.
            _ if place.is_dir() => destination.to_owned(),
            Some(name) if into_folder => destination.join(name),
            _ => destination.to_owned(),
        };
        archive.add(&place, &target, wanted.dress, &keep)?;
    }
    Ok(archive.finish()?)
}

impl Ground {
    /// Paths below the root that a source means.
    fn find(&self, pattern: &str) -> Result<Vec<PathBuf>, CopyError> {
        if pattern.contains('[') {
            return Err(CopyError::Asked(format!("character classes in {pattern:?} are not supported")));
        }
        let mut paths = vec![PathBuf::new()];
        for component in components(pattern)? {
            let mut next = Vec::new();
            for path in paths {
                if component.contains(['*', '?']) {
                    next.extend(self.matching(&path, &component)?);
                } else {
                    next.push(path.join(&component));
                }
            }
            paths = next;
        }
        paths.retain(|path| self.keeps(path) && fs::symlink_metadata(self.root.join(path)).is_ok());
        if paths.is_empty() {
            return Err(CopyError::Asked(format!("there is no {pattern:?}, or it is left out")));
        }
        Ok(paths)
    }

    fn matching(&self, folder: &Path, pattern: &str) -> Result<Vec<PathBuf>, CopyError> {
        let place = self.place(folder)?;
        if !place.is_dir() {
            return Ok(Vec::new());
        }
        let mut names: Vec<String> = fs::read_dir(place)?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| matches(pattern, name))
            .collect();
        names.sort();
        Ok(names.into_iter().map(|name| folder.join(name)).collect())
    }

    /// Where a path really is. Links are followed, and none leads out.
    fn place(&self, path: &Path) -> Result<PathBuf, CopyError> {
        let root = self.root.canonicalize()?;
        let place = root.join(path).canonicalize()?;
        if place.starts_with(&root) {
            Ok(place)
        } else {
            Err(CopyError::Asked(format!("{} leads out of what can be copied", path.display())))
        }
    }

    pub(super) fn keeps(&self, path: &Path) -> bool {
        let Some(ignore) = &self.ignore else { return true };
        let Some(text) = path.to_str() else { return true };
        let holds_more = || self.root.join(path).is_dir() && ignore.may_include_below(text);
        text.is_empty() || !ignore.excludes(text) || holds_more()
    }
}

/// The names of a path below the root; a leading slash means the root.
fn components(path: &str) -> Result<Vec<String>, CopyError> {
    let mut names: Vec<String> = Vec::new();
    for component in Path::new(path.trim_start_matches('/')).components() {
        match component {
            Component::Normal(name) => names.push(name.to_string_lossy().into_owned()),
            Component::ParentDir if names.pop().is_some() => {}
            Component::ParentDir => {
                return Err(CopyError::Asked(format!("{path:?} leads out of what can be copied")));
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Ok(names)
}

/// The folder of a pattern above its first name with a wildcard, without slashes at the ends.
pub(super) fn fixed_part(pattern: &str) -> Result<String, CopyError> {
    let names = components(pattern)?;
    let fixed: Vec<String> = names.into_iter().take_while(|name| !name.contains(['*', '?', '['])).collect();
    Ok(fixed.join("/"))
}

/// `*` and `?` within one name.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Where each prefix of the pattern may end in the name.
    let mut ends = vec![false; name.len() + 1];
    ends[0] = true;
    for wanted in pattern {
        let mut next = vec![false; name.len() + 1];
        for at in 0..=name.len() {
            next[at] = match wanted {
                '*' => ends[at] || (at > 0 && next[at - 1]),
                '?' => at > 0 && ends[at - 1],
                letter => at > 0 && ends[at - 1] && name[at - 1] == letter,
            };
        }
        ends = next;
    }
    ends[name.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(ground: &Ground, sources: &[&str], destination: &str, is_folder: bool) -> Vec<String> {
        let copy = Copy {
            sources: sources.iter().map(|path| CopySource::Path((*path).to_owned())).collect(),
            destination: destination.to_owned(),
            ..Copy::default()
        };
        let dress = Dress { ids: Some((1, 2)), mode: None };
        let wanted = Wanted { copy: &copy, destination: destination.to_owned(), is_folder, dress };
        let scratch = tempfile::tempdir().unwrap();
        let file = match pack(ground, &wanted, scratch.path()) {
            Ok(file) => file,
            Err(error) => return vec![error.to_string()],
        };
        let mut archive = tar::Archive::new(fs::File::open(file.path()).unwrap());
        let mut names: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                assert_eq!((entry.header().uid().unwrap(), entry.header().gid().unwrap()), (1, 2));
                entry.path().unwrap().display().to_string().trim_end_matches('/').to_owned()
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn files_go_where_docker_puts_them() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("src/deep")).unwrap();
        for name in ["a.txt", "b.txt", "src/main.rs", "src/deep/x.rs", "src/secret.key"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        std::os::unix::fs::symlink("/etc", dir.path().join("out")).unwrap();
        let ground =
            Ground { root: dir.path().to_owned(), ignore: Some(IgnoreFile::parse("**/*.key\nb.txt\n")) };
        assert_eq!(packed(&ground, &["a.txt"], "/app/x", false), ["app/x"]);
        assert_eq!(packed(&ground, &["a.txt"], "/app/", false), ["app/a.txt"]);
        assert_eq!(packed(&ground, &["a.txt"], "/app", true), ["app/a.txt"]);
        assert_eq!(
            packed(&ground, &["/src"], "/app", false),
            ["app", "app/deep", "app/deep/x.rs", "app/main.rs"]
        );
        assert_eq!(packed(&ground, &["*.txt"], "/app/", false), ["app/a.txt"]);
        assert_eq!(packed(&ground, &["s*c/m*.rs"], "/app/", false), ["app/main.rs"]);
        for (sources, destination) in [
            (&["../a"][..], "/"),
            (&["out/passwd"], "/"),
            (&["none"], "/"),
            (&["b.txt"], "/"),
            (&["a.txt", "src/main.rs"], "/x"),
        ] {
            let answer = packed(&ground, sources, destination, false);
            assert!(answer.len() == 1 && answer[0].contains(' '), "{sources:?}: {answer:?}");
        }
    }

    #[test]
    fn wildcards_match_within_a_name() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("a*c", "abbc", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*.rs", "x.rs.bak", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        assert_eq!(fixed_part("/usr/local/lib*/x").unwrap(), "usr/local");
    }
}
