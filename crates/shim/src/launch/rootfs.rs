//! The box's root file system, as far as the shim builds it: overlays, grafts, volumes, the agent.
//!
//! All of it is mounted in the shim's namespace. The box's own namespace is a copy made with less privilege, in
//! which the kernel locks these mounts: not even a box that got CAP_SYS_ADMIN inside could take them apart.
//! Invariant: a path inside the box is resolved with the box's root as root (`openat2`), never by name on the host.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, chownat, fstat, mkdirat};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

use super::etc::{self, AGENT, Ground, open_host, open_inside};
use super::overlay::{self, Overlay};
use crate::directory::BoxDir;
use crate::egress;
use crate::kernel::mounts::{NODEV, NOEXEC, NOSUID, RDONLY, Reach, attach, set_attributes};
use crate::remains::Remains;
use crate::spec::{Bind, BoxSpec, IdRange};

/// Where the box finds the certificate of the authority that intercepts its connections: a link into a directory that
/// the enforcer writes.
const AUTHORITY: &str = "opt/opensandbox/mitmproxy-ca-cert.pem";
const AUTHORITY_TARGET: &str = "authority/mitmproxy-ca-cert.pem";
const AUTHORITY_DIRECTORY: &str = "/opt/opensandbox/authority";

/// Mount points that images without a system lack.
const NEEDED: [&str; 4] = ["proc", "sys", "dev", "tmp"];

/// Builds everything at `<dir>/root`.
pub fn build(dir: &BoxDir, spec: &BoxSpec, userns: BorrowedFd<'_>, remains: &mut Remains) -> io::Result<()> {
    if spec.root.lowers.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the root file system has no layer"));
    }
    let uppers = Uppers::make(dir, spec)?;
    plant(spec, &uppers)?;
    // Recorded first: from here on there is something to unmount.
    remains.mounted_root = Some(dir.root());
    let layers = spec.root.lowers.iter().chain(spec.root.grafts.iter().map(|graft| &graft.lower));
    let layers: Vec<&Path> = layers.map(PathBuf::as_path).collect();
    let shown = overlay::map_layers(&layers, &dir.root(), userns)?;
    let (lowers, grafted) = shown.split_at(spec.root.lowers.len());
    let (upper, work) = uppers.root();
    let merged = overlay::create(&Overlay { lowers, upper, work })?;
    let overlays: Vec<OwnedFd> = grafted
        .iter()
        .zip(uppers.grafts())
        .map(|(lower, (upper, work))| {
            overlay::create(&Overlay { lowers: std::slice::from_ref(lower), upper, work })
        })
        .collect::<io::Result<_>>()?;
    // From here on the layers are covered.
    attach(merged.as_fd(), CWD, &dir.root())?;
    for (graft, mount) in spec.root.grafts.iter().zip(overlays) {
        let target = mount_point(&merged, &graft.target, FileType::Directory, spec.ids)?;
        attach(mount.as_fd(), target.as_fd(), Path::new(""))?;
    }
    for name in NEEDED {
        needed_directory(&merged, name, spec.ids)?;
    }
    mount_agent(&merged, &spec.process.agent)?;
    if shows_authority(spec) {
        mount_authority(&merged, dir, spec.ids)?;
    }
    for volume in &spec.root.volumes {
        mount_volume(&merged, volume, userns, spec.ids).map_err(|error| {
            io::Error::new(error.kind(), format!("volume {}: {error}", volume.target.display()))
        })?;
    }
    if spec.root.read_only {
        set_attributes(merged.as_fd(), RDONLY, None, Reach::This)?;
    }
    Ok(())
}

/// Upper and work directory of every overlay, the root's first.
struct Uppers {
    pairs: Vec<(PathBuf, PathBuf)>,
}

impl Uppers {
    fn make(dir: &BoxDir, spec: &BoxSpec) -> io::Result<Self> {
        make_directory(&dir.root())?;
        let mut pairs = vec![(dir.join("upper"), dir.join("work"))];
        for index in 0..spec.root.grafts.len() {
            pairs.push((dir.join(&format!("upper-{index}")), dir.join(&format!("work-{index}"))));
        }
        for (upper, work) in &pairs {
            make_directory(upper)?;
            make_directory(work)?;
            chown(work, Some(spec.ids.base), Some(spec.ids.base))?;
        }
        Ok(Self { pairs })
    }

    fn root(&self) -> (&Path, &Path) {
        let (upper, work) = &self.pairs[0];
        (upper, work)
    }

    fn grafts(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.pairs[1..].iter().map(|(upper, work)| (upper.as_path(), work.as_path()))
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

/// Writes our files where they will be seen: below a graft, or below the root.
fn plant(spec: &BoxSpec, uppers: &Uppers) -> io::Result<()> {
    let root = Ground::open(&spec.root.lowers, uppers.root().0, spec.ids)?;
    root.adopt_root()?;
    let mut grounds = vec![(Path::new(""), root)];
    for (graft, (upper, _)) in spec.root.grafts.iter().zip(uppers.grafts()) {
        let ground = Ground::open(std::slice::from_ref(&graft.lower), upper, spec.ids)?;
        ground.adopt_root()?;
        grounds.push((graft.target.strip_prefix("/").unwrap_or(&graft.target), ground));
    }
    let put = |path: &Path, content: &str| {
        deepest(&grounds, path).map_or(Ok(()), |(ground, path)| ground.file(path, content))
    };
    for (name, content) in etc::files(spec) {
        put(&Path::new("etc").join(name), &content)?;
    }
    put(Path::new(AGENT), "")?;
    if shows_authority(spec) {
        let deepest = deepest(&grounds, Path::new(AUTHORITY));
        deepest.map_or(Ok(()), |(ground, path)| ground.link(path, AUTHORITY_TARGET))?;
    }
    Ok(())
}

/// The ground in which `path` will be seen, and its path there.
fn deepest<'a, 'p>(grounds: &'a [(&Path, Ground<'a>)], path: &'p Path) -> Option<(&'a Ground<'a>, &'p Path)> {
    let below = grounds.iter().filter(|(at, _)| path.starts_with(at));
    let (at, ground) = below.max_by_key(|(at, _)| at.components().count())?;
    Some((ground, path.strip_prefix(at).unwrap_or(path)))
}

