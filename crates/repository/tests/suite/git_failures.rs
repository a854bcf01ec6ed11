//! What goes wrong with git: every class of failure, ends by time and by hand, and what of a failure is told.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Author, Bench, HttpServer, TOKEN, git, token, until};
use sandglass_repository::git::{Checkout, FailureClass, Mirror, Remote, Resolved};
use sandglass_repository::{HostAllowList, Reference, RepositoryUrl};

#[tokio::test]
async fn a_deadline_and_a_cancellation_end_the_whole_group() {
    let server = HttpServer::start();
    let bench = Bench::new();
    let url = server.url("silent/web.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let error = bench
        .git
        .resolve(remote, &Reference::Head, bench.control_until(Duration::from_millis(700)))
        .await
        .unwrap_err();
    assert_eq!(error.class, FailureClass::Timeout, "{error:?}");
    // Killed with the group, and gone a moment later.
    until("the group is gone", || bench.processes().is_empty()).await;

    let asked = server.requests().len();
    let call = bench.git.resolve(remote, &Reference::Head, bench.control());
    let cancel = async {
        until("git asks the server", || server.requests().len() > asked).await;
        let processes = bench.processes();
        assert!(!processes.is_empty());
        for (arguments, environment) in &processes {
            assert!(!arguments.contains(TOKEN) && !environment.contains(TOKEN), "{arguments}");
        }
        bench.cancel.cancel();
    };
    let (result, ()) = tokio::join!(call, cancel);
    assert_eq!(result.unwrap_err().class, FailureClass::Cancelled);
    until("the group is gone", || bench.processes().is_empty()).await;
    assert_eq!(fs::read_dir(bench.scratch()).unwrap().count(), 0);
    let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Cancelled, "cancelled before it began");
}

#[tokio::test]
async fn a_dropped_call_leaves_nothing_running() {
    let server = HttpServer::start();
    let bench = Bench::new();
    let url = server.url("silent/web.git");
    let remote = Remote { url: &url, credential: None };
    tokio::select! {
        result = bench.git.resolve(remote, &Reference::Head, bench.control()) => panic!("{result:?}"),
        () = until("git asks the server", || !server.requests().is_empty()) => {}
    }
    until("the group is gone", || bench.processes().is_empty()).await;
}

#[tokio::test]
async fn failures_are_classed() {
    let server = HttpServer::start();
    let bench = Bench::new();
    let class = async |url: RepositoryUrl| {
        let remote = Remote { url: &url, credential: None };
        bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err().class
    };
    assert_eq!(class(server.url("broken/web.git")).await, FailureClass::Unreachable);
    assert_eq!(class(server.url("open/nothing-there.git")).await, FailureClass::Unreachable);
    let closed = RepositoryUrl::parse("http://127.0.0.1:1/a/b.git").unwrap();
    assert_eq!(class(closed).await, FailureClass::Unreachable);
    let missing = Bench::with(|settings| settings.program = "/nonexistent/git".into());
    let url = server.url("open/web.git");
    let error = missing
        .git
        .resolve(Remote { url: &url, credential: None }, &Reference::Head, missing.control())
        .await
        .unwrap_err();
    assert_eq!(error.class, FailureClass::Other);
}

#[tokio::test]
async fn a_redirect_gets_neither_past_the_list_of_hosts_nor_at_the_token() {
    let thief = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    author.push(&thief.bare("private/web.git"));
    let to = format!("http://127.0.0.1:{}/private", thief.port);
    let server = HttpServer::start_with(&[("SERVER_MOVED_TO", &to)]);
    let credential = token(TOKEN);
    let url = server.url("moved/web.git");
    let remote = Remote { url: &url, credential: Some(&credential) };

    let listed = Bench::with(|settings| settings.policy.hosts = HostAllowList::parse(["127.0.0.1"]).unwrap());
    assert!(listed.git.resolve(remote, &Reference::Head, listed.control()).await.is_err());
    assert_eq!(thief.requests(), Vec::<String>::new());

    let open = Bench::new();
    let error = open.git.resolve(remote, &Reference::Head, open.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::AuthFailed, "{error:?}");
    assert!(!thief.requests().is_empty());
    assert!(
        thief.requests().iter().all(|line| line.ends_with("without credential")),
        "{:?}",
        thief.requests()
    );
}

