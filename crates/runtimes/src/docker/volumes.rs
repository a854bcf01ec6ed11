//! Volumes of boxes: directories of the host, the engine's named volumes, and mounted buckets (`object_stores.rs`).
//!
//! Every path is resolved and checked again right before it is mounted, and then held on to (`pins.rs`), because a box that writes into a
//! shared directory can put links there. Invariant: a volume made for one box alone carries the box's id, so that it is found even if no container ever named it.

use std::{
    collections::HashMap,
    io,
    path::{Component, Path, PathBuf},
};

use bollard::{
    models::{Mount, MountType, MountVolumeOptions, Volume as EngineVolume, VolumeCreateRequest},
    query_parameters::{ListVolumesOptions, RemoveVolumeOptions},
};
use sandglass_sandbox::{
    SandboxId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
    spec::{Secrets, Spec, Volume, VolumeSource},
};

use super::{
    Made, Shared,
    errors::{Failure, failed, invalid},
    labels::{BY_SERVER, MANAGED_VOLUMES, TENANT},
    object_stores::Bucket,
    pins::Pin,
};
use crate::host_paths;

/// On volumes that go with one box: its id.
const OWNER: &str = "opensandbox.io/sandglass-volume-of";
/// Engines mount a part of a volume by themselves, and safely, from this version on.
const SUB_PATH_VERSION: (usize, usize) = (1, 45);

impl Shared {
    /// Refuses volumes that cannot be mounted. Changes nothing.
    pub(super) async fn admit_volumes(&self, spec: &Spec) -> Result<(), RuntimeError> {
        for volume in &spec.volumes {
            match &volume.source {
                VolumeSource::Host { path } => {
                    resolve(path, &self.config.allowed_host_paths)?;
                }
                VolumeSource::Named { claim, sub_path, create_if_missing, .. } => {
                    let found = self.find_volume(claim).await?;
                    if let Some(found) = &found {
                        check_owner(claim, found, spec.tenant.as_deref())?;
                    }
                    match found {
                        None if !create_if_missing => return Err(missing(claim)),
                        Some(Found::Readable(found)) if sub_path.is_some() => check_driver(claim, &found)?,
                        Some(Found::Foreign) if sub_path.is_some() => return Err(other_driver(claim)),
                        None | Some(_) => {}
                    }
                }
                VolumeSource::ObjectStore { .. } => self.check_object_store_root()?,
            }
        }
        Ok(())
    }

    /// Makes and mounts the volumes of a box. What must be undone with it is noted in `made` as soon as it exists.
    pub(super) async fn mount_volumes(
        &self,
        id: SandboxId,
        spec: &Spec,
        secrets: &Secrets,
        made: &mut Made,
    ) -> Result<(Vec<Mount>, Vec<Pin>), RuntimeError> {
        let mut mounts = Vec::with_capacity(spec.volumes.len());
        let mut pins = Vec::new();
        for volume in &spec.volumes {
            mounts.push(match &volume.source {
                VolumeSource::Host { path } => bind(volume, &self.host_path(path, &mut pins)?),
                VolumeSource::Named { .. } => {
                    self.mount_named(id, volume, spec.tenant.as_deref(), made, &mut pins).await?
                }
                VolumeSource::ObjectStore { bucket, endpoint, version, options, sub_path } => {
                    let key = secrets.object_stores.get(&volume.name).ok_or_else(|| {
                        failed("ossfs", format!("the key of volume {} is not known any more", volume.name))
                    })?;
                    let bucket = Bucket {
                        bucket,
                        endpoint,
                        version: *version,
                        options,
                        sub_path: sub_path.as_deref(),
                        key,
                    };
                    let at = self.mount_object_store(id, &bucket).await?;
                    made.object_stores.push(at.clone());
                    bind(volume, &at)
                }
            });
        }
        Ok((mounts, pins))
    }

    /// What to mount for a path of the host. Where it cannot be pinned, only what no sandbox can replace is mounted: a directory that
    /// the operator named.
    fn host_path(&self, path: &Path, pins: &mut Vec<Pin>) -> Result<PathBuf, RuntimeError> {
        let prefixes = &self.config.allowed_host_paths;
        let resolved = resolve(path, prefixes)?;
        if self.pins.are_seen_by(&self.config.engine) {
            match self.pins.pin(&resolved) {
                Ok(pin) => {
                    let at = pin.path().to_owned();
                    pins.push(pin);
                    return Ok(at);
                }
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
                Err(e) if is_link(&e) => return Err(refused(path)),
                Err(e) => return Err(failed("volume-host", format!("cannot open {}: {e}", path.display()))),
            }
        }
        if prefixes.iter().any(|prefix| prefix == path) {
            return Ok(path.to_owned());
        }
        let message = format!(
            "host path {} cannot be held on to while the engine mounts it (that needs root, and an engine on the same machine); only \
             the directories that [storage] allowed_host_paths names can be mounted",
            path.display()
        );
        Err(invalid("volume-host", message))
    }

