//! Random trees come out as GNU tar would unpack them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;

use super::fixture::*;

#[derive(Clone, Debug)]
enum Kind {
    Dir(u32),
    File(u32, Vec<u8>),
    Link(String),
    Hard(usize),
    Fifo(u32),
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        3 => (0_u32..0o10000).prop_map(Kind::Dir),
        5 => (0_u32..0o10000, prop::collection::vec(any::<u8>(), 0..3000)).prop_map(|(m, d)| Kind::File(m, d)),
        2 => "[a-z./]{1,150}".prop_map(Kind::Link),
        2 => any::<usize>().prop_map(Kind::Hard),
        1 => (0_u32..0o1000).prop_map(Kind::Fifo),
    ]
}

/// Entries as (index of the parent among earlier directories, name, kind, owner, time).
fn tree() -> impl Strategy<Value = Vec<(usize, String, Kind, u32, i64)>> {
    let name = prop_oneof![4 => "[a-zA-Z0-9 _.é-]{1,12}", 1 => "[a-z]{90,140}"]
        .prop_filter("reserved", |n| n != "." && n != ".." && !n.starts_with(".wh."));
    let time = prop_oneof![0_i64..2_000_000_000, Just(9_000_000_000), Just(-5)];
    prop::collection::vec((any::<usize>(), name, kind(), 0_u32..3_000_000, time), 0..25)
}

fn make(root: &Path, tree: &[(usize, String, Kind, u32, i64)]) {
    let mut dirs = vec![root.to_owned()];
    let mut files = Vec::new();
    let mut made = Vec::new();
    for (parent, name, kind, owner, time) in tree {
        let path = dirs[parent % dirs.len()].join(name);
        if fs::symlink_metadata(&path).is_ok() {
            continue;
        }
        match kind {
            Kind::Dir(_) => {
                fs::create_dir(&path).unwrap();
                dirs.push(path.clone());
            }
            Kind::File(_, data) => {
                fs::write(&path, data).unwrap();
                files.push(path.clone());
            }
            Kind::Link(target) => symlink(target, &path).unwrap(),
            Kind::Hard(_) if files.is_empty() => continue,
            Kind::Hard(index) => fs::hard_link(&files[index % files.len()], &path).unwrap(),
            Kind::Fifo(_) => {
                let mode = rustix::fs::Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            }
        }
        made.push((path, kind, *owner, *time));
    }
    for (path, kind, owner, time) in made.into_iter().rev() {
        if let Kind::Hard(_) = kind {
            continue;
        }
        std::os::unix::fs::lchown(&path, Some(owner), Some(owner / 2)).unwrap();
        if let Kind::Dir(mode) | Kind::File(mode, _) | Kind::Fifo(mode) = kind {
            fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
        }
        let at = rustix::fs::Timespec { tv_sec: time, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: at, last_modification: at };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

/// Describes everything below `root`.
fn describe(root: &Path) -> BTreeMap<String, String> {
    fn walk(root: &Path, dir: &Path, inodes: &mut BTreeMap<u64, String>, out: &mut BTreeMap<String, String>) {
        let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let meta = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            let first = inodes.entry(meta.ino()).or_insert_with(|| name.clone()).clone();
            let content = match meta.file_type() {
                t if t.is_file() => format!("{:?} of {first}", fs::read(&path).unwrap()),
                t if t.is_symlink() => format!("-> {:?}", fs::read_link(&path).unwrap()),
                _ => String::new(),
            };
            let (mode, uid, gid, time) = (meta.mode(), meta.uid(), meta.gid(), meta.mtime());
            out.insert(name, format!("{mode:o} {uid}:{gid} {time} {content}"));
            if meta.is_dir() {
                walk(root, &path, inodes, out);
            }
        }
    }
    let mut out = BTreeMap::new();
    walk(root, root, &mut BTreeMap::new(), &mut out);
    out
}

fn tar(args: &[&str], archive: &Path, dir: &Path) {
    let status = Command::new("tar")
        .arg("--warning=no-timestamp")
        .args(args)
        .arg("-f")
        .arg(archive)
        .arg("-C")
        .arg(dir)
        .arg(".")
        .status()
        .unwrap();
    assert!(status.success(), "tar {args:?}");
}

#[test]
fn random_trees_unpack_as_with_gnu_tar() {
    if !is_root() {
        return skipped("random_trees_unpack_as_with_gnu_tar", "needs root for owners");
    }
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let (dir, store) = store();
    let count = std::cell::Cell::new(0);
    runner
        .run(&(tree(), prop::sample::select(vec!["gnu", "posix"])), |(tree, format)| {
            count.set(count.get() + 1);
            let work = dir.path().join(count.get().to_string());
            let [source, expected] = ["source", "expected"].map(|n| work.join(n));
            for dir in [&work, &source, &expected] {
                fs::create_dir(dir).unwrap();
            }
            make(&source, &tree);
            let archive = work.join("a.tar");
            tar(&["-c", "--sparse-version=0.0", "--format", format, "--numeric-owner"], &archive, &source);
            tar(&["-x", "-p", "--numeric-owner", "--same-owner"], &archive, &expected);
            let image = store.import(&archive, Some("x"), &quiet).unwrap().remove(0);
            prop_assert_eq!(describe(&image.layers[0]), describe(&expected));
            fs::remove_dir_all(&work).unwrap();
            Ok(())
        })
        .unwrap();
}

#[test]
fn old_gnu_sparse_files_keep_their_holes() {
    let (dir, store) = store();
    let source = dir.path().join("s");
    fs::create_dir(&source).unwrap();
    let file = fs::File::create(source.join("sparse")).unwrap();
    use std::os::unix::fs::FileExt as _;
    for part in 0..40 {
        file.write_all_at(format!("part {part}").as_bytes(), part * 100_000).unwrap();
    }
    file.set_len(5_000_000).unwrap();
    file.sync_all().unwrap();
    let archive = dir.path().join("a.tar");
    tar(&["-c", "-S", "--format", "gnu"], &archive, &source);
    let image = store.import(&archive, Some("x"), &quiet).unwrap().remove(0);
    let unpacked = image.layers[0].join("sparse");
    assert!(fs::read(&unpacked).unwrap() == fs::read(source.join("sparse")).unwrap());
    assert!(fs::metadata(&unpacked).unwrap().blocks() * 512 < 2_000_000);
}
