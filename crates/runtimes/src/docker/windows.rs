//! Windows boxes: a Linux container that runs a virtual machine (the images of dockur), which brings its own start-up.
//!
//! The container keeps its entrypoint, needs devices of the host, is sized by its environment, and finds the agent for the machine on a
//! volume. Owns all that differs; nothing else asks for the operating system.

use std::{io::Read, path::Path};

use bollard::{
    body_full,
    models::{ContainerCreateBody, DeviceMapping, HostConfig, Mount, MountType},
    query_parameters::{
        CreateContainerOptions, DownloadFromContainerOptions, RemoveContainerOptions,
        UploadToContainerOptions,
    },
};
use bytes::Bytes;
use futures_util::TryStreamExt;
use sandglass_sandbox::{
    SandboxId,
    ports::runtime::RuntimeError,
    spec::{Limits, Platform},
};

use super::{
    Shared,
    errors::{failed, invalid},
    host_config::is_capability,
};

const DEVICES: [&str; 2] = ["/dev/kvm", "/dev/net/tun"];
const CAPABILITIES: [&str; 2] = ["NET_ADMIN", "NET_RAW"];
/// Remote desktop and the web viewer.
pub(super) const PORTS: [&str; 3] = ["3389/tcp", "3389/udp", "8006/tcp"];
const OEM: &str = "/oem";
const ARTIFACTS: [&str; 2] = ["install.bat", "execd.exe"];

pub(super) fn is_windows(platform: &Platform) -> bool {
    platform.os == "windows"
}

/// The volume that brings the agent into the machine.
pub(super) fn oem_volume(id: SandboxId) -> String {
    format!("opensandbox-win-oem-{id}")
}

/// Refuses a host that cannot run virtual machines.
pub(super) fn admit() -> Result<(), RuntimeError> {
    admit_with(|device| Path::new(device).exists())
}