    async fn mount_named(
        &self,
        id: SandboxId,
        volume: &Volume,
        tenant: Option<&str>,
        made: &mut Made,
        pins: &mut Vec<Pin>,
    ) -> Result<Mount, RuntimeError> {
        let VolumeSource::Named { claim, sub_path, create_if_missing, delete_with_sandbox } = &volume.source
        else {
            return Err(failed("volume", "not a named volume"));
        };
        let found = match self.find_volume(claim).await? {
            Some(found) => {
                check_owner(claim, &found, tenant)?;
                // An earlier attempt at the same box made it and died.
                if *delete_with_sandbox && found.is_of(id) {
                    made.volumes.push(claim.clone());
                }
                found
            }
            None if !create_if_missing => return Err(missing(claim)),
            None => {
                let owner = delete_with_sandbox.then_some(id);
                let created = Found::Readable(Box::new(self.create_volume(claim, owner, tenant).await?));
                // Another one may have been quicker, and the engine answers with theirs.
                check_owner(claim, &created, tenant)?;
                if *delete_with_sandbox {
                    made.volumes.push(claim.clone());
                }
                created
            }
        };
        let whole = Mount {
            typ: Some(MountType::VOLUME),
            source: Some(claim.clone()),
            target: Some(volume.target.to_string_lossy().into_owned()),
            read_only: Some(volume.read_only),
            ..Mount::default()
        };
        let Some(sub_path) = sub_path else { return Ok(whole) };
        let Found::Readable(found) = found else { return Err(other_driver(claim)) };
        check_driver(claim, &found)?;
        let root = Path::new(&found.mountpoint);
        if self.pins.are_seen_by(&self.config.engine) && root.is_dir() {
            let inside = below(root, sub_path)?;
            match self.pins.pin(&inside) {
                Ok(pin) => {
                    let mount = bind(volume, pin.path());
                    pins.push(pin);
                    return Ok(mount);
                }
                // Without the right to mount, the engine has to do it.
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
                Err(_) => return Err(leads_out(sub_path)),
            }
        }
        let engine = self.client.engine().await.map_err(|e| e.during("volume"))?;
        let version = engine.client_version();
        if (version.major_version, version.minor_version) < SUB_PATH_VERSION {
            let message = format!(
                "the engine is too old to mount a part of volume {claim}, and its files cannot be seen from here"
            );
            return Err(invalid("volume-driver", message));
        }
        let options = MountVolumeOptions {
            subpath: Some(sub_path.to_string_lossy().into_owned()),
            ..MountVolumeOptions::default()
        };
        Ok(Mount { volume_options: Some(options), ..whole })
    }

    async fn find_volume(&self, name: &str) -> Result<Option<Found>, RuntimeError> {
        let safe = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(safe) {
            return Err(invalid("volume-missing", format!("{name:?} is not the name of a volume")));
        }
        match self.client.call(|docker| async move { docker.inspect_volume(name).await }).await {
            Ok(volume) => Ok(Some(Found::Readable(Box::new(volume)))),
            Err(e) if e.is_absent() => Ok(None),
            // Volume plugins add what no schema knows; the volume exists all the same.
            Err(Failure::Unreadable(_)) => Ok(Some(Found::Foreign)),
            Err(e) => Err(e.during("volume-inspect")),
        }
    }

    /// Makes a named volume; one that exists is success.
    pub(super) async fn create_volume(
        &self,
        name: &str,
        owner: Option<SandboxId>,
        tenant: Option<&str>,
    ) -> Result<EngineVolume, RuntimeError> {
        let mut labels = HashMap::from([(MANAGED_VOLUMES.to_owned(), BY_SERVER.to_owned())]);
        labels.extend(owner.map(|id| (OWNER.to_owned(), id.to_string())));
        labels.extend(tenant.map(|tenant| (TENANT.to_owned(), tenant.to_owned())));
        let request = VolumeCreateRequest {
            name: Some(name.to_owned()),
            labels: Some(labels),
            ..VolumeCreateRequest::default()
        };
        let created = self.client.call(|docker| async move { docker.create_volume(request).await }).await;
        created.map_err(|e| e.during("volume"))
    }

