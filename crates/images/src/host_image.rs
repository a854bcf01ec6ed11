//! The built-in image `host`: the host's programs with none of its data.
//!
//! The host's `/usr` is grafted, never copied; everything else is a small skeleton layer made from an allow-list.
//! Invariant: a file gets in only when it is listed here *and* everyone on the host may read it. Nothing of /home, /root
//! or anything secret is ever listed.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::ImageError;
use crate::image::{Image, ImageDigest, Platform};
use crate::layers::LayerArchive;
use crate::lock::{FileLock, Workspace};
use crate::reference::Reference;
use crate::store::{ImageStore, Record};

/// The name of the built-in image.
pub(crate) const HOST_IMAGE: &str = "host";

/// Part of the fingerprint, to be raised when the skeleton is made in another way.
const RECIPE: u32 = 1;
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Larger files are no configuration.
const MAX_FILE: u64 = 8 << 20;
const MAX_DEPTH: usize = 8;
const FIRST_USER_ID: u32 = 1000;
const NOBODY: u32 = 65534;

/// Top-level names that are links into /usr on a merged host, and directories of their own on another.
const USR_NAMES: &[&str] = &["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

const DIRECTORIES: &[(&str, u32)] = &[
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/tmp", 0o1777),
    ("workspace", 0o755),
];

/// What is copied from /etc, directories with all that is in them.
const ETC: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "services",
    "ssl/certs",
    "terminfo",
    "timezone",
];

/// What `host.json` remembers.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    fingerprint: String,
    image: ImageDigest,
}

/// Something that goes into the skeleton.
struct Item {
    /// Path inside, without a leading slash.
    target: PathBuf,
    content: Content,
    mtime: i64,
}

enum Content {
    Directory(u32),
    Link(PathBuf),
    Copy(PathBuf),
    Text(Vec<u8>),
}

impl ImageStore {
    /// Returns the built-in `host` image, making it anew when the host's files have changed; blocks the thread.
    pub fn ensure_host_image(&self) -> Result<Image, ImageError> {
        self.host_image_of(Path::new("/"))
    }

    pub(crate) fn host_image_of(&self, root: &Path) -> Result<Image, ImageError> {
        let items = collect(root).map_err(|e| ImageError::io("reading the host's configuration", e))?;
        let fingerprint =
            fingerprint(root, &items).map_err(|e| ImageError::io("reading the host's configuration", e))?;
        let memory = self.inner.dir.join("host.json");
        if let Some(image) = self.remembered(&memory, &fingerprint)? {
            return Ok(image);
        }
        let _lock = FileLock::acquire_blocking(&self.inner.lock_path("host"))?;
        if let Some(image) = self.remembered(&memory, &fingerprint)? {
            return Ok(image);
        }
        let archive = skeleton(&items).map_err(|e| ImageError::io("making the host image", e))?;
        let archive = LayerArchive { length: archive.len() as u64, data: Box::new(io::Cursor::new(archive)) };
        let record = |diff_id: &ImageDigest| {
            let platform = Platform::default();
            let config = serde_json::json!({
                "architecture": platform.arch, "os": platform.os,
                "config": { "Env": [PATH], "Cmd": ["bash"], "WorkingDir": "/" },
                "rootfs": { "type": "layers", "diff_ids": [diff_id] },
            });
            let mut record = Record::new(config.to_string().as_bytes())?;
            record.grafts = grafts(root);
            Ok(record)
        };
        let workspace = Workspace::create(&self.inner.tmp())?;
        let name: Reference = HOST_IMAGE.parse()?;
        let image = self.install_single_layer(archive, record, &[name], &workspace, &|_| {})?;
        self.inner.write_json(&memory, &Remembered { fingerprint, image: image.id.clone() })?;
        Ok(image)
    }

    /// Returns the image made last, if the host is still the same and nobody has removed or renamed it.
    fn remembered(&self, memory: &Path, fingerprint: &str) -> Result<Option<Image>, ImageError> {
        let Ok(text) = fs::read(memory) else {
            return Ok(None);
        };
        match serde_json::from_slice::<Remembered>(&text) {
            Ok(known) if known.fingerprint == fingerprint => {
                Ok(self.resolve(HOST_IMAGE)?.filter(|image| image.id == known.image))
            }
            _ => Ok(None),
        }
    }
}

