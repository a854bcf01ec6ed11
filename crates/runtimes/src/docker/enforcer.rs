//! The image of our own enforcer: the static program and what it needs to verify its peers, made on each engine and named by its content.
//!
//! Invariant: whoever finds the name on an engine finds what this server would put there, so that nothing has to be remembered: made once,
//! made again after somebody pruned it, and left to sweeps once no server brings it any more.

use std::{collections::HashMap, fs, io, io::Read, path::Path};

use bollard::{
    auth::DockerCredentials,
    body_full,
    query_parameters::{ImportImageOptions, ListImagesOptions, RemoveImageOptions},
};
use bytes::Bytes;
use futures_util::StreamExt;
use sandglass_sandbox::ports::runtime::RuntimeError;
use serde_json::json;
use sha2::{Digest, Sha256};
use tracing::{debug, info, warn};

use super::{
    Shared,
    agent::HOME,
    errors::{failed, invalid},
};
use crate::binaries;

const REPOSITORY: &str = "sandglass-egress";
/// On the image and, inherited, on every container that is made from it.
pub(super) const LABEL: &str = "opensandbox.io/sandglass-egress";
/// Where rules are found that hold whatever the policy says; here and in the image.
pub(super) const ALWAYS: &str = "/var/egress/rules";
/// Counts changes of what is around the program.
const LAYOUT: u32 = 1;
const PROGRAM: &str = "/sandglass-egress";
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Where distributions keep the authorities that a machine trusts.
const BUNDLES: [&str; 5] = [
    BUNDLE,
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Larger bundles do not exist.
const MAX_BUNDLE: u64 = 8 << 20;
/// What the embedded program runs on.
const ARCH: &str = "amd64";

/// Which program enforces policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enforcer<'a> {
    /// The image that the operator named.
    Configured(&'a str),
    Own,
}

/// Our image, as far as this process knows it.
#[derive(Debug, Default)]
pub(super) struct OwnImage {
    content: tokio::sync::OnceCell<Content>,
    /// Only one create at a time makes it.
    making: tokio::sync::Mutex<()>,
}

/// What the image is made of, beside the program.
#[derive(Debug)]
struct Content {
    name: String,
    /// The authorities that this machine trusts; none when it has no bundle.
    authorities: Option<Bytes>,
}

impl Content {
    fn read(bundles: &[&str]) -> Self {
        let authorities = bundles.iter().find_map(|path| bundle(Path::new(path)));
        if authorities.is_none() {
            warn!("this machine has no bundle of certificate authorities; enforcers use their own");
        }
        let mut hash = Sha256::new();
        hash.update(format!("{LAYOUT} {} ", binaries::EGRESS_HASH));
        hash.update(authorities.as_deref().unwrap_or_default());
        let digits: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Self { name: format!("{REPOSITORY}:{digits}"), authorities }
    }
}

fn bundle(path: &Path) -> Option<Bytes> {
    let mut content = Vec::new();
    fs::File::open(path).ok()?.take(MAX_BUNDLE + 1).read_to_end(&mut content).ok()?;
    let fits = content.len() as u64 <= MAX_BUNDLE;
    (fits && content.windows(11).any(|part| part == b"-----BEGIN ")).then(|| content.into())
}

impl Shared {
    pub(super) fn enforcer(&self) -> Enforcer<'_> {
        self.config.egress.image.as_deref().map_or(Enforcer::Own, Enforcer::Configured)
    }

    /// Refuses engines that cannot run the configured enforcer.
    pub(super) async fn admit_enforcer(&self) -> Result<(), RuntimeError> {
        if self.enforcer() != Enforcer::Own {
            return Ok(());
        }
        let engine = self.expected(None).await?.platform();
        if engine.arch.is_empty() || engine.arch == ARCH {
            return Ok(());
        }
        let message = format!(
            "the enforcer of network policies that comes with this server runs on {ARCH}, and the engine is {}; name an \
             image for it with [egress] image",
            engine.arch
        );
        Err(invalid("network", message))
    }

    async fn own_content(&self) -> Result<&Content, RuntimeError> {
        let read = || async {
            let read = tokio::task::spawn_blocking(|| Content::read(&BUNDLES)).await;
            read.map_err(|e| failed("sidecar", format!("cannot read the certificate authorities: {e}")))
        };
        self.own_image.content.get_or_try_init(read).await
    }

    pub(super) async fn own_image_name(&self) -> Result<String, RuntimeError> {
        Ok(self.own_content().await?.name.clone())
    }

    /// The name of our image, which is on the engine when this returns.
    pub(super) async fn make_own_image(&self) -> Result<String, RuntimeError> {
        let content = self.own_content().await?;
        let name = content.name.clone();
        let _alone = self.own_image.making.lock().await;
        if self.look(&name).await?.is_some() {
            return Ok(name);
        }
        let (named, authorities) = (name.clone(), content.authorities.clone());
        let packed = tokio::task::spawn_blocking(move || {
            let packed = archive(&named, authorities.as_deref().unwrap_or_default(), binaries::EGRESS);
            binaries::forget_pages(binaries::EGRESS);
            packed
        });
        let packed = packed.await.map_err(io::Error::other).flatten();
        let packed = packed.map_err(|e| failed("sidecar", format!("cannot pack the enforcer: {e}")))?;
        self.load(packed).await?;
        if self.look(&name).await?.is_none() {
            return Err(failed("sidecar", format!("the engine took the image {name} and does not have it")));
        }
        info!(image = name, "the enforcer of network policies is on the engine");
        Ok(name)
    }

    pub(super) async fn load(&self, packed: Bytes) -> Result<(), RuntimeError> {
        let loaded = self.client.call_patiently(|docker| async move {
            let options = ImportImageOptions { quiet: true, ..ImportImageOptions::default() };
            let mut steps = docker.import_image(options, body_full(packed), None);
            while let Some(step) = steps.next().await {
                step?;
            }
            Ok(())
        });
        loaded.await.map_err(|e| e.during("sidecar"))
    }

    /// Removes our images that are not this server's and that no container uses. Another server makes its own again when it needs it.
    pub(super) async fn sweep_own_images(&self) {
        let Ok(content) = self.own_content().await else { return };
        let filters = HashMap::from([("label".to_owned(), vec![LABEL.to_owned()])]);
        let options = ListImagesOptions { filters: Some(filters), ..ListImagesOptions::default() };
        let listed = self.client.call(|docker| async move { docker.list_images(Some(options)).await }).await;
        let images = match listed {
            Ok(images) => images,
            Err(error) => return warn!(error = %error, "images of enforcers cannot be listed"),
        };
        for tag in
            images.into_iter().flat_map(|image| image.repo_tags).filter(|tag| is_old(tag, &content.name))
        {
            let name = tag.clone();
            let removed = self.client.call(|docker| async move {
                docker.remove_image(&name, None::<RemoveImageOptions>, None::<DockerCredentials>).await
            });
            match removed.await {
                Ok(_) => info!(image = tag, "an enforcer that nothing uses was removed"),
                // In use, as a rule.
                Err(error) => debug!(image = tag, error = %error, "an old enforcer stays"),
            }
        }
    }
}

