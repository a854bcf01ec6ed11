//! An image made of what a sandbox changed: its upper directory as one more layer on the image that it was made from.
//!
//! The upper directory is written as a layer's archive and unpacked like any other, so that it is digested, bounded and placed by the same
//! code. Invariant: nothing in it is followed; links are entries.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::ImageError;
use crate::image::{Image, ImageConfig, ImageDigest};
use crate::layers::{LayerArchive, Watch};
use crate::lock::{Pins, Workspace};
use crate::reference::Reference;
use crate::store::{ImageStore, Record};

/// Where an overlay mounted by the host's root says that a directory hides what is below it.
const OPAQUE: &str = "trusted.overlay.opaque";
/// The largest value of an extended attribute that is kept.
const XATTR_LIMIT: usize = 64 << 10;
const NOBODY: u32 = 65_534;

/// What a sandbox changed, and what the image of it is to be.
#[derive(Debug)]
pub struct Commit<'a> {
    /// The image that the sandbox was made from.
    pub base: &'a ImageDigest,
    /// The upper directory of its overlay. Nobody may write there meanwhile.
    pub upper: &'a Path,
    /// First id and number of ids of the sandbox: owners are shifted by it.
    pub ids: (u32, u32),
    /// Relative paths that are not part of the image, with what is below them.
    pub leave_out: &'a [PathBuf],
    /// How it is run.
    pub config: &'a ImageConfig,
    /// Leads to the image from then on.
    pub name: &'a str,
}

impl ImageStore {
    /// Makes the image; blocks the thread.
    ///
    /// # Errors
    /// When the base is gone, the files cannot be read, or the disk is full.
    pub fn commit(&self, commit: &Commit<'_>) -> Result<Image, ImageError> {
        let inner = &self.inner;
        let name: Reference = commit.name.parse()?;
        let absent =
            || ImageError::NotFound { reference: commit.base.to_string(), place: "in the store".to_owned() };
        let base = inner.read_record(commit.base)?.ok_or_else(absent)?;
        let mut layers = base.parse_config()?.diff_ids;
        let workspace = Workspace::create(&inner.tmp())?;
        inner.locked(|| workspace.pin(&Pins { layers: layers.clone() }))?;
        let layer = std::thread::scope(|scope| {
            let (reader, writer) = io::pipe().map_err(|e| ImageError::io("making a pipe", e))?;
            let archive = scope.spawn(move || write_archive(commit, writer));
            let watch = Watch { report: &|_| {}, cancelled: &std::sync::atomic::AtomicBool::new(false) };
            let source = LayerArchive { data: Box::new(reader) as Box<dyn Read + Send>, length: u64::MAX };
            let unpacked = inner.unpack_layer(&workspace, source, None, &watch);
            // Why nothing more came says more than that it did not.
            match archive.join() {
                Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
                    Err(ImageError::io("reading what the sandbox changed", error))
                }
                _ => unpacked,
            }
        })?;
        layers.push(layer.diff_id.clone());
        inner.locked(|| workspace.pin(&Pins { layers: layers.clone() }))?;
        inner.place_layer(layer)?;
        let config = configuration(base.config.get(), commit.config, &layers)?;
        let mut record = Record::new(config.to_string().as_bytes())?;
        record.grafts = base.grafts;
        inner.publish(&record, &[name], &[])
    }
}

/// The base's configuration with what is new. Its history is left away: it would have to tell one line a layer.
fn configuration(base: &str, config: &ImageConfig, layers: &[ImageDigest]) -> Result<Value, ImageError> {
    let mut value: Value =
        serde_json::from_str(base).map_err(|e| ImageError::Corrupt(format!("image configuration: {e}")))?;
    let env: Vec<String> = config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let ports: serde_json::Map<String, Value> =
        config.exposed_ports.iter().map(|port| (port.clone(), json!({}))).collect();
    value["config"] = json!({
        "Env": env,
        "User": config.user,
        "WorkingDir": config.working_dir,
        "Entrypoint": config.entrypoint,
        "Cmd": config.cmd,
        "Labels": config.labels,
        "StopSignal": config.stop_signal,
        "ExposedPorts": ports,
    });
    value["rootfs"] = json!({ "type": "layers", "diff_ids": layers });
    if let Some(members) = value.as_object_mut() {
        members.remove("history");
    }
    Ok(value)
}

fn write_archive(commit: &Commit<'_>, out: impl Write) -> io::Result<()> {
    let mut archive = Archive {
        builder: tar::Builder::new(BufWriter::with_capacity(256 << 10, out)),
        commit,
        links: HashMap::new(),
    };
    archive.directory(Path::new(""))?;
    archive.builder.into_inner()?.flush()
}

struct Archive<'a, W: Write> {
    builder: tar::Builder<W>,
    commit: &'a Commit<'a>,
    /// Files with several names, by device and number: where the first one stands.
    links: HashMap<(u64, u64), PathBuf>,
}

