//! Checkouts: from a mirror and from the remote, deep and shallow, with submodules and large files, and again into the same folder.

use std::fs;

use crate::support::{Author, Bench, HttpServer, TOKEN, git, token};
use sandglass_repository::git::{Checkout, FailureClass, Present, Remote, stands_at};
use sandglass_repository::{HostAllowList, Reference, RepositoryUrl};

fn wanted<'a>(
    remote: Remote<'a>,
    resolved: &'a sandglass_repository::git::Resolved,
    folder: &'a std::path::Path,
) -> Checkout<'a> {
    Checkout { remote, resolved, mirror: None, folder, depth: None, submodules: false, lfs: false }
}

#[tokio::test]
async fn a_branch_is_checked_out_from_a_mirror_with_the_history_that_is_asked_for() {
    let server = HttpServer::start();
    let author = Author::new();
    for number in 1..=4 {
        author.commit("a", &number.to_string());
    }
    git(author.path(), &["tag", "v1"]);
    author.push(&server.bare("private/web.git"));
    let bench = Bench::new();
    let url = server.url("private/web.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let resolved =
        bench.git.resolve(remote, &Reference::parse("main").unwrap(), bench.control()).await.unwrap();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    for (depth, commits) in [(Some(1), "1"), (Some(2), "2"), (None, "4")] {
        let folder = bench.work(&format!("depth-{depth:?}").replace(['(', ')'], ""));
        let checkout = Checkout { mirror: Some(&mirror), depth, ..wanted(remote, &resolved, &folder) };
        let before = server.requests().len();
        let done = bench.git.checkout(&checkout, bench.control()).await.unwrap();
        assert_eq!(server.requests().len(), before, "the mirror has everything");
        assert_eq!((done.commit.as_str(), done.branch.as_deref()), (resolved.commit(), Some("main")));
        assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "4");
        assert_eq!(git(&folder, &["rev-list", "--count", "HEAD"]), commits, "{depth:?}");
        assert_eq!(git(&folder, &["status", "--porcelain"]), "");
        assert_eq!(git(&folder, &["rev-parse", "--abbrev-ref", "main@{upstream}"]), "origin/main");
        let config = fs::read_to_string(folder.join(".git/config")).unwrap();
        assert!(config.contains(&url.to_string()) && !config.contains(TOKEN), "{config}");
    }
    assert_eq!(git(&bench.work("depth-None"), &["tag"]), "v1");
}

#[tokio::test]
async fn tags_and_commits_are_checked_out_from_the_remote_itself() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    git(author.path(), &["tag", "-a", "-m", "x", "v1"]);
    author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    for (index, (asked, depth)) in
        [("v1", Some(1)), ("v1", None), (first.as_str(), Some(1)), (first.as_str(), None)]
            .into_iter()
            .enumerate()
    {
        let resolved =
            bench.git.resolve(remote, &Reference::parse(asked).unwrap(), bench.control()).await.unwrap();
        let folder = bench.work(&format!("w{index}"));
        let done = bench
            .git
            .checkout(&Checkout { depth, ..wanted(remote, &resolved, &folder) }, bench.control())
            .await
            .unwrap();
        assert_eq!((done.commit.as_str(), done.branch), (first.as_str(), None));
        assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "1");
    }
    let absent = Reference::parse(&"ab".repeat(20)).unwrap();
    let resolved = bench.git.resolve(remote, &absent, bench.control()).await.unwrap();
    let folder = bench.work("absent");
    let error = bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::RefNotFound, "{error:?}");
    let error = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::RefNotFound, "{error:?}");
}

#[tokio::test]
async fn a_folder_is_brought_from_one_commit_to_the_next() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let folder = bench.work("w");
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    bench
        .git
        .checkout(&Checkout { depth: Some(1), ..wanted(remote, &resolved, &folder) }, bench.control())
        .await
        .unwrap();
    fs::write(folder.join("node_modules"), "kept").unwrap();
    fs::write(folder.join("a"), "changed").unwrap();
    fs::write(folder.join(".git/index.lock"), "").unwrap();
    let second = author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let done = bench
        .git
        .checkout(&Checkout { depth: Some(1), ..wanted(remote, &resolved, &folder) }, bench.control())
        .await
        .unwrap();
    assert_eq!(done.commit, second);
    assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "2");
    assert_eq!(fs::read_to_string(folder.join("node_modules")).unwrap(), "kept");
}

