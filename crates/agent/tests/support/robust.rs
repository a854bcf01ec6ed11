//! Files that are large, many, in the way or out of space; clients that are slow or gone.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::{Agent, Answer, Part, copy_program, form, until};

fn peak(agent: &Agent) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.child.id())).unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse().unwrap()
}

fn send(agent: &Agent, parts: &[Part<'_>]) -> Answer {
    let (kind, body) = form(parts);
    agent.send("POST", "/files/upload", &[("Content-Type", &kind)], &body)
}

fn put(agent: &Agent, path: &Path, content: &[u8]) -> Answer {
    let meta = json!({ "path": path }).to_string();
    send(agent, &[("metadata", Some("m"), meta.as_bytes()), ("file", Some("f"), content)])
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A small file system of its own, where one can be made.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=1m", "small"];
        let done = Command::new("mount").args(mount).arg(&at).stderr(std::process::Stdio::null()).status();
        done.is_ok_and(|status| status.success()).then_some(Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_told_and_keeps_what_was_there() {
    let agent = Agent::start();
    let Some(small) = Small::mount(agent.path("small")) else { return };
    let old = small.0.join("old");
    fs::write(&old, "precious").unwrap();
    let refused = |answer: &Answer| {
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(answer.status == 500 && message.contains("no space left on device"), "{message}");
        assert_eq!(fs::read(&old).unwrap(), b"precious");
    };
    refused(&put(&agent, &old, &vec![1; 8 << 20]));
    assert_eq!(names(&small.0), ["old"]);
    // The same where the file must stay the one that it is.
    fs::hard_link(&old, small.0.join("second")).unwrap();
    refused(&put(&agent, &old, &vec![1; 700 << 10]));
    assert_eq!(names(&small.0), ["old", "second"]);
    assert_eq!(put(&agent, &old, &vec![1; 300 << 10]).status, 200);
    assert_eq!(fs::metadata(small.0.join("second")).unwrap().len(), 300 << 10);
    assert_eq!(put(&agent, &old, b"precious").status, 200);
    let grow = json!({ old.to_str().unwrap(): { "old": "r", "new": "r".repeat(2 << 20) } });
    refused(&agent.post("/files/replace", &grow));
    // One of several that does not fit: none is put in place.
    let meta = |name: &str| json!({ "path": small.0.join(name) }).to_string();
    let (a, b) = (meta("a"), meta("b"));
    refused(&send(
        &agent,
        &[
            ("metadata", Some("m"), a.as_bytes()),
            ("file", Some("f"), b"fits"),
            ("metadata", Some("m"), b.as_bytes()),
            ("file", Some("f"), &vec![0; 2 << 20]),
        ],
    ));
    assert_eq!(names(&small.0), ["old", "second"]);
}

#[test]
fn a_file_with_several_names_or_attributes_stays_the_same_file() {
    let agent = Agent::start();
    let file = agent.path("f");
    fs::write(&file, "long old content").unwrap();
    let inode = file.metadata().unwrap().ino();
    fs::hard_link(&file, agent.path("g")).unwrap();
    assert_eq!(put(&agent, &file, b"new").status, 200);
    assert_eq!(
        (fs::read(agent.path("g")).unwrap(), file.metadata().unwrap().ino()),
        (b"new".to_vec(), inode)
    );
    fs::remove_file(agent.path("g")).unwrap();
    // With one name it is a new file, and a reader keeps the old one to its end.
    let mut reader = fs::File::open(&file).unwrap();
    assert_eq!(put(&agent, &file, b"newer").status, 200);
    assert_ne!(file.metadata().unwrap().ino(), inode);
    let mut seen = String::new();
    reader.read_to_string(&mut seen).unwrap();
    assert_eq!((seen.as_str(), fs::read(&file).unwrap()), ("new", b"newer".to_vec()));
    // A program that runs can be replaced as well.
    let program = agent.path("program");
    copy_program("/bin/sleep", &program);
    let mut child = Command::new(&program).arg("60").spawn().unwrap();
    let answer = put(&agent, &program, b"#!/bin/sh\n");
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!((answer.status, fs::read(&program).unwrap()), (200, b"#!/bin/sh\n".to_vec()));
}

#[test]
fn what_a_killed_agent_left_is_swept() {
    let env = [("OPENSANDBOX_ID", "box-1")];
    let mut agent = Agent::start_with(&[], &env);
    let dir = agent.path("d");
    fs::create_dir(&dir).unwrap();
    let meta = json!({ "path": dir.join("f") }).to_string();
    let (kind, body) =
        form(&[("metadata", Some("m"), meta.as_bytes()), ("file", Some("f"), &vec![1; 900_000])]);
    let mut stream = agent.connect();
    write!(
        stream,
        "POST /files/upload HTTP/1.1\r\nHost: b\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .unwrap();
    stream.write_all(&body[..800_000]).unwrap();
    until(|| (!names(&dir).is_empty()).then_some(()));
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    assert_eq!(names(&dir).len(), 1);
    // What belongs to others stays: of another box, and what only looks like it.
    fs::write(dir.join(".execd-upload-12345678-12345678-x"), "").unwrap();
    fs::write(dir.join(".execd-upload-mine"), "").unwrap();
    let next = Agent::start_with(&[], &env);
    assert_eq!(put(&next, &dir.join("g"), b"x").status, 200);
    assert_eq!(names(&dir), [".execd-upload-12345678-12345678-x", ".execd-upload-mine", "g"]);
}

#[test]
fn memory_does_not_grow_with_what_is_sent() {
    let agent = Agent::start();
    assert_eq!(agent.get("/ping").status, 200);
    let before = peak(&agent);
    let big = vec![b'x'; 48 << 20];
    // A part that nobody wants, a head without an end, and metadata that is none.
    assert_eq!(send(&agent, &[("other", None, &big)]).json()["code"], "INVALID_FILE_METADATA");
    assert_eq!(send(&agent, &[("metadata", Some("m"), &big)]).json()["code"], "INVALID_FILE_METADATA");
    let head = [b"--B\r\nX: ".to_vec(), big.clone()].concat();
    let kind = ("Content-Type", "multipart/form-data; boundary=B");
    assert_eq!(agent.send("POST", "/files/upload", &[kind], &head).json()["code"], "INVALID_FILE");
    assert_eq!(put(&agent, &agent.path("big"), &big).status, 200);
    let whole = agent.get(&format!("/files/download?path={}", agent.path("big").display()));
    assert!(whole.body == big);
    // One line, and carriage returns that may be its end or not.
    let line = agent.get(&format!("/files/download?path={}&limit=1", agent.path("big").display()));
    assert!(line.body == big);
    let returns = [vec![b'\r'; 5 << 20], b"x\r\r\n".to_vec()].concat();
    fs::write(agent.path("returns"), &returns).unwrap();
    let line = agent.get(&format!("/files/download?path={}&limit=1", agent.path("returns").display()));
    assert!(line.body == returns[..returns.len() - 3]);
    assert!(peak(&agent) < before + (16 << 10), "{} KiB, {before} before", peak(&agent));
}

#[test]
fn thousands_of_files_in_one_form() {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 200; exec \"$@\"", "sh", crate::support::BINARY]);
    let agent = Agent::launch(limited, &[], &[]);
    let metas: Vec<String> =
        (0..2000).map(|n| json!({ "path": agent.path(&format!("{n}/f")) }).to_string()).collect();
    let mut parts: Vec<Part<'_>> = Vec::new();
    for meta in &metas {
        parts.push(("metadata", Some("m"), meta.as_bytes()));
        parts.push(("file", Some("f"), meta.as_bytes()));
    }
    let answer = send(&agent, &parts);
    assert_eq!(answer.status, 200, "{}", answer.text());
    for (n, meta) in metas.iter().enumerate() {
        assert_eq!(fs::read_to_string(agent.path(&format!("{n}/f"))).unwrap(), *meta);
        assert_eq!(names(&agent.path(&n.to_string())), ["f"]);
    }
}

#[test]
fn a_directory_of_a_hundred_thousand() {
    let agent = Agent::start();
    let dir = agent.path("d");
    fs::create_dir_all(dir.join("sub/deep")).unwrap();
    symlink("..", dir.join("sub/up")).unwrap();
    symlink("self", dir.join("self")).unwrap();
    for n in 0..100_000 {
        fs::hard_link(agent.path(&format!("seed{}", n / 50_000)), dir.join(format!("f{n:06}")))
            .unwrap_or_else(|_| {
                fs::write(agent.path(&format!("seed{}", n / 50_000)), "").unwrap();
                fs::hard_link(agent.path(&format!("seed{}", n / 50_000)), dir.join(format!("f{n:06}")))
                    .unwrap();
            });
    }
    let before = peak(&agent);
    let list = agent.get(&format!("/directories/list?path={}", dir.display()));
    let list = list.json();
    let listed: Vec<&str> = list.as_array().unwrap().iter().map(|i| i["path"].as_str().unwrap()).collect();
    assert_eq!(listed.len(), 100_002);
    assert!(listed.is_sorted());
    let search =
        |pattern: &str| agent.get(&format!("/files/search?path={}&pattern={pattern}", dir.display()));
    assert_eq!(search("f09999%3F").json().as_array().unwrap().len(), 10);
    assert_eq!(search("{up,self,deep}").json().as_array().unwrap().len(), 2);
    assert!(peak(&agent) < before + (24 << 10), "{} KiB, {before} before", peak(&agent));
    // A client that leaves early ends it, and is not noticed otherwise.
    let mut client = agent.connect();
    write!(client, "GET /directories/list?path={} HTTP/1.1\r\nHost: b\r\n\r\n", dir.display()).unwrap();
    client.read_exact(&mut [0; 1000]).unwrap();
    drop(client);
    assert_eq!(agent.delete(&format!("/directories?path={}", dir.display())).status, 200);
    assert!(!dir.exists());
}

#[test]
fn slow_readers_hold_no_thread() {
    let agent = Agent::start();
    fs::write(agent.path("big"), "line\n".repeat(4 << 20)).unwrap();
    let big = agent.path("big").display().to_string();
    let mut slow: Vec<_> = (0..24).map(|_| agent.connect()).collect();
    for (n, client) in slow.iter_mut().enumerate() {
        let query = if n % 2 == 0 { "&offset=2" } else { "" };
        write!(client, "GET /files/download?path={big}{query} HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
        let mut head = [0; 15];
        client.read_exact(&mut head).unwrap();
        assert_eq!(&head, b"HTTP/1.1 200 OK");
    }
    for _ in 0..20 {
        assert_eq!(agent.get(&format!("/files/info?path={big}")).status, 200);
    }
}

#[test]
fn files_that_do_not_know_their_size() {
    let agent = Agent::start();
    let get = |path: &str| agent.get(&format!("/files/download?path={path}"));
    for path in ["/proc/self/mounts", "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/kallsyms"] {
        let Ok(expected) = fs::read(path) else { continue };
        let answer = get(path);
        assert_eq!(answer.status, 200, "{path}");
        if path != "/proc/kallsyms" {
            assert_eq!(answer.header("content-length").unwrap(), answer.body.len().to_string(), "{path}");
        }
        assert_eq!(answer.body.len(), expected.len(), "{path}");
    }
    for (path, what) in [("/dev/zero", "not a regular file"), ("/tmp", "is a directory")] {
        let answer = get(path);
        assert!(answer.status == 500 && answer.text().contains(what), "{}", answer.text());
    }
}

#[test]
fn a_refusal_reaches_a_client_that_is_still_sending() {
    let agent = Agent::start();
    // The target is a directory, which is known long before all of the content has arrived.
    let answer = put(&agent, agent.dir.path(), &vec![0; 64 << 20]);
    assert!(answer.status == 500 && answer.text().contains("is a directory"), "{}", answer.text());
}

#[test]
fn a_box_at_its_limit_of_processes_still_answers() {
    if Path::new("/proc/self").metadata().unwrap().uid() != 0 {
        return;
    }
    // The agent's own thread and one more; root itself has no such limit.
    let mut limited = Command::new("prlimit");
    limited.args(["--nproc=2", "setpriv", "--reuid=41777", "--regid=41777", "--clear-groups", "--"]);
    limited.arg(crate::support::BINARY);
    let agent = Agent::launch(limited, &[], &[]);
    std::thread::scope(|threads| {
        for _ in 0..12 {
            threads.spawn(|| {
                for _ in 0..10 {
                    assert_eq!(agent.get("/files/info?path=/").status, 200);
                    assert_eq!(agent.get("/directories/list?path=/").status, 200);
                }
            });
        }
    });
    let answer = agent.get("/v1/filesystem/41777/41777/files/info?path=/");
    assert_eq!((answer.status, &answer.json()["code"]), (503, &json!("FILESYSTEM_IDENTITY_UNAVAILABLE")));
    assert_eq!(agent.get("/metrics").status, 200);
}
