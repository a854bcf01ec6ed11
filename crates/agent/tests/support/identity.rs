//! `/v1/filesystem/{uid}/{gid}`: the same files as somebody else.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use crate::support::{Agent, Answer, BINARY, form, root, until};

const UID: u32 = 41_234;
const GID: u32 = 42_345;

/// Only root can be somebody else.
/// An agent started with other groups or capabilities.
fn through(setpriv: &[&str]) -> Agent {
    let mut command = Command::new("setpriv");
    command.args(setpriv).arg("--").arg(BINARY);
    Agent::launch(command, &[], &[])
}

fn at(route: &str) -> String {
    format!("/v1/filesystem/{UID}/{GID}{route}")
}

fn upload(agent: &Agent, prefix: &str, path: &Path, rest: &serde_json::Value, content: &[u8]) -> Answer {
    let mut meta = rest.clone();
    meta["path"] = json!(path);
    let (kind, body) =
        form(&[("metadata", Some("metadata"), meta.to_string().as_bytes()), ("file", Some("f"), content)]);
    agent.send("POST", &format!("{prefix}/files/upload"), &[("Content-Type", &kind)], &body)
}

/// A directory that anybody may use, made by root.
fn shared(agent: &Agent, name: &str) -> std::path::PathBuf {
    fs::set_permissions(agent.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let dir = agent.path(name);
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    dir
}

fn owner(path: &Path) -> (u32, u32) {
    let meta = path.symlink_metadata().unwrap();
    (meta.uid(), meta.gid())
}

fn refused(answer: &Answer) {
    assert!(answer.status >= 400, "{} {}", answer.status, answer.text());
    let message = answer.json()["message"].as_str().unwrap().to_lowercase();
    assert!(message.contains("permission"), "{message}");
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_route_acts_as_the_identity() {
    if !root() {
        return;
    }
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    let d = dir.to_str().unwrap();
    let file = dir.join("sub/f");
    assert_eq!(upload(&agent, &at(""), &file, &json!({ "mode": 640 }), b"hello\nworld\n").status, 200);
    assert_eq!((owner(&file), owner(&dir.join("sub"))), ((UID, GID), (UID, GID)));
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
    let download =
        agent.send("GET", &at(&format!("/files/download?path={d}/sub/f")), &[("Range", "bytes=1-2")], b"");
    assert_eq!((download.status, download.text().as_str()), (206, "el"));
    assert_eq!(agent.get(&at(&format!("/files/download?path={d}/sub/f&offset=2"))).text(), "world");
    let replaced = agent.post(
        &at("/files/replace?verbose=true"),
        &json!({ (d.to_owned() + "/sub/f"): { "old": "l", "new": "L" } }),
    );
    assert_eq!(replaced.json()[d.to_owned() + "/sub/f"]["replacedCount"], 3);
    assert_eq!((owner(&file), fs::read(&file).unwrap()), ((UID, GID), b"heLLo\nworLd\n".to_vec()));
    assert_eq!(
        agent.post(&at("/directories"), &json!({ (d.to_owned() + "/new/er"): { "mode": 700 } })).status,
        200
    );
    assert_eq!(owner(&dir.join("new/er")), (UID, GID));
    let mv = json!([{ "src": file, "dest": dir.join("moved/f") }]);
    assert_eq!(agent.post(&at("/files/mv"), &mv).status, 200);
    let permissions = json!({ (d.to_owned() + "/moved/f"): { "mode": 600 } });
    assert_eq!(agent.post(&at("/files/permissions"), &permissions).status, 200);
    let info = agent.get(&at(&format!("/files/info?path={d}/moved/f"))).json();
    assert_eq!(info[d.to_owned() + "/moved/f"]["mode"], 600);
    assert_eq!(info[d.to_owned() + "/moved/f"]["owner"], UID.to_string());
    assert_eq!(agent.get(&at(&format!("/directories/list?path={d}"))).json().as_array().unwrap().len(), 3);
    assert_eq!(agent.get(&at(&format!("/files/search?path={d}"))).json().as_array().unwrap().len(), 1);
    assert_eq!(agent.delete(&at(&format!("/files?path={d}/moved/f"))).status, 200);
    assert_eq!(agent.delete(&at(&format!("/directories?path={d}/moved"))).status, 200);
    assert_eq!(names(&dir), ["new", "sub"]);
    assert_eq!(agent.get(&at("/files/nope")).status, 404);
    assert_eq!(agent.get("/v1/filesystem/1").status, 404);
}

#[test]
fn what_the_kernel_forbids_is_refused() {
    if !root() {
        return;
    }
    let agent = through(&["--groups", "4711"]);
    let dir = shared(&agent, "d");
    let d = dir.display().to_string();
    let secret = dir.join("secret");
    fs::write(&secret, "root's").unwrap();
    chown(&secret, Some(0), Some(4711)).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).unwrap();
    fs::create_dir(dir.join("closed")).unwrap();
    fs::write(dir.join("closed/f"), "").unwrap();
    fs::set_permissions(dir.join("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&secret, dir.join("link")).unwrap();
    // The groups of the agent help nobody.
    refused(&agent.get(&at(&format!("/files/download?path={d}/secret"))));
    refused(&agent.get(&at(&format!("/files/download?path={d}/link"))));
    refused(&agent.get(&at(&format!("/files/info?path={d}/closed/f"))));
    refused(&agent.get(&at(&format!("/directories/list?path={d}/closed"))));
    refused(&agent.get(&at(&format!("/files/search?path={d}"))));
    refused(&agent.delete(&at(&format!("/files?path={d}/closed/f"))));
    refused(&agent.post(&at("/files/permissions"), &json!({ (d.clone() + "/secret"): { "mode": 666 } })));
    refused(
        &agent.post(&at("/files/replace"), &json!({ (d.clone() + "/secret"): { "old": "r", "new": "" } })),
    );
    refused(&agent.post(&at("/files/mv"), &json!([{ "src": dir.join("closed/f"), "dest": dir.join("g") }])));
    refused(&agent.post(&at("/directories"), &json!({ (d.clone() + "/closed/x"): {} })));
    for name in ["secret", "link", "closed/f", "closed/new"] {
        refused(&upload(&agent, &at(""), &dir.join(name), &json!({}), b"mine"));
    }
    // Neither can a file be given away, and then it is not left behind either.
    for rest in [json!({ "owner": "root" }), json!({ "group": "root" })] {
        refused(&upload(&agent, &at(""), &dir.join("given"), &rest, b"x"));
    }
    assert_eq!(fs::read(&secret).unwrap(), b"root's");
    assert_eq!(names(&dir), ["closed", "link", "secret"]);
    // Root's own capabilities are root's, without the agent's groups.
    assert_eq!(agent.get(&format!("/v1/filesystem/0/{GID}/files/download?path={d}/secret")).text(), "root's");
    // And the agent itself is as it was, once the threads of these calls have ended.
    until(|| {
        let mut tasks = fs::read_dir(format!("/proc/{}/task", agent.child.id())).unwrap();
        let own = tasks.all(|task| {
            let status = fs::read_to_string(task.unwrap().path().join("status"));
            status.is_ok_and(|status| status.contains("Uid:\t0\t0\t0\t0") && status.contains("Groups:\t4711"))
        });
        own.then_some(())
    });
}

#[test]
fn ids_out_of_range_are_400_and_an_impossible_identity_is_503() {
    let agent = Agent::start();
    for ids in ["4294967295/0", "0/4294967295", "x/0", "-1/0", "0/1.5", "99999999999/0"] {
        let answer = agent.get(&format!("/v1/filesystem/{ids}/files/info"));
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")), "{ids}");
    }
    if !root() {
        return;
    }
    for weak in [
        &["--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"][..],
        &["--reuid=41000", "--regid=41000", "--clear-groups"],
    ] {
        let agent = through(weak);
        let answer = agent.get(&at("/files/info"));
        let code = answer.json()["code"].clone();
        assert_eq!((answer.status, &code), (503, &json!("FILESYSTEM_IDENTITY_UNAVAILABLE")), "{weak:?}");
        assert_eq!(agent.get("/files/info").status, 200);
    }
    // Its own identity is one that any agent has.
    let agent = through(&["--reuid=41000", "--regid=41000", "--clear-groups"]);
    assert_eq!(agent.get("/v1/filesystem/41000/41000/files/info?path=/").status, 200);
}

#[test]
fn identities_at_once_do_not_mix() {
    if !root() {
        return;
    }
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    std::thread::scope(|threads| {
        for id in 0..12_u32 {
            let (agent, dir) = (&agent, &dir);
            threads.spawn(move || {
                for round in 0..10 {
                    let path = dir.join(format!("{id}-{round}"));
                    let (prefix, expected) = match id {
                        0 => (String::new(), (0, 0)),
                        id => (
                            format!("/v1/filesystem/{}/{}", 50_000 + id, 60_000 + id),
                            (50_000 + id, 60_000 + id),
                        ),
                    };
                    assert_eq!(upload(agent, &prefix, &path, &json!({}), &[7; 300_000]).status, 200);
                    assert_eq!(owner(&path), expected);
                }
            });
        }
    });
    assert_eq!(names(&dir).len(), 120);
}

#[test]
fn a_file_is_rewritten_where_a_new_one_is_not_allowed() {
    if !root() {
        return;
    }
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    let make = |name: &str, owned: (u32, u32), mode: u32| {
        let path = dir.join(name);
        fs::write(&path, "old content, longer than the new").unwrap();
        chown(&path, Some(owned.0), Some(owned.1)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (path.metadata().unwrap().ino(), path)
    };
    let (inode, own) = make("own", (UID, GID), 0o600);
    let (foreign_inode, foreign) = make("foreign", (7, GID), 0o660);
    let check = |path: &Path, inode: u64, owned: (u32, u32)| {
        let answer = upload(&agent, &at(""), path, &json!({}), b"new");
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(fs::read(path).unwrap(), b"new");
        assert_eq!((path.metadata().unwrap().ino(), owner(path)), (inode, owned));
    };
    // Somebody else's file stays somebody else's.
    check(&foreign, foreign_inode, (7, GID));
    // In a sticky directory it cannot be replaced, in a closed one nothing can.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    check(&foreign, foreign_inode, (7, GID));
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    check(&own, inode, (UID, GID));
    check(&foreign, foreign_inode, (7, GID));
    assert_eq!(names(&dir), ["foreign", "own"]);
    refused(&upload(&agent, &at(""), &dir.join("new"), &json!({}), b""));
}

#[test]
fn a_fifo_holds_nobody_up() {
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    let fifo = dir.join("fifo");
    assert!(Command::new("mkfifo").args(["-m", "666"]).arg(&fifo).status().unwrap().success());
    let prefixes = if root() { vec![String::new(), at("")] } else { vec![String::new()] };
    for prefix in prefixes {
        for _ in 0..20 {
            let answer = agent.get(&format!("{prefix}/files/download?path={}", fifo.display()));
            assert!(
                answer.status == 500 && answer.text().contains("not a regular file"),
                "{}",
                answer.text()
            );
        }
        assert_eq!(upload(&agent, &prefix, &fifo, &json!({}), b"x").status, 500);
        let replace = json!({ fifo.to_str().unwrap(): { "old": "a", "new": "b" } });
        assert_eq!(agent.post(&format!("{prefix}/files/replace"), &replace).status, 500);
        let info = agent.get(&format!("{prefix}/files/info?path={}", fifo.display())).json();
        assert_eq!(info[fifo.to_str().unwrap()]["type"], "other");
    }
}

#[test]
fn swapped_path_components_lead_nowhere_new() {
    if !root() {
        return;
    }
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    let (open, closed) = (dir.join("open"), dir.join("closed"));
    for (path, mode) in [(&open, 0o777), (&closed, 0o755)] {
        fs::create_dir(path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::write(closed.join("f"), "safe").unwrap();
    let stop = AtomicBool::new(false);
    let content = vec![b'n'; 200_000];
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for target in [&open, &closed] {
                    let _ = fs::remove_file(dir.join("next"));
                    symlink(target, dir.join("next")).unwrap();
                    fs::rename(dir.join("next"), dir.join("swap")).unwrap();
                }
            }
        });
        let mut done = 0;
        for round in 0..150 {
            let answer = upload(&agent, &at(""), &dir.join("swap/f"), &json!({}), &content);
            done += u32::from(answer.status == 200);
            if round == 149 && done == 0 {
                stop.store(true, Ordering::Relaxed);
                panic!("never written: {}", answer.text());
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::read(closed.join("f")).unwrap(), b"safe");
    assert_eq!((names(&closed), names(&open)), (vec!["f".to_owned()], vec!["f".to_owned()]));
    assert!(fs::read(open.join("f")).unwrap() == content);
}

#[test]
fn a_client_that_leaves_in_the_middle_leaves_nothing() {
    let agent = Agent::start();
    let dir = shared(&agent, "d");
    let prefixes = if root() { vec![String::new(), at("")] } else { vec![String::new()] };
    for prefix in prefixes {
        let mut stream = agent.connect();
        let meta = json!({ "path": dir.join("f") }).to_string();
        let (kind, body) =
            form(&[("metadata", Some("m"), meta.as_bytes()), ("file", Some("f"), &vec![1; 2_000_000])]);
        write!(
            stream,
            "POST {prefix}/files/upload HTTP/1.1\r\nHost: b\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        )
        .unwrap();
        stream.write_all(&body[..1_500_000]).unwrap();
        crate::support::until(|| names(&dir).first().map(|name| assert!(name.starts_with(".execd-upload-"))));
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
        drop(stream);
        crate::support::until(|| names(&dir).is_empty().then_some(()));
    }
}
