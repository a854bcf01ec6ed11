//! Files that every box gets: hosts, hostname, resolv.conf, and a place for the agent.
//!
//! They are written into the upper directory before anything is mounted. Nothing of the image is followed on the way:
//! a link at `/etc` or `/etc/resolv.conf` is simply covered by ours. Inside, they are ordinary files that
//! programs may replace.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};

use crate::spec::{BoxSpec, IdRange};

/// Where the agent appears inside, without the leading slash.
pub const AGENT: &str = "opt/opensandbox/execd";

/// One overlay's layers and upper directory, as far as planting files needs them.
pub struct Ground<'a> {
    pub lowers: Vec<OwnedFd>,
    pub upper: &'a Path,
    pub ids: IdRange,
}

impl<'a> Ground<'a> {
    pub fn open(lowers: &[PathBuf], upper: &'a Path, ids: IdRange) -> io::Result<Self> {
        let open_layer = |path: &PathBuf| {
            open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
                io::Error::new(io::Error::from(error).kind(), format!("{}: {error}", path.display()))
            })
        };
        let lowers = lowers.iter().map(open_layer).collect::<io::Result<_>>()?;
        Ok(Self { lowers, upper, ids })
    }

    /// Gives the upper directory the owner and mode of the image's root.
    pub fn adopt_root(&self) -> io::Result<()> {
        self.dress(self.upper, self.find(Path::new(".")))
    }

    /// Makes a directory and its parents in the upper directory, looking like those of the image where it has them.
    pub fn directory(&self, path: &Path) -> io::Result<PathBuf> {
        let mut inside = PathBuf::new();
        let mut place = self.upper.to_owned();
        for name in path.components() {
            inside.push(name);
            place.push(name);
            match fs::create_dir(&place) {
                Ok(()) => self.dress(&place, self.find(&inside))?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Ok(place)
    }

    pub fn file(&self, path: &Path, content: &str) -> io::Result<()> {
        let parent = self.directory(path.parent().unwrap_or(Path::new("")))?;
        let place = parent.join(path.file_name().unwrap_or_default());
        fs::write(&place, content)?;
        fs::set_permissions(&place, fs::Permissions::from_mode(0o644))?;
        chown(&place, Some(self.ids.base), Some(self.ids.base))
    }

    pub fn link(&self, path: &Path, to: &str) -> io::Result<()> {
        let parent = self.directory(path.parent().unwrap_or(Path::new("")))?;
        let place = parent.join(path.file_name().unwrap_or_default());
        symlink(to, &place)?;
        lchown(&place, Some(self.ids.base), Some(self.ids.base))
    }

    /// The directory that the image has there, if it is one. Hidden ones of deeper layers may be found too,
    /// which only lends us their looks.
    fn find(&self, path: &Path) -> Option<fs::Metadata> {
        self.lowers.iter().find_map(|layer| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let found = openat2(layer, path, flags, Mode::empty(), resolve).ok()?;
            File::from(found).metadata().ok()
        })
    }

    fn dress(&self, place: &Path, like: Option<fs::Metadata>) -> io::Result<()> {
        let (mode, uid, gid) =
            like.map_or((0o755, 0, 0), |like| (like.mode() & 0o7777, like.uid(), like.gid()));
        let shifted = |id: u32| self.ids.base + if id < self.ids.count { id } else { 0 };
        chown(place, Some(shifted(uid)), Some(shifted(gid)))?;
        fs::set_permissions(place, fs::Permissions::from_mode(mode))
    }
}

/// Name and content of the files of `/etc`.
pub fn files(spec: &BoxSpec) -> [(&'static str, String); 3] {
    let host = &spec.hostname;
    let mut hosts = String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    let mut resolv = String::new();
    if let Some(network) = &spec.network {
        // Writing to a string does not fail.
        let _ = writeln!(hosts, "{}\t{host}", network.address);
        for server in &network.dns {
            let _ = writeln!(resolv, "nameserver {server}");
        }
        if !network.search.is_empty() {
            let _ = writeln!(resolv, "search {}", network.search.join(" "));
        }
    } else {
        let _ = writeln!(hosts, "127.0.0.1\t{host}");
    }
    [("hosts", hosts), ("hostname", format!("{host}\n")), ("resolv.conf", resolv)]
}

/// What [`crate::launch::rootfs`] resolves paths of the box with: never outside of it.
pub fn open_inside(root: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    openat2(root, relative, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::IN_ROOT)
}

/// Opens a file or directory of the host that may lie where a box can write, so that a name proves nothing.
///
/// The server hands on resolved paths only. A link met on the way is therefore a swap made since then, which
/// following would turn into a mount of any place of the host. What is opened here must not be named again.
pub fn open_host(path: &Path) -> io::Result<OwnedFd> {
    use std::path::Component;
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "volume source is not a resolved path"));
    }
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Err(rustix::io::Errno::LOOP) => {
            Err(io::Error::other("volume source changed while it was being mounted"))
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_on_the_way_to_a_volume_is_refused() {
        let home = std::env::temp_dir().join(format!("sgt-open-host-{}", std::process::id()));
        fs::create_dir_all(home.join("real/sub")).unwrap();
        let home = home.canonicalize().unwrap();
        symlink("real", home.join("link")).unwrap();
        symlink("/", home.join("real/root")).unwrap();
        assert!(open_host(&home.join("real/sub")).is_ok());
        assert!(open_host(Path::new("/")).is_ok());
        for path in ["link", "link/sub", "real/root", "real/root/etc"] {
            let error = open_host(&home.join(path)).unwrap_err().to_string();
            assert_eq!(error, "volume source changed while it was being mounted", "{path}");
        }
        assert!(open_host(&home.join("real/../real")).is_err());
        assert!(open_host(Path::new("real")).is_err());
        fs::remove_dir_all(&home).unwrap();
    }
}
