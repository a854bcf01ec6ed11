//! Pulls from a stub registry: what can go wrong on the way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sandglass_images::{Credentials, ImageDigest, ImageErrorKind, Platform, Progress, ProgressPhase};

use super::archives::check_image;
use super::fixture::*;
use super::stub::{Answer, Asked, Stub};

/// Serves an image under any name; `wrap` may change an answer.
fn registry(
    image: TestImage,
    wrap: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static,
) -> (Arc<TestImage>, Stub) {
    let image = Arc::new(image);
    let served = Arc::clone(&image);
    let stub = Stub::start(move |asked| {
        let last = asked.path.rsplit('/').next().unwrap_or_default();
        let manifest = |bytes: &[u8], kind: &str| {
            Answer::ok(bytes).header("content-type", format!("application/vnd.oci.image.{kind}.v1+json"))
        };
        let answer = if asked.path == "/v2/" {
            Answer::ok(b"{}")
        } else if asked.path.contains("/manifests/") {
            match last {
                "list" => manifest(&served.list(), "index"),
                "1" => manifest(&served.manifest, "manifest"),
                digest if digest == ImageDigest::of(&served.manifest).as_str() => {
                    manifest(&served.manifest, "manifest")
                }
                _ => Answer::status(404),
            }
        } else {
            match served.blobs.get(last) {
                Some(blob) => Answer::ok(blob),
                None => Answer::status(404),
            }
        };
        wrap(asked, answer)
    });
    (image, stub)
}

fn unchanged(_: &Asked, answer: Answer) -> Answer {
    answer
}

fn name(stub: &Stub, tag: &str) -> String {
    format!("{}/demo/app:{tag}", stub.address)
}

