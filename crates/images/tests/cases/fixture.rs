//! Images made by the tests, in every form the store reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use sandglass_images::{ImageDigest, ImageStore, Progress};
use serde_json::{Value, json};

pub fn quiet(_: Progress) {}

/// A store in a fresh directory.
pub fn store() -> (tempfile::TempDir, ImageStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = ImageStore::open(&dir.path().join("images")).unwrap();
    (dir, store)
}

/// What is in the store's directory apart from its fixed parts: must be empty after a failure.
pub fn leftovers(dir: &Path) -> Vec<PathBuf> {
    let list = |sub: &str| {
        fs::read_dir(dir.join("images").join(sub)).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>()
    };
    ["images", "layers", "tmp", "locks"].into_iter().flat_map(list).collect()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Says loudly that a test could not run.
pub fn skipped(test: &str, why: &str) {
    // Not by a macro, whose output the test runner would swallow.
    std::io::stderr().write_all(format!("\nSKIPPED {test}: {why}\n").as_bytes()).unwrap();
}

pub enum Node<'a> {
    Dir(u32),
    File(u32, &'a [u8]),
    Link(&'a str),
    Hard(&'a str),
}

/// Makes a layer's archive.
pub fn layer(entries: &[(&str, Node<'_>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, node) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mtime(1_700_000_000);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(0);
        match node {
            Node::Dir(mode) => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_mode(*mode);
                builder.append_data(&mut header, path, &[][..]).unwrap();
            }
            Node::File(mode, content) => {
                header.set_mode(*mode);
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, path, *content).unwrap();
            }
            Node::Link(target) | Node::Hard(target) => {
                let hard = matches!(node, Node::Hard(_));
                header.set_entry_type(if hard { tar::EntryType::Link } else { tar::EntryType::Symlink });
                header.set_mode(0o777);
                builder.append_link(&mut header, path, target).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(data: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
}

/// An image as blobs and a manifest.
pub struct TestImage {
    pub config: Vec<u8>,
    pub layers: Vec<Vec<u8>>,
    pub manifest: Vec<u8>,
    pub blobs: BTreeMap<String, Vec<u8>>,
}

impl TestImage {
    /// Two layers: the second is compressed otherwise, replaces a file, and hides one.
    pub fn new(mark: &str) -> Self {
        let base = layer(&[
            ("etc/", Node::Dir(0o755)),
            ("etc/mark", Node::File(0o644, mark.as_bytes())),
            ("etc/gone", Node::File(0o644, b"old")),
            ("bin/", Node::Dir(0o755)),
            ("bin/tool", Node::File(0o4755, b"#!tool")),
            ("bin/same", Node::Hard("bin/tool")),
            ("bin/alias", Node::Link("tool")),
        ]);
        let top = layer(&[
            ("etc/added", Node::File(0o600, b"new")),
            ("etc/.wh.gone", Node::File(0, b"")),
            ("data/", Node::Dir(0o1777)),
            ("data/.wh..wh..opq", Node::File(0, b"")),
        ]);
        Self::of(vec![base, top])
    }

    pub fn of(plain: Vec<Vec<u8>>) -> Self {
        let diff_ids: Vec<_> = plain.iter().map(|l| ImageDigest::of(l)).collect();
        let config = json!({
            "architecture": sandglass_images::Platform::default().arch, "os": "linux",
            "created": "2024-01-02T03:04:05Z",
            "config": { "Env": ["PATH=/bin", "BARE"], "Cmd": ["sh"], "Entrypoint": null, "User": "7:8" },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let config = serde_json::to_vec(&config).unwrap();
        let layers: Vec<Vec<u8>> =
            plain.iter().enumerate().map(|(i, l)| if i % 2 == 0 { gzip(l) } else { zstd(l) }).collect();
        let describe = |bytes: &[u8], kind: &str| json!({ "mediaType": kind, "digest": ImageDigest::of(bytes), "size": bytes.len() });
        let layer_type = |i: usize| ["tar+gzip", "tar+zstd"][i % 2];
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": describe(&config, "application/vnd.oci.image.config.v1+json"),
            "layers": layers.iter().enumerate().map(|(i, l)| {
                describe(l, &format!("application/vnd.oci.image.layer.v1.{}", layer_type(i)))
            }).collect::<Vec<_>>(),
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let blobs = [&config]
            .into_iter()
            .chain(&layers)
            .map(|b| (ImageDigest::of(b).to_string(), b.clone()))
            .collect();
        Self { config, layers, manifest, blobs }
    }

    pub fn id(&self) -> ImageDigest {
        ImageDigest::of(&self.config)
    }

    /// The image as one of two platforms.
    pub fn list(&self) -> Vec<u8> {
        let other = ImageDigest::of(b"other");
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let arch = sandglass_images::Platform::default().arch;
        serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                { "mediaType": kind, "digest": other, "size": 5, "platform": { "os": "linux", "architecture": "s390x" } },
                { "mediaType": kind, "digest": ImageDigest::of(&self.manifest), "size": self.manifest.len(),
                  "platform": { "os": "linux", "architecture": arch } },
            ],
        }))
        .unwrap()
    }

    /// Files of an OCI layout.
    pub fn layout(&self, annotations: Value) -> Vec<(String, Vec<u8>)> {
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": ImageDigest::of(&self.manifest), "size": self.manifest.len(), "annotations": annotations,
        }]});
        let mut files = vec![
            ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".to_owned(), serde_json::to_vec(&index).unwrap()),
            (blob_path(&self.manifest), self.manifest.clone()),
        ];
        files.extend(self.blobs.values().map(|b| (blob_path(b), b.clone())));
        files
    }

    /// A `docker save` archive of the old form, layers uncompressed and with the manifest at the end.
    pub fn docker_save(&self, plain: &[Vec<u8>], tags: &[&str]) -> Vec<u8> {
        let config = format!("{}.json", self.id().hex());
        let names: Vec<_> = plain.iter().map(|l| format!("{}/layer.tar", ImageDigest::of(l).hex())).collect();
        let manifest = json!([{ "Config": config, "RepoTags": tags, "Layers": names }]);
        let mut files = vec![(config, self.config.clone())];
        files.extend(names.into_iter().zip(plain.iter().cloned()));
        files.push(("repositories".to_owned(), b"{}".to_vec()));
        files.push(("manifest.json".to_owned(), serde_json::to_vec(&manifest).unwrap()));
        pack(&files)
    }
}

fn blob_path(bytes: &[u8]) -> String {
    format!("blobs/sha256/{}", ImageDigest::of(bytes).hex())
}

pub fn pack(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let entries: Vec<_> = files.iter().map(|(name, data)| (name.as_str(), Node::File(0o644, data))).collect();
    layer(&entries)
}

pub fn write(dir: &Path, name: &str, data: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, data).unwrap();
    path
}

/// A raw header, for what the tar crate refuses to write.
pub fn raw_entry(path: &[u8], kind: u8, link: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(data.len() as u64);
    header.as_mut_bytes()[..path.len()].copy_from_slice(path);
    header.as_mut_bytes()[156] = kind;
    header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link);
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

pub fn ended(mut entries: Vec<u8>) -> Vec<u8> {
    entries.extend([0; 1024]);
    entries
}
