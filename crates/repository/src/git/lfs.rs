//! Large files, where the `git-lfs` program is installed.

use super::access::Access;
use super::checkout::Checkout;
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
    /// Replaces the pointers of large files by the files, in the repository and its submodules.
    pub(super) async fn get_large_files(
        &self,
        wanted: &Checkout<'_>,
        access: &Access,
        submodules: &[String],
        control: Control<'_>,
    ) -> Result<(), GitError> {
        for path in std::iter::once("").chain(submodules.iter().map(String::as_str)) {
            let folder = wanted.folder.join(path);
            let mut call = Call::new(OPERATION, wanted.remote, access, &folder);
            self.check_store(&call, control).await?;
            call.configuration = FILTERS;
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
    async fn check_store(&self, call: &Call<'_>, control: Control<'_>) -> Result<(), GitError> {
        if !std::fs::symlink_metadata(call.folder.join(CONFIGURATION)).is_ok_and(|entry| entry.is_file()) {
            return Ok(());
        }
        let listed = self
            .run(call, &["config", "--null", "--file", CONFIGURATION, "--no-includes", "--list"], control)
            .await?;
        for (name, value) in listed.split('\0').filter_map(|entry| entry.split_once('\n')) {
            if name.to_ascii_lowercase().ends_with("url")
                && let Err(error) = self.settings.policy.check_url(value)
            {
                let message = format!(
                    "{CONFIGURATION} names a store for large files that is not allowed: {}",
                    error.message
                );
                return Err(GitError::new(FailureClass::Other, OPERATION, message));
            }
        }
        Ok(())
    }
}
