//! Imports of well-formed archives.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use sandglass_images::{Image, ImageErrorKind, ImageStore};
use serde_json::json;

use super::fixture::*;

fn read(image: &Image, layer: usize, path: &str) -> String {
    fs::read_to_string(image.layers[layer].join(path)).unwrap()
}

/// Checks what [`TestImage::new`] unpacks to.
pub fn check_image(image: &Image, mark: &str) {
    assert_eq!(image.layers.len(), 2);
    let (top, base) = (&image.layers[0], &image.layers[1]);
    assert_eq!(read(image, 1, "etc/mark"), mark);
    assert_eq!(read(image, 0, "etc/added"), "new");
    let tool = fs::metadata(base.join("bin/tool")).unwrap();
    assert_eq!((tool.mode() & 0o7777, tool.mtime(), tool.nlink()), (0o4755, 1_700_000_000, 2));
    assert_eq!(tool.ino(), fs::metadata(base.join("bin/same")).unwrap().ino());
    assert_eq!(fs::read_link(base.join("bin/alias")).unwrap(), Path::new("tool"));
    let whiteout = fs::symlink_metadata(top.join("etc/gone")).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    assert_eq!(fs::metadata(top.join("data")).unwrap().mode() & 0o7777, 0o1777);
    assert!(!top.join("data/.wh..wh..opq").exists());
    if is_root() {
        let mut value = [0; 4];
        let n = rustix::fs::getxattr(top.join("data"), "trusted.overlay.opaque", &mut value).unwrap();
        assert_eq!(&value[..n], b"y");
    }
    assert_eq!(image.config.user, "7:8");
    assert_eq!(image.config.env[1], ("BARE".to_owned(), String::new()));
    assert_eq!(image.created_at.as_deref(), Some("2024-01-02T03:04:05Z"));
    assert_eq!(image.size_bytes, (mark.len() + 3 + 6 + 3) as u64);
}

fn plain_layers(image: &TestImage) -> Vec<Vec<u8>> {
    let mut plain = Vec::new();
    for (i, layer) in image.layers.iter().enumerate() {
        let mut out = Vec::new();
        if i % 2 == 0 {
            std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&layer[..]), &mut out).unwrap();
        } else {
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(&layer[..]).unwrap();
            std::io::Read::read_to_end(&mut decoder, &mut out).unwrap();
        }
        plain.push(out);
    }
    plain
}

#[test]
fn a_docker_save_archive_is_imported_under_its_names() {
    let (dir, store) = store();
    let image = TestImage::new("saved");
    let archive = image.docker_save(&plain_layers(&image), &["demo:1", "demo:latest"]);
    for (name, data) in
        [("a.tar", archive.clone()), ("a.tar.gz", gzip(&archive)), ("a.tar.zst", zstd(&archive))]
    {
        let path = write(dir.path(), name, &data);
        let imported = store.import(&path, None, &quiet).unwrap();
        assert_eq!(imported.len(), 1, "{name}");
        assert_eq!(imported[0].references, ["demo:1", "demo:latest"]);
        check_image(&imported[0], "saved");
    }
    let found = store.resolve("demo").unwrap().unwrap();
    assert_eq!(found.id, image.id());
    assert_eq!(store.resolve(found.id.short()).unwrap().unwrap().id, found.id);
    assert_eq!(store.resolve(found.id.as_str()).unwrap().unwrap().id, found.id);
    assert_eq!(store.resolve("demo:2").unwrap().map(|i| i.id), None);
    assert_eq!(store.resolve("Not A Name").unwrap_err().kind(), ImageErrorKind::InvalidReference);
}

#[test]
fn an_oci_layout_is_imported_from_directory_and_tar() {
    let (dir, store) = store();
    let image = TestImage::new("layout");
    let files = image.layout(json!({ "io.containerd.image.name": "ghcr.io/o/app:9" }));
    for (name, data) in &files {
        write(&dir.path().join("layout"), name, data);
    }
    let from_dir = store.import(&dir.path().join("layout"), None, &quiet).unwrap();
    assert_eq!(from_dir[0].references, ["ghcr.io/o/app:9"]);
    check_image(&from_dir[0], "layout");
    let tar = write(dir.path(), "layout.tar", &pack(&files));
    let from_tar = store.import(&tar, Some("other"), &quiet).unwrap();
    assert_eq!(from_tar[0].id, from_dir[0].id);
    assert_eq!(
        from_tar[0].references,
        ["docker.io/library/other:latest", "ghcr.io/o/app:9"]
            .map(|n| { n.strip_prefix("docker.io/library/").unwrap_or(n).to_owned() })
    );
    let by_digest = format!("ghcr.io/o/app@{}", sandglass_images::ImageDigest::of(&image.manifest));
    assert_eq!(store.resolve(&by_digest).unwrap().unwrap().id, image.id());
}

