//! Builds that start from the image of an older commit: what its setup made stays, its sources are replaced, and setup runs again.
//!
//! Only the commits differ then: everything that the recipe reads is part of what such images have in common.

use std::{
    fmt::Write as _,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use tempfile::NamedTempFile;
use tracing::debug;

use super::{
    attempt::{Attempt, OWN, Workshop, of_disk, of_runtime, sandbox_id},
    engine::SandboxEngine,
};

/// The names of the files that a checkout consists of, below it; see [`names`].
pub(super) const SOURCES: &str = ".git/sandglass-sources";
/// Takes away what the new sources do not have, folders that get empty by it, and git's own files. Fails where the names are not known.
/// The shell is to see bytes in names, not letters.
const CLEAR: &str = r#"export LC_ALL=C
cd "$0" && [ -f .git/sandglass-sources ] || exit 3
awk 'FILENAME==ARGV[1]{kept[$0];next} !($0 in kept)' "$1" .git/sandglass-sources >"$1.gone" || exit 3
while IFS= read -r name; do
  # A line feed at the end would be lost.
  case $name in *\\*) name=$(printf '%b.' "$name"); name=${name%.} ;; esac
  rm -f -- "$name"
  while case $name in */*) ;; *) false ;; esac; do
    name=${name%/*}
    rmdir -- "$name" 2>/dev/null || break
  done
done <"$1.gone"
rm -rf .git"#;

/// The attempt's sandbox that is made of an older image.
const NUMBER: usize = 0;

impl SandboxEngine {
    /// Makes the build sandbox of the older commit's image, with the new sources in it. `None` when there is none, or when it is of no use:
    /// whatever is wrong with it, the base still is.
    pub(super) async fn start_from_parent(
        &self,
        job: &Job,
        attempt: &mut Attempt,
    ) -> Result<Option<Workshop>, EngineError> {
        let Some(parent) = &job.parent else { return Ok(None) };
        let step = if attempt.recipe.setup.is_empty() { StepName::Sanitize } else { StepName::Setup };
        let line = format!("starting from {parent}, the image of another commit\n");
        job.log.write(step, line.as_bytes()).await;
        let error = match self.refreshed(job, attempt, parent).await {
            Ok(workshop) => {
                attempt.workshop = Some(workshop.clone());
                attempt.from_parent = true;
                return Ok(Some(workshop));
            }
            Err(EngineError::Cancelled) => return Err(EngineError::Cancelled),
            Err(error) => error,
        };
        debug!(build = %job.build, %error, "an older image is not built upon");
        let line = format!("it cannot be built upon ({error}); starting from the base\n");
        job.log.write(step, line.as_bytes()).await;
        let failed = sandbox_id(job.build, job.attempt, NUMBER);
        self.runtime.remove(failed, Duration::ZERO).await.map_err(of_runtime)?;
        Ok(None)
    }

    async fn refreshed(&self, job: &Job, attempt: &Attempt, parent: &str) -> Result<Workshop, EngineError> {
        let workshop = self.open(job, NUMBER, parent).await?;
        for (checkout, folder) in job.plan.checkouts.iter().zip(&attempt.folders) {
            let (folder, scratch) = (folder.clone(), attempt.scratch.path().to_owned());
            let listed = tokio::task::spawn_blocking(move || -> io::Result<NamedTempFile> {
                let file = NamedTempFile::new_in(scratch)?;
                std::fs::write(file.path(), names(&folder)?)?;
                Ok(file)
            });
            let listed = listed.await.map_err(|error| EngineError::transient(error.to_string()))?;
            let listed = listed.map_err(of_disk("list the sources"))?;
            let there = format!("{OWN}/sources");
            self.uncancelled(job, async {
                let put = self.inside.put(&workshop.door, listed.path(), &there, 0o600).await;
                put.map_err(|error| EngineError::transient(error.to_string()))
            })
            .await?;
            self.quietly(job, &workshop, &["/bin/sh", "-c", CLEAR, &checkout.path, &there]).await?;
        }
        self.put_sources(job, attempt, &workshop).await?;
        Ok(workshop)
    }
}

/// Every file and link of a checkout, one a line, but for git's own. What is no printable ASCII, and the backslash, is `\0` and the three octal
/// digits of the byte, as `printf %b` reads it: any name is one line, and shells and `awk` of every image and locale have the same idea of it.
pub(super) fn names(folder: &Path) -> io::Result<String> {
    let mut all = String::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(place) = waiting.pop() {
        for entry in std::fs::read_dir(folder.join(&place))? {
            let entry = entry?;
            let path = place.join(entry.file_name());
            if path == Path::new(".git") {
                continue;
            }
            if entry.file_type()?.is_dir() {
                waiting.push(path);
            } else {
                push_name(&mut all, path.as_os_str().as_bytes());
                all.push('\n');
            }
        }
    }
    Ok(all)
}

fn push_name(all: &mut String, name: &[u8]) {
    for byte in name {
        match byte {
            b' '..=b'~' if *byte != b'\\' => all.push(char::from(*byte)),
            _ => write!(all, "\\0{byte:03o}").expect("a string takes everything"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, fs, process::Command};

    use super::*;

    fn write(folder: &Path, name: &str) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "x").unwrap();
    }

    fn sorted(folder: &Path) -> Vec<String> {
        let mut all: Vec<String> = names(folder).unwrap().lines().map(str::to_owned).collect();
        all.sort();
        all
    }

    fn run_clear(place: &Path, list: &Path) -> Option<i32> {
        Command::new("/bin/sh").args(["-c", CLEAR]).arg(place).arg(list).status().unwrap().code()
    }

    #[test]
    fn what_a_commit_took_away_goes_and_what_setup_made_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        let odd = "odd/a b\\c*$(x)";
        for name in ["kept", "gone", "deep/er/gone", "half/gone", "-n", odd, "was_folder/file"] {
            write(&old, name);
        }
        for name in ["kept", "was_folder", "added"] {
            write(&new, name);
        }
        write(&old, ".git/config");
        fs::write(old.join(SOURCES), names(&old).unwrap()).unwrap();
        for made in ["node_modules/x", "half/made"] {
            write(&old, made);
        }
        let list = dir.path().join("list");
        fs::write(&list, names(&new).unwrap()).unwrap();
        let clear = |place: &Path| run_clear(place, &list);
        assert_eq!(clear(&old), Some(0));
        assert_eq!(sorted(&old), ["half/made", "kept", "node_modules/x"]);
        assert!(!old.join(".git").exists() && !old.join("deep").exists() && !old.join("was_folder").exists());
        // An image that does not say what it was made of is not built upon.
        assert_eq!(clear(&old), Some(3));
        assert_eq!(clear(&dir.path().join("none")), Some(3));
        assert!(old.join("kept").exists());
    }
    #[test]
    fn names_are_taken_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        let put = |folder: &Path, name: &[u8]| {
            let path = folder.join(OsStr::from_bytes(name));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        };
        let gone: &[&[u8]] = &[
            b"line\nfeed",
            b"at its end\n",
            b"\n\n",
            b"'single' \"double\"",
            b"back\\slash",
            b"\\",
            b"\\0101",
            b"\\n",
            b"\\c",
            b"--",
            b"-rf",
            b"--help",
            b"  spaces  ",
            b"*",
            b"$(touch x) `touch x` ; #",
            b"\xff\xfe",
            "\u{e4}".as_bytes(),
            b"\x01\x7f\t\r",
            b"folder \n\\\xff/-n\n",
        ];
        // What a name would be that was read otherwise.
        let kept: &[&[u8]] =
            &[b"line", b"feed", b"at its end", b"A", b"backslash", b"spaces", b"\xff", b"-", b"\xc3"];
        for name in gone.iter().chain(kept) {
            put(&old, name);
        }
        for name in kept {
            put(&new, name);
        }
        let told = names(&old).unwrap();
        assert!(told.is_ascii());
        assert_eq!(told.lines().count(), gone.len() + kept.len());
        put(&old, SOURCES.as_bytes());
        fs::write(old.join(SOURCES), told).unwrap();
        let list = dir.path().join("list");
        fs::write(&list, names(&new).unwrap()).unwrap();
        assert_eq!(run_clear(&old, &list), Some(0));
        assert_eq!(sorted(&old), sorted(&new));
        assert_eq!(fs::read_dir(&old).unwrap().count(), kept.len(), "no folder is left either");
    }

    #[test]
    fn a_commit_may_take_everything_away() {
        let dir = tempfile::tempdir().unwrap();
        let (old, list) = (dir.path().join("old"), dir.path().join("list"));
        write(&old, "gone");
        write(&old, SOURCES);
        fs::write(old.join(SOURCES), "gone\n").unwrap();
        fs::write(&list, "").unwrap();
        assert_eq!(run_clear(&old, &list), Some(0));
        assert!(sorted(&old).is_empty());
    }
}
