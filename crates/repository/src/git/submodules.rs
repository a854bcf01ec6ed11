//! Submodules, level by level, each address held to the same rules as the repository's own.

use std::path::{Path, PathBuf};

use super::failure::{FailureClass, GitError};
use super::process::Call;
use super::{Control, Git};
use crate::error::Code;

const OPERATION: &str = "submodules";
/// Levels and submodules beyond which a repository is taken for one that means harm.
const DEPTH_LIMIT: usize = 8;
const COUNT_LIMIT: usize = 256;

impl Git {
    /// Checks out every submodule of a call's folder and gives their paths.
    pub(super) async fn update_submodules(
        &self,
        of: &Call<'_>,
        depth: Option<u32>,
        control: Control<'_>,
    ) -> Result<Vec<String>, GitError> {
        let mut done = Vec::new();
        let mut waiting = vec![(PathBuf::new(), 0)];
        while let Some((parent, level)) = waiting.pop() {
            let folder = of.folder.join(&parent);
            let call = Call { operation: OPERATION, folder: &folder, ..*of };
            for path in self.update_level(&call, depth, control).await? {
                let path = parent.join(path);
                if level + 1 >= DEPTH_LIMIT || done.len() >= COUNT_LIMIT {
                    let message =
                        format!("submodules are nested deeper than {DEPTH_LIMIT} or more than {COUNT_LIMIT}");
                    return Err(GitError::new(FailureClass::Other, OPERATION, message));
                }
                done.push(path.to_string_lossy().into_owned());
                waiting.push((path, level + 1));
            }
        }
        done.sort();
        Ok(done)
    }

    async fn update_level(
        &self,
        update: &Call<'_>,
        depth: Option<u32>,
        control: Control<'_>,
    ) -> Result<Vec<String>, GitError> {
        if !is_regular_file(&update.folder.join(".gitmodules")) {
            return Ok(Vec::new());
        }
        // The others write next to nothing.
        let call = Call { watched: None, ..*update };
        self.run(&call, &["submodule", "--quiet", "init"], control).await?;
        // What `init` wrote: relative addresses are resolved, and only submodules that the commit has are here.
        let configured = self.run(&call, &["config", "--null", "--local", "--list"], control).await?;
        for (name, value) in configured.split('\0').filter_map(|entry| entry.split_once('\n')) {
            if name.starts_with("submodule.") && name.ends_with(".url") {
                self.check_address(name, value)?;
            }
        }
        let depth = depth.map(|depth| format!("--depth={depth}"));
        let mut arguments = vec!["submodule", "update", "--force", "--jobs=2"];
        arguments.extend(depth.as_deref());
        self.run(update, &arguments, control).await?;
        let listed = self
            .run(&call, &["submodule", "--quiet", "foreach", "printf '%s\\0' \"$sm_path\""], control)
            .await?;
        Ok(listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
    }

    fn check_address(&self, name: &str, url: &str) -> Result<(), GitError> {
        let Err(error) = self.settings.policy.check_url(url) else { return Ok(()) };
        let name = name.trim_start_matches("submodule.").trim_end_matches(".url");
        let why = match error.code {
            Code::HostNotAllowed => "is on a host that is not allowed",
            _ => "has an address that is not allowed",
        };
        Err(GitError::new(
            FailureClass::Other,
            OPERATION,
            format!("submodule {name:?} {why}: {}", error.message),
        ))
    }
}

fn is_regular_file(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|entry| entry.is_file())
}