#[test]
fn a_plain_root_file_system_becomes_an_image() {
    let (dir, store) = store();
    let root = layer(&[
        ("./", Node::Dir(0o755)),
        ("./bin/", Node::Dir(0o755)),
        ("./bin/sh", Node::File(0o755, b"shell")),
        ("./manifest.json", Node::File(0o644, b"{}")),
    ]);
    let mut ids = Vec::new();
    for (name, data) in [("r.tar", root.clone()), ("r.tgz", gzip(&root)), ("r.zst", zstd(&root))] {
        let path = write(dir.path(), name, &data);
        let imported = store.import(&path, Some("root:1"), &quiet).unwrap();
        assert_eq!(read(&imported[0], 0, "bin/sh"), "shell");
        ids.push(imported[0].id.clone());
    }
    assert!(ids.windows(2).all(|w| w[0] == w[1]), "the form of the archive makes no difference");
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn layers_are_shared_and_go_with_their_last_image() {
    let (dir, store) = store();
    let base = layer(&[("base", Node::File(0o644, &[1; 1000]))]);
    let tops = ["one", "two"].map(|n| layer(&[(n, Node::File(0o644, &[2; 10]))]));
    let mut ids = Vec::new();
    for (i, top) in tops.iter().enumerate() {
        let image = TestImage::of(vec![base.clone(), top.clone()]);
        let files = image.layout(json!({ "io.containerd.image.name": format!("app:{i}") }));
        let path = write(dir.path(), "l.tar", &pack(&files));
        ids.push(store.import(&path, None, &quiet).unwrap().remove(0));
    }
    assert_eq!(ids[0].layers[1], ids[1].layers[1]);
    let in_use = |id: &sandglass_images::ImageDigest| *id == ids[0].id;
    let refused = store.remove("app:0", &in_use).unwrap_err();
    assert_eq!(refused.kind(), ImageErrorKind::InUse);
    let gone = store.remove("app:1", &in_use).unwrap();
    assert_eq!((gone.layers, gone.bytes, gone.images.len()), (1, 10, 1));
    assert!(ids[0].layers.iter().all(|l| l.exists()));
    assert_eq!(store.remove("app:1", &in_use).unwrap_err().kind(), ImageErrorKind::NotFound);
    let gone = store.remove(ids[0].id.short(), &|_| false).unwrap();
    assert_eq!((gone.layers, gone.bytes), (2, 1010));
    assert_eq!(leftovers(dir.path()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn images_without_a_name_are_collected_unless_in_use() {
    let (dir, store) = store();
    for mark in ["old", "new"] {
        let image = TestImage::new(mark);
        let path = write(dir.path(), "l.tar", &pack(&image.layout(json!({}))));
        store.import(&path, Some("app"), &quiet).unwrap();
    }
    let old = TestImage::new("old").id();
    assert_eq!(store.list().unwrap().len(), 2);
    assert_eq!(store.collect_garbage(&|id| *id == old).unwrap(), Default::default());
    let collected = store.collect_garbage(&|_| false).unwrap();
    assert_eq!((collected.images, collected.layers), (vec![old], 1), "the upper layer is shared");
    check_image(&store.resolve("app").unwrap().unwrap(), "new");
}

#[test]
fn simultaneous_imports_from_several_stores_agree() {
    let (dir, store) = store();
    let image = TestImage::new("together");
    let files = image.layout(json!({ "io.containerd.image.name": "app:1" }));
    let path = write(dir.path(), "l.tar", &pack(&files));
    std::thread::scope(|scope| {
        let work = || {
            // Each with its own handle, as another process would have.
            let store = ImageStore::open(&dir.path().join("images")).unwrap();
            for _ in 0..5 {
                check_image(&store.import(&path, None, &quiet).unwrap()[0], "together");
                store.collect_garbage(&|_| false).unwrap();
            }
        };
        for _ in 0..4 {
            scope.spawn(work);
        }
    });
    assert_eq!(store.list().unwrap().len(), 1);
    assert_eq!(leftovers(dir.path()).len(), 3, "one record, two layers");
}

#[test]
fn what_a_crash_left_is_removed_at_the_next_start() {
    let (dir, _) = store();
    write(dir.path(), "images/tmp/work-x/layer-y/fs/etc/passwd", b"half");
    ImageStore::open(&dir.path().join("images")).unwrap();
    assert_eq!(leftovers(dir.path()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn archives_that_are_none_are_told_apart() {
    let (dir, store) = store();
    let import = |name: &str, data: &[u8]| {
        let path = write(dir.path(), name, data);
        store.import(&path, Some("x"), &quiet).unwrap_err().kind()
    };
    assert_eq!(import("text", &[b'x'; 2000]), ImageErrorKind::Corrupt);
    assert_eq!(import("empty", b""), ImageErrorKind::Corrupt);
    assert_eq!(import("xz", b"\xfd7zXZ\0junk"), ImageErrorKind::Unsupported);
    let missing = store.import(&dir.path().join("missing"), None, &quiet).unwrap_err();
    assert_eq!(missing.kind(), ImageErrorKind::NotFound);
    let empty = store.import(dir.path(), None, &quiet).unwrap_err();
    assert_eq!(empty.kind(), ImageErrorKind::Unsupported);
    assert_eq!(leftovers(dir.path()), Vec::<std::path::PathBuf>::new());
}
