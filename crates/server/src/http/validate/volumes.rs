//! Volumes that a single host can offer: directories under the allowed prefixes.

use std::{
    collections::HashSet,
    path::{Component, Path, PathBuf},
};

use sandglass_api::lifecycle::Volume;
use sandglass_sandbox::spec::HostVolume;

use crate::http::error::{ApiError, ApiResult, Code};

/// Checks the volumes and says what is to be mounted.
pub(super) fn check(volumes: &[Volume], allowed: &[PathBuf]) -> ApiResult<Vec<HostVolume>> {
    let mut names = HashSet::new();
    for volume in volumes {
        if !names.insert(volume.name.as_str()) {
            return Err(ApiError::new(
                Code::VolumeDuplicateName,
                format!("two volumes are named {:?}", volume.name),
            ));
        }
    }
    volumes.iter().map(|volume| one(volume, allowed)).collect()
}

fn one(volume: &Volume, allowed: &[PathBuf]) -> ApiResult<HostVolume> {
    let refused =
        |code: Code, why: &str| Err(ApiError::new(code, format!("volume {:?}: {why}", volume.name)));
    let target = Path::new(&volume.mount_path);
    if target.components().any(|c| matches!(c, Component::ParentDir)) || target == Path::new("/") {
        return refused(Code::VolumeInvalidMountPath, "mountPath must name a directory below / without '..'");
    }
    let Some(host) = &volume.host else {
        return refused(
            Code::VolumeUnsupportedBackend,
            "only host directories are available on the embedded runtime",
        );
    };
    let sub = Path::new(volume.sub_path.as_deref().unwrap_or_default());
    if sub.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir)) {
        return refused(Code::VolumeInvalidSubPath, "subPath must be relative and without '..'");
    }
    if !clean(&host.path) {
        return refused(
            Code::VolumeInvalidHostPath,
            "the path must be absolute, without '..', '//' or a trailing slash",
        );
    }
    let asked = Path::new(&host.path);
    let inside = |path: &Path| allowed.iter().any(|prefix| path.starts_with(prefix));
    if !inside(asked) {
        return refused(Code::VolumeHostPathNotAllowed, "the path is not under storage.allowed_host_paths");
    }
    let full = asked.join(sub);
    // Resolved again after it exists: a symbolic link must not lead out of what is allowed.
    if std::fs::create_dir_all(&full).is_err() && !full.is_file() {
        return refused(Code::VolumeHostPathCreateFailed, "the directory does not exist and cannot be made");
    }
    let resolved = std::fs::canonicalize(&full);
    let prefixes: Vec<PathBuf> = allowed.iter().filter_map(|p| std::fs::canonicalize(p).ok()).collect();
    match resolved {
        Ok(source) if prefixes.iter().any(|prefix| source.starts_with(prefix)) => {
            Ok(HostVolume { source, target: target.to_path_buf(), read_only: volume.read_only })
        }
        Ok(_) => refused(Code::VolumeHostPathNotAllowed, "the path leads out of storage.allowed_host_paths"),
        Err(_) => refused(Code::VolumeHostPathCreateFailed, "the path cannot be resolved"),
    }
}

fn clean(path: &str) -> bool {
    path.starts_with('/')
        && !path.contains('\0')
        && (path.len() == 1 || !path.ends_with('/'))
        && !path.contains("//")
        && !path.split('/').any(|part| part == "..")
}
