//! Git over HTTP, against git's own server program: refs, mirrors, credentials, progress.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;

use crate::support::{Author, Bench, HttpServer, TOKEN, git, token, until};
use sandglass_repository::Reference;
use sandglass_repository::git::{Checkout, Control, FailureClass, Progress, Remote, ResolvedKind};

fn reference(text: &str) -> Reference {
    Reference::parse(text).unwrap()
}

#[tokio::test]
async fn every_kind_of_ref_is_resolved() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    git(author.path(), &["tag", "light"]);
    git(author.path(), &["tag", "-a", "-m", "x", "v1.0"]);
    let second = author.commit("a", "2");
    git(author.path(), &["branch", "feature/x", &first]);
    git(author.path(), &["branch", "v1.0"]);
    git(author.path(), &["update-ref", "refs/pull/7/head", &first]);
    author.push(&server.bare("open/web.git"));
    git(
        author.path(),
        &["push", "--quiet", server.bare("open/web.git").to_str().unwrap(), "refs/pull/7/head"],
    );
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let tag_object = git(author.path(), &["rev-parse", "refs/tags/v1.0"]);
    assert_ne!(tag_object, first, "the tag is annotated");
    for (asked, commit, kind, name) in [
        ("HEAD", &second, ResolvedKind::Branch, Some("refs/heads/main")),
        ("main", &second, ResolvedKind::Branch, Some("refs/heads/main")),
        ("feature/x", &first, ResolvedKind::Branch, Some("refs/heads/feature/x")),
        ("light", &first, ResolvedKind::Tag, Some("refs/tags/light")),
        ("v1.0", &second, ResolvedKind::Branch, Some("refs/heads/v1.0")),
        ("refs/tags/v1.0", &first, ResolvedKind::Tag, Some("refs/tags/v1.0")),
        ("refs/pull/7/head", &first, ResolvedKind::Other, Some("refs/pull/7/head")),
        (&second, &second, ResolvedKind::Commit, None),
        (&second[..10], &second, ResolvedKind::Commit, None),
    ] {
        let resolved = bench
            .git
            .resolve(remote, &reference(asked), bench.control())
            .await
            .unwrap_or_else(|e| panic!("{asked}: {e:?}"));
        assert_eq!(
            (resolved.commit(), resolved.kind(), resolved.full_name()),
            (commit.as_str(), kind, name),
            "{asked}"
        );
    }
    for missing in ["nope", "x", "refs/heads/nope", "abcdef1", "ain"] {
        let error = bench.git.resolve(remote, &reference(missing), bench.control()).await.unwrap_err();
        assert_eq!(error.class, FailureClass::RefNotFound, "{missing}: {error:?}");
    }
    let empty = server.bare("open/empty.git");
    fs::create_dir_all(&empty).unwrap();
    git(&empty, &["init", "--quiet", "--bare", "."]);
    let url = server.url("open/empty.git");
    let error = bench
        .git
        .resolve(Remote { url: &url, credential: None }, &Reference::Head, bench.control())
        .await
        .unwrap_err();
    assert_eq!(error.class, FailureClass::RefNotFound);
    assert!(error.message.contains("empty"), "{error}");
    assert_eq!(fs::read_dir(bench.scratch()).unwrap().count(), 0, "nothing of a call stays behind");
}

#[tokio::test]
async fn a_commit_that_no_ref_reaches_directly_is_found_by_its_beginning() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let resolved = bench
        .git
        .resolve(Remote { url: &url, credential: None }, &reference(&first[..12]), bench.control())
        .await
        .unwrap();
    assert_eq!(resolved.commit(), first);
}

