//! Volumes of a create: which directories, files, named volumes and buckets a sandbox may see.
//!
//! Owns the check of host paths against the allowed prefixes, in two steps: [`check`] judges what was written and touches
//! nothing; [`HostVolumes::settle`] looks at the host and makes what is missing. The invariant: what is handed on is a resolved
//! path below an allowed prefix, and nothing is created on the host before every volume of the request was found acceptable.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    path::{Component, Path, PathBuf},
};

use sandglass_api::lifecycle::Volume;
use sandglass_runtimes::host_paths::{self, below_any, resolve_existing};
use sandglass_sandbox::spec::{self, ObjectStoreKey, VolumeSource};

use super::{ossfs, rules::RuntimeRules};
use crate::http::error::{ApiError, ApiResult, Code};

/// Places inside the sandbox that mounts must not cover: the kernel's views and the agent.
const TAKEN_TARGETS: &[&str] = &["/proc", "/sys", "/opt/opensandbox"];

/// Volumes as they were written, found acceptable.
#[derive(Debug, Default)]
pub(super) struct Checked {
    pub(super) volumes: Vec<spec::Volume>,
    pub(super) hosts: HostVolumes,
    /// By the name of the volume.
    pub(super) keys: BTreeMap<String, ObjectStoreKey>,
}

/// Checks what can be judged by what was written.
///
/// # Errors
/// 400 `VOLUME::*`.
pub(super) fn check(asked: &[Volume], allowed: &[PathBuf], rules: &RuntimeRules) -> ApiResult<Checked> {
    let mut names = BTreeSet::new();
    if !asked.iter().all(|volume| names.insert(volume.name.as_str())) {
        return Err(ApiError::new(Code::VolumeDuplicateName, "two volumes have the same name"));
    }
    let mut targets = BTreeSet::new();
    let mut checked = Checked::default();
    for volume in asked {
        let target = target(&volume.mount_path)?;
        if !targets.insert(target.clone()) {
            return Err(ApiError::new(Code::VolumeInvalidMountPath, "two volumes have the same mountPath"));
        }
        let source = checked.source(volume, allowed, rules)?;
        let (name, read_only) = (volume.name.clone(), volume.read_only);
        checked.volumes.push(spec::Volume { name, source, target, read_only });
    }
    Ok(checked)
}

impl Checked {
    fn source(
        &mut self,
        volume: &Volume,
        allowed: &[PathBuf],
        rules: &RuntimeRules,
    ) -> ApiResult<VolumeSource> {
        let sub_path = sub_path(volume.sub_path.as_deref())?;
        let owned = sub_path.map(Path::to_path_buf);
        if let Some(host) = &volume.host {
            let base = host_path(&host.path)?;
            let source = Source { full: sub_path.map_or_else(|| base.clone(), |sub| base.join(sub)), base };
            source.check_written(allowed)?;
            let path = source.full.clone();
            self.hosts.0.push((self.volumes.len(), source));
            return Ok(VolumeSource::Host { path });
        }
        if let Some(claim) = volume.pvc.as_ref().filter(|_| rules.capabilities.named_volumes) {
            return Ok(VolumeSource::Named {
                claim: claim.claim_name.clone(),
                sub_path: owned,
                create_if_missing: claim.create_if_not_exists,
                delete_with_sandbox: claim.delete_on_sandbox_termination,
            });
        }
        if let Some(store) = volume.ossfs.as_ref().filter(|_| rules.capabilities.object_store_volumes) {
            let (bucket, key) = ossfs::check(store)?;
            self.keys.insert(volume.name.clone(), key);
            let ossfs::Bucket { bucket, endpoint, version, options } = bucket;
            return Ok(VolumeSource::ObjectStore { bucket, endpoint, version, options, sub_path: owned });
        }
        let message = format!("volumes of this kind are not available on the {} runtime", rules.name);
        Err(ApiError::new(Code::VolumeUnsupportedBackend, message))
    }
}

/// The volumes that lie on the host, by their position among all.
#[derive(Debug, Default)]
pub struct HostVolumes(Vec<(usize, Source)>);