fn is_old(tag: &str, current: &str) -> bool {
    tag != current && tag.strip_prefix(REPOSITORY).is_some_and(|rest| rest.starts_with(':'))
}

/// The image as engines load it: a description, a configuration and one layer.
pub(super) fn archive(name: &str, authorities: &[u8], program: &[u8]) -> io::Result<Bytes> {
    let layer = layer(authorities, program)?;
    let config = json!({
        "architecture": ARCH,
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": [PROGRAM],
            "WorkingDir": "/",
            "Labels": { LABEL: name.rsplit(':').next().unwrap_or_default() },
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer))] },
        "history": [{ "created": "1970-01-01T00:00:00Z", "created_by": "sandglass" }],
    })
    .to_string();
    let config_name = format!("{}.json", digest(config.as_bytes()));
    let manifest =
        json!([{ "Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"] }]).to_string();
    let mut tar = tar::Builder::new(Vec::with_capacity(layer.len() + (16 << 10)));
    file(&mut tar, "layer.tar", 0o644, &layer)?;
    file(&mut tar, &config_name, 0o644, config.as_bytes())?;
    file(&mut tar, "manifest.json", 0o644, manifest.as_bytes())?;
    tar.into_inner().map(Bytes::from)
}

fn layer(authorities: &[u8], program: &[u8]) -> io::Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::with_capacity(program.len() + authorities.len() + (16 << 10)));
    // Places to mount to; everything else is read only.
    let home = HOME.trim_start_matches('/');
    let rules = ALWAYS.trim_start_matches('/');
    let folders = ["etc", "etc/ssl", "etc/ssl/certs", "opt", home, "proc", "sys", "dev", "run", "tmp"];
    for folder in folders.into_iter().chain(["var", "var/egress", rules]) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o755);
        header.set_size(0);
        tar.append_data(&mut header, folder, io::empty())?;
    }
    for name in ["etc/passwd", "etc/group"] {
        file(&mut tar, name, 0o644, &[])?;
    }
    if !authorities.is_empty() {
        file(&mut tar, BUNDLE.trim_start_matches('/'), 0o644, authorities)?;
    }
    file(&mut tar, PROGRAM.trim_start_matches('/'), 0o755, program)?;
    tar.into_inner()
}

