//! How the agent gets into a box: as a read-only bind of one unpacked file where the engine sees this machine's files, by upload elsewhere.
//!
//! Which of the two is found out by trying. The file's name carries the hash of its content, so a file that the engine finds under that
//! name is the right one, on whatever machine it looks.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use bollard::{
    body_full,
    models::{Mount, MountType},
    query_parameters::UploadToContainerOptions,
};
use bytes::Bytes;
use sandglass_sandbox::ports::runtime::RuntimeError;

use super::{DockerConfig, Shared, errors::Failure, errors::failed};
use crate::binaries;

/// Where agents listen in every box.
pub(super) const AGENT_PORT: u16 = 44772;
/// Everything of ours in a box lies here.
pub(super) const HOME: &str = "/opt/opensandbox";
/// The agent inside a box; the name is the reference's, which looks for it when it adopts a box.
pub(super) const TARGET: &str = "/opt/opensandbox/execd";

/// The agent's option that names whom everything else in the box runs as.
const USER: &str = "--user=";

/// How a container starts the agent. `user`: whom the agent itself, which is root then, runs everything as.
pub(super) fn command(user: Option<&str>, standby: bool) -> Vec<String> {
    let user = user.map(|user| format!("{USER}{user}"));
    let words = [TARGET.to_owned(), "--init".to_owned()];
    let standby = standby.then(|| "--standby".to_owned());
    words.into_iter().chain(standby).chain(user).chain(["--".to_owned()]).collect()
}

/// The user of such a command.
pub(super) fn user_of(command: &[String]) -> Option<&str> {
    let (program, options) = command.split_first()?;
    let own = options.iter().take_while(|word| *word != "--");
    own.filter(|_| program == TARGET).find_map(|word| word.strip_prefix(USER))
}

pub(super) struct Agent {
    path: PathBuf,
    binds: AtomicBool,
}

impl Agent {
    pub(super) fn unpack(config: &DockerConfig) -> io::Result<Self> {
        let path = binaries::unpack_agent(&config.state_dir.join("bin"))?;
        Ok(Self { path, binds: AtomicBool::new(config.engine.is_local()) })
    }

    /// The mount that brings the agent in; `None` when it must be uploaded.
    pub(super) fn mount(&self) -> Option<Mount> {
        self.binds.load(Ordering::Relaxed).then(|| Mount {
            typ: Some(MountType::BIND),
            source: Some(self.path.to_string_lossy().into_owned()),
            target: Some(TARGET.to_owned()),
            read_only: Some(true),
            ..Mount::default()
        })
    }

    /// Whether a create failed because the engine does not see this machine's files. From then on the agent is uploaded.
    pub(super) fn is_out_of_sight(&self, failure: &Failure) -> bool {
        let Failure::Refused { message, .. } = failure else { return false };
        let ours = message.contains(&*self.path.to_string_lossy());
        let unseen = ours && (message.contains("does not exist") || message.contains("not shared"));
        if unseen && self.binds.swap(false, Ordering::Relaxed) {
            tracing::info!("the engine does not see {}; agents are uploaded", self.path.display());
        }
        unseen
    }
}

impl Shared {
    /// Uploads the agent into a container that was made and not started.
    pub(super) async fn upload_agent(&self, container: &str) -> Result<(), RuntimeError> {
        let archive = archive(binaries::AGENT)
            .map_err(|e| failed("agent-copy", format!("cannot pack the agent: {e}")))?;
        let options = UploadToContainerOptions { path: "/".into(), ..UploadToContainerOptions::default() };
        let sent = self.client.call(|docker| async move {
            docker.upload_to_container(container, Some(options), body_full(archive)).await
        });
        sent.await.map_err(|e| e.during("agent-copy"))
    }
}

fn archive(agent: &[u8]) -> io::Result<Bytes> {
    let mut tar = tar::Builder::new(Vec::with_capacity(agent.len() + 4096));
    let relative = |path: &str| Path::new(path.trim_start_matches('/')).to_path_buf();
    let mut directory = tar::Header::new_gnu();
    directory.set_entry_type(tar::EntryType::Directory);
    directory.set_mode(0o755);
    directory.set_size(0);
    tar.append_data(&mut directory, relative(HOME), io::empty())?;
    let mut file = tar::Header::new_gnu();
    file.set_mode(0o755);
    file.set_size(agent.len() as u64);
    tar.append_data(&mut file, relative(TARGET), agent)?;
    tar.into_inner().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_upload_holds_the_directory_and_an_executable() {
        let packed = archive(b"binary").unwrap();
        let mut archive = tar::Archive::new(&packed[..]);
        let mut seen = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            let mode = entry.header().mode().unwrap();
            seen.push((entry.path().unwrap().display().to_string(), mode, content));
        }
        let expected = [
            ("opt/opensandbox".to_owned(), 0o755, String::new()),
            ("opt/opensandbox/execd".to_owned(), 0o755, "binary".to_owned()),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn the_user_is_read_back_from_the_command() {
        assert_eq!(user_of(&command(Some("ann:users"), true)), Some("ann:users"));
        assert_eq!(user_of(&command(None, false)), None);
        let others = ["/bin/sh", "--user=ann", "--"].map(str::to_owned);
        assert_eq!(user_of(&others), None);
        let entrypoint = [TARGET, "--init", "--", "x", "--user=ann"].map(str::to_owned);
        assert_eq!(user_of(&entrypoint), None);
    }

    #[test]
    fn only_a_missing_source_of_ours_turns_to_uploads() {
        let agent = Agent { path: "/state/bin/agent-1".into(), binds: AtomicBool::new(true) };
        let refused = |message: &str| Failure::Refused { status: 400, message: message.to_owned() };
        assert!(!agent.is_out_of_sight(&refused("bind source path does not exist: /other")));
        assert!(agent.mount().is_some());
        assert!(agent.is_out_of_sight(&refused("bind source path does not exist: /state/bin/agent-1")));
        assert!(agent.mount().is_none());
    }
}