#[tokio::test]
async fn private_repositories_need_the_token() {
    let server = HttpServer::start();
    let author = Author::new();
    let commit = author.commit("a", "1");
    author.push(&server.bare("private/web.git"));
    let bench = Bench::new();
    let url = server.url("private/web.git");
    let right = token(TOKEN);
    let wrong = token("not-the-token-at-all");
    let resolved = bench
        .git
        .resolve(Remote { url: &url, credential: Some(&right) }, &Reference::Head, bench.control())
        .await
        .unwrap();
    assert_eq!(resolved.commit(), commit);
    for credential in [None, Some(&wrong)] {
        // A complete commit is no way around the question.
        for asked in [Reference::Head, reference(&commit)] {
            let remote = Remote { url: &url, credential };
            let error = bench.git.resolve(remote, &asked, bench.control()).await.unwrap_err();
            assert_eq!(error.class, FailureClass::AuthFailed, "{error:?}");
            assert!(!format!("{error:?}").contains("not-the-token-at-all"));
        }
    }
}

#[tokio::test]
async fn a_mirror_is_fetched_once_and_follows_its_remote() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    // That the mirrors lie in a repository must not matter, least of all when one of them is broken.
    git(bench.folder.path(), &["init", "--quiet", "."]);
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    drop(bench.git.mirror(remote, &resolved, bench.control()).await.unwrap());
    let before = server.requests().len();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    assert_eq!(server.requests().len(), before, "a commit that is there is not fetched again");
    // Two may read at the same time.
    let again = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    let mode = fs::metadata(bench.work("mirrors")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    drop((mirror, again));

    let second = author.commit("a", "2");
    author.push(&server.bare("open/web.git"));
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let mirror = bench.git.mirror(remote, &resolved, bench.control()).await.unwrap();
    assert_eq!(git(mirror.path(), &["rev-parse", "refs/heads/main"]), second);

    // What a killed git leaves behind does not stop the next one.
    fs::write(mirror.path().join("packed-refs.lock"), "").unwrap();
    fs::write(mirror.path().join("refs/heads/main.lock"), "").unwrap();
    let path = mirror.path().to_owned();
    drop(mirror);
    let third = author.commit("a", "3");
    author.push(&server.bare("open/web.git"));
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    drop(bench.git.mirror(remote, &resolved, bench.control()).await.unwrap());
    assert_eq!(git(&path, &["rev-parse", "refs/heads/main"]), third);

    // A broken mirror is made anew.
    fs::write(path.join("config"), "[[[").unwrap();
    fs::remove_dir_all(path.join("objects")).unwrap();
    drop(bench.git.mirror(remote, &resolved, bench.control()).await.unwrap());
    assert_eq!(git(&path, &["rev-parse", "refs/heads/main"]), third);
    assert_eq!(git(bench.folder.path(), &["for-each-ref"]), "");
}

#[tokio::test]
async fn many_may_ask_for_the_same_mirror_at_once() {
    let server = HttpServer::start();
    let author = Author::new();
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    let calls = (0..6).map(|_| bench.git.mirror(remote, &resolved, bench.control()));
    let mut fetched = Vec::new();
    let all = futures_join(calls.collect()).await;
    for mirror in all {
        fetched.push(mirror.unwrap());
    }
    let fetches = server.requests().iter().filter(|line| line.starts_with("POST")).count();
    // One to list for `resolve`, and those of one fetch.
    assert!(fetches <= 3, "{:?}", server.requests());
}

/// Drives several futures on one task.
async fn futures_join<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut pending: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, slot) in pending.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *slot = Some(value);
            }
        }
        if done.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn progress_is_told_while_a_repository_comes_over() {
    let server = HttpServer::start();
    let author = Author::new();
    for index in 0..20 {
        fs::write(author.path().join(format!("f{index}")), format!("{index}")).unwrap();
    }
    author.commit("a", "1");
    author.push(&server.bare("open/web.git"));
    let bench = Bench::new();
    let url = server.url("open/web.git");
    let remote = Remote { url: &url, credential: None };
    let seen: Mutex<Vec<Progress>> = Mutex::new(Vec::new());
    let progress = |step: &Progress| seen.lock().unwrap().push(step.clone());
    let control = Control { progress: &progress, ..bench.control() };
    let resolved = bench.git.resolve(remote, &Reference::Head, control).await.unwrap();
    let folder = bench.work("w");
    let wanted = Checkout {
        remote,
        resolved: &resolved,
        mirror: None,
        folder: &folder,
        depth: Some(1),
        submodules: false,
        lfs: false,
    };
    bench.git.checkout(&wanted, control).await.unwrap();
    let seen = seen.lock().unwrap();
    assert!(
        seen.iter().any(|step| step.percent == Some(100) && step.done == step.total.unwrap()),
        "{seen:?}"
    );
}