#[tokio::test]
async fn the_name_of_a_secret_is_no_credential() {
    let bench = Bench::new();
    let url = RepositoryUrl::parse("http://127.0.0.1:1/a/b.git").unwrap();
    let credential = sandglass_repository::Credential::SecretRef { secret_ref: "x".into() };
    let remote = Remote { url: &url, credential: Some(&credential) };
    let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::Other);
}

#[tokio::test]
async fn what_is_told_of_a_failure_is_bounded_and_without_secrets() {
    // In place of git: writes far more than is kept, with the token in it, cut in two.
    let script = format!(
        "#!/bin/sh\ni=0\nwhile [ $i -lt 2000 ]; do echo \"line $i {TOKEN}\" >&2; i=$((i+1)); done\nprintf 'end {}' >&2\nsleep 0.1\n\
         printf '{} fatal: Authentication failed' >&2\nexit 128\n",
        &TOKEN[..5],
        &TOKEN[5..],
    );
    let bench = Bench::with(|settings| settings.program = settings.scratch.join("program"));
    executable(&bench.scratch().join("program"), &script);
    let url = RepositoryUrl::parse("http://127.0.0.1:1/a/b.git").unwrap();
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::AuthFailed);
    assert!(error.tail.len() <= 8 * 1024 && error.tail.lines().count() <= 60, "{}", error.tail.len());
    assert!(error.tail.ends_with("line 1999 ***\nend *** fatal: Authentication failed"), "{}", error.tail);
    assert!(!format!("{error:?}{error}").contains(TOKEN));
}

#[tokio::test]
async fn a_program_that_outlives_git_holds_nobody_up() {
    let bench = Bench::with(|settings| settings.program = settings.scratch.join("program"));
    executable(&bench.scratch().join("program"), "#!/bin/sh\nsleep 600 &\necho broken >&2\nexit 1\n");
    let url = RepositoryUrl::parse("http://127.0.0.1:1/a/b.git").unwrap();
    let error = bench
        .git
        .resolve(Remote { url: &url, credential: None }, &Reference::Head, bench.control())
        .await
        .unwrap_err();
    assert_eq!((error.class, error.tail.as_str()), (FailureClass::Other, "broken"));
    until("the one left behind is ended", || bench.processes().is_empty()).await;
}

