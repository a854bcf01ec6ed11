//! `cp` against a stub, both ways.

#![expect(clippy::unwrap_used, reason = "a stub or helper that fails is a test that fails")]

mod stub;

use std::{
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Stdio,
};

use stub::{ID, Inside, Stub, stderr, stdout};

fn inside(kind: &'static str, mode: u32, content: &[u8]) -> Inside {
    Inside { kind, mode, content: content.to_vec() }
}

fn put(stub: &Stub, files: &[(&str, Inside)]) {
    stub.seen(|seen| seen.files.extend(files.iter().map(|(path, what)| ((*path).to_owned(), what.clone()))));
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_file_goes_in_with_its_bytes_and_mode() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    put(&stub, &[("/srv", inside("directory", 0o755, b""))]);
    let local = dir.path().join("tool");
    let bytes: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    fs::write(&local, &bytes).unwrap();
    fs::set_permissions(&local, fs::Permissions::from_mode(0o750)).unwrap();
    for (dest, expected) in [("/srv", "/srv/tool"), ("/new/name", "/new/name"), ("/fresh/", "/fresh/tool")] {
        let output = stub.run(&["cp", local.to_str().unwrap(), &format!("{ID}:{dest}")]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(stub.seen(|seen| seen.files[expected].clone()), inside("file", 0o750, &bytes));
    }
    assert!(stub.was_asked(&format!("POST /v1/sandboxes/{ID}/proxy/44772/files/upload")));
    fs::write(&local, b"").unwrap();
    assert!(stub.run(&["cp", local.to_str().unwrap(), &format!("{ID}:/empty")]).status.success());
    assert_eq!(stub.seen(|seen| seen.files["/empty"].content.len()), 0);
}

#[test]
fn a_directory_goes_in_whole() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    let root = dir.path().join("site");
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::write(root.join("a"), b"1").unwrap();
    fs::write(root.join("deep/er/b"), b"2").unwrap();
    symlink("a", root.join("link")).unwrap();
    let output = stub.run(&["cp", root.to_str().unwrap(), "first:srv/www"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let paths = stub.seen(|seen| seen.files.keys().cloned().collect::<Vec<_>>());
    assert_eq!(paths, ["/srv/www", "/srv/www/a", "/srv/www/deep", "/srv/www/deep/er", "/srv/www/deep/er/b"]);
    let link = serde_json::json!(["ln", "-sfn", "--", "a", "/srv/www/link"]);
    assert!(stub.seen(|seen| seen.bodies.iter().any(|body| body["argv"] == link)));
}

#[test]
fn standard_streams_are_one_files_content() {
    let stub = Stub::start();
    let mut child = stub
        .command(&["cp", "-", &format!("{ID}:/in")])
        .stdin(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\x00\xffraw").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(stub.seen(|seen| seen.files["/in"].content.clone()), b"\x00\xffraw");
    let output = stub.run(&["cp", &format!("{ID}:/in"), "-"]);
    assert_eq!((output.status.code(), output.stdout), (Some(0), b"\x00\xffraw".to_vec()));
}

#[test]
fn files_come_out_with_their_mode() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    put(&stub, &[("/bin/x", inside("file", 0o711, b"\xffcode"))]);
    for dest in [dir.path().join("renamed"), dir.path().to_owned()] {
        let output = stub.run(&["cp", &format!("{ID}:/bin/x"), dest.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    for name in ["renamed", "x"] {
        let path = dir.path().join(name);
        assert_eq!((fs::read(&path).unwrap(), mode(&path)), (b"\xffcode".to_vec(), 0o711));
    }
    let output = stub.run(&["cp", &format!("{ID}:/absent"), "/tmp"]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains("/absent"));
}

#[test]
fn a_cut_download_leaves_nothing_behind() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    put(&stub, &[("/big", inside("file", 0o644, b"CUT"))]);
    fs::write(dir.path().join("big"), b"old").unwrap();
    let output = stub.run(&["cp", &format!("{ID}:/big"), dir.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read(dir.path().join("big")).unwrap(), b"old");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert_eq!(stub.run(&["cp", &format!("{ID}:/big"), "-"]).status.code(), Some(1));
}

#[test]
fn directories_come_out_and_stay_inside_their_destination() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    put(
        &stub,
        &[
            ("/d", inside("directory", 0o755, b"")),
            ("/d/closed", inside("directory", 0o500, b"")),
            ("/d/closed/f", inside("file", 0o400, b"deep")),
            ("/d/link", inside("symlink", 0o777, b"")),
            ("/d/../../escape", inside("file", 0o644, b"no")),
        ],
    );
    let dest = dir.path().join("copy");
    let output = stub.run(&["cp", &format!("{ID}:/d"), dest.to_str().unwrap()]);
    // One entry had to be left out, which is told and is a failure.
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("escape"), "{}", stderr(&output));
    assert_eq!(fs::read(dest.join("closed/f")).unwrap(), b"deep");
    assert_eq!((mode(&dest.join("closed")), mode(&dest.join("closed/f"))), (0o500, 0o400));
    assert_eq!(fs::read_link(dest.join("link")).unwrap(), Path::new("/etc/passwd"));
    assert!(!dir.path().join("escape").exists());
}

#[test]
fn a_link_from_an_earlier_copy_is_not_written_through() {
    let (stub, dir) = (Stub::start(), tempfile::tempdir().unwrap());
    let (dest, elsewhere) = (dir.path().join("copy"), dir.path().join("elsewhere"));
    fs::create_dir_all(&dest).unwrap();
    fs::create_dir_all(&elsewhere).unwrap();
    symlink(&elsewhere, dest.join("out")).unwrap();
    put(
        &stub,
        &[
            ("/d", inside("directory", 0o755, b"")),
            ("/d/out", inside("directory", 0o755, b"")),
            ("/d/out/planted", inside("file", 0o644, b"no")),
        ],
    );
    let output = stub.run(&["cp", &format!("{ID}:/d/."), dest.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
}
