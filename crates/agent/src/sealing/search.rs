//! Secrets in what a build changed: the values that it was given, and what looks like somebody's token.
//!
//! What changed is told by the time of change, which the kernel keeps and no program sets: files with times of their own, as `cp -p`, `tar`
//! and `touch` leave them, are among it. Tokens are looked for in less: only where the time of writing is later as well, because packages
//! and sources hold tokens of nobody, for their tests and manuals.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, SeekFrom, seek};
use sandglass_repository::redact::{Needles, scan};
use sandglass_sandbox::sealing::{Found, SECRETS_MOST, Search, TOKENS_MOST};

/// File systems keep times a little late, some in whole seconds.
const SLACK: i64 = 1_000_000_000;
/// Larger files are data, and hold no tokens by accident.
const TOKEN_FILE_MOST: u64 = 2 << 20;
/// How long tokens are looked for.
const TOKEN_TIME: Duration = Duration::from_secs(120);
/// Folders of packages, by name and by path.
const PACKAGES: [&str; 3] = ["node_modules", "site-packages", "dist-packages"];
const PACKAGE_PATHS: [&str; 2] = ["usr/share", "var/lib"];
const PACKAGE_ENDS: [&str; 2] = [".cargo/registry", "go/pkg/mod"];
/// The kernel's bound for the value of an attribute.
const ATTRIBUTE_MOST: usize = 64 << 10;
/// Characters of a path that are told.
const PATH_MOST: usize = 400;
/// What could not be read is told so often.
const UNREAD_MOST: usize = 5;

/// Told what is found.
pub(super) type Tell<'t> = dyn FnMut(&Found) -> io::Result<()> + 't;

/// Looks at everything below `root` on its file system.
///
/// # Errors
/// When what is found cannot be told, or the root cannot be read.
pub(super) fn search(root: &Path, task: &Search, tell: &mut Tell<'_>) -> io::Result<()> {
    let since = task.since.saturating_sub(SLACK);
    let mut run = Run {
        root,
        since,
        needles: Needles::new(task.values.iter().map(String::as_str)),
        tokens_until: Some(Instant::now() + TOKEN_TIME),
        secrets: 0,
        tokens: 0,
        unread: 0,
        changed: 0,
        tell,
    };
    let device = fs::symlink_metadata(root)?.dev();
    let mut folders = vec![(root.to_owned(), true)];
    while let Some((folder, tokens)) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) => {
                run.unreadable(&folder, &error)?;
                continue;
            }
        };
        for entry in entries {
            let looked = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)));
            let (path, meta) = match looked {
                Ok(looked) => looked,
                Err(error) => {
                    run.unreadable(&folder, &error)?;
                    continue;
                }
            };
            if meta.is_dir() {
                // What is mounted there becomes no part of an image.
                if meta.dev() != device {
                    continue;
                }
                let tokens = tokens && !holds_packages(path.strip_prefix(root).unwrap_or(&path));
                folders.push((path.clone(), tokens));
            }
            if run.is_later(meta.ctime(), meta.ctime_nsec()) {
                run.look(&path, &meta, tokens)?;
            }
            if run.secrets >= SECRETS_MOST {
                return run.done();
            }
        }
    }
    run.done()
}

struct Run<'r, 't> {
    root: &'r Path,
    since: i64,
    needles: Needles,
    /// `None` when enough of them were looked for.
    tokens_until: Option<Instant>,
    secrets: usize,
    tokens: usize,
    unread: usize,
    changed: u64,
    tell: &'r mut Tell<'t>,
}

