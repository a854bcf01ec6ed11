//! `/files` and `/directories`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use serde_json::json;

use crate::support::{Agent, chunked, form, until};

fn meta(path: &std::path::Path, rest: &serde_json::Value) -> Vec<u8> {
    let mut value = rest.clone();
    value["path"] = json!(path);
    value.to_string().into_bytes()
}

#[test]
fn uploads_of_many_pairs_in_small_chunks() {
    let agent = Agent::start();
    let (a, b) = (agent.path("new/dir/a.txt"), agent.path("b.bin"));
    let big: Vec<u8> = (0..1_000_000_u32).flat_map(|n| n.to_le_bytes()).collect();
    let (kind, body) = form(&[
        ("note", None, b"ignored"),
        ("metadata", Some("metadata"), &meta(&a, &json!({ "owner": null, "group": null, "mode": 600 }))),
        ("file", Some("a.txt"), b"hello\r\n--opensandbox"),
        ("metadata", Some("metadata"), &meta(&b, &json!({}))),
        ("file", Some("b.bin"), &big),
    ]);
    let headers = [("Content-Type", kind.as_str()), ("Transfer-Encoding", "chunked")];
    let answer = agent.send("POST", "/files/upload", &headers, &chunked(&body, 9973));
    assert_eq!((answer.status, answer.header("content-length"), answer.body.len()), (200, Some("0"), 0));
    assert_eq!(fs::read(&a).unwrap(), b"hello\r\n--opensandbox");
    assert_eq!(fs::metadata(&a).unwrap().mode() & 0o7777, 0o600);
    assert!(fs::read(&b).unwrap() == big);
    assert_eq!(fs::metadata(&b).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_dir(agent.dir.path()).unwrap().count(), 2 + usize::from(agent.path("env").exists()));
}

