//! Archives that mean harm, or are broken. Each must be refused or made harmless, and leave nothing.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use sandglass_images::{Image, ImageError, ImageErrorKind, ImageStore, StoreOptions, UnpackLimits};
use serde_json::json;

use super::fixture::*;

fn import(archive: &[u8]) -> (tempfile::TempDir, Result<Image, ImageError>) {
    let (dir, store) = store();
    let path = write(dir.path(), "x.tar", archive);
    write(dir.path(), "outside/file", b"untouched");
    let result = store.import(&path, Some("x"), &quiet).map(|mut images| images.remove(0));
    assert_eq!(fs::read(dir.path().join("outside/file")).unwrap(), b"untouched");
    assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 1);
    (dir, result)
}

fn refused(name: &str, archive: &[u8]) {
    let (dir, result) = import(archive);
    let error = result.map(|i| i.layers).expect_err(name);
    assert_eq!(error.kind(), ImageErrorKind::Corrupt, "{name}: {error}");
    assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new(), "{name}");
}

fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest + 1..).find(|n| n.to_string().len() + rest == *n).unwrap();
        data.extend(format!("{length} {key}=").bytes());
        data.extend_from_slice(value);
        data.push(b'\n');
    }
    raw_entry(b"pax", b'x', b"", &data)
}

#[test]
fn paths_that_lead_out_are_refused() {
    let file = |path: &[u8]| ended(raw_entry(path, b'0', b"", b"evil"));
    for path in ["/etc/evil", "../evil", "a/../../evil", "a/..", "..", "./../x"] {
        refused(path, &file(path.as_bytes()));
    }
    let long = "n".repeat(300);
    refused(
        "long name",
        &ended([pax(&[("path", long.as_bytes())]), raw_entry(b"x", b'0', b"", b"")].concat()),
    );
    refused("zero byte", &ended([pax(&[("path", b"a\0b")]), raw_entry(b"x", b'0', b"", b"")].concat()));
    let deep = "d/".repeat(400) + "f";
    refused("deep", &ended([pax(&[("path", deep.as_bytes())]), raw_entry(b"x", b'0', b"", b"")].concat()));
    refused("root file", &file(b"./"));
    refused("whiteout of parent", &file(b"a/.wh..."));
}

#[test]
fn nothing_is_written_through_links() {
    for target in ["/", "/etc", "..", "../../../../outside", "../../../../../../../../../../tmp"] {
        let archive = ended(
            [
                raw_entry(b"out", b'2', target.as_bytes(), b""),
                raw_entry(b"out/file", b'0', b"", b"evil"),
                raw_entry(b"in", b'2', b"out", b""),
                raw_entry(b"in/deeper/file", b'0', b"", b"evil"),
                raw_entry(b"direct", b'2', b"/etc/passwd", b""),
                raw_entry(b"direct", b'0', b"", b"evil"),
            ]
            .concat(),
        );
        let (_dir, result) = import(&archive);
        let root = result.unwrap().layers.remove(0);
        for path in ["out", "in", "in/deeper"] {
            assert!(fs::symlink_metadata(root.join(path)).unwrap().is_dir(), "{path} was replaced");
        }
        for path in ["out/file", "in/deeper/file", "direct"] {
            assert!(fs::symlink_metadata(root.join(path)).unwrap().is_file(), "{path}");
        }
    }
}

#[test]
fn hard_links_stay_inside() {
    let link = |to: &[u8]| ended([raw_entry(b"f", b'0', b"", b"x"), raw_entry(b"l", b'1', to, b"")].concat());
    for target in ["/etc/passwd", "../../../outside/file", "missing", "f/x", ""] {
        refused(target, &link(target.as_bytes()));
    }
    let through =
        ended([raw_entry(b"s", b'2', b"/etc", b""), raw_entry(b"l", b'1', b"s/passwd", b"")].concat());
    refused("through a link", &through);
    let directory = ended([raw_entry(b"d/", b'5', b"", b""), raw_entry(b"l", b'1', b"d", b"")].concat());
    refused("to a directory", &directory);
    let (_dir, result) = import(&link(b"l"));
    assert!(result.is_ok(), "a link to itself is nothing");
}