#[tokio::test]
async fn a_server_that_hands_out_refs_alone_is_worked_with() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    git(author.path(), &["branch", "odd\"name"]);
    let second = author.commit("a", "2");
    author.push(&server.bare("old/web.git"));
    let bench = Bench::new();
    let url = server.url("old/web.git");
    let remote = Remote { url: &url, credential: None };
    for (commit, name, text) in [(&second, "main", "2"), (&first, "main", "1"), (&first, "odd\"name", "1")] {
        let name = format!("refs/heads/{name}");
        let pinned = bench.git.resolve_pinned(remote, commit, Some(&name), bench.control()).await.unwrap();
        let folder = bench.work(&format!("w{}{}", name.len(), &commit[..7]));
        let checkout = Checkout { depth: Some(1), ..wanted(remote, &pinned, &folder) };
        bench.git.checkout(&checkout, bench.control()).await.unwrap();
        assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), text);
        assert_eq!(git(&folder, &["symbolic-ref", "HEAD"]), name);
        let upstream = git(&folder, &["rev-parse", "--symbolic-full-name", "@{upstream}"]);
        assert_eq!(upstream, name.replace("refs/heads", "refs/remotes/origin"));
    }
}

#[tokio::test]
async fn refreshing_touches_no_files() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let checkout = Checkout { depth: Some(1), ..wanted(remote, &resolved, &folder) };
    bench.git.checkout(&checkout, bench.control()).await.unwrap();
    fs::write(folder.join("a"), "changed").unwrap();
    let second = author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    bench.git.refresh(remote, &folder, bench.control()).await.unwrap();
    assert_eq!(git(&folder, &["rev-parse", "HEAD"]), first);
    assert_eq!(git(&folder, &["rev-parse", "origin/main"]), second);
    assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "changed");
}

#[tokio::test]
async fn nothing_of_a_repository_is_run() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit(".gitattributes", "* filter=evil diff=evil merge=evil\n");
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let mark = bench.work("mark");
    bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap();
    // Whoever worked in the folder has left hooks and a monitor; the next run does not start them.
    let hooks = folder.join(".git/hooks");
    fs::create_dir_all(&hooks).unwrap();
    let hook = hooks.join("post-checkout");
    fs::write(&hook, format!("#!/bin/sh\ntouch {}\n", mark.display())).unwrap();
    fs::set_permissions(&hook, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    git(&folder, &["config", "core.fsmonitor", hook.to_str().unwrap()]);
    git(&folder, &["config", "credential.helper", &format!("!touch {}", mark.display())]);
    author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap();
    assert!(!mark.exists());
    assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "2");
}

#[tokio::test]
async fn submodules_are_checked_out_at_every_level_with_the_hosts_credential() {
    let server = HttpServer::start();
    let leaf = Author::new();
    leaf.commit("leaf", "leaf");
    leaf.push(&server.bare("private/leaf.git"));
    let middle = Author::new();
    middle.commit("middle", "middle");
    add_submodule(&middle, &server.bare("private/leaf.git"), "../leaf.git", "deps/leaf");
    middle.push(&server.bare("private/middle.git"));
    let top = Author::new();
    add_submodule(&top, &server.bare("private/middle.git"), "../middle.git", "lib");
    top.push(&server.bare("private/top.git"));
    let bench = Bench::with(|settings| {
        settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap();
        settings.policy.allow_file = false;
    });
    let url = server.url("private/top.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let checkout = Checkout {
        mirror: Some(&mirror),
        depth: Some(1),
        submodules: true,
        ..wanted(remote, &resolved, &folder)
    };
    let done = bench.git.checkout(&checkout, bench.control()).await.unwrap();
    assert_eq!(done.submodules, ["lib", "lib/deps/leaf"]);
    assert_eq!(fs::read_to_string(folder.join("lib/deps/leaf/leaf")).unwrap(), "leaf");
}