#[test]
fn an_upload_keeps_what_it_does_not_change() {
    let agent = Agent::start();
    fs::write(agent.path("real"), "old").unwrap();
    fs::set_permissions(agent.path("real"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("real", agent.path("link")).unwrap();
    let (kind, body) = form(&[
        ("metadata", Some("metadata"), &meta(&agent.path("link"), &json!({}))),
        ("file", Some("f"), b"new"),
    ]);
    let headers = [("Content-Type", kind.as_str())];
    assert_eq!(agent.send("POST", "/files/upload", &headers, &body).status, 200);
    assert!(fs::symlink_metadata(agent.path("link")).unwrap().is_symlink());
    assert_eq!(fs::read(agent.path("real")).unwrap(), b"new");
    assert_eq!(fs::metadata(agent.path("real")).unwrap().mode() & 0o7777, 0o640);
    // A form that breaks off changes nothing.
    let cut = &body[..body.len() - 12];
    let answer = agent.send("POST", "/files/upload", &headers, cut);
    assert_eq!(answer.status, 400);
    assert_eq!(fs::read(agent.path("real")).unwrap(), b"new");
    assert!(
        !fs::read_dir(agent.dir.path()).unwrap().any(|e| e
            .unwrap()
            .file_name()
            .to_string_lossy()
            .contains("upload"))
    );
}

#[test]
fn bad_forms_have_their_codes() {
    let agent = Agent::start();
    let good = meta(&agent.path("x"), &json!({}));
    let cases: [(&[crate::support::Part<'_>], &str); 6] = [
        (&[], "INVALID_FILE_METADATA"),
        (&[("metadata", Some("m"), &good)], "INVALID_FILE_CONTENT"),
        (&[("metadata", Some("m"), b"{"), ("file", Some("f"), b"")], "INVALID_FILE_METADATA"),
        (&[("metadata", Some("m"), b"{\"path\":\"\"}"), ("file", Some("f"), b"")], "INVALID_FILE_METADATA"),
        (&[("metadata", None, &good), ("file", Some("f"), b"")], "INVALID_FILE"),
        (
            &[("metadata", Some("m"), &good), ("metadata", Some("m"), &good), ("file", Some("f"), b"")],
            "INVALID_FILE",
        ),
    ];
    for (parts, code) in cases {
        let (kind, body) = form(parts);
        let answer = agent.send("POST", "/files/upload", &[("Content-Type", &kind)], &body);
        assert_eq!(
            (answer.status, answer.json()["code"].as_str().unwrap()),
            (400, code),
            "{}",
            answer.text()
        );
    }
    assert_eq!(agent.post("/files/upload", &json!({})).json()["code"], "INVALID_FILE");
    assert!(!agent.path("x").exists());
}

#[test]
fn downloads_whole_in_ranges_and_by_lines() {
    let agent = Agent::start();
    let text: String = (1..=1000).map(|n| format!("line {n}\r\n")).collect();
    fs::write(agent.path("t.txt"), &text).unwrap();
    let target = format!("/files/download?path={}", agent.path("t.txt").display());
    let whole = agent.get(&target);
    assert_eq!((whole.status, whole.text()), (200, text.clone()));
    assert_eq!(whole.header("content-disposition"), Some("attachment; filename=\"t.txt\""));
    assert_eq!(whole.header("content-type"), Some("application/octet-stream"));
    assert_eq!(whole.header("content-length").unwrap(), text.len().to_string());
    let modified = whole.header("last-modified").unwrap().to_owned();
    assert_eq!(agent.send("GET", &target, &[("If-Modified-Since", &modified)], b"").status, 304);
    let range = |r: &str| agent.send("GET", &target, &[("Range", r)], b"");
    let part = range("bytes=5-9");
    assert_eq!((part.status, part.text().as_bytes()), (206, &text.as_bytes()[5..10]));
    assert_eq!(part.header("content-range").unwrap(), format!("bytes 5-9/{}", text.len()));
    assert_eq!(range("bytes=-4").text(), text[text.len() - 4..]);
    assert_eq!(range("bytes=nope").status, 416);
    assert_eq!(range("bytes=nope").json()["code"], "UNKNOWN");
    let beyond = range("bytes=999999-");
    assert_eq!(
        (beyond.status, beyond.header("content-range").unwrap().to_owned()),
        (416, format!("bytes */{}", text.len()))
    );
    let lines = agent.get(&format!("{target}&offset=3&limit=2"));
    assert_eq!(
        (lines.text().as_str(), lines.header("content-type")),
        ("line 3\nline 4", Some("text/plain; charset=utf-8"))
    );
    assert_eq!(agent.get(&format!("{target}&offset=5000")).body, b"");
    assert_eq!(agent.get(&format!("{target}&limit=0")).status, 400);
    assert_eq!(agent.send("GET", &format!("{target}&limit=1"), &[("Range", "bytes=0-1")], b"").status, 400);
    assert_eq!(agent.get("/files/download?path=/no/such").json()["code"], "FILE_NOT_FOUND");
    assert_eq!(agent.get("/files/download").json()["code"], "MISSING_QUERY");
    assert_eq!(agent.get("/files/download?path=/tmp").status, 500);
    assert!(agent.get("/files/download?path=/proc/self/status").text().contains("execd"));
    fs::write(agent.path("empty"), "").unwrap();
    let empty = agent.get(&format!("/files/download?path={}", agent.path("empty").display()));
    assert_eq!((empty.status, empty.header("content-length")), (200, Some("0")));
}

#[test]
fn info_move_permissions_and_delete() {
    let agent = Agent::start();
    let file = agent.path("f");
    fs::write(&file, "12345").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4644)).unwrap();
    symlink("f", agent.path("l")).unwrap();
    let raw = format!("{}/./f", agent.dir.path().display());
    let info = agent.get(&format!("/files/info?path={raw}&path={}", agent.path("l").display())).json();
    assert_eq!(info[&raw]["path"], json!(file));
    assert_eq!(
        (&info[&raw]["type"], &info[&raw]["size"], &info[&raw]["mode"]),
        (&json!("file"), &json!(5), &json!(644))
    );
    for key in ["modified_at", "created_at", "owner", "group"] {
        assert!(!info[&raw][key].as_str().unwrap().is_empty(), "{key}");
    }
    assert_eq!(info[agent.path("l").to_str().unwrap()]["type"], "symlink");
    assert_eq!(agent.get("/files/info").json(), json!({}));
    assert_eq!(agent.get("/files/info?path=/no").status, 404);

    let mv = |src: &str, dest: &str| {
        agent.post("/files/mv", &json!([{ "src": agent.path(src), "dest": agent.path(dest) }]))
    };
    assert_eq!(mv("f", "deep/er/g").header("content-length"), Some("0"));
    fs::write(agent.path("other"), "").unwrap();
    let refused = mv("other", "deep/er/g");
    assert!(refused.status == 500 && refused.text().contains("destination path already exists"));
    assert_eq!(mv("gone", "x").status, 404);

    let target = agent.path("deep/er/g");
    let permissions = |body| agent.post("/files/permissions", &body);
    assert_eq!(permissions(json!({ target.to_str().unwrap(): { "mode": 751, "owner": null } })).status, 200);
    assert_eq!(fs::metadata(&target).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(permissions(json!({ target.to_str().unwrap(): { "mode": 788 } })).status, 500);
    assert_eq!(permissions(json!({ target.to_str().unwrap(): { "owner": "nobody-such" } })).status, 500);
    assert_eq!(permissions(json!({ "/no/such": { "mode": 600 } })).status, 500);

    let del = |path: &std::path::Path| agent.delete(&format!("/files?path={}", path.display()));
    assert_eq!(del(&target).status, 200);
    assert_eq!(del(&target).status, 200);
    assert_eq!(del(agent.dir.path()).status, 500);
    assert_eq!(del(&agent.path("l")).status, 200);
    assert!(fs::symlink_metadata(agent.path("l")).is_ok(), "a dangling link counts as missing");
}

#[test]
fn directories_and_search() {
    let agent = Agent::start();
    let root = agent.path("tree");
    let text = |p: &std::path::Path| p.to_str().unwrap().to_owned();
    let make = |path: &str, mode: i32| agent.post("/directories", &json!({ path: { "mode": mode } }));
    assert_eq!(make(&text(&root.join("b/c")), 700).status, 200);
    assert_eq!(fs::metadata(root.join("b/c")).unwrap().mode() & 0o777, 0o700);
    assert_eq!(make(&text(&root.join("b/c")), 755).status, 200);
    assert_eq!(fs::metadata(root.join("b/c")).unwrap().mode() & 0o777, 0o700);
    for name in ["a.py", "b/x.py", "b/c/y.txt", "z.md"] {
        fs::write(root.join(name), "").unwrap();
    }
    symlink("b", root.join("k")).unwrap();
    let names = |answer: crate::support::Answer| -> Vec<String> {
        let prefix = text(&root) + "/";
        let list = answer.json();
        list.as_array().unwrap().iter().map(|i| i["path"].as_str().unwrap().replace(&prefix, "")).collect()
    };
    let list = |rest: &str| agent.get(&format!("/directories/list?path={}{rest}", root.display()));
    assert_eq!(names(list("")), ["a.py", "b", "k", "z.md"]);
    assert_eq!(names(list("&depth=2")), ["a.py", "b", "b/c", "b/x.py", "k", "z.md"]);
    assert_eq!(names(list("&depth=9")), ["a.py", "b", "b/c", "b/c/y.txt", "b/x.py", "k", "z.md"]);
    assert_eq!(list("&depth=0").text(), "[]");
    assert_eq!(list("&depth=-1").json()["code"], "INVALID_REQUEST_BODY");
    assert_eq!(agent.get(&format!("/directories/list?path={}", root.join("k").display())).status, 400);
    assert_eq!(agent.get("/directories/list?path=/no").status, 404);
    assert_eq!(agent.get("/directories/list").json()["code"], "MISSING_QUERY");

    let search = |pattern: &str| agent.get(&format!("/files/search?path={}{pattern}", root.display()));
    assert_eq!(names(search("&pattern=%2A.py")), ["a.py", "b/x.py"]);
    assert_eq!(names(search("")), ["a.py", "b/c/y.txt", "b/x.py", "k", "z.md"]);
    assert_eq!(names(search("&pattern=!(*.py)")), ["b/c/y.txt", "k", "z.md"]);
    assert_eq!(search("&pattern=%5Ba").status, 500);
    assert_eq!(agent.get("/files/search?path=/no/such").status, 404);

    let remove = || agent.delete(&format!("/directories?path={}", root.display()));
    assert_eq!((remove().status, root.exists(), remove().status), (200, false, 200));
}

#[test]
fn replace_in_files() {
    let agent = Agent::start();
    let file = agent.path("f");
    let key = file.to_str().unwrap();
    fs::write(&file, "aXbXc").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let plain = agent.post("/files/replace", &json!({ key: { "old": "X", "new": "--" } }));
    assert_eq!((plain.status, plain.body.len(), plain.header("content-length")), (200, 0, Some("0")));
    assert_eq!(fs::read_to_string(&file).unwrap(), "a--b--c");
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    let verbose = agent.post("/files/replace?verbose=true", &json!({ key: { "old": "-", "new": "" } }));
    assert_eq!(verbose.json(), json!({ key: { "replacedCount": 4 } }));
    assert_eq!(
        agent.post("/files/replace?verbose=true", &json!({ key: { "old": "q", "new": "" } })).json()[key]["replacedCount"],
        0
    );
    assert_eq!(agent.post("/files/replace", &json!({ key: { "old": "", "new": "" } })).status, 400);
    assert_eq!(agent.post("/files/replace", &json!({ "/no": { "old": "a", "new": "" } })).status, 404);
}

#[test]
fn a_small_request_cannot_make_a_huge_file_or_agent() {
    let agent = Agent::start();
    let file = agent.path("f");
    let key = file.to_str().unwrap();
    fs::write(&file, "a".repeat(4 << 20)).unwrap();
    let grow = agent.post("/files/replace", &json!({ key: { "old": "a", "new": "b".repeat(1000) } }));
    assert_eq!((grow.status, &grow.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")));
    assert!(grow.json()["message"].as_str().unwrap().contains("4194304000 bytes"), "{}", grow.text());
    assert_eq!(fs::metadata(&file).unwrap().len(), 4 << 20);
    let count = fs::read_dir(agent.dir.path()).unwrap().count();
    let grow = agent.post("/files/replace?verbose=1", &json!({ key: { "old": "a", "new": "b".repeat(12) } }));
    assert_eq!(grow.json(), json!({ key: { "replacedCount": 4 << 20 } }));
    assert_eq!(fs::metadata(&file).unwrap().len(), 12 * (4 << 20));
    assert_eq!(fs::read_dir(agent.dir.path()).unwrap().count(), count);
    let status = fs::read_to_string(format!("/proc/{}/status", agent.child.id())).unwrap();
    let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 64 << 10, "{peak} KiB");
}

#[test]
fn a_scan_for_a_far_line_ends_with_its_client() {
    let agent = Agent::start();
    // Sparse, but far too long to be read through within the test.
    fs::File::create(agent.path("sparse")).unwrap().set_len(1 << 42).unwrap();
    let target = format!("/files/download?path={}&offset=999999999&limit=1", agent.path("sparse").display());
    let mut clients: Vec<_> = (0..8).map(|_| agent.connect()).collect();
    for client in &mut clients {
        write!(client, "GET {target} HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
    }
    // They take turns with others, and stop when nobody waits for them any more.
    let info = || agent.get(&format!("/files/info?path={}", agent.path("sparse").display())).status;
    assert_eq!(info(), 200);
    drop(clients);
    let threads = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", agent.child.id())).unwrap();
        tasks
            .filter_map(|t| fs::read_to_string(t.unwrap().path().join("stat")).ok())
            .filter(|s| s.contains(") R "))
            .count()
    };
    until(|| (threads() == 0).then_some(()));
    assert_eq!(info(), 200);
}