impl<W: Write> Archive<'_, W> {
    /// What is in the directory, in the order of names.
    fn directory(&mut self, path: &Path) -> io::Result<()> {
        let mut names = fs::read_dir(self.commit.upper.join(path))?
            .map(|entry| entry.map(|e| e.file_name()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            let inside = path.join(&name);
            if !self.commit.leave_out.contains(&inside) {
                self.entry(&inside)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path) -> io::Result<()> {
        let place = self.commit.upper.join(path);
        let meta = fs::symlink_metadata(&place)?;
        let kind = meta.file_type();
        let mut header = self.header(&meta);
        if kind.is_char_device() && meta.rdev() == 0 {
            return self.empty(&mut header, &whiteout(path));
        }
        if kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
            return Ok(());
        }
        if kind.is_symlink() {
            header.set_entry_type(tar::EntryType::Symlink);
            return self.builder.append_link(&mut header, path, fs::read_link(&place)?);
        }
        if meta.nlink() > 1 && !kind.is_dir() {
            let file = (meta.dev(), meta.ino());
            if let Some(first) = self.links.get(&file) {
                header.set_entry_type(tar::EntryType::Link);
                return self.builder.append_link(&mut header, path, first);
            }
            self.links.insert(file, path.to_owned());
        }
        self.attributes(&place)?;
        if kind.is_dir() {
            header.set_entry_type(tar::EntryType::Directory);
            self.builder.append_data(&mut header, path, io::empty())?;
            if attribute(&place, OPAQUE).is_some_and(|value| value == b"y") {
                let mut mark = self.header(&meta);
                self.empty(&mut mark, &path.join(".wh..wh..opq"))?;
            }
            return self.directory(path);
        }
        if kind.is_fifo() {
            header.set_entry_type(tar::EntryType::Fifo);
            return self.builder.append_data(&mut header, path, io::empty());
        }
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(meta.len());
        let file = File::open(&place)?;
        self.builder.append_data(&mut header, path, file.take(meta.len()))
    }

    fn empty(&mut self, header: &mut tar::Header, path: &Path) -> io::Result<()> {
        header.set_entry_type(tar::EntryType::Regular);
        self.builder.append_data(header, path, io::empty())
    }

    fn header(&self, meta: &Metadata) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        let (base, count) = self.commit.ids;
        let inside = |id: u32| id.checked_sub(base).filter(|id| *id < count).unwrap_or(NOBODY);
        header.set_uid(u64::from(inside(meta.uid())));
        header.set_gid(u64::from(inside(meta.gid())));
        header.set_mode(meta.mode() & 0o7777);
        header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
        header.set_size(0);
        header
    }

    /// Extended attributes, as a header of their own before the entry.
    fn attributes(&mut self, place: &Path) -> io::Result<()> {
        let kept: Vec<(String, Vec<u8>)> = attribute_names(place)
            .into_iter()
            .filter(|name| name.starts_with("user.") || name == "security.capability")
            .filter(|name| !name.starts_with("user.overlay."))
            .filter_map(|name| Some((format!("SCHILY.xattr.{name}"), attribute(place, &name)?)))
            .collect();
        if kept.is_empty() {
            return Ok(());
        }
        self.builder.append_pax_extensions(kept.iter().map(|(name, value)| (name.as_str(), value.as_slice())))
    }
}

/// The name that says that a lower file of this path is hidden.
fn whiteout(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".wh.");
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

fn attribute(place: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; XATTR_LIMIT];
    let length = rustix::fs::lgetxattr(place, name, &mut value[..]).ok()?;
    value.truncate(length);
    Some(value)
}

fn attribute_names(place: &Path) -> Vec<String> {
    let mut names = vec![0; XATTR_LIMIT];
    let Ok(length) = rustix::fs::llistxattr(place, &mut names[..]) else { return Vec::new() };
    names[..length]
        .split(|byte| *byte == 0)
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn tarball(files: &[(&str, &str)]) -> tempfile::NamedTempFile {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_size(text.len() as u64);
            builder.append_data(&mut header, path, text.as_bytes()).unwrap();
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), builder.into_inner().unwrap()).unwrap();
        file
    }

    #[test]
    fn what_was_changed_becomes_a_layer_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let store = ImageStore::open(&dir.path().join("store")).unwrap();
        let base = store
            .import(tarball(&[("etc/os", "x"), ("gone", "y")]).path(), Some("base"), &|_| {})
            .unwrap()
            .remove(0);
        let upper = dir.path().join("upper");
        fs::create_dir_all(upper.join("work/deep")).unwrap();
        fs::create_dir_all(upper.join("etc")).unwrap();
        fs::write(upper.join("etc/hosts"), "planted").unwrap();
        fs::write(upper.join("work/run.sh"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(upper.join("work/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::hard_link(upper.join("work/run.sh"), upper.join("work/deep/again")).unwrap();
        symlink("/etc/shadow", upper.join("work/link")).unwrap();
        let owner = fs::metadata(upper.join("work")).unwrap();
        let config = ImageConfig {
            env: vec![("A".into(), "1".into())],
            working_dir: "/work".into(),
            labels: [("build".to_owned(), "7".to_owned())].into(),
            ..ImageConfig::default()
        };
        let commit = Commit {
            base: &base.id,
            upper: &upper,
            ids: (owner.uid(), 65_536),
            leave_out: &[PathBuf::from("etc/hosts")],
            config: &config,
            name: "osb-img-000000000000-1",
        };
        let image = store.commit(&commit).unwrap();
        assert_eq!(store.resolve("osb-img-000000000000-1").unwrap().unwrap().id, image.id);
        assert_eq!(image.layers.len(), base.layers.len() + 1);
        assert_eq!(image.layers[1..], base.layers[..]);
        assert_eq!((&image.config.env, image.config.labels["build"].as_str()), (&config.env, "7"));
        let layer = &image.layers[0];
        assert_eq!(fs::read_to_string(layer.join("work/deep/again")).unwrap(), "#!/bin/sh\n");
        assert_eq!(fs::metadata(layer.join("work/run.sh")).unwrap().mode() & 0o777, 0o755);
        assert_eq!(fs::read_link(layer.join("work/link")).unwrap(), Path::new("/etc/shadow"));
        assert!(!layer.join("etc/hosts").exists());
        // The same again is the same image: its id says what is in it.
        assert_eq!(store.commit(&commit).unwrap().id, image.id);
    }
}
