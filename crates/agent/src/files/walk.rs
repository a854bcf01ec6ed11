//! Looking through trees: search by name, list by depth. Symbolic links are entries, never followed.

use std::fs;
use std::io;
use std::path::Path;

use super::glob::Glob;
use super::info::{FileInfo, missing_or};
use super::{Scope, blocking};
use crate::accounts::Accounts;
use crate::http::query::Query;
use crate::http::reply::{self, Failure, Outcome};

/// Deepest nesting that is entered; deeper trees exist only to break walkers.
const MAX_DEPTH: usize = 1024;

/// `GET /files/search`: files below `path` whose base name matches `pattern`.
pub(super) async fn search(scope: Scope, query: &Query) -> Outcome {
    let root = query.required("path")?.to_owned();
    let pattern = query.get("pattern").filter(|p| !p.is_empty()).unwrap_or("**").to_owned();
    let found = blocking(move || {
        let glob = Glob::parse(&pattern).map_err(|e| Failure::runtime(e.to_string()))?;
        let root = scope.path(&root)?;
        let meta = fs::metadata(&root).map_err(|e| missing_or(&root, &e))?;
        let mut found = Vec::new();
        let accounts = Accounts::load();
        if !meta.is_dir() {
            take_if_matching(&root, &glob, &accounts, &mut found)?;
            return Ok(found);
        }
        let mut pending = vec![(root, 0)];
        while let Some((dir, depth)) = pending.pop() {
            for entry in sorted(&dir)? {
                let path = dir.join(entry.file_name());
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    if depth < MAX_DEPTH {
                        pending.push((path, depth + 1));
                    }
                } else {
                    take_if_matching(&path, &glob, &accounts, &mut found)?;
                }
            }
        }
        Ok(found)
    })
    .await?;
    Ok(reply::json(&found))
}

fn take_if_matching(
    path: &Path,
    glob: &Glob,
    accounts: &Accounts,
    found: &mut Vec<FileInfo>,
) -> Result<(), Failure> {
    let name = path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
    if !glob.matches(&name) {
        return Ok(());
    }
    match path.symlink_metadata() {
        Ok(meta) => found.push(FileInfo::new(path.to_string_lossy().into_owned(), &meta, accounts)),
        // Gone between the listing and the look.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Failure::io("stat", path, &e)),
    }
    Ok(())
}

/// `GET /directories/list`: entries down to `depth`, each directory's children right after it.
pub(super) async fn list(scope: Scope, query: &Query) -> Outcome {
    let root = query.required("path")?.to_owned();
    let depth = match query.get("depth") {
        None | Some("") => 1,
        Some(text) => text
            .parse::<usize>()
            .map_err(|_| Failure::invalid(format!("depth must be a non-negative integer, not {text:?}")))?,
    };
    let found = blocking(move || {
        let root = scope.path(&root)?;
        let meta = root.symlink_metadata().map_err(|e| missing_or(&root, &e))?;
        if !meta.is_dir() {
            return Err(Failure::invalid(format!("{} is not a directory", root.display())));
        }
        let mut found = Vec::new();
        descend(&root, depth.min(MAX_DEPTH), &Accounts::load(), &mut found)?;
        Ok(found)
    })
    .await?;
    Ok(reply::json(&found))
}

fn descend(dir: &Path, depth: usize, accounts: &Accounts, found: &mut Vec<FileInfo>) -> Result<(), Failure> {
    if depth == 0 {
        return Ok(());
    }
    for entry in sorted(dir)? {
        let path = dir.join(entry.file_name());
        let meta = match path.symlink_metadata() {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(Failure::io("stat", &path, &e)),
        };
        found.push(FileInfo::new(path.to_string_lossy().into_owned(), &meta, accounts));
        if meta.is_dir() {
            descend(&path, depth - 1, accounts, found)?;
        }
    }
    Ok(())
}

fn sorted(dir: &Path) -> Result<Vec<fs::DirEntry>, Failure> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Failure::io("list", dir, &e)),
    };
    let mut entries: Vec<_> = entries.collect::<io::Result<_>>().map_err(|e| Failure::io("list", dir, &e))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}
