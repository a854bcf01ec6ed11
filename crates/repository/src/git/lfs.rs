//! Large files, where the `git-lfs` program is installed.

use super::access::Access;
use super::checkout::Checkout;
use super::failure::{FailureClass, GitError};
use super::process::Call;
use super::{Control, Git};

const OPERATION: &str = "lfs";

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
            call.configuration = FILTERS;
            self.run(&call, &["lfs", "pull", "origin"], control).await.map_err(|error| {
                if error.tail.contains("'lfs' is not a git command") {
                    return GitError::new(FailureClass::Other, OPERATION, "the program git-lfs is not installed");
                }
                error
            })?;
        }
        Ok(())
    }
}