#[tokio::test]
async fn a_commit_keeps_the_branch_that_it_was_resolved_from() {
    let server = HttpServer::start();
    let author = Author::new();
    let first = author.commit("a", "1");
    author.commit("a", "2");
    author.push(&server.bare("private/web.git"));
    let bench = Bench::new();
    let url = server.url("private/web.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let pinned =
        bench.git.resolve_pinned(remote, &first, Some("refs/heads/main"), bench.control()).await.unwrap();
    assert_eq!((pinned.commit(), pinned.branch()), (first.as_str(), Some("main")));
    let folder = bench.work("w");
    let wanted = Checkout {
        remote,
        resolved: &pinned,
        mirror: None,
        folder: &folder,
        depth: Some(1),
        submodules: false,
        lfs: false,
    };
    let done = bench.git.checkout(&wanted, bench.control()).await.unwrap();
    assert_eq!((done.commit, done.branch.as_deref()), (first.clone(), Some("main")));
    let stranger = Remote { url: &url, credential: None };
    let error = bench.git.resolve_pinned(stranger, &first, None, bench.control()).await.unwrap_err();
    assert_eq!(error.class, FailureClass::AuthFailed);
    for (commit, name) in [("main", None), (first.as_str(), Some("main")), (first.as_str(), Some("--x"))] {
        let error = bench.git.resolve_pinned(remote, commit, name, bench.control()).await.unwrap_err();
        assert_eq!(error.class, FailureClass::RefNotFound);
    }
}

#[tokio::test]
async fn the_disk_is_kept_clean() {
    let server = HttpServer::start();
    let bench = Bench::new();
    let mut held = Vec::new();
    for name in ["open/a.git", "open/b.git", "open/c.git"] {
        let author = Author::new();
        author.commit("a", name);
        author.push(&server.bare(name));
        let url = server.url(name);
        let remote = Remote { url: &url, credential: None };
        let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
        held.push(bench.git.mirror(remote, &resolved, bench.control()).await.unwrap());
    }
    let paths: Vec<_> = held.iter().map(|mirror| mirror.path().to_owned()).collect();
    held.truncate(1);
    assert!(bench.git.evict_mirrors(u64::MAX).unwrap() > 0);
    assert!(paths.iter().all(|path| path.exists()));
    // A lock is given up a moment later where a child that another test starts just then has a copy of it.
    until("those that nobody uses are gone", || {
        let left = bench.git.evict_mirrors(1).unwrap();
        assert!(left > 0, "the one in use is counted");
        paths[1..].iter().all(|path| !path.exists())
    })
    .await;
    assert!(paths[0].exists());
    held.clear();
    until("nothing is left", || bench.git.evict_mirrors(0).unwrap() == 0).await;

    let left_behind = bench.scratch().join("git-abc");
    fs::create_dir(&left_behind).unwrap();
    fs::write(left_behind.join("password"), TOKEN).unwrap();
    bench.git.sweep_scratch().unwrap();
    assert_eq!(fs::read_dir(bench.scratch()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_private_repository_may_have_escapes_in_its_address() {
    let server = HttpServer::start();
    let author = Author::new();
    let commit = author.commit("a", "1");
    author.push(&server.bare("private/my org/web@home.git"));
    let bench = Bench::new();
    let url = server.url("private/my%20org/web%40home.git");
    let credential = token(TOKEN);
    let remote = Remote { url: &url, credential: Some(&credential) };
    let resolved = bench.git.resolve(remote, &Reference::Head, bench.control()).await.unwrap();
    assert_eq!(resolved.commit(), commit);
}
