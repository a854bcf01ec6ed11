//! Large files, where the `git-lfs` program is installed.

use std::io::ErrorKind;

use super::failure::{FailureClass, GitError};
use super::process::Call;
use super::{Control, Git};

const OPERATION: &str = "lfs";

const CONFIGURATION: &str = ".lfsconfig";

/// The filters that `git lfs install` would write, without anything written.
const FILTERS: &[(&str, &str)] = &[
    ("filter.lfs.clean", "git-lfs clean -- %f"),
    ("filter.lfs.smudge", "git-lfs smudge -- %f"),
    ("filter.lfs.process", "git-lfs filter-process"),
    ("filter.lfs.required", "true"),
    // The lock check asks the server on each push, and its first answer is written into the configuration.
    ("lfs.locksverify", "false"),
    ("lfs.activitytimeout", "60"),
    ("lfs.concurrenttransfers", "4"),
];

impl Git {
    /// Replaces the pointers of large files by the files, in the repository of a call and its submodules.
    pub(super) async fn get_large_files(
        &self,
        of: &Call<'_>,
        submodules: &[String],
        control: Control<'_>,
    ) -> Result<(), GitError> {
        for path in std::iter::once("").chain(submodules.iter().map(String::as_str)) {
            let folder = of.folder.join(path);
            self.check_store(&Call::new(OPERATION, of.remote, of.access, &folder), control).await?;
            let call = Call { operation: OPERATION, folder: &folder, configuration: FILTERS, ..*of };
            self.run(&call, &["lfs", "pull", "origin"], control).await.map_err(|error| {
                if error.tail.contains("'lfs' is not a git command") {
                    return GitError::new(
                        FailureClass::Other,
                        OPERATION,
                        "the program git-lfs is not installed",
                    );
                }
                error
            })?;
        }
        Ok(())
    }

    /// A repository may say where its large files are; that is an address like any other.
    ///
    /// The client follows links and inclusions, and where the file is missing it reads what the index or the commit has.
    async fn check_store(&self, call: &Call<'_>, control: Control<'_>) -> Result<(), GitError> {
        match std::fs::symlink_metadata(call.folder.join(CONFIGURATION)) {
            Ok(entry) if entry.is_file() => self.check_listed(call, ["--file", CONFIGURATION], control).await,
            Ok(_) => Err(refused("is no regular file")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                for blob in [format!(":{CONFIGURATION}"), format!("HEAD:{CONFIGURATION}")] {
                    if self.ask(call, &["cat-file", "-e", &blob], control).await? {
                        self.check_listed(call, ["--blob", &blob], control).await?;
                    }
                }
                Ok(())
            }
            Err(error) => Err(GitError::io(OPERATION, "cannot look for `.lfsconfig`", &error)),
        }
    }

    async fn check_listed(
        &self,
        call: &Call<'_>,
        from: [&str; 2],
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let list = ["config", "--null", from[0], from[1], "--no-includes", "--list"];
        let listed = self.run(call, &list, control).await?;
        for entry in listed.split('\0').filter(|entry| !entry.is_empty()) {
            let (name, value) = entry.split_once('\n').unwrap_or((entry, ""));
            let lower = name.to_ascii_lowercase();
            if lower.starts_with("include") {
                return Err(refused("includes another file"));
            }
            // The client reads lines of `name=value`: these would be others to it than they are here.
            if name.contains('=') || value.contains('\n') {
                return Err(refused("has a name with `=` or a value of several lines"));
            }
            if lower.ends_with("url")
                && let Err(error) = self.settings.policy.check_url(value)
            {
                let why = format!("names a store for large files that is not allowed: {}", error.message);
                return Err(refused(&why));
            }
        }
        Ok(())
    }
}

fn refused(why: &str) -> GitError {
    GitError::new(FailureClass::Other, OPERATION, format!("{CONFIGURATION} {why}"))
}