impl HostVolumes {
    /// Whether there is nothing to settle.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Resolves the paths, makes the directories that are missing and writes down where they really are. Blocking.
    ///
    /// # Errors
    /// 400 and 500 `VOLUME::*`.
    pub fn settle(&self, allowed: &[PathBuf], volumes: &mut [spec::Volume]) -> ApiResult<()> {
        for (_, source) in &self.0 {
            source.check_resolved(allowed)?;
        }
        for (position, source) in &self.0 {
            let path = source.settle(allowed)?;
            if let Some(volume) = volumes.get_mut(*position) {
                volume.source = VolumeSource::Host { path };
            }
        }
        Ok(())
    }
}

/// Where the volume appears inside.
fn target(text: &str) -> ApiResult<PathBuf> {
    let refused = |message: &str| Err(ApiError::new(Code::VolumeInvalidMountPath, message));
    let path = Path::new(text);
    if !path.is_absolute()
        || text.contains('\0')
        || path.components().any(|part| part == Component::ParentDir)
    {
        return refused("mountPath must be an absolute path without '..'");
    }
    // Collected anew: doubled and trailing slashes are gone, so equal places are equal paths.
    let path: PathBuf = path.components().collect();
    if path == Path::new("/") || TAKEN_TARGETS.iter().any(|taken| path.starts_with(taken)) {
        return refused("mountPath must not cover the sandbox's root, /proc, /sys or its agent");
    }
    Ok(path)
}

fn sub_path(text: Option<&str>) -> ApiResult<Option<&Path>> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let path = Path::new(text);
    if text.contains('\0')
        || !path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    {
        return Err(ApiError::new(
            Code::VolumeInvalidSubPath,
            "subPath must be relative and must not contain '..'",
        ));
    }
    Ok(Some(path))
}

fn host_path(text: &str) -> ApiResult<PathBuf> {
    let trailing = text.len() > 1 && text.ends_with('/');
    if !text.starts_with('/')
        || text.contains("/..")
        || text.contains("//")
        || trailing
        || text.contains('\0')
    {
        let message = "host.path must be absolute, without '..' and without doubled or trailing slashes";
        return Err(ApiError::new(Code::VolumeInvalidHostPath, message));
    }
    Ok(PathBuf::from(text))
}

fn not_allowed() -> ApiError {
    ApiError::new(
        Code::VolumeHostPathNotAllowed,
        "host.path is not below a directory that this server allows",
    )
}

fn create_failed(error: &std::io::Error) -> ApiError {
    tracing::warn!(%error, "the host directory of a volume could not be made or resolved");
    ApiError::new(
        Code::VolumeHostPathCreateFailed,
        "the host directory of a volume could not be made or resolved",
    )
}

/// A place on the host as it was asked for.
#[derive(Debug)]
struct Source {
    base: PathBuf,
    full: PathBuf,
}

impl Source {
    /// Compares with the prefixes as written.
    fn check_written(&self, allowed: &[PathBuf]) -> ApiResult<()> {
        if allowed.iter().any(|prefix| self.full.starts_with(prefix)) { Ok(()) } else { Err(not_allowed()) }
    }

    /// Compares with the prefixes once more, with symbolic links resolved as far as the path exists.
    fn check_resolved(&self, allowed: &[PathBuf]) -> ApiResult<()> {
        let resolved = resolve_existing(&self.full).map_err(|error| create_failed(&error))?;
        if below_any(&resolved, allowed) { Ok(()) } else { Err(not_allowed()) }
    }