#[tokio::test]
async fn a_submodule_is_held_to_the_rules_for_addresses() {
    let server = HttpServer::start();
    let leaf = Author::new();
    leaf.commit("leaf", "leaf");
    leaf.push(&server.bare("open/leaf.git"));
    for (url, reason) in [
        ("https://evil.example/leaf.git", "host that is not allowed"),
        ("ext::sh -c 'touch /tmp/x'", "address that is not allowed"),
        ("file:///etc", "address that is not allowed"),
        ("/etc", "address that is not allowed"),
        ("--upload-pack=x", "address"),
    ] {
        let top = Author::new();
        add_submodule(&top, &server.bare("open/leaf.git"), url, "lib");
        top.push(&server.bare("open/top.git"));
        let bench = Bench::with(|settings| {
            settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap();
            settings.policy.allow_file = false;
        });
        let address = server.url("open/top.git");
        let remote = Remote { url: &address, credential: None };
        let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
        let folder = bench.work("w");
        let checkout = Checkout { submodules: true, ..wanted(remote, &resolved, &folder) };
        match bench.git.checkout(&checkout, bench.control()).await {
            Err(error) => {
                assert!(error.message.contains(reason) || url.starts_with("--"), "{url}: {error:?}")
            }
            // git itself passes over an address that reads as an option.
            Ok(done) => assert!(url.starts_with("--") && done.submodules.is_empty(), "{url}: {done:?}"),
        }
        assert!(!folder.join("lib/leaf").exists());
    }
}

#[tokio::test]
async fn large_files_come_with_the_checkout_when_asked_for() {
    let server = HttpServer::start();
    let content = "large\n".repeat(1000);
    let oid = sha256(content.as_bytes());
    fs::create_dir_all(server.root.path().join("lfs")).unwrap();
    fs::write(server.root.path().join("lfs").join(&oid), &content).unwrap();
    let author = Author::new();
    author.commit(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n");
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {}\n", content.len());
    author.commit("big.bin", &pointer);
    author.push(&server.bare("private/web.git"));
    let bench = Bench::new();
    let url = server.url("private/web.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let folder = bench.work("pointers");
    bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap();
    assert_eq!(fs::read_to_string(folder.join("big.bin")).unwrap(), pointer);
    let folder = bench.work("files");
    let checkout = Checkout { lfs: true, depth: Some(1), ..wanted(remote, &resolved, &folder) };
    bench.git.checkout(&checkout, bench.control()).await.expect("the package git-lfs is installed");
    assert_eq!(fs::read_to_string(folder.join("big.bin")).unwrap(), content);
    // Where the files are is for the repository to say, within the rules for addresses.
    author.commit(".lfsconfig", "[lfs]\n\turl = https://evil.example/store\n");
    author.push(&server.bare("private/web.git"));
    let bench = Bench::with(|settings| settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap());
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let folder = bench.work("elsewhere");
    let checkout = Checkout { lfs: true, ..wanted(remote, &resolved, &folder) };
    let error = bench.git.checkout(&checkout, bench.control()).await.unwrap_err();
    assert!(error.message.contains(".lfsconfig"), "{error:?}");
}

#[tokio::test]
async fn a_store_for_large_files_is_held_to_the_rules_however_it_is_written() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("store", "[lfs]\n\turl = https://evil.example/store\n");
    let config = author.path().join(".lfsconfig");
    let bench = Bench::with(|settings| settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap());
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let texts = [
        "[include]\n\tpath = store\n",
        "[includeIf \"gitdir:**\"]\n\tpath = store\n",
        "[lfs]\n\tfetchinclude = \"x\\nlfs.url=https://evil.example/store\"\n",
        "[lfs \"url=https://evil.example/\"]\n\tx = 1\n",
        "[lfs \"url=https://evil.example/\"]\n\tx\n",
        "[remote \"origin\"]\n\tlfsurl = https://evil.example/store\n",
    ];
    let links = ["store", "../elsewhere", "[lfs]\turl = https:evil.example"];
    let written = texts.iter().map(|text| (text, false)).chain(links.iter().map(|link| (link, true)));
    for (number, (text, link)) in written.enumerate() {
        let _ = fs::remove_file(&config);
        if link {
            std::os::unix::fs::symlink(text, &config).unwrap();
        } else {
            fs::write(&config, text).unwrap();
        }
        author.commit("number", &number.to_string());
        author.push(&server.bare("open/web.git"));
        let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
        let folder = bench.work(&number.to_string());
        let checkout = Checkout { lfs: true, ..wanted(remote, &resolved, &folder) };
        let error = bench.git.checkout(&checkout, bench.control()).await.unwrap_err();
        assert!(error.operation == "lfs" && error.message.starts_with(".lfsconfig "), "{text}: {error:?}");
    }
}

#[tokio::test]
async fn a_store_for_large_files_is_found_where_the_folder_does_not_show_it() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::with(|settings| settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap());
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let folder = bench.work("w");
    bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap();
    // As in a sparse checkout.
    git(&folder, &["config", "core.sparseCheckout", "true"]);
    fs::create_dir_all(folder.join(".git/info")).unwrap();
    fs::write(folder.join(".git/info/sparse-checkout"), "/a\n").unwrap();
    author.commit(".lfsconfig", "[lfs]\n\turl = https://evil.example/store\n");
    author.push(&server.bare("open/web.git"));
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let checkout = Checkout { lfs: true, ..wanted(remote, &resolved, &folder) };
    let error = bench.git.checkout(&checkout, bench.control()).await.unwrap_err();
    assert!(!folder.join(".lfsconfig").exists() && error.message.contains(".lfsconfig"), "{error:?}");
}