    /// Removes the volumes that go with a box: those named here, if a server made them, and those that carry its id.
    pub(super) async fn remove_volumes(&self, id: SandboxId, named: &[String]) -> Result<(), RuntimeError> {
        let filters = HashMap::from([("label".to_owned(), vec![format!("{OWNER}={id}")])]);
        let options = ListVolumesOptions { filters: Some(filters) };
        let listed = self.client.call(|docker| async move { docker.list_volumes(Some(options)).await }).await;
        let owned = listed.map_err(|e| e.during("volume"))?.volumes.unwrap_or_default();
        let mut names: Vec<String> = owned.into_iter().map(|volume| volume.name).collect();
        for name in named {
            if names.contains(name) {
                continue;
            }
            // A label may name anything; only what a server made is removed.
            if let Some(Found::Readable(found)) = self.find_volume(name).await?
                && found.labels.get(MANAGED_VOLUMES).is_some_and(|by| by == BY_SERVER)
            {
                names.push(name.clone());
            }
        }
        let mut first_failure = None;
        for name in &names {
            let options = RemoveVolumeOptions { force: false };
            let removed =
                self.client.call(|d| async move { d.remove_volume(name, Some(options)).await }).await;
            match removed {
                Ok(()) => {}
                Err(e) if e.is_absent() => {}
                // Another box uses it too; the last one to go takes it along.
                Err(Failure::Refused { status: 409, .. }) => {
                    tracing::debug!(sandbox = %id, volume = %name, "a volume is still in use");
                }
                Err(e) => first_failure = first_failure.or(Some(e)),
            }
        }
        first_failure.map_or(Ok(()), |e| Err(e.during("volume")))
    }
}

/// A named volume that exists.
enum Found {
    Readable(Box<EngineVolume>),
    /// Described in a way that only its driver understands.
    Foreign,
}

impl Found {
    /// Whether it was made for this box alone.
    fn is_of(&self, id: SandboxId) -> bool {
        let Self::Readable(volume) = self else { return false };
        volume.labels.get(OWNER).is_some_and(|owner| *owner == id.to_string())
    }
}

fn missing(claim: &str) -> RuntimeError {
    invalid("volume-missing", format!("there is no volume {claim}, and it is not to be created"))
}

/// A tenant mounts what carries its own label. Names are shared by everybody on the engine, and there are volumes that nobody is
/// to mount, such as those between a sandbox and its sidecar.
fn check_owner(claim: &str, found: &Found, tenant: Option<&str>) -> Result<(), RuntimeError> {
    let Some(tenant) = tenant else { return Ok(()) };
    match found {
        Found::Readable(volume) if volume.labels.get(TENANT).is_some_and(|owner| owner == tenant) => Ok(()),
        _ => Err(invalid("volume-missing", format!("there is no volume {claim} for this tenant"))),
    }
}

/// Whether opening failed because a link had come into the path.
fn is_link(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR | libc::EXDEV))
}

fn leads_out(sub_path: &Path) -> RuntimeError {
    invalid("volume-sub-path", format!("{} leads out of the volume", sub_path.display()))
}

fn other_driver(claim: &str) -> RuntimeError {
    invalid(
        "volume-driver",
        format!("volume {claim} is not a plain directory, so no part of it can be mounted"),
    )
}

/// A part of a volume is mounted as a directory, which only plain local volumes are before somebody uses them.
fn check_driver(claim: &str, volume: &EngineVolume) -> Result<(), RuntimeError> {
    let elsewhere = volume.options.contains_key("device") || volume.options.contains_key("type");
    if volume.driver != "local" || volume.mountpoint.is_empty() || elsewhere {
        return Err(other_driver(claim));
    }
    Ok(())
}

fn bind(volume: &Volume, source: &Path) -> Mount {
    Mount {
        typ: Some(MountType::BIND),
        source: Some(source.to_string_lossy().into_owned()),
        target: Some(volume.target.to_string_lossy().into_owned()),
        read_only: Some(volume.read_only),
        ..Mount::default()
    }
}

fn refused(path: &Path) -> RuntimeError {
    let message = format!("host path {} is not below any of [storage] allowed_host_paths", path.display());
    invalid("volume-host", message)
}

/// Checks the words of a path.
fn allowed(path: &Path, prefixes: &[PathBuf]) -> Result<(), RuntimeError> {
    let plain = path.is_absolute()
        && path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if plain && prefixes.iter().any(|prefix| path.starts_with(prefix)) { Ok(()) } else { Err(refused(path)) }
}

/// Checks where a path leads: itself when it exists, else its nearest ancestor that does. Returns the path with links followed.
fn resolve(path: &Path, prefixes: &[PathBuf]) -> Result<PathBuf, RuntimeError> {
    allowed(path, prefixes)?;
    let resolved = host_paths::resolve_existing(path).map_err(|e| match e.kind() {
        // A link that leads nowhere.
        io::ErrorKind::NotFound => refused(path),
        _ => failed("volume-host", format!("cannot look at {}: {e}", path.display())),
    })?;
    if host_paths::below_any(&resolved, prefixes) { Ok(resolved) } else { Err(refused(path)) }
}