    /// Makes the directory if need be and resolves it; checked again, because it may have changed in between.
    fn settle(&self, allowed: &[PathBuf]) -> ApiResult<PathBuf> {
        match fs::metadata(&self.full) {
            Ok(found) if found.is_dir() || found.is_file() => {}
            Ok(_) => {
                let message = "the host path of a volume is neither a directory nor a file";
                return Err(ApiError::new(Code::VolumeInvalidHostPath, message));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let resolved = resolve_existing(&self.full).map_err(|error| create_failed(&error))?;
                if !below_any(&resolved, allowed) {
                    return Err(not_allowed());
                }
                host_paths::open(&resolved).map_err(|error| create_failed(&error))?;
            }
            Err(error) => return Err(create_failed(&error)),
        }
        let resolved = fs::canonicalize(&self.full).map_err(|error| create_failed(&error))?;
        let base = fs::canonicalize(&self.base).map_err(|error| create_failed(&error))?;
        if !below_any(&resolved, allowed) {
            return Err(not_allowed());
        }
        // A link inside a shared directory is the work of whoever may write there, which may be a sandbox.
        if !resolved.starts_with(&base) {
            return Err(ApiError::new(Code::VolumeInvalidSubPath, "subPath leads out of its volume"));
        }
        Ok(resolved)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use sandglass_api::lifecycle::{HostVolume as WireHost, OssfsVolume, PvcVolume};

    use super::*;
    use crate::http::validate::rules::CreateRules;

    fn run(volumes: &[Volume], allowed: &[PathBuf]) -> ApiResult<Vec<spec::Volume>> {
        let mut checked = super::check(volumes, allowed, &CreateRules::embedded().runtime)?;
        checked.hosts.settle(allowed, &mut checked.volumes)?;
        Ok(checked.volumes)
    }

    fn volume(path: &str, mount: &str, sub: Option<&str>) -> Volume {
        Volume {
            name: "data".to_owned(),
            host: Some(WireHost { path: path.to_owned() }),
            pvc: None,
            ossfs: None,
            mount_path: mount.to_owned(),
            read_only: false,
            sub_path: sub.map(str::to_owned),
        }
    }

    fn code(volumes: &[Volume], allowed: &[PathBuf]) -> &'static str {
        run(volumes, allowed).map_or_else(|error| error.code, |_| "ok")
    }

