//! Listing a directory tree and searching it by name.
//!
//! Goes on in steps and sends what it finds as it finds it. Memory: the names of the directories that are being gone
//! through, at most [`MAX_NAMES`] bytes of them.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::Scope;
use super::glob::Glob;
use super::info::{FileInfo, missing_or};
use super::pieces::{self, Piece, Pieces};
use crate::accounts::Accounts;
use crate::http::query::Query;
use crate::http::reply::{self, Failure, Outcome};

/// Some 700,000 names of the usual length.
const MAX_NAMES: usize = 64 << 20;
/// What a name costs beyond its bytes.
const NAME_COST: usize = 64;
/// After so many entries or bytes others get their turn.
const STEP_ENTRIES: usize = 4096;
const STEP_BYTES: usize = 64 << 10;

/// `GET /directories/list`: children right after their directory, each directory in lexical order.
pub(super) async fn list(scope: Scope, query: &Query) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let depth = match query.get("depth").filter(|d| !d.is_empty()) {
        None => 1,
        Some(text) => text
            .parse::<u32>()
            .map_err(|_| Failure::invalid(format!("depth must be a non-negative integer, not {text:?}")))?,
    };
    let root = scope.path(&raw)?;
    let listing = scope
        .blocking(move || {
            let meta = root.symlink_metadata().map_err(|e| missing_or(&root, &e))?;
            if meta.file_type().is_symlink() {
                return Err(Failure::invalid(format!("{} is a symbolic link", root.display())));
            }
            if !meta.is_dir() {
                return Err(Failure::invalid(format!("{} is not a directory", root.display())));
            }
            let mut listing = Listing::new(depth, None);
            if depth > 0 {
                listing.tree.enter(root)?;
            }
            Ok(listing)
        })
        .await?;
    pieces::answer(scope, listing, reply::JSON).await
}

/// `GET /files/search`: everything below the path that is no directory and whose name matches.
pub(super) async fn search(scope: Scope, query: &Query) -> Outcome {
    let raw = query.required("path")?.to_owned();
    let pattern = query.get("pattern").filter(|p| !p.is_empty()).unwrap_or("**").to_owned();
    let root = scope.path(&raw)?;
    let listing = scope
        .blocking(move || {
            let meta = root.symlink_metadata().map_err(|e| missing_or(&root, &e))?;
            let glob = Glob::parse(&pattern).map_err(|e| Failure::runtime(e.to_string()))?;
            let mut listing = Listing::new(u32::MAX, Some(glob));
            if meta.is_dir() {
                listing.tree.enter(root)?;
            } else {
                listing.consider(&root, &meta)?;
            }
            Ok(listing)
        })
        .await?;
    pieces::answer(scope, listing, reply::JSON).await
}

/// A JSON array of what is found.
struct Listing {
    tree: Tree,
    /// With one, directories are left out and names must match.
    glob: Option<Glob>,
    accounts: Accounts,
    out: Vec<u8>,
    first: bool,
}

impl Listing {
    fn new(depth: u32, glob: Option<Glob>) -> Self {
        let tree = Tree { open: Vec::new(), depth, names: 0 };
        Listing { tree, glob, accounts: Accounts::load(), out: b"[".to_vec(), first: true }
    }

    fn consider(&mut self, path: &Path, meta: &Metadata) -> Result<(), Failure> {
        if let Some(glob) = &self.glob {
            let name = path.file_name().map(|n| n.to_string_lossy()).unwrap_or_default();
            if meta.is_dir() || !glob.matches(&name) {
                return Ok(());
            }
        }
        if !std::mem::take(&mut self.first) {
            self.out.push(b',');
        }
        let info = FileInfo::new(path.to_string_lossy().into_owned(), meta, &self.accounts);
        serde_json::to_writer(&mut self.out, &info).map_err(|e| Failure::runtime(e.to_string()))
    }
}

impl Pieces for Listing {
    fn step(&mut self) -> Result<Piece, Failure> {
        for _ in 0..STEP_ENTRIES {
            let Some((path, meta)) = self.tree.next()? else {
                self.out.push(b']');
                return Ok(Piece::Last(std::mem::take(&mut self.out)));
            };
            self.consider(&path, &meta)?;
            if self.out.len() >= STEP_BYTES {
                break;
            }
        }
        Ok(Piece::More(std::mem::take(&mut self.out)))
    }
}

/// A tree being gone through depth-first without following links. Entries that vanish meanwhile are skipped.
struct Tree {
    /// A stack of directories instead of recursion: trees can be deeper than a thread's stack.
    open: Vec<Level>,
    depth: u32,
    /// What the names in `open` take.
    names: usize,
}

struct Level {
    path: PathBuf,
    /// In reverse order: the next one is at the end.
    left: Vec<OsString>,
}

impl Tree {
    fn next(&mut self) -> Result<Option<(PathBuf, Metadata)>, Failure> {
        loop {
            let Some(level) = self.open.last_mut() else { return Ok(None) };
            let Some(name) = level.left.pop() else {
                self.open.pop();
                continue;
            };
            self.names -= name.len() + NAME_COST;
            let path = level.path.join(name);
            let meta = match path.symlink_metadata() {
                Ok(meta) => meta,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Failure::io("stat", &path, &error)),
            };
            if meta.is_dir() && u32::try_from(self.open.len()).is_ok_and(|level| level < self.depth) {
                match self.enter(path.clone()) {
                    Err(failure) if failure.code == crate::http::reply::Code::FileNotFound => {}
                    entered => entered?,
                }
            }
            return Ok(Some((path, meta)));
        }
    }

    fn enter(&mut self, path: PathBuf) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::io("read", &path, &e);
        let mut left = Vec::new();
        let mut size = 0;
        for entry in fs::read_dir(&path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            size += name.len() + NAME_COST;
            if self.names + size > MAX_NAMES {
                return Err(Failure::runtime(format!("{}: too many entries to list", path.display())));
            }
            left.push(name);
        }
        left.sort_unstable_by(|a, b| b.cmp(a));
        self.names += size;
        self.open.push(Level { path, left });
        Ok(())
    }
}