fn file(tar: &mut tar::Builder<Vec<u8>>, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, name, content)
}

fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(packed: &[u8]) -> HashMap<String, (u32, Vec<u8>)> {
        let mut found = HashMap::new();
        for entry in tar::Archive::new(packed).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            let path = entry.path().unwrap().display().to_string();
            found.insert(path, (entry.header().mode().unwrap(), content));
        }
        found
    }

    #[test]
    fn the_archive_is_an_image_of_one_layer() {
        let packed = archive("sandglass-egress:ab", b"authorities", b"program").unwrap();
        let outer = entries(&packed);
        let manifest: serde_json::Value = serde_json::from_slice(&outer["manifest.json"].1).unwrap();
        assert_eq!(manifest[0]["RepoTags"], json!(["sandglass-egress:ab"]));
        let config_name = manifest[0]["Config"].as_str().unwrap();
        let config = &outer[config_name].1;
        assert_eq!(config_name, format!("{}.json", digest(config)));
        let config: serde_json::Value = serde_json::from_slice(config).unwrap();
        assert_eq!(config["config"]["Entrypoint"], json!(["/sandglass-egress"]));
        assert_eq!(config["config"]["Labels"][LABEL], json!("ab"));
        let layer = &outer["layer.tar"].1;
        assert_eq!(config["rootfs"]["diff_ids"], json!([format!("sha256:{}", digest(layer))]));
        let inner = entries(layer);
        assert_eq!(inner["sandglass-egress"], (0o755, b"program".to_vec()));
        assert_eq!(inner["etc/ssl/certs/ca-certificates.crt"].1, b"authorities");
        assert!(inner.contains_key("opt/opensandbox") && inner["etc/passwd"].1.is_empty());
        let without = archive("a:b", b"", b"program").unwrap();
        assert!(
            !entries(&entries(&without)["layer.tar"].1).contains_key("etc/ssl/certs/ca-certificates.crt")
        );
    }

    #[test]
    fn the_name_follows_the_authorities_and_the_same_content_has_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        fs::write(path("a"), "-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap();
        fs::write(path("b"), "-----BEGIN CERTIFICATE-----\nBBBB\n").unwrap();
        fs::write(path("c"), "nothing of the kind").unwrap();
        let name = |bundles: &[&str]| Content::read(bundles).name;
        let first = name(&[&path("none"), &path("c"), &path("a"), &path("b")]);
        assert_eq!(first, name(&[&path("a")]));
        assert_ne!(first, name(&[&path("b")]));
        assert_ne!(first, name(&[]));
        assert!(first.strip_prefix("sandglass-egress:").is_some_and(|hash| hash.len() == 16), "{first}");
    }

    #[test]
    fn only_other_images_of_ours_are_old() {
        let current = "sandglass-egress:1";
        assert!(is_old("sandglass-egress:2", current));
        for kept in [current, "sandglass-egress2:1", "busybox:1", "mine/sandglass-egress:2", "<none>:<none>"]
        {
            assert!(!is_old(kept, current), "{kept}");
        }
    }
}