/// Host directories that appear in the image as they are.
fn grafts(root: &Path) -> Vec<(PathBuf, PathBuf)> {
    let own = USR_NAMES.iter().filter(|name| is_directory(&root.join(name)));
    ["usr"].iter().chain(own).map(|name| (root.join(name), Path::new("/").join(name))).collect()
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn collect(root: &Path) -> io::Result<Vec<Item>> {
    let mut items: Vec<Item> = DIRECTORIES
        .iter()
        .map(|(path, mode)| Item { target: path.into(), content: Content::Directory(*mode), mtime: 0 })
        .collect();
    for name in USR_NAMES {
        let path = root.join(name);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_symlink() => {
                items.push(Item {
                    target: name.into(),
                    content: Content::Link(fs::read_link(&path)?),
                    mtime: 0,
                });
            }
            Ok(meta) if meta.is_dir() => {
                items.push(Item { target: name.into(), content: Content::Directory(0o755), mtime: 0 });
            }
            _ => {}
        }
    }
    let accounts = [
        ("etc/passwd", passwd(&fs::read_to_string(root.join("etc/passwd")).unwrap_or_default())),
        ("etc/group", group(&fs::read_to_string(root.join("etc/group")).unwrap_or_default())),
    ];
    for (path, text) in accounts {
        items.push(Item { target: path.into(), content: Content::Text(text.into_bytes()), mtime: 0 });
    }
    let etc = root.join("etc");
    let mut listed: Vec<String> = ETC.iter().map(|name| (*name).to_owned()).collect();
    for entry in fs::read_dir(&etc)? {
        let name = entry?.file_name();
        let Some(name) = name.to_str() else { continue };
        if name.strip_prefix("python3").is_some_and(|v| v.chars().all(|c| c == '.' || c.is_ascii_digit())) {
            listed.push(name.to_owned());
        }
    }
    listed.sort();
    for name in listed {
        if let Some((parent, _)) = name.rsplit_once('/') {
            let target = Path::new("etc").join(parent);
            if !items.iter().any(|item| item.target == target) {
                items.push(Item { target, content: Content::Directory(0o755), mtime: 0 });
            }
        }
        add(&etc.join(&name), &Path::new("etc").join(&name), 0, &mut items)?;
    }
    Ok(items)
}

/// Adds a listed path and what is below it, leaving out whatever not everyone may read.
fn add(path: &Path, target: &Path, depth: usize, items: &mut Vec<Item>) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let (target, mtime) = (target.to_owned(), meta.mtime());
    let is_key = path.extension().is_some_and(|extension| extension == "key");
    if meta.is_symlink() {
        items.push(Item { target, content: Content::Link(fs::read_link(path)?), mtime });
    } else if meta.is_dir() && meta.mode() & 0o005 == 0o005 && depth < MAX_DEPTH {
        items.push(Item { target: target.clone(), content: Content::Directory(0o755), mtime });
        let mut names =
            fs::read_dir(path)?.map(|e| e.map(|e| e.file_name())).collect::<io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            add(&path.join(&name), &target.join(&name), depth + 1, items)?;
        }
    } else if meta.is_file() && meta.mode() & 0o004 != 0 && meta.len() <= MAX_FILE && !is_key {
        items.push(Item { target, content: Content::Copy(path.to_owned()), mtime });
    }
    Ok(())
}

/// Keeps system accounts, which packages' files belong to, and root; people's accounts stay out.
fn passwd(text: &str) -> String {
    let mut kept = String::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, about, home, shell] = fields.as_slice() else { continue };
        let Some(id) = system_id(uid) else { continue };
        let (about, home, shell) = match id {
            0 => ("root", "/root", "/bin/bash"),
            // A system account's home may be anywhere; what is below /home is a person's.
            _ if home.starts_with("/home") || home.starts_with("/root") => (*about, "/nonexistent", *shell),
            _ => (*about, *home, *shell),
        };
        kept.push_str(&format!("{name}:x:{uid}:{gid}:{about}:{home}:{shell}\n"));
    }
    if !kept.starts_with("root:") && !kept.contains("\nroot:") {
        kept.insert_str(0, "root:x:0:0:root:/root:/bin/bash\n");
    }
    kept
}

/// Keeps system groups without their members.
fn group(text: &str) -> String {
    let mut kept = String::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, gid, _] = fields.as_slice() else { continue };
        if system_id(gid).is_some() {
            kept.push_str(&format!("{name}:x:{gid}:\n"));
        }
    }
    if !kept.starts_with("root:") && !kept.contains("\nroot:") {
        kept.insert_str(0, "root:x:0:\n");
    }
    kept
}

fn system_id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id < FIRST_USER_ID || *id == NOBODY)
}

/// Digests what the skeleton would be made of, without reading the files.
fn fingerprint(root: &Path, items: &[Item]) -> io::Result<String> {
    let mut hasher = Sha256::new();
    hasher.update(RECIPE.to_le_bytes());
    for (host, inside) in grafts(root) {
        hasher.update(host.as_os_str().as_bytes());
        hasher.update([0]);
        hasher.update(inside.as_os_str().as_bytes());
        hasher.update([0]);
    }
    for item in items {
        hasher.update(item.target.as_os_str().as_bytes());
        hasher.update([0]);
        match &item.content {
            Content::Directory(mode) => hasher.update(mode.to_le_bytes()),
            Content::Link(target) => hasher.update(target.as_os_str().as_bytes()),
            Content::Text(text) => hasher.update(text),
            Content::Copy(path) => {
                let meta = fs::symlink_metadata(path)?;
                for number in [meta.mtime(), meta.mtime_nsec(), meta.size() as i64, meta.ino() as i64] {
                    hasher.update(number.to_le_bytes());
                }
            }
        }
        hasher.update([0]);
    }
    Ok(ImageDigest::from_hash(&hasher.finalize().into()).hex().to_owned())
}

