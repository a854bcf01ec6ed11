//! Against a real engine: pulls, from a registry of a few lines that can ask for a login and can fail to answer.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use sandglass_sandbox::{
    ports::{RuntimeErrorKind as Kind, runtime::PrepareProgress},
    spec::{Credentials, Platform, Secrets, Spec},
};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::{
    live_tests::{IDLE, bench},
    *,
};

/// What base64 spells with the two letters that differ between its alphabets.
const PASSWORD: &str = "~~~???>>>~~~";
const USER: &str = "someone";

struct Registry {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

fn digest(content: &[u8]) -> String {
    let hex: String = Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// An image of one layer with one file. The engine keeps no layer of this content yet.
fn image(content: &str) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, "hello", content.as_bytes()).unwrap();
    let layer = tar.into_inner().unwrap();
    let config = serde_json::json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": {"opensandbox.io/expires-at": "2020-01-01T00:00:00+00:00"}},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        "history": [{"created_by": "test"}],
    });
    let config = serde_json::to_vec(&config).unwrap();
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": config.len(),
            "digest": digest(&config),
        },
        "layers": [{
            "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
            "size": layer.len(),
            "digest": digest(&layer),
        }],
    });
    (serde_json::to_vec(&manifest).unwrap(), config, layer)
}

impl Registry {
    async fn start(answers: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let content = uuid::Uuid::new_v4().to_string();
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                if answers {
                    tokio::spawn(Self::answer(stream, content.clone()));
                } else {
                    open.push(stream);
                }
            }
        });
        Self { address, asked }
    }

    async fn answer(mut stream: tokio::net::TcpStream, content: String) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                // The engine tries TLS first, and goes on at once when that is refused.
                Ok(byte) if request.is_empty() && !byte.is_ascii_uppercase() => return,
                Ok(byte) => request.push(byte),
                Err(_) => return,
            }
        }
        let request = String::from_utf8_lossy(&request).into_owned();
        let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
        let (manifest, config, layer) = image(&content);
        let login = request.lines().find_map(|l| {
            let (name, value) = l.split_once(": ")?;
            name.eq_ignore_ascii_case("authorization").then(|| value.to_owned())
        });
        let (status, kind, body) = if login.as_deref() != Some("Basic c29tZW9uZTp+fn4/Pz8+Pj5+fn4=") {
            (
                "401 Unauthorized",
                "application/json",
                br#"{"errors":[{"code":"UNAUTHORIZED","message":"no"}]}"#.to_vec(),
            )
        } else if path == "/v2/" {
            ("200 OK", "application/json", b"{}".to_vec())
        } else if path.contains("/manifests/") && !path.contains("missing") {
            ("200 OK", "application/vnd.docker.distribution.manifest.v2+json", manifest)
        } else if path.ends_with(&digest(&config)) {
            ("200 OK", "application/octet-stream", config)
        } else if path.ends_with(&digest(&layer)) {
            ("200 OK", "application/octet-stream", layer)
        } else {
            (
                "404 Not Found",
                "application/json",
                br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#.to_vec(),
            )
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nDocker-Content-Digest: {}\r\n\
             WWW-Authenticate: Basic realm=\"test\"\r\nDocker-Distribution-Api-Version: registry/2.0\r\nConnection: close\r\n\r\n",
            body.len(),
            digest(&body)
        );
        let _ = stream.write_all(head.as_bytes()).await;
        if !request.starts_with("HEAD") {
            let _ = stream.write_all(&body).await;
        }
    }
}

async fn until_asked(registry: &Registry, before: usize) {
    while registry.asked.load(Ordering::SeqCst) <= before {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn login(password: &str) -> Secrets {
    let login = Credentials { username: USER.into(), password: password.into() };
    Secrets { registry: Some(login), ..Secrets::default() }
}

#[tokio::test]
async fn a_private_image_is_pulled_with_its_login_once() {
    let Some(bench) = bench(|_| {}) else { return };
    let registry = Registry::start(true).await;
    let image = format!("{}/private/image-{}:1", registry.address, uuid::Uuid::new_v4());
    let spec = Spec { image: image.clone(), ..bench.spec(IDLE) };
    let shared = bench.shared();

    for (secrets, why) in [(Secrets::default(), "no login"), (login("wrong-password"), "a wrong one")] {
        let failed = shared.prepare(&spec, &secrets, &|_| {}).await.unwrap_err();
        assert_eq!((failed.kind, failed.phase.as_str()), (Kind::ImagePull, "image"), "{why}: {failed}");
        assert!(!failed.message.contains("wrong-password"), "{failed}");
    }
    let told = std::sync::Mutex::new(Vec::new());
    let tell = |step: PrepareProgress| told.lock().unwrap().push(step.message);
    shared.prepare(&spec, &login(PASSWORD), &tell).await.unwrap();
    let told = told.into_inner().unwrap();
    assert!(told[0].starts_with("pulling") && told.iter().any(|m| m.contains("Pull complete")), "{told:?}");

    // From now on nobody asks the registry, with or without a login.
    let before = registry.asked.load(Ordering::SeqCst);
    shared.prepare(&spec, &Secrets::default(), &|_| {}).await.unwrap();
    assert_eq!(registry.asked.load(Ordering::SeqCst), before);
    assert!(shared.image_facts(&image).await.unwrap().labels.contains_key("opensandbox.io/expires-at"));

    // For another platform the registry is asked again. There is none, of which the engine takes long to be convinced.
    let other = Platform { os: "linux".into(), arch: "arm64".into() };
    let wanted = Spec { platform: Some(other), ..spec };
    let secrets = login(PASSWORD);
    tokio::select! {
        _ = shared.prepare(&wanted, &secrets, &|_| {}) => {}
        () = until_asked(&registry, before) => {}
    }
    assert!(registry.asked.load(Ordering::SeqCst) > before, "the platform was not looked at");

    let missing = format!("{}/private/missing:1", registry.address);
    let wanted = Spec { image: missing, platform: None, ..wanted };
    let failed = shared.prepare(&wanted, &login(PASSWORD), &|_| {}).await.unwrap_err();
    assert_eq!(failed.kind, Kind::ImagePull, "{failed}");
    let removed = shared.client.call(|d| async move {
        d.remove_image(&image, None::<bollard::query_parameters::RemoveImageOptions>, None).await
    });
    removed.await.unwrap();
}

#[tokio::test]
async fn a_pull_from_a_silent_registry_ends_when_nobody_wants_it_any_more() {
    let Some(bench) = bench(|_| {}) else { return };
    let registry = Registry::start(false).await;
    let image = format!("{}/silent/image-{}:1", registry.address, uuid::Uuid::new_v4());
    let spec = Spec { image, ..bench.spec(IDLE) };
    let secrets = Secrets::default();
    tokio::select! {
        ended = bench.shared().prepare(&spec, &secrets, &|_| {}) => panic!("it ended: {ended:?}"),
        () = until_asked(&registry, 0) => {}
    }
    // The engine serves others meanwhile.
    bench.start(bench.spec(IDLE)).await.unwrap();
    bench.close().await;
}
