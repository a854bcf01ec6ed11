//! What the server delivers into a box: binds where the engine sees this machine's files, an upload of the files elsewhere.

use std::{io, os::unix::fs::PermissionsExt, path::Path};

use bollard::{
    body_full,
    models::{Mount, MountType},
    query_parameters::UploadToContainerOptions,
};
use bytes::Bytes;
use sandglass_sandbox::ports::runtime::{Delivery, RuntimeError};

use super::{Shared, errors::failed};

/// The mount that shows it.
pub(super) fn mount(delivery: &Delivery) -> Mount {
    Mount {
        typ: Some(MountType::BIND),
        source: Some(delivery.source.to_string_lossy().into_owned()),
        target: Some(delivery.target.to_string_lossy().into_owned()),
        read_only: Some(delivery.read_only),
        ..Mount::default()
    }
}

impl Shared {
    /// Uploads files into a container that was made and not started. Folders are left out: what is made in them later would not be seen.
    pub(super) async fn upload_delivery(
        &self,
        container: &str,
        delivery: &[Delivery],
    ) -> Result<(), RuntimeError> {
        if delivery.is_empty() {
            return Ok(());
        }
        let delivery = delivery.to_vec();
        let packed = tokio::task::spawn_blocking(move || archive(&delivery)).await;
        let packed = packed
            .unwrap_or_else(|e| Err(io::Error::other(e)))
            .map_err(|e| failed("agent-copy", format!("cannot pack what is for the agent: {e}")))?;
        let options = UploadToContainerOptions { path: "/".into(), ..UploadToContainerOptions::default() };
        let sent = self.client.call(|docker| async move {
            docker.upload_to_container(container, Some(options), body_full(packed)).await
        });
        sent.await.map_err(|e| e.during("agent-copy"))
    }
}

fn archive(delivery: &[Delivery]) -> io::Result<Bytes> {
    let mut tar = tar::Builder::new(Vec::new());
    for file in delivery.iter().filter(|file| file.source.is_file()) {
        let content = std::fs::read(&file.source)?;
        let target = file.target.strip_prefix("/").unwrap_or(&file.target);
        if let Some(parent) = target.parent().filter(|parent| *parent != Path::new("")) {
            let mut folder = tar::Header::new_gnu();
            folder.set_entry_type(tar::EntryType::Directory);
            folder.set_mode(0o755);
            folder.set_size(0);
            tar.append_data(&mut folder, parent, io::empty())?;
        }
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode(&file.source)?);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, target, content.as_slice())?;
    }
    tar.into_inner().map(Bytes::from)
}

/// As outside, except that the owner is root.
fn mode(source: &Path) -> io::Result<u32> {
    Ok(std::fs::metadata(source)?.permissions().mode() & 0o777)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_packed_as_they_are_and_folders_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (token, open) = (dir.path().join("token"), dir.path().join("open"));
        for (path, mode) in [(&token, 0o600), (&open, 0o644)] {
            std::fs::write(path, "content").unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        let to = |source: &Path, target: &str| Delivery {
            source: source.into(),
            target: target.into(),
            read_only: true,
        };
        let all = [
            to(&token, "/run/.execd/workspace.token"),
            to(dir.path(), "/run/.execd/bridge"),
            to(&open, "/etc/open"),
        ];
        let packed = archive(&all).unwrap();
        let mut seen = Vec::new();
        for entry in tar::Archive::new(&packed[..]).entries().unwrap() {
            let entry = entry.unwrap();
            seen.push((entry.path().unwrap().display().to_string(), entry.header().mode().unwrap()));
        }
        assert_eq!(
            seen,
            [
                ("run/.execd".to_owned(), 0o755),
                ("run/.execd/workspace.token".to_owned(), 0o600),
                ("etc".to_owned(), 0o755),
                ("etc/open".to_owned(), 0o644)
            ]
        );
        assert_eq!(mount(&all[1]).target.as_deref(), Some("/run/.execd/bridge"));
    }
}