#[test]
fn broken_archives_are_corrupt() {
    let good = layer(&[("a", Node::File(0o644, &[7; 5000])), ("b", Node::File(0o644, b"x"))]);
    refused("cut in data", &good[..2000]);
    refused("cut in a header", &good[..700]);
    refused("cut between entries", &good[..512 + 5120]);
    let mut flipped = good.clone();
    flipped[10] ^= 1;
    refused("checksum", &flipped);
    let packed = gzip(&good);
    refused("cut gzip", &packed[..packed.len() - 4]);
    let mut crc = packed.clone();
    let at = crc.len() - 6;
    crc[at] ^= 1;
    refused("gzip checksum", &crc);
    let packed = zstd(&good);
    refused("cut zstd", &packed[..packed.len() - 4]);
    refused("huge extension", &raw_entry(b"x", b'x', b"", &vec![b'1'; 2 << 20]));
    refused("bad pax", &ended(raw_entry(b"x", b'x', b"", b"99 path=a\n")));
    refused("owner", &ended([pax(&[("uid", b"4294967295")]), raw_entry(b"x", b'0', b"", b"")].concat()));
}

#[test]
fn later_entries_replace_earlier_ones() {
    let archive = ended(
        [
            raw_entry(b"a/b/c", b'0', b"", b"1"),
            raw_entry(b"a", b'0', b"", b"file"),
            raw_entry(b"a/b", b'0', b"", b"2"),
            raw_entry(b"d", b'2', b"x", b""),
            raw_entry(b"d/", b'5', b"", b""),
            raw_entry(b"e/.wh.f", b'0', b"", b""),
            raw_entry(b"e/f/", b'5', b"", b""),
            raw_entry(b"g/h", b'0', b"", b"kept"),
            raw_entry(b".wh.g", b'0', b"", b""),
            raw_entry(b".wh..wh.plnk/x", b'0', b"", b"aufs"),
        ]
        .concat(),
    );
    let (_dir, result) = import(&archive);
    let root = result.unwrap().layers.remove(0);
    assert_eq!(fs::read(root.join("a/b")).unwrap(), b"2");
    assert!(fs::symlink_metadata(root.join("d")).unwrap().is_dir());
    assert_eq!(fs::read(root.join("g/h")).unwrap(), b"kept");
    assert!(!root.join(".wh..wh.plnk").exists());
    if is_root() {
        for path in ["e/f", "g"] {
            assert!(has_xattr(&root.join(path), "trusted.overlay.opaque"), "{path} hides what is below");
        }
    }
}

fn has_xattr(path: &Path, name: &str) -> bool {
    rustix::fs::getxattr(path, name, &mut [0; 64][..]).is_ok()
}

#[test]
fn attributes_are_filtered() {
    if !is_root() {
        return skipped("attributes_are_filtered", "needs root for trusted and security attributes");
    }
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let attributes = pax(&[
        ("SCHILY.xattr.user.mime", b"text"),
        ("SCHILY.xattr.security.capability", &capability),
        ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ("SCHILY.xattr.trusted.overlay.redirect", b"/secret"),
        ("SCHILY.xattr.user.overlay.opaque", b"y"),
        ("SCHILY.xattr.security.selinux", b"label"),
        ("uid", b"12"),
        ("mtime", b"1600000000.123456789"),
    ]);
    let archive = ended([attributes.clone(), raw_entry(b"f", b'0', b"", b"x")].concat());
    let (_dir, result) = import(&archive);
    let file = result.unwrap().layers.remove(0).join("f");
    assert!(has_xattr(&file, "user.mime") && has_xattr(&file, "security.capability"));
    for name in
        ["trusted.overlay.opaque", "trusted.overlay.redirect", "user.overlay.opaque", "security.selinux"]
    {
        assert!(!has_xattr(&file, name), "{name}");
    }
    use std::os::unix::fs::MetadataExt as _;
    let meta = fs::metadata(&file).unwrap();
    assert_eq!((meta.uid(), meta.mtime(), meta.mtime_nsec()), (12, 1_600_000_000, 123_456_789));
}