impl Run<'_, '_> {
    fn is_later(&self, seconds: i64, nanoseconds: i64) -> bool {
        seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds) >= self.since
    }

    fn done(self) -> io::Result<()> {
        (self.tell)(&Found::Done { changed: self.changed })
    }

    /// Everything that is kept of one that changed.
    fn look(&mut self, path: &Path, meta: &Metadata, tokens: bool) -> io::Result<()> {
        self.changed += 1;
        if !self.needles.is_empty() {
            match self.holds_value(path, meta) {
                Ok(false) => {}
                Ok(true) => {
                    self.secrets += 1;
                    return (self.tell)(&Found::Secret { path: shown(self.root, path) });
                }
                Err(error) => self.unreadable(path, &error)?,
            }
        }
        let suits = tokens && meta.is_file() && meta.len() <= TOKEN_FILE_MOST;
        if suits && self.is_later(meta.mtime(), meta.mtime_nsec()) {
            self.look_for_tokens(path)?;
        }
        Ok(())
    }

    fn holds_value(&self, path: &Path, meta: &Metadata) -> io::Result<bool> {
        if path.file_name().is_some_and(|name| self.needles.occur_in(name.as_bytes())) {
            return Ok(true);
        }
        if meta.is_symlink() {
            return Ok(self.needles.occur_in(fs::read_link(path)?.as_os_str().as_bytes()));
        }
        if attributes(path).iter().any(|value| self.needles.occur_in(value)) {
            return Ok(true);
        }
        if !meta.is_file() {
            return Ok(false);
        }
        let file = open(path)?;
        let mut from = 0;
        // Holes hold nothing, and may be larger than every disk.
        while let Some((begin, end)) = next_data(&file, from, meta.len())? {
            seek(&file, SeekFrom::Start(begin))?;
            if self.needles.occur_in_stream((&file).take(end - begin))? {
                return Ok(true);
            }
            from = end;
        }
        Ok(false)
    }

    fn look_for_tokens(&mut self, path: &Path) -> io::Result<()> {
        let Some(until) = self.tokens_until else { return Ok(()) };
        if Instant::now() >= until {
            self.tokens_until = None;
            return (self.tell)(&Found::TokensGivenUp { seconds: TOKEN_TIME.as_secs() });
        }
        let findings = match open(path).and_then(|file| scan(file.take(TOKEN_FILE_MOST))) {
            Ok(findings) => findings,
            Err(error) => return self.unreadable(path, &error),
        };
        let mut kinds: Vec<String> = findings.iter().map(|found| found.kind.word().to_owned()).collect();
        kinds.sort();
        kinds.dedup();
        if kinds.is_empty() {
            return Ok(());
        }
        self.tokens += 1;
        if self.tokens >= TOKENS_MOST {
            self.tokens_until = None;
        }
        (self.tell)(&Found::Tokens { path: shown(self.root, path), kinds })
    }

    /// What went meanwhile is not kept either.
    fn unreadable(&mut self, path: &Path, error: &io::Error) -> io::Result<()> {
        self.unread += 1;
        if error.kind() == io::ErrorKind::NotFound || self.unread > UNREAD_MOST {
            return Ok(());
        }
        (self.tell)(&Found::Unread { path: shown(self.root, path), message: error.to_string() })
    }
}

fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    File::options().read(true).custom_flags(flags).open(path)
}

/// The next stretch of the file that is no hole; all of it where the file system does not tell.
fn next_data(file: &File, from: u64, length: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= length {
        return Ok(None);
    }
    let begin = match seek(file, SeekFrom::Data(from)) {
        Ok(begin) => begin,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(_) => return Ok(Some((from, length))),
    };
    let end = seek(file, SeekFrom::Hole(begin)).unwrap_or(length);
    Ok(Some((begin, end.clamp(begin + 1, length.max(begin + 1)))))
}

/// The values of a file's extended attributes; none where there are none, or they cannot be read.
fn attributes(path: &Path) -> Vec<Vec<u8>> {
    let mut names = match rustix::fs::llistxattr(path, &mut [0_u8; 0]) {
        Ok(length) if length > 0 => vec![0; length],
        _ => return Vec::new(),
    };
    let Ok(length) = rustix::fs::llistxattr(path, &mut names) else { return Vec::new() };
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let mut value = vec![0; ATTRIBUTE_MOST];
        let length = rustix::fs::lgetxattr(path, name, &mut value).ok()?;
        value.truncate(length);
        Some(value)
    };
    names.filter_map(value).collect()
}

/// Whether the files below are those of packages, by the path below the root.
fn holds_packages(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| PACKAGES.contains(&name))
        || path.to_str().is_some_and(|path| PACKAGE_PATHS.contains(&path))
        || PACKAGE_ENDS.iter().any(|known| path.ends_with(known))
}