    #[test]
    fn paths_have_a_grammar() {
        let root = [PathBuf::from("/")];
        for (path, mount, sub, expected) in [
            ("relative", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("C:\\data", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("/a/../b", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("/a//b", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("/a/", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("/tmp", "/", None, "VOLUME::INVALID_MOUNT_PATH"),
            ("/tmp", "/a/../b", None, "VOLUME::INVALID_MOUNT_PATH"),
            ("/tmp", "/proc/x", None, "VOLUME::INVALID_MOUNT_PATH"),
            ("/tmp", "//opt/opensandbox/", None, "VOLUME::INVALID_MOUNT_PATH"),
            ("/tmp", "/m", Some("/abs"), "VOLUME::INVALID_SUB_PATH"),
            ("/tmp", "/m", Some("a/../.."), "VOLUME::INVALID_SUB_PATH"),
            ("/dev/null", "/m", None, "VOLUME::INVALID_HOST_PATH"),
            ("/etc/passwd", "/m", None, "ok"),
            ("/tmp", "/m", None, "ok"),
            ("/tmp", "/m", Some(""), "ok"),
        ] {
            assert_eq!(code(&[volume(path, mount, sub)], &root), expected, "{path} {mount} {sub:?}");
        }
    }

    #[test]
    fn names_and_places_are_unique_and_other_backends_unsupported() {
        let root = [PathBuf::from("/")];
        let first = volume("/tmp", "/m", None);
        let twin = volume("/tmp", "/n", None);
        assert_eq!(code(&[first.clone(), twin.clone()], &root), "VOLUME::DUPLICATE_NAME");
        let same_place = Volume { name: "other".to_owned(), mount_path: "/m/".to_owned(), ..twin.clone() };
        assert_eq!(code(&[first, same_place], &root), "VOLUME::INVALID_MOUNT_PATH");
        let claim = PvcVolume {
            claim_name: "c".to_owned(),
            create_if_not_exists: true,
            delete_on_sandbox_termination: false,
            storage_class: None,
            storage: None,
            access_modes: None,
        };
        let claim = Volume { host: None, pvc: Some(claim), sub_path: Some("a".to_owned()), ..twin };
        assert_eq!(code(std::slice::from_ref(&claim), &root), "VOLUME::UNSUPPORTED_BACKEND");
        let rules = CreateRules::docker(|_| {}).runtime;
        let named = super::check(&[claim], &[], &rules).unwrap();
        let expected = VolumeSource::Named {
            claim: "c".to_owned(),
            sub_path: Some("a".into()),
            create_if_missing: true,
            delete_with_sandbox: false,
        };
        assert_eq!(named.volumes[0].source, expected);
        assert!(named.hosts.is_empty());
    }

    #[test]
    fn the_key_of_a_bucket_is_kept_apart() {
        let store = OssfsVolume {
            bucket: "bucket".to_owned(),
            endpoint: "oss.example".to_owned(),
            version: "1.0".to_owned(),
            options: None,
            access_key_id: Some("id".to_owned()),
            access_key_secret: Some("hunter2".to_owned()),
        };
        let asked = Volume { host: None, ossfs: Some(store), ..volume("/x", "/m", None) };
        let checked = super::check(&[asked], &[], &CreateRules::docker(|_| {}).runtime).unwrap();
        assert_eq!(checked.keys["data"].secret, "hunter2");
        assert!(!format!("{checked:?}").contains("hunter2"));
        let VolumeSource::ObjectStore { version, .. } = checked.volumes[0].source else { panic!("a bucket") };
        assert_eq!(version, 1);
    }

    #[test]
    fn only_what_lies_below_an_allowed_prefix_is_shared() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let text = |name: &str| at(name).to_str().unwrap().to_owned();
        fs::create_dir_all(at("open/inner")).unwrap();
        fs::create_dir(at("secret")).unwrap();
        symlink(at("secret"), at("open/out")).unwrap();
        symlink(at("nowhere"), at("open/dangling")).unwrap();
        symlink(at("open/inner"), at("open/in")).unwrap();
        let allowed = [at("open")];
        for (path, sub, expected) in [
            ("open", None, "ok"),
            ("open/inner", None, "ok"),
            ("open/in", None, "ok"),
            ("open/new/deep", None, "ok"),
            ("open/inner", Some("new/./sub"), "ok"),
            ("secret", None, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            ("opened", None, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            ("open/out", None, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            ("open/out/new", None, "VOLUME::HOST_PATH_NOT_ALLOWED"),
            ("open", Some("out"), "VOLUME::HOST_PATH_NOT_ALLOWED"),
            ("open/dangling", None, "VOLUME::HOST_PATH_CREATE_FAILED"),
        ] {
            assert_eq!(code(&[volume(&text(path), "/m", sub)], &allowed), expected, "{path} {sub:?}");
        }
        assert_eq!(code(&[volume(&text("open"), "/m", None)], &[]), "VOLUME::HOST_PATH_NOT_ALLOWED");
        assert!(!at("secret/new").exists() && !at("nowhere").exists() && at("open/new/deep").is_dir());
        let shared = run(&[volume(&text("open/in"), "/m//n/", None)], &allowed).unwrap();
        let inner = fs::canonicalize(at("open/inner")).unwrap();
        assert_eq!(shared[0].source, spec::VolumeSource::Host { path: inner });
        assert_eq!(shared[0].target, Path::new("/m/n"));
    }

    #[test]
    fn a_link_must_not_lead_from_one_volume_into_another() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("mine")).unwrap();
        fs::create_dir_all(dir.path().join("theirs")).unwrap();
        symlink(dir.path().join("theirs"), dir.path().join("mine/link")).unwrap();
        let mine = dir.path().join("mine").to_str().unwrap().to_owned();
        let allowed = [dir.path().to_path_buf()];
        assert_eq!(code(&[volume(&mine, "/m", Some("link"))], &allowed), "VOLUME::INVALID_SUB_PATH");
    }

    #[test]
    fn nothing_is_made_for_a_request_that_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = dir.path().join("fresh");
        let good = volume(fresh.to_str().unwrap(), "/m", None);
        let bad = Volume { name: "bad".to_owned(), ..volume("/elsewhere", "/n", None) };
        assert_eq!(code(&[good, bad], &[dir.path().to_path_buf()]), "VOLUME::HOST_PATH_NOT_ALLOWED");
        assert!(!fresh.exists());
    }
}