/// Makes the skeleton's archive. The same files give the same bytes, so the image's id says what is in it.
fn skeleton(items: &[Item]) -> io::Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    for item in items {
        let mut header = tar::Header::new_gnu();
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(u64::try_from(item.mtime).unwrap_or(0));
        header.set_size(0);
        match &item.content {
            Content::Directory(mode) => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_mode(*mode);
                builder.append_data(&mut header, &item.target, io::empty())?;
            }
            Content::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_mode(0o777);
                builder.append_link(&mut header, &item.target, target)?;
            }
            Content::Text(text) => append_file(&mut builder, &mut header, item, text)?,
            Content::Copy(path) => append_file(&mut builder, &mut header, item, &fs::read(path)?)?,
        }
    }
    builder.into_inner()
}

fn append_file(
    builder: &mut tar::Builder<Vec<u8>>,
    header: &mut tar::Header,
    item: &Item,
    content: &[u8],
) -> io::Result<()> {
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    builder.append_data(header, &item.target, content)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn fake_host(root: &Path) {
        for dir in
            ["usr/bin", "etc/ssl/certs", "etc/ssl/private", "etc/ssh", "etc/python3.11", "home/ann", "root"]
        {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        for (path, text) in [
            (
                "etc/passwd",
                "root:x:0:0:Boss:/r:/bin/zsh\nann:x:1000:1000:Ann:/home/ann:/bin/sh\nsvc:x:33:33::/home/svc:/bin/sh\nnobody:x:65534:65534:n:/nonexistent:/usr/sbin/nologin\n",
            ),
            ("etc/group", "root:x:0:\nsudo:x:27:ann\nann:x:1000:\nnogroup:x:65534:\n"),
            ("etc/shadow", "root:secret"),
            ("etc/ssh/key", "secret"),
            ("etc/ssl/private/k.pem", "secret"),
            ("etc/ssl/certs/a.pem", "cert"),
            ("etc/ssl/certs/hidden.pem", "secret"),
            ("etc/ssl/certs/b.key", "secret"),
            ("etc/python3.11/sitecustomize.py", "#"),
            ("etc/profile", "export A=1"),
            ("home/ann/x", "secret"),
            ("root/x", "secret"),
        ] {
            fs::write(root.join(path), text).unwrap();
        }
        fs::set_permissions(root.join("etc/ssl/certs/hidden.pem"), fs::Permissions::from_mode(0o600))
            .unwrap();
        symlink("usr/bin", root.join("bin")).unwrap();
        fs::create_dir_all(root.join("lib")).unwrap();
    }

    #[test]
    fn the_host_image_has_programs_and_no_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        fs::create_dir(&host).unwrap();
        fake_host(&host);
        let store = ImageStore::open(&dir.path().join("store")).unwrap();
        let image = store.host_image_of(&host).unwrap();
        assert_eq!(image.references, ["host:latest"]);
        assert_eq!(image.config.cmd, ["bash"]);
        let graft = |name: &str| (host.join(name), Path::new("/").join(name));
        assert_eq!(image.grafts, [graft("usr"), graft("lib")]);
        let [layer] = image.layers.as_slice() else { panic!("one layer") };
        let read = |path: &str| fs::read_to_string(layer.join(path)).unwrap();
        assert_eq!(fs::read_link(layer.join("bin")).unwrap(), Path::new("usr/bin"));
        assert_eq!(
            read("etc/passwd"),
            "root:x:0:0:root:/root:/bin/bash\nsvc:x:33:33::/nonexistent:/bin/sh\n\
             nobody:x:65534:65534:n:/nonexistent:/usr/sbin/nologin\n"
        );
        assert_eq!(read("etc/group"), "root:x:0:\nsudo:x:27:\nnogroup:x:65534:\n");
        assert_eq!(read("etc/ssl/certs/a.pem"), "cert");
        assert!(layer.join("etc/python3.11/sitecustomize.py").exists());
        assert_eq!(fs::metadata(layer.join("tmp")).unwrap().mode() & 0o7777, 0o1777);
        assert_eq!(fs::metadata(layer.join("root")).unwrap().mode() & 0o7777, 0o700);
        let found = std::process::Command::new("grep").args(["-rl", "secret"]).arg(layer).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout), "");
        for gone in ["etc/shadow", "etc/ssh", "etc/ssl/private", "home/ann", "root/x"] {
            assert!(!layer.join(gone).exists(), "{gone}");
        }
    }

    #[test]
    fn the_host_image_follows_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        fs::create_dir(&host).unwrap();
        fake_host(&host);
        let store = ImageStore::open(&dir.path().join("store")).unwrap();
        let first = store.host_image_of(&host).unwrap();
        assert_eq!(store.host_image_of(&host).unwrap().id, first.id);
        fs::write(host.join("etc/profile"), "export A=22").unwrap();
        let second = store.host_image_of(&host).unwrap();
        assert_ne!(second.id, first.id);
        assert_eq!(store.resolve("host").unwrap().unwrap().id, second.id);
        assert_eq!(store.collect_garbage(&|_| false).unwrap().images, [first.id]);
    }
}