fn shows_authority(spec: &BoxSpec) -> bool {
    spec.egress.as_ref().is_some_and(|egress| egress.authority)
}

/// A directory, so that a certificate that replaces this one is seen, too.
fn mount_authority(merged: &OwnedFd, dir: &BoxDir, ids: IdRange) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mount = open_tree(CWD, egress::authority(dir), flags)?;
    set_attributes(mount.as_fd(), RDONLY | NODEV | NOSUID | NOEXEC, None, Reach::This)?;
    let target = mount_point(merged, Path::new(AUTHORITY_DIRECTORY), FileType::Directory, ids)?;
    attach(mount.as_fd(), target.as_fd(), Path::new(""))
}

fn needed_directory(merged: &OwnedFd, name: &str, ids: IdRange) -> io::Result<()> {
    let mode = if name == "tmp" { 0o1777 } else { 0o755 };
    match rustix::fs::statat(merged, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => Ok(()),
        // A link at /tmp is the image's business; at a mount point it would lead us astray.
        Ok(_) if name == "tmp" => Ok(()),
        Ok(_) => Err(io::Error::other(format!("/{name} of the image is not a directory"))),
        Err(Errno::NOENT) => {
            mkdirat(merged, name, Mode::from_raw_mode(0o755))?;
            chownat(merged, name, Some(owner(ids).0), Some(owner(ids).1), AtFlags::SYMLINK_NOFOLLOW)?;
            // Not by mkdir, whose mode the umask cuts.
            Ok(rustix::fs::chmodat(merged, name, Mode::from_raw_mode(mode), AtFlags::empty())?)
        }
        Err(error) => Err(error.into()),
    }
}

fn mount_agent(merged: &OwnedFd, agent: &Path) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let named = |error: Errno| {
        io::Error::new(io::Error::from(error).kind(), format!("agent {}: {error}", agent.display()))
    };
    let mount = open_tree(CWD, agent, flags).map_err(named)?;
    set_attributes(mount.as_fd(), RDONLY | NODEV | NOSUID, None, Reach::This)?;
    let target = open_inside(merged, Path::new(AGENT), OFlags::PATH | OFlags::NOFOLLOW)?;
    attach(mount.as_fd(), target.as_fd(), Path::new(""))
}

/// With the box's ids: what the host's root owns is the box's root's, and the other way round.
fn mount_volume(merged: &OwnedFd, volume: &Bind, userns: BorrowedFd<'_>, ids: IdRange) -> io::Result<()> {
    let source = open_host(&volume.source)?;
    let kind = match FileType::from_raw_mode(fstat(&source)?.st_mode) {
        FileType::Directory => FileType::Directory,
        _ => FileType::RegularFile,
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let mount = open_tree(&source, "", flags)?;
    let access = if volume.read_only { RDONLY } else { 0 };
    set_attributes(mount.as_fd(), NODEV | NOSUID | access, Some(userns), Reach::Subtree).map_err(
        |error| {
            let source = volume.source.display();
            io::Error::new(
                error.kind(),
                format!("{source}: the file system does not support id-mapped mounts: {error}"),
            )
        },
    )?;
    let target = mount_point(merged, &volume.target, kind, ids)?;
    attach(mount.as_fd(), target.as_fd(), Path::new(""))
}

/// The place `path` inside the box, made if it is not there.
fn mount_point(merged: &OwnedFd, path: &Path, kind: FileType, ids: IdRange) -> io::Result<OwnedFd> {
    let names: Vec<_> = path.strip_prefix("/").unwrap_or(path).components().collect();
    let mut inside = PathBuf::new();
    let mut parent = open_inside(merged, &inside, OFlags::PATH)?;
    for (index, name) in names.iter().enumerate() {
        inside.push(name);
        let place = match open_inside(merged, &inside, OFlags::PATH) {
            Err(Errno::NOENT) => {
                let last = index + 1 == names.len();
                make(&parent, name.as_os_str(), if last { kind } else { FileType::Directory }, ids)?;
                open_inside(merged, &inside, OFlags::PATH)?
            }
            other => other?,
        };
        parent = place;
    }
    Ok(parent)
}

fn make(parent: &OwnedFd, name: &std::ffi::OsStr, kind: FileType, ids: IdRange) -> io::Result<()> {
    if kind == FileType::Directory {
        mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
    } else {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o644))?;
    }
    let (uid, gid) = owner(ids);
    Ok(chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn owner(ids: IdRange) -> (Uid, Gid) {
    (Uid::from_raw(ids.base), Gid::from_raw(ids.base))
}