#[test]
fn bombs_are_stopped() {
    let limits = UnpackLimits {
        max_bytes: 64 << 20,
        max_ratio: 100,
        ratio_floor_bytes: 1 << 20,
        max_entries: 100,
        ..UnpackLimits::default()
    };
    let options = StoreOptions { limits, ..StoreOptions::default() };
    let dir = tempfile::tempdir().unwrap();
    let store = ImageStore::open_with(&dir.path().join("images"), options).unwrap();
    let zeros = vec![0; 4 << 20];
    let by_ratio = gzip(&layer(&[("zeros", Node::File(0o644, &zeros))]));
    let mut by_padding = layer(&[("x", Node::File(0o644, b""))]);
    by_padding.extend(&zeros);
    let by_count: Vec<u8> =
        (0..200).flat_map(|i| raw_entry(format!("f{i}").as_bytes(), b'0', b"", b"")).collect();
    let mut sparse = raw_entry(b"s", b'S', b"", b"");
    sparse[483..495].copy_from_slice(b"77777777777\0");
    sparse[148..156].fill(b' ');
    let sum: u32 = sparse[..512].iter().map(|&b| u32::from(b)).sum();
    sparse[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    for (name, archive) in [
        ("ratio", by_ratio),
        ("padding", gzip(&by_padding)),
        ("count", ended(by_count)),
        ("sparse", ended(sparse)),
    ] {
        let path = write(dir.path(), "x.tar", &archive);
        let error = store.import(&path, Some("x"), &quiet).expect_err(name);
        assert_eq!(error.kind(), ImageErrorKind::TooLarge, "{name}: {error}");
        assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new(), "{name}");
    }
}

#[test]
fn manifests_that_lie_are_refused() {
    let image = TestImage::new("lie");
    let import = |files: &[(String, Vec<u8>)]| {
        let (dir, store) = store();
        let path = write(dir.path(), "x.tar", &pack(files));
        let error = store.import(&path, Some("x"), &quiet).map(|i| i.len()).unwrap_err();
        assert!(leftovers(dir.path()).iter().all(|p| !p.ends_with("images")), "{error}");
        assert_eq!(store.list().unwrap().len(), 0);
        error.kind()
    };
    let good = image.layout(json!({}));
    // A layer other than the configuration says.
    let mut files = good.clone();
    let other = gzip(&layer(&[("evil", Node::File(0o644, b"x"))]));
    let base = sandglass_images::ImageDigest::of(&image.layers[0]);
    for (name, data) in &mut files {
        if name.ends_with(base.hex()) {
            *data = other.clone();
        }
    }
    assert_eq!(import(&files), ImageErrorKind::Corrupt);
    // A manifest other than its digest.
    let mut files = good.clone();
    let manifest = sandglass_images::ImageDigest::of(&image.manifest);
    for (name, data) in &mut files {
        if name.ends_with(manifest.hex()) {
            data.push(b' ');
        }
    }
    assert_eq!(import(&files), ImageErrorKind::Corrupt);
    // A missing layer.
    let files: Vec<_> = good.iter().filter(|(name, _)| !name.ends_with(base.hex())).cloned().collect();
    assert_eq!(import(&files), ImageErrorKind::Corrupt);
    // A file outside.
    let manifest = json!([{ "Config": "../../../etc/hostname", "RepoTags": null, "Layers": ["x"] }]);
    let files = [("manifest.json".to_owned(), serde_json::to_vec(&manifest).unwrap())];
    assert_eq!(import(&files), ImageErrorKind::Corrupt);
}

#[test]
fn damaged_archives_never_get_out_or_leave_anything() {
    let good = layer(&[
        ("d/", Node::Dir(0o755)),
        ("d/file", Node::File(0o644, &[7; 700])),
        ("d/link", Node::Link("../../outside/file")),
        ("d/hard", Node::Hard("d/file")),
        ("d/.wh.x", Node::File(0, b"")),
    ]);
    let config = ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() };
    let change = (0..good.len(), any::<u8>());
    proptest::test_runner::TestRunner::new(config)
        .run(&(prop::collection::vec(change, 1..6), 0..good.len(), any::<bool>()), |(changes, cut, sums)| {
            let mut archive = good.clone();
            for (at, byte) in changes {
                archive[at] = byte;
            }
            if cut % 3 == 0 {
                archive.truncate(cut);
            }
            // Without a right checksum nothing else would be looked at.
            for block in archive.chunks_exact_mut(512).filter(|b| sums && b[257..262] == *b"ustar") {
                block[148..156].fill(b' ');
                let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
            let (dir, result) = import(&archive);
            if result.is_err() {
                prop_assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new());
            }
            Ok(())
        })
        .unwrap();
}