#[tokio::test]
async fn a_repository_that_is_too_large_is_not_kept() {
    let server = HttpServer::start();
    let author = Author::new();
    // Does not compress.
    let mut state = 1u64;
    let noise: String = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b'!' + (state >> 33) as u8 % 90)
    })
    .take(3 << 20)
    .collect();
    author.commit("noise", &noise);
    author.push(&server.bare("open/web.git"));
    let bench = Bench::with(|settings| settings.repository_limit = 1 << 20);
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    // The second time it is there, and is refused all the same.
    for _ in 0..2 {
        let error = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap_err();
        assert!(
            error.class == FailureClass::Other && error.message.contains("larger than the 1 MiB"),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn a_small_repository_is_not_unpacked_beyond_the_limit() {
    let server = HttpServer::start();
    let zeros = Author::new();
    fs::write(zeros.path().join("zeros"), vec![0; 8 << 20]).unwrap();
    zeros.commit("a", "1");
    let empty = Author::new();
    for number in 0..1500 {
        fs::write(empty.path().join(number.to_string()), "").unwrap();
    }
    empty.commit("a", "1");
    let outer = Author::new();
    outer.commit("a", "1");
    let inside = server.bare("open/zeros.git");
    zeros.push(&inside);
    git(outer.path(), &["submodule", "--quiet", "add", inside.to_str().unwrap(), "inside"]);
    let modules =
        format!("[submodule \"inside\"]\n\tpath = inside\n\turl = {}\n", server.url("open/zeros.git"));
    outer.commit(".gitmodules", &modules);
    let bench = Bench::with(|settings| settings.repository_limit = 4 << 20);
    for (author, name, operation) in
        [(&zeros, "zeros", "checkout"), (&empty, "empty", "checkout"), (&outer, "outer", "submodules")]
    {
        author.push(&server.bare(&format!("open/{name}.git")));
        let url = server.url(&format!("open/{name}.git"));
        let remote = Remote { url: &url, credential: None };
        let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
        let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
        let folder = bench.work(name);
        let wanted = Checkout { folder: &folder, ..checkout(remote, &resolved, &mirror) };
        let error = bench.git.checkout(&wanted, bench.control()).await.unwrap_err();
        assert!(
            error.operation == operation && error.message.contains("larger than the 4 MiB"),
            "{name}: {error:?}"
        );
    }
}

#[tokio::test]
async fn a_folder_that_repeats_without_end_is_not_unpacked_to_its_end() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    // Ten entries to a folder, six levels: a million files of seven objects.
    let script = "child=\"100644 blob $(git hash-object -w a)\"\n\
        for level in 1 2 3 4 5 6; do\n\
        tree=$(for name in 0 1 2 3 4 5 6 7 8 9; do printf '%s\\t%s\\n' \"$child\" $name; done | git mktree --missing)\n\
        child=\"040000 tree $tree\"\ndone\n\
        commit=$(git -c user.name=a -c user.email=a@example.com commit-tree -m x $tree)\n\
        git update-ref refs/heads/main $commit\n";
    let made = Command::new("sh").args(["-ec", script]).current_dir(author.path()).status().unwrap();
    assert!(made.success());
    author.push(&server.bare("open/web.git"));
    let bench = Bench::with(|settings| settings.repository_limit = 4 << 20);
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    let folder = bench.work("w");
    let wanted = Checkout { folder: &folder, ..checkout(remote, &resolved, &mirror) };
    let error = bench.git.checkout(&wanted, bench.control()).await.unwrap_err();
    assert!(error.message.contains("larger than the 4 MiB"), "{error:?}");
    assert!(folder.join("0").exists() && !folder.join("9/9").exists(), "it was stopped on its way");
}

#[tokio::test]
async fn git_has_no_more_memory_than_it_needs() {
    let bench = Bench::with(|settings| settings.program = settings.scratch.join("program"));
    // In place of git, which would have to be given gigabytes to notice.
    let script = "#!/bin/sh\nfor look in 1 2 3 4 5 6 7 8 9; do [ $(ulimit -d) = unlimited ] && sleep 0.2; done\n\
        sh -c 'ulimit -d' >&2\nexit 1\n";
    executable(&bench.scratch().join("program"), script);
    let url = RepositoryUrl::parse("http://127.0.0.1:1/a/b.git").unwrap();
    let remote = Remote { url: &url, credential: None };
    let error = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap_err();
    assert!(error.tail.parse::<u64>().is_ok_and(|kib| kib <= 4 << 20), "{error:?}");
}

fn checkout<'a>(remote: Remote<'a>, resolved: &'a Resolved, mirror: &'a Mirror) -> Checkout<'a> {
    Checkout {
        remote,
        resolved,
        mirror: Some(mirror),
        folder: std::path::Path::new("/nonexistent"),
        depth: Some(1),
        submodules: true,
        lfs: false,
    }
}

/// Written by another process: one of this process's own that is just being started could hold the file open for writing, and then
/// it could not be run.
fn executable(path: &std::path::Path, text: &str) {
    let mut child = Command::new("sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\"", path.to_str().unwrap()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}