#[tokio::test]
async fn repositories_on_this_machines_disk_are_read_where_a_policy_opens_them() {
    let author = Author::new();
    let commit = author.commit("a", "1");
    let bench = Bench::new();
    let bare = bench.work("web.git");
    author.push(&bare);
    let url = RepositoryUrl::parse(&format!("file://{}", bare.display())).unwrap();
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let checkout = Checkout { mirror: Some(&mirror), ..wanted(remote, &resolved, &folder) };
    assert_eq!(bench.git.checkout(&checkout, bench.control()).await.unwrap().commit, commit);
    let closed = Bench::with(|settings| settings.policy.allow_file = false);
    let error = closed.git.resolve(remote, &Reference::Head, closed.control()).await.unwrap_err();
    assert!(error.tail.contains("not allowed"), "{error:?}");
}

/// Adds a submodule that is got from `from` now and is written down as `url`.
fn add_submodule(author: &Author, from: &std::path::Path, url: &str, path: &str) {
    git(author.path(), &["submodule", "--quiet", "add", "--name", "x", from.to_str().unwrap(), path]);
    fs::write(
        author.path().join(".gitmodules"),
        format!("[submodule \"x\"]\n\tpath = {path}\n\turl = \"{url}\"\n"),
    )
    .unwrap();
    author.commit("added", path);
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn what_the_folder_has_is_checked_out_without_asking_anybody() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    let second = author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let folder = bench.work("web");
    let present = |commit, full_name| Present {
        remote,
        commit,
        full_name,
        folder: &folder,
        submodules: false,
        lfs: false,
    };
    let done = bench.git.checkout_present(&present(&second, None), bench.control()).await.unwrap();
    assert_eq!(done, None, "there is no folder yet");
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    bench.git.checkout(&wanted(remote, &resolved, &folder), bench.control()).await.unwrap();
    let third = author.commit("a", "3");
    author.push(&server.bare("open/web.git"));
    let before = server.requests().len();
    let main = Some("refs/heads/main");
    let done = bench.git.checkout_present(&present(&first, main), bench.control()).await.unwrap().unwrap();
    assert_eq!((done.commit.as_str(), done.branch.as_deref()), (first.as_str(), Some("main")));
    assert!(stands_at(&folder, &first, main) && !stands_at(&folder, &second, main));
    assert!(!stands_at(&folder, &first, None) && !stands_at(&folder, &first, Some("refs/heads/x")));
    assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "1");
    assert_eq!(bench.git.checkout_present(&present(&third, main), bench.control()).await.unwrap(), None);
    assert_eq!(server.requests().len(), before);
    for (commit, name) in [("main", main), (second.as_str(), Some("main")), (second.as_str(), Some("--x"))] {
        let error = bench.git.checkout_present(&present(commit, name), bench.control()).await.unwrap_err();
        assert_eq!(error.class, FailureClass::RefNotFound);
    }
}
