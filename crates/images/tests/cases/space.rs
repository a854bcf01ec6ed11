//! A full disk.

use std::path::{Path, PathBuf};

use sandglass_images::{ImageErrorKind, ImageStore};

use super::fixture::*;

/// A small file system that goes with the test.
struct Small(PathBuf);

impl Small {
    fn mount(path: &Path) -> rustix::io::Result<Self> {
        std::fs::create_dir_all(path).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", path, "tmpfs", flags, Some(c"size=2m"))?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_is_named_and_left_clean() {
    let dir = tempfile::tempdir().unwrap();
    let _small = match Small::mount(&dir.path().join("small")) {
        Ok(small) => small,
        Err(e) => {
            return skipped("a_full_disk_is_named_and_left_clean", &format!("cannot mount a tmpfs: {e}"));
        }
    };
    let store = ImageStore::open(&dir.path().join("small/images")).unwrap();
    let big =
        layer(&[("a", Node::File(0o644, &vec![1; 1 << 20])), ("b", Node::File(0o644, &vec![2; 4 << 20]))]);
    for (name, data) in [("big.tar", big.clone()), ("big.tgz", gzip(&big))] {
        let path = write(dir.path(), name, &data);
        let error = store.import(&path, Some("x"), &quiet).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::NoSpace, "{error}");
        assert_eq!(leftovers(&dir.path().join("small")), Vec::<PathBuf>::new());
    }
    let small = write(dir.path(), "small.tar", &layer(&[("a", Node::File(0o644, &vec![1; 1 << 20]))]));
    store.import(&small, Some("x"), &quiet).expect("there is space again");
}