fn shown(root: &Path, path: &Path) -> String {
    let path = Path::new("/").join(path.strip_prefix(root).unwrap_or(path));
    let text: String = path.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    match text.char_indices().nth(PATH_MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::time::{SystemTime, UNIX_EPOCH};

    use rustix::fs::{Mode, mkfifoat};

    use super::*;

    const SECRET: &str = "s3cr3t/Value+1=";

    fn now() -> i64 {
        i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
    }

    fn found(root: &Path, since: i64) -> Vec<Found> {
        let task = Search { values: vec![SECRET.to_owned(), "short".to_owned()], since };
        let mut all = Vec::new();
        search(root, &task, &mut |found| {
            all.push(found.clone());
            Ok(())
        })
        .unwrap();
        assert!(matches!(all.pop(), Some(Found::Done { .. })), "{all:?}");
        all.sort_by_key(|found| format!("{found:?}"));
        all
    }

    fn write(root: &Path, name: &str, content: &[u8]) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn set_back(path: &Path) {
        File::options().write(true).open(path).unwrap().set_modified(UNIX_EPOCH).unwrap();
    }

    #[test]
    fn a_value_is_found_wherever_a_build_can_leave_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(root, "plain", format!("export X={SECRET}\n").as_bytes());
        write(root, "nul", format!("\0\0{SECRET}\0").as_bytes());
        write(root, "base64", b"eHMzY3IzdC9WYWx1ZSsxPQo=");
        write(root, "old", SECRET.as_bytes());
        set_back(&root.join("old"));
        write(root, "node_modules/large", &[vec![b'x'; 3 << 20], SECRET.into()].concat());
        write(root, &format!("name-{}", "s3cr3t%2FValue%2B1%3D"), b"");
        symlink(format!("/x/{SECRET}"), root.join("link")).unwrap();
        let sparse = File::create(root.join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&sparse, SECRET.as_bytes(), 1 << 39).unwrap();
        // None of these holds anything, or ever answers.
        write(root, "clean", b"short s3cr3t/ Value+1=");
        mkfifoat(rustix::fs::CWD, root.join("fifo"), Mode::RWXU).unwrap();
        symlink("/", root.join("loop")).unwrap();
        let paths: Vec<String> = found(root, now() - 3_600_000_000_000)
            .into_iter()
            .map(|found| match found {
                Found::Secret { path } => path,
                other => panic!("{other:?}"),
            })
            .collect();
        let expected = [
            "/base64",
            "/link",
            "/name-s3cr3t%2FValue%2B1%3D",
            "/node_modules/large",
            "/nul",
            "/old",
            "/plain",
            "/sparse",
        ];
        assert_eq!(paths, expected);
        // What was there before the build is its parent's.
        assert_eq!(found(root, now() + 3_600_000_000_000), []);
    }

    #[test]
    fn tokens_are_those_that_commands_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let token = format!("ghp_{}", "a1B2".repeat(9));
        let text = format!("{token} {token} AKIAIOSFODNN7EXAMPLE");
        for name in ["home/x", "usr/share/x", "home/node_modules/x", "old", "home/go/pkg/mod/x"] {
            write(dir.path(), name, text.as_bytes());
        }
        set_back(&dir.path().join("old"));
        write(dir.path(), "large", &[text.as_bytes(), &vec![0; 2 << 20]].concat());
        let kinds = ["aws-access-key-id", "github-token"].map(str::to_owned).to_vec();
        let expected = [Found::Tokens { path: "/home/x".to_owned(), kinds }];
        assert_eq!(found(dir.path(), now() - 3_600_000_000_000), expected);
    }

    #[test]
    fn what_is_told_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..30 {
            write(dir.path(), &format!("{number}"), SECRET.as_bytes());
        }
        assert_eq!(found(dir.path(), 0).len(), SECRETS_MOST);
        let deep = PathBuf::from("/r/a\nb").join("x".repeat(600));
        let told = shown(Path::new("/r"), &deep);
        assert!(told.starts_with("/a?b/xxx") && told.ends_with('…') && told.chars().count() == 401);
    }
}