fn admit_with(exists: impl Fn(&str) -> bool) -> Result<(), RuntimeError> {
    let missing: Vec<&str> = DEVICES.into_iter().filter(|device| !exists(device)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!("the windows profile requires host devices to be present: {}", missing.join(", "));
    Err(invalid("windows", message))
}

/// Turns the host configuration of a Linux box into that of a Windows one.
pub(super) fn adapt(host: &mut HostConfig, id: SandboxId) {
    // They size the machine, not the container around it.
    (host.memory, host.memory_swap, host.nano_cpus, host.device_requests) = (None, None, None, None);
    let devices = DEVICES.map(|device| DeviceMapping {
        path_on_host: Some(device.to_owned()),
        path_in_container: Some(device.to_owned()),
        cgroup_permissions: Some("rwm".to_owned()),
    });
    host.devices.get_or_insert_default().extend(devices);
    if let Some(dropped) = &mut host.cap_drop {
        dropped.retain(|c| !CAPABILITIES.iter().any(|needed| is_capability(c, needed)));
    }
    host.cap_add.get_or_insert_default().extend(CAPABILITIES.map(str::to_owned));
    host.mounts.get_or_insert_default().push(Mount {
        typ: Some(MountType::VOLUME),
        source: Some(oem_volume(id)),
        target: Some(OEM.to_owned()),
        ..Mount::default()
    });
}

/// The machine's size and open ports, as its image wants to be told. What was asked for as limit wins over the request's environment.
pub(super) fn size(env: &mut Vec<(String, String)>, limits: &Limits, exposed: &[String]) {
    let gigabytes = |bytes: u64| format!("{}G", bytes.div_ceil(1 << 30).max(1));
    let sizes = [
        ("CPU_CORES", limits.cpu_millis.map(|millis| millis.div_ceil(1000).max(1).to_string())),
        ("RAM_SIZE", limits.memory_bytes.map(gigabytes)),
        ("DISK_SIZE", limits.disk_bytes.map(gigabytes)),
    ];
    for (name, value) in sizes {
        if let Some(value) = value {
            env.retain(|(known, _)| known != name);
            env.push((name.to_owned(), value));
        }
    }
    let asked = env.iter().rev().find(|(name, _)| name == "USER_PORTS").map(|(_, value)| value.clone());
    let mut ports: Vec<String> = Vec::new();
    let ours = exposed.iter().filter_map(|port| port.split('/').next());
    for port in asked.iter().flat_map(|p| p.split(',')).map(str::trim).chain(ours) {
        if !port.is_empty() && !ports.iter().any(|known| known == port) {
            ports.push(port.to_owned());
        }
    }
    if !ports.is_empty() {
        env.retain(|(known, _)| known != "USER_PORTS");
        env.push(("USER_PORTS".to_owned(), ports.join(",")));
    }
}

impl Shared {
    /// Puts the agent for Windows onto the volume of a container that was made and not started.
    pub(super) async fn upload_windows_agent(&self, container: &str) -> Result<(), RuntimeError> {
        let archive = self.windows_artifacts.get_or_try_init(|| self.read_windows_artifacts()).await?.clone();
        let options = UploadToContainerOptions { path: "/".into(), ..UploadToContainerOptions::default() };
        let sent = self.client.call(|docker| async move {
            docker.upload_to_container(container, Some(options), body_full(archive)).await
        });
        sent.await.map_err(|e| e.during("agent-copy"))
    }

    /// Reads the artifacts out of the configured image, through a container that is made and never run.
    async fn read_windows_artifacts(&self) -> Result<Bytes, RuntimeError> {
        let Some(image) = self.config.execd_image.clone() else {
            return Err(failed(
                "agent-copy",
                "windows sandboxes need [runtime] execd_image in the configuration",
            ));
        };
        if image.is_empty() {
            return Err(failed("agent-copy", "[runtime] execd_image is empty"));
        }
        let name = format!("sandbox-execd-winbin-{}", uuid::Uuid::new_v4());
        let options =
            CreateContainerOptions { name: Some(name.clone()), ..CreateContainerOptions::default() };
        let body = ContainerCreateBody {
            image: Some(image.clone()),
            cmd: Some(vec!["tail".to_owned(), "-f".to_owned(), "/dev/null".to_owned()]),
            ..ContainerCreateBody::default()
        };
        let made = self.client.call(|d| async move { d.create_container(Some(options), body).await }).await;
        made.map_err(|e| e.during("agent-copy"))?;
        let read = self.copy_windows_artifacts(&name).await;
        let options = RemoveContainerOptions { force: true, v: true, ..RemoveContainerOptions::default() };
        let name = &name;
        let gone = self.client.call(|d| async move { d.remove_container(name, Some(options)).await }).await;
        if let Err(e) = gone {
            tracing::warn!(container = %name, error = %e, "a temporary container was not removed");
        }
        read
    }

    async fn copy_windows_artifacts(&self, container: &str) -> Result<Bytes, RuntimeError> {
        let mut tar = tar::Builder::new(Vec::new());
        for artifact in ARTIFACTS {
            let options = DownloadFromContainerOptions { path: format!("/{artifact}") };
            let read = self.client.call(|docker| async move {
                let chunks = docker.download_from_container(container, Some(options));
                chunks
                    .try_fold(Vec::new(), |mut all, chunk| async move {
                        all.extend_from_slice(&chunk);
                        Ok(all)
                    })
                    .await
            });
            let packed = read.await.map_err(|e| e.during("agent-copy"))?;
            let bad = |e: std::io::Error| failed("agent-copy", format!("{artifact} of the execd image: {e}"));
            let content = only_file(&packed).map_err(bad)?;
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            let path = Path::new(OEM.trim_start_matches('/')).join(artifact);
            tar.append_data(&mut header, path, &content[..]).map_err(bad)?;
        }
        let packed = tar.into_inner().map_err(|e| failed("agent-copy", e.to_string()))?;
        Ok(Bytes::from(packed))
    }
}

fn only_file(packed: &[u8]) -> std::io::Result<Vec<u8>> {
    for entry in tar::Archive::new(packed).entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_file() {
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            return Ok(content);
        }
    }
    Err(std::io::Error::other("not a file"))
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::ports::RuntimeErrorKind;

    use super::*;

    #[test]
    fn the_missing_devices_are_named() {
        assert!(admit_with(|_| true).is_ok());
        let refused = admit_with(|device| device == "/dev/kvm").unwrap_err();
        assert_eq!(refused.kind, RuntimeErrorKind::Invalid);
        assert!(refused.message.ends_with("present: /dev/net/tun"), "{}", refused.message);
    }

    #[test]
    fn devices_and_capabilities_are_added_and_limits_left_to_the_machine() {
        let mut host = HostConfig {
            memory: Some(1),
            nano_cpus: Some(1),
            cap_drop: Some(vec!["NET_RAW".into(), "cap_net_admin".into(), "MKNOD".into()]),
            ..HostConfig::default()
        };
        adapt(&mut host, SandboxId::random());
        assert_eq!((host.memory, host.nano_cpus), (None, None));
        assert_eq!(host.cap_drop, Some(vec!["MKNOD".to_owned()]));
        assert_eq!(host.cap_add, Some(vec!["NET_ADMIN".to_owned(), "NET_RAW".to_owned()]));
        assert_eq!(host.devices.unwrap().len(), 2);
        assert_eq!(host.mounts.unwrap()[0].target.as_deref(), Some("/oem"));
    }

    #[test]
    fn the_machine_is_sized_by_its_environment() {
        let limits = Limits {
            cpu_millis: Some(2500),
            memory_bytes: Some(4 << 30),
            disk_bytes: Some((64 << 30) + 1),
            ..Limits::default()
        };
        let mut env = vec![("RAM_SIZE".into(), "1G".into()), ("USER_PORTS".into(), "22, 8080".into())];
        size(
            &mut env,
            &limits,
            &["44772/tcp".into(), "8080/tcp".into(), "3389/tcp".into(), "3389/udp".into()],
        );
        let get =
            |name: &str| env.iter().filter(|(k, _)| k == name).map(|(_, v)| v.as_str()).collect::<Vec<_>>();
        assert_eq!(
            (get("CPU_CORES"), get("RAM_SIZE"), get("DISK_SIZE")),
            (vec!["3"], vec!["4G"], vec!["65G"])
        );
        assert_eq!(get("USER_PORTS"), ["22,8080,44772,3389"]);
    }
}