/// A thread that was unpacking when its pull ended needs a moment to notice.
async fn no_work_remains(dir: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let tmp =
        || std::fs::read_dir(dir.join("images/tmp")).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    while !tmp().is_empty() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(tmp(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_list_leads_to_the_image_of_the_platform() {
    let (dir, store) = store();
    let (image, stub) = registry(TestImage::new("list"), unchanged);
    let seen = std::sync::Mutex::new(Vec::<Progress>::new());
    let pulled =
        store.pull(&name(&stub, "list"), None, None, &|p| seen.lock().unwrap().push(p)).await.unwrap();
    assert_eq!(pulled.id, image.id());
    check_image(&pulled, "list");
    assert_eq!(leftovers(dir.path()).len(), 3);
    let seen = seen.into_inner().unwrap();
    let phases: Vec<_> = seen.iter().map(|p| p.phase).collect();
    assert_eq!((phases[0], phases[phases.len() - 1]), (ProgressPhase::Resolving, ProgressPhase::Done));
    assert!(phases.contains(&ProgressPhase::Downloading) && phases.contains(&ProgressPhase::Unpacking));
    let whole = |p: &Progress| p.phase == ProgressPhase::Downloading && p.total == Some(p.current);
    assert_eq!(seen.iter().filter(|p| whole(p)).count(), 2, "both layers were seen to be complete");

    let other = Some(Platform { os: "linux".into(), arch: "riscv64".into() });
    let error = store.pull(&name(&stub, "list"), None, other, &quiet).await.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unsupported);
    // By the digest of the list as well as of the manifest.
    for digest in [ImageDigest::of(&image.list()), ImageDigest::of(&image.manifest)] {
        let reference = format!("{}/demo/app@{digest}", stub.address);
        assert_eq!(store.resolve(&reference).unwrap().unwrap().id, image.id());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn simultaneous_pulls_fetch_each_layer_once() {
    let (dir, store) = store();
    let (image, stub) = registry(TestImage::new("once"), unchanged);
    let pulls: Vec<_> = (0..6)
        .map(|_| {
            // A handle of its own, as another process would have.
            let store = sandglass_images::ImageStore::open(&dir.path().join("images")).unwrap();
            let name = name(&stub, "1");
            tokio::spawn(async move { store.pull(&name, None, None, &quiet).await })
        })
        .collect();
    for pull in pulls {
        check_image(&pull.await.unwrap().unwrap(), "once");
    }
    for layer in &image.layers {
        assert_eq!(stub.count(ImageDigest::of(layer).as_str()), 1);
    }
    assert_eq!(store.list().unwrap().len(), 1);
}

#[tokio::test]
async fn a_token_is_fetched_with_the_credentials_and_used() {
    let (_dir, store) = store();
    let port = Arc::new(AtomicUsize::new(0));
    let realm = Arc::clone(&port);
    let (_, stub) = registry(TestImage::new("token"), move |asked, answer| {
        let port = realm.load(Ordering::SeqCst);
        let authorized = asked.authorization.as_deref();
        if asked.path.starts_with("/token") {
            // ann:hunter2-secret
            return match authorized {
                Some("Basic YW5uOmh1bnRlcjItc2VjcmV0") => Answer::ok(br#"{"token":"tok-123"}"#),
                other => Answer { status: 401, ..Answer::ok(format!("no: {other:?}").as_bytes()) },
            };
        }
        if authorized == Some("Bearer tok-123") {
            return answer;
        }
        let challenge = format!(r#"Bearer realm="http://127.0.0.1:{port}/token",service="s""#);
        Answer::status(401).header("www-authenticate", challenge)
    });
    port.store(stub.address.port().into(), Ordering::SeqCst);
    let ann = |password: &str| Some(Credentials { username: "ann".into(), password: password.into() });
    let image = store.pull(&name(&stub, "1"), ann("hunter2-secret"), None, &quiet).await.unwrap();
    check_image(&image, "token");
    let bearer = Credentials { username: String::new(), password: "tok-123".into() };
    assert!(store.pull(&name(&stub, "1"), Some(bearer), None, &quiet).await.is_ok());
    for auth in [ann("wrong-secret"), None] {
        let error = store.pull(&name(&stub, "1"), auth, None, &quiet).await.unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unauthorized);
        let told = format!("{error} {error:?}");
        for secret in ["wrong-secret", "Basic", "YW5u"] {
            assert!(!told.contains(secret), "{told}");
        }
    }
    assert!(!format!("{:?}", ann("hunter2-secret")).contains("hunter2"));
}

#[tokio::test]
async fn a_broken_download_goes_on_where_it_stopped() {
    let (_dir, store) = store();
    let noise: Vec<u8> = (0..60_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let image = TestImage::of(vec![layer(&[("noise", Node::File(0o644, &noise))])]);
    let blob = ImageDigest::of(&image.layers[0]);
    let tries = AtomicUsize::new(0);
    let cut_blob = blob.clone();
    let (_, stub) = registry(image, move |asked, mut answer| {
        if !asked.path.ends_with(cut_blob.as_str()) {
            return answer;
        }
        if let Some(range) = &asked.range {
            let from: usize = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap();
            answer.status = 206;
            answer.body.drain(..from);
        }
        match tries.fetch_add(1, Ordering::SeqCst) {
            0 => Answer::status(503),
            1 | 2 => {
                answer.cut = Some(answer.body.len() / 2);
                answer
            }
            _ => answer,
        }
    });
    let pulled = store.pull(&name(&stub, "1"), None, None, &quiet).await.unwrap();
    assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), noise);
    let ranges: Vec<_> = stub.asked().iter().filter_map(|a| a.range.clone()).collect();
    assert_eq!(ranges.len(), 2, "{ranges:?}");
}

#[tokio::test]
async fn other_content_than_its_digest_is_refused() {
    for part in ["/manifests/", "config", "layer"] {
        let (dir, store) = store();
        let image = TestImage::new("tampered");
        let target = match part {
            "config" => image.id().to_string(),
            "layer" => ImageDigest::of(&image.layers[0]).to_string(),
            _ => "/manifests/sha256:".to_owned(),
        };
        let (_, stub) = registry(image, move |asked, mut answer| {
            if asked.path.contains(&target) {
                let middle = answer.body.len() / 2;
                answer.body[middle] ^= 1;
            }
            answer
        });
        let error = store.pull(&name(&stub, "list"), None, None, &quiet).await.unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Corrupt, "{part}: {error}");
        assert!(store.list().unwrap().is_empty());
        no_work_remains(dir.path()).await;
    }
}

#[tokio::test]
async fn a_failing_registry_is_asked_a_few_times_only() {
    let (_dir, store) = store();
    let (_, stub) = registry(TestImage::new("down"), |asked, answer| {
        if asked.path.contains("/manifests/") { Answer::status(503) } else { answer }
    });
    let error = store.pull(&name(&stub, "1"), None, None, &quiet).await.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unreachable);
    assert_eq!(stub.count("/manifests/"), 4);
    let error = store.pull(&name(&stub, "1").replace(":1", ":nope"), None, None, &quiet).await;
    assert!(error.is_err());
}

#[tokio::test]
async fn an_unreachable_registry_is_noticed_soon() {
    let (_dir, store) = store();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let started = Instant::now();
    let error = store.pull(&format!("localhost:{port}/a"), None, None, &quiet).await.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unreachable, "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_pull_leaves_nothing() {
    let (dir, store) = store();
    let (_, stub) = registry(TestImage::new("slow"), |asked, answer| {
        if asked.path.contains("/blobs/") {
            std::thread::sleep(Duration::from_millis(300));
        }
        answer
    });
    let reference = name(&stub, "1");
    for wait in [50, 400, 620] {
        let pull = store.pull(&reference, None, None, &quiet);
        let result = tokio::time::timeout(Duration::from_millis(wait), pull).await;
        assert!(result.is_err());
    }
    no_work_remains(dir.path()).await;
    assert!(store.list().unwrap().is_empty());
}

#[tokio::test]
async fn only_registries_of_this_machine_are_spoken_to_without_tls() {
    let (_dir, store) = store();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let first_byte = std::thread::spawn(move || {
        let mut byte = [0];
        std::io::Read::read_exact(&mut listener.accept().unwrap().0, &mut byte).unwrap();
        byte[0]
    });
    // Leads to this machine, but is not one of its loopback names.
    let secret = Credentials { username: "ann".into(), password: "hunter2-secret".into() };
    let error = store.pull(&format!("0.0.0.0:{port}/a"), Some(secret), None, &quiet).await.unwrap_err();
    assert_eq!(error.kind(), ImageErrorKind::Unreachable, "{error}");
    assert_eq!(first_byte.join().unwrap(), 0x16, "a TLS handshake");
}
