//! Listing a directory tree and searching it by name.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::glob::Glob;
use super::info::{FileInfo, missing_or};
use super::{Scope, blocking};
use crate::accounts::Accounts;
use crate::http::query::Query;
use crate::http::reply::{self, Failure, Outcome};

/// `GET /directories/list`: children right after their directory, each directory in lexical order.
pub(super) async fn list(scope: Scope, query: &Query) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let depth = match query.get("depth").filter(|d| !d.is_empty()) {
        None => 1,
        Some(text) => text
            .parse::<u32>()
            .map_err(|_| Failure::invalid(format!("depth must be a non-negative integer, not {text:?}")))?,
    };
    let found = blocking(move || {
        let root = scope.path(&raw)?;
        let meta = root.symlink_metadata().map_err(|e| missing_or(&root, &e))?;
        if meta.file_type().is_symlink() {
            return Err(Failure::invalid(format!("{} is a symbolic link", root.display())));
        }
        if !meta.is_dir() {
            return Err(Failure::invalid(format!("{} is not a directory", root.display())));
        }
        let accounts = Accounts::load();
        let mut found = Vec::new();
        if depth > 0 {
            walk(&root, depth, &mut |path, meta| {
                found.push(FileInfo::new(path.to_string_lossy().into_owned(), meta, &accounts));
            })?;
        }
        Ok(found)
    })
    .await?;
    Ok(reply::json(&found))
}

/// `GET /files/search`: everything below the path that is no directory and whose name matches.
pub(super) async fn search(scope: Scope, query: &Query) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let pattern = query.get("pattern").filter(|p| !p.is_empty()).unwrap_or("**").to_owned();
    let found = blocking(move || {
        let root = scope.path(&raw)?;
        let meta = root.symlink_metadata().map_err(|e| missing_or(&root, &e))?;
        let glob = Glob::parse(&pattern).map_err(|e| Failure::runtime(e.to_string()))?;
        let accounts = Accounts::load();
        let mut found = Vec::new();
        let mut consider = |path: &Path, meta: &fs::Metadata| {
            let name = path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
            if !meta.is_dir() && glob.matches(&name) {
                found.push(FileInfo::new(path.to_string_lossy().into_owned(), meta, &accounts));
            }
        };
        if meta.is_dir() {
            walk(&root, u32::MAX, &mut consider)?;
        } else {
            consider(&root, &meta);
        }
        Ok(found)
    })
    .await?;
    Ok(reply::json(&found))
}

/// Visits a tree depth-first without following links. Entries that vanish meanwhile are skipped.
fn walk(root: &Path, depth: u32, visit: &mut dyn FnMut(&Path, &fs::Metadata)) -> Result<(), Failure> {
    // A stack of directories being read instead of recursion: trees can be deeper than a thread's stack.
    let mut open: Vec<VecDeque<PathBuf>> = vec![children(root).map_err(|e| Failure::io("read", root, &e))?];
    while let Some(level) = open.last_mut() {
        let Some(path) = level.pop_front() else {
            open.pop();
            continue;
        };
        let meta = match path.symlink_metadata() {
            Ok(meta) => meta,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(Failure::io("stat", &path, &error)),
        };
        visit(&path, &meta);
        let more = u32::try_from(open.len()).is_ok_and(|level| level < depth);
        if meta.is_dir() && more {
            match children(&path) {
                Ok(entries) => open.push(entries),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(Failure::io("read", &path, &error)),
            }
        }
    }
    Ok(())
}

fn children(dir: &Path) -> io::Result<VecDeque<PathBuf>> {
    let mut names =
        fs::read_dir(dir)?.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names.into())
}