/// Where the directory `sub_path` of a volume is, or will be. Links may not lead out of it.
fn below(root: &Path, sub_path: &Path) -> Result<PathBuf, RuntimeError> {
    let io = |e: io::Error| {
        let message = format!("cannot use {} of the volume: {e}", sub_path.display());
        RuntimeError::new(RuntimeErrorKind::Failed, "volume", message)
    };
    let root = root.canonicalize().map_err(io)?;
    let wanted = root.join(sub_path);
    let inside = std::slice::from_ref(&root);
    resolve(&wanted, inside).map_err(|_| leads_out(sub_path))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn host_paths_are_judged_by_where_they_lead() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let shared = root.join("shared");
        fs::create_dir_all(shared.join("inner")).unwrap();
        fs::create_dir_all(root.join("secret")).unwrap();
        fs::write(shared.join("file"), "").unwrap();
        symlink(root.join("secret"), shared.join("out")).unwrap();
        symlink(root.join("nowhere"), shared.join("dangling")).unwrap();
        symlink(shared.join("inner"), shared.join("in")).unwrap();
        symlink(&shared, root.join("alias")).unwrap();
        let prefixes = [shared.clone()];

        for (path, leads_to) in [
            ("", "shared"),
            ("inner", "shared/inner"),
            ("file", "shared/file"),
            ("in", "shared/inner"),
            ("new/deep", "shared/new/deep"),
            ("in/new", "shared/inner/new"),
        ] {
            assert_eq!(resolve(&shared.join(path), &prefixes).unwrap(), root.join(leads_to), "{path}");
        }
        for path in ["out", "out/new", "dangling", "dangling/x", "../secret", "inner/../../secret"] {
            let refused = resolve(&shared.join(path), &prefixes).unwrap_err();
            assert_eq!(
                (refused.kind, refused.phase.as_str()),
                (RuntimeErrorKind::Invalid, "volume-host"),
                "{path}"
            );
        }
        assert!(resolve(&root.join("sharedness"), &prefixes).is_err());
        assert!(resolve(&shared, &[]).is_err());
        assert!(resolve(Path::new("relative"), &prefixes).is_err());
        assert_eq!(resolve(&root.join("alias/inner"), &[root.join("alias")]).unwrap(), shared.join("inner"));
        assert_eq!(resolve(&root.join("later/x"), &[root.join("later")]).unwrap(), root.join("later/x"));
    }

    #[test]
    fn a_part_of_a_volume_stays_inside_it() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("volume");
        fs::create_dir_all(&volume).unwrap();
        symlink("/etc", volume.join("out")).unwrap();
        let made = below(&volume, Path::new("a/b")).unwrap();
        assert!(made.ends_with("volume/a/b"));
        for bad in ["out", "../x", "/etc"] {
            assert!(below(&volume, Path::new(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_tenant_mounts_its_own_volumes_only() {
        let marked = |owner: Option<&str>| {
            let labels = owner.map(|owner| (TENANT.to_owned(), owner.to_owned())).into_iter().collect();
            Found::Readable(Box::new(EngineVolume { labels, ..EngineVolume::default() }))
        };
        assert!(check_owner("v", &marked(Some("a")), Some("a")).is_ok());
        for (owner, tenant) in [(None, "a"), (Some("b"), "a"), (Some(""), "a"), (Some("A"), "a")] {
            let refused = check_owner("v", &marked(owner), Some(tenant)).unwrap_err();
            assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Invalid, "volume-missing"));
        }
        assert!(check_owner("v", &Found::Foreign, Some("a")).is_err());
        for found in [marked(None), marked(Some("a")), Found::Foreign] {
            assert!(check_owner("v", &found, None).is_ok(), "without tenants everything is everybody's");
        }
    }

    #[test]
    fn only_plain_local_volumes_have_parts() {
        let volume = |driver: &str, mountpoint: &str, option: Option<&str>| EngineVolume {
            driver: driver.into(),
            mountpoint: mountpoint.into(),
            options: option.map(|name| (name.to_owned(), "x".to_owned())).into_iter().collect(),
            ..EngineVolume::default()
        };
        assert!(check_driver("v", &volume("local", "/m", None)).is_ok());
        for other in
            [volume("nfs", "/m", None), volume("local", "", None), volume("local", "/m", Some("device"))]
        {
            let refused = check_driver("v", &other).unwrap_err();
            assert_eq!(refused.phase, "volume-driver");
        }
    }
}
