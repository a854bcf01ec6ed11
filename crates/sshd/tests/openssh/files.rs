//! File transfer: `sftp`, `scp` and `rsync`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Output};

use crate::host::{Host, is_root, noise, run, run_with_input, text};

/// Runs commands of `sftp` as a login; the first that fails ends it.
fn sftp(host: &Host, login: &str, commands: &str) -> Output {
    let mut command = host.program("sftp");
    run_with_input(command.args(["-q", "-b", "-"]).arg(format!("{login}@127.0.0.1")), commands.as_bytes())
}

fn done(host: &Host, commands: &str) -> String {
    let output = sftp(host, "tester", commands);
    assert!(output.status.success(), "{commands}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn failed(host: &Host, commands: &str) -> String {
    let output = sftp(host, "tester", commands);
    assert!(!output.status.success(), "{commands}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn files_go_up_and_come_down_as_they_are() {
    let host = Host::start();
    let bytes = noise(30 << 20);
    std::fs::write(host.path("local"), &bytes).unwrap();
    std::fs::set_permissions(host.path("local"), std::fs::Permissions::from_mode(0o640)).unwrap();
    let (local, back) = (host.path("local").display().to_string(), host.path("back").display().to_string());
    done(&host, &format!("put -pf {local} up\nrename up moved\nget -p moved {back}\n"));
    assert!(std::fs::read(host.home("moved")).unwrap() == bytes);
    assert!(std::fs::read(host.path("back")).unwrap() == bytes);
    let (here, there) =
        (std::fs::metadata(host.path("local")).unwrap(), std::fs::metadata(host.home("moved")).unwrap());
    assert_eq!((there.mode() & 0o777, there.mtime()), (0o640, here.mtime()));
}

#[test]
fn an_interrupted_upload_goes_on_where_it_stopped() {
    let host = Host::start();
    let bytes = noise(3 << 20);
    std::fs::write(host.path("local"), &bytes).unwrap();
    std::fs::write(host.home("part"), &bytes[..1_000_000]).unwrap();
    done(&host, &format!("reput {} part\n", host.path("local").display()));
    assert!(std::fs::read(host.home("part")).unwrap() == bytes);
}

#[test]
fn odd_names_are_kept_and_listed() {
    let host = Host::start();
    let names: [&[u8]; 5] =
        [b"with space", "gr\u{fc}n \u{1f40c}".as_bytes(), b"\xff\xfe", b"-rf", b"quote'\"\\"];
    for name in names {
        std::fs::write(host.home("x").with_file_name(OsStr::from_bytes(name)), "odd").unwrap();
    }
    std::fs::create_dir(host.path("got")).unwrap();
    done(&host, &format!("get -r . {}\n", host.path("got").display()));
    for name in names {
        let got = host.path("got").join(OsStr::from_bytes(name));
        assert_eq!(std::fs::read(&got).unwrap(), b"odd", "{got:?}");
    }
    let listed = done(&host, "ls -la\n");
    assert!(listed.contains("with space") && listed.contains("drwxrwxrwx"), "{listed}");
}

#[test]
fn folders_links_and_attributes() {
    let host = Host::start();
    let said = done(
        &host,
        "mkdir d\nlmkdir unused-here\nln -s d/target link\nln -s /etc/passwd there\nput /etc/hostname d/target\n\
         ln d/target hard\nchmod 600 d/target\nls -l link\npwd\ncd d\npwd\nrename target renamed\nrm renamed\ncd ..\nrmdir d\ndf\n"
            .replace("lmkdir unused-here\n", "")
            .as_str(),
    );
    let home = host.path("home").canonicalize().unwrap();
    assert!(said.contains(&format!("Remote working directory: {}/d", home.display())), "{said}");
    assert_eq!(std::fs::read_link(host.home("link")).unwrap(), OsStr::new("d/target"));
    assert_eq!(std::fs::metadata(host.home("hard")).unwrap().mode() & 0o777, 0o600);
    assert!(!host.home("d").exists());
    assert!(said.contains("%Capacity") || said.contains("Avail"), "{said}");
}

#[test]
fn a_listing_of_many_files_is_whole() {
    let host = Host::start();
    for number in 0..1000 {
        std::fs::write(host.home(&format!("file-{number:04}")), "").unwrap();
    }
    let listed = done(&host, "ls -1\n");
    assert_eq!(listed.lines().filter(|line| line.starts_with("file-")).count(), 1000);
}

#[test]
fn what_cannot_be_done_is_told_in_the_systems_words() {
    let host = Host::start();
    assert!(failed(&host, "get missing /dev/null\n").contains("not found"));
    std::fs::create_dir_all(host.home("full/inside")).unwrap();
    assert!(
        failed(&host, "rmdir full\n").contains("Failure")
            || failed(&host, "rmdir full\n").contains("not empty")
    );
    std::fs::write(host.home("a"), "").unwrap();
    assert!(!failed(&host, "mkdir a\n").is_empty());
}

#[test]
fn files_are_made_and_read_as_the_sessions_user() {
    if !is_root() {
        return;
    }
    let host = Host::start();
    std::fs::write(host.path("local"), "mine").unwrap();
    std::fs::write(host.path("secret"), "not yours").unwrap();
    std::fs::set_permissions(host.path("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let put = sftp(&host, "nobody", &format!("put {} made\n", host.path("local").display()));
    // The program itself may be out of nobody's reach, where the tests are built in a private folder.
    let stderr = String::from_utf8_lossy(&put.stderr).into_owned();
    if stderr.contains("Permission denied") && !host.home("made").exists() {
        eprintln!("skipped: the file transfer program is in a folder that others cannot enter");
        return;
    }
    assert!(put.status.success(), "{stderr}");
    let made = std::fs::metadata(host.home("made")).unwrap();
    assert_eq!((made.uid(), made.gid()), (65534, 65534));
    let got = sftp(
        &host,
        "nobody",
        &format!("get {} {}\n", host.path("secret").display(), host.path("x").display()),
    );
    assert!(String::from_utf8_lossy(&got.stderr).contains("ermission denied"));
    let id = text(
        host.ssh_as("nobody", "user", &[])
            .arg("id -u; id -g; id -G; touch by-command; cat /proc/self/status | grep CapEff"),
    );
    assert_eq!(id, "65534\n65534\n65534\nCapEff:\t0000000000000000");
    assert_eq!(std::fs::metadata(host.home("by-command")).unwrap().uid(), 65534);
}

#[test]
fn scp_copies_by_either_protocol() {
    let host = Host::start();
    std::fs::write(host.path("local"), noise(100_000)).unwrap();
    for (flag, name) in [("-s", "by-sftp"), ("-O", "by-exec")] {
        let back = host.path(name);
        run(host.program("scp").arg(flag).arg(host.path("local")).arg(format!("tester@127.0.0.1:{name}")));
        run(host.program("scp").arg(flag).arg(format!("tester@127.0.0.1:{name}")).arg(&back));
        assert!(std::fs::read(&back).unwrap() == noise(100_000), "{flag}");
    }
}

#[test]
fn rsync_copies_a_tree_and_then_only_the_changes() {
    let host = Host::start();
    std::fs::create_dir_all(host.path("tree/deep")).unwrap();
    std::fs::write(host.path("tree/deep/file"), noise(500_000)).unwrap();
    std::os::unix::fs::symlink("deep/file", host.path("tree/link")).unwrap();
    let copy = || {
        let mut rsync = Command::new("rsync");
        rsync.args(["-a", "--itemize-changes", "-e", &host.remote_shell()]).arg(host.path("tree/"));
        text(rsync.arg("127.0.0.1:tree"))
    };
    assert!(copy().contains("deep/file"));
    assert!(std::fs::read(host.home("tree/link")).unwrap() == noise(500_000));
    assert_eq!(copy(), "");
}
