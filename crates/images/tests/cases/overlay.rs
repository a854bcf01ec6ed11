//! The kernel's view: layers mounted as the embedded runtime mounts them.

use std::fs;
use std::path::Path;

use sandglass_images::ImageStore;
use serde_json::json;

use super::fixture::*;

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn whiteouts_and_opaque_directories_work_in_overlayfs() {
    let (dir, store) = store();
    let base = layer(&[
        ("gone", Node::File(0o644, b"1")),
        ("kept", Node::File(0o644, b"1")),
        ("opaque/old", Node::File(0o644, b"1")),
        ("swapped/old", Node::File(0o644, b"1")),
        ("merged/old", Node::File(0o644, b"1")),
    ]);
    let top = layer(&[
        (".wh.gone", Node::File(0, b"")),
        ("opaque/new", Node::File(0o644, b"2")),
        ("opaque/.wh..wh..opq", Node::File(0, b"")),
        (".wh.swapped", Node::File(0, b"")),
        ("swapped/new", Node::File(0o644, b"2")),
        ("merged/new", Node::File(0o644, b"2")),
    ]);
    // The first layer occurs twice, as empty layers do in practice; the kernel refuses the same directory twice.
    let image = TestImage::of(vec![layer(&[]), base, layer(&[]), top]);
    let path = write(dir.path(), "x.tar", &pack(&image.layout(json!({}))));
    let image = store.import(&path, Some("x"), &quiet).unwrap().remove(0);
    assert_eq!(image.layers.len(), 2);
    let target = dir.path().join("merged");
    fs::create_dir(&target).unwrap();
    let lowers: Vec<_> = image.layers.iter().map(|l| l.to_str().unwrap()).collect();
    let options = std::ffi::CString::new(format!("lowerdir={}", lowers.join(":"))).unwrap();
    let flags = rustix::mount::MountFlags::RDONLY;
    if let Err(e) = rustix::mount::mount("overlay", &target, "overlay", flags, Some(options.as_c_str())) {
        return skipped(
            "whiteouts_and_opaque_directories_work_in_overlayfs",
            &format!("cannot mount overlayfs: {e}"),
        );
    }
    let _mounted = Mounted(&target);
    let names = |sub: &str| {
        let mut names: Vec<_> = fs::read_dir(target.join(sub))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(""), ["kept", "merged", "opaque", "swapped"]);
    assert_eq!(names("opaque"), ["new"]);
    assert_eq!(names("swapped"), ["new"]);
    assert_eq!(names("merged"), ["new", "old"]);
}

#[test]
fn the_real_host_image_holds_no_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let store = ImageStore::open(&dir.path().join("images")).unwrap();
    let image = store.ensure_host_image().unwrap();
    assert_eq!(store.resolve("host").unwrap().unwrap().id, image.id);
    assert!(
        image.grafts.iter().any(|(host, inside)| host == Path::new("/usr") && inside == Path::new("/usr"))
    );
    assert!(image.size_bytes < 50 << 20, "{} bytes", image.size_bytes);
    let layer = &image.layers[0];
    for gone in ["etc/shadow", "etc/gshadow", "etc/ssh", "etc/ssl/private", "etc/hostname", "etc/sudoers"] {
        assert!(!layer.join(gone).exists(), "{gone}");
    }
    for empty in ["root", "home", "tmp", "run", "workspace"] {
        assert_eq!(fs::read_dir(layer.join(empty)).unwrap().count(), 0, "{empty}");
    }
    assert!(fs::read_to_string(layer.join("etc/passwd")).unwrap().starts_with("root:x:0:0:root:/root:"));
}

#[test]
fn the_real_host_image_runs_programs() {
    let dir = tempfile::tempdir().unwrap();
    let store = ImageStore::open(&dir.path().join("images")).unwrap();
    let image = store.ensure_host_image().unwrap();
    let [upper, work, target] = ["upper", "work", "root"].map(|name| dir.path().join(name));
    for dir in [&upper, &work, &target] {
        fs::create_dir(dir).unwrap();
    }
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    let options =
        format!("lowerdir={},upperdir={},workdir={}", shown(&image.layers[0]), shown(&upper), shown(&work));
    let options = std::ffi::CString::new(options).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    if let Err(e) = rustix::mount::mount("overlay", &target, "overlay", flags, Some(options.as_c_str())) {
        return skipped("the_real_host_image_runs_programs", &format!("cannot mount overlayfs: {e}"));
    }
    // Detaching the root detaches what is mounted below it.
    let _mounted = Mounted(&target);
    for (host, inside) in &image.grafts {
        let inside = target.join(inside.strip_prefix("/").unwrap());
        rustix::mount::mount_bind(host, inside).unwrap();
    }
    let script = "id -un; echo $HOME; ls -A /root /home; test -w /tmp && test ! -e /etc/shadow && echo fine";
    let output = std::process::Command::new("chroot")
        .arg(&target)
        .args(["bash", "-c", script])
        .env_clear()
        .envs(image.config.env.iter().map(|(k, v)| (k, v)))
        .output()
        .unwrap();
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(told.starts_with("root\n") && told.ends_with("fine\n"), "{told}");
}
