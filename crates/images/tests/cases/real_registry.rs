//! Pulls from Debian's `docker-registry`.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use sandglass_images::{Credentials, ImageDigest, ImageErrorKind};

use super::archives::check_image;
use super::fixture::*;

const PROGRAM: &str = "/usr/bin/docker-registry";
const PASSWORD: &str = "correct-horse-battery";
/// bcrypt of the password, at the lowest cost.
const PASSWORD_HASH: &str = "$2b$04$CjxBd0u9h3qKjTUAQsD9aO68eR1twVcFK1d8vXQc0maPuVzcuExcm";

struct Registry {
    child: Child,
    address: String,
    password: Option<&'static str>,
}

/// Below those that the kernel gives away by itself, so that nobody gets it in between. Not found out by listening: a closed socket
/// lives on for a moment in a child that another test starts just then.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = u32::from(NEXT.fetch_add(1, Ordering::Relaxed)) + std::process::id() * 500;
        let port = u16::try_from(10_000 + number % 20_000).unwrap();
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

impl Registry {
    fn start(dir: &Path, password: Option<&'static str>) -> Option<Self> {
        if !Path::new(PROGRAM).exists() {
            return None;
        }
        let port = free_port();
        let address = format!("127.0.0.1:{port}");
        let mut config = format!(
            "version: 0.1\nlog: {{ level: error }}\nstorage: {{ filesystem: {{ rootdirectory: {0}/data }} }}\n\
             http: {{ addr: '{address}' }}\n",
            dir.display()
        );
        if password.is_some() {
            write(dir, "htpasswd", format!("ann:{PASSWORD_HASH}\n").as_bytes());
            config += &format!("auth: {{ htpasswd: {{ realm: test, path: {}/htpasswd }} }}\n", dir.display());
        }
        let config = write(dir, "config.yml", config.as_bytes());
        let child = Command::new(PROGRAM)
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let started = Self { child, address, password };
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&started.address).is_err() {
            assert!(Instant::now() < deadline, "docker-registry does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(started)
    }

    async fn push(&self, repository: &str, tag: &str, image: &TestImage) {
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = reqwest::Client::new();
        let base = format!("http://{}/v2/{repository}", self.address);
        let login = |request: reqwest::RequestBuilder| match self.password {
            Some(password) => request.basic_auth("ann", Some(password)),
            None => request,
        };
        for (digest, blob) in &image.blobs {
            let begun = login(client.post(format!("{base}/blobs/uploads/"))).send().await.unwrap();
            assert_eq!(begun.status(), 202);
            let location = begun.headers()["location"].to_str().unwrap().to_owned();
            let joint = if location.contains('?') { '&' } else { '?' };
            let put = client.put(format!("{location}{joint}digest={digest}")).body(blob.clone());
            assert_eq!(login(put).send().await.unwrap().status(), 201);
        }
        let put = client
            .put(format!("{base}/manifests/{tag}"))
            .header("content-type", "application/vnd.oci.image.manifest.v1+json")
            .body(image.manifest.clone());
        assert_eq!(login(put).send().await.unwrap().status(), 201);
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn an_image_is_pulled_anonymously() {
    let (dir, store) = store();
    let Some(registry) = Registry::start(&dir.path().join("registry"), None) else {
        return skipped("an_image_is_pulled_anonymously", "no docker-registry");
    };
    let image = TestImage::new("real");
    registry.push("team/app", "v1", &image).await;
    let reference = format!("{}/team/app:v1", registry.address);
    let pulled = store.pull(&reference, None, None, &quiet).await.unwrap();
    assert_eq!((&pulled.id, &pulled.references), (&image.id(), &vec![reference.clone()]));
    check_image(&pulled, "real");
    let again = store.pull(&reference, None, None, &quiet).await.unwrap();
    assert_eq!(again.layers, pulled.layers);
    let by_digest = format!("{}/team/app@{}", registry.address, ImageDigest::of(&image.manifest));
    assert_eq!(store.pull(&by_digest, None, None, &quiet).await.unwrap().id, image.id());

    // The tag moves, and the image that lost it can go.
    let moved = TestImage::new("moved");
    registry.push("team/app", "v1", &moved).await;
    assert_eq!(store.pull(&reference, None, None, &quiet).await.unwrap().id, moved.id());
    assert_eq!(store.resolve(&by_digest).unwrap().unwrap().id, image.id());

    for missing in [format!("{}/team/app:v2", registry.address), format!("{}/team/none:v1", registry.address)]
    {
        let error = store.pull(&missing, None, None, &quiet).await.unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(&missing), "{error}");
    }
}

#[tokio::test]
async fn a_password_is_used_and_never_told() {
    let (dir, store) = store();
    let Some(registry) = Registry::start(&dir.path().join("registry"), Some(PASSWORD)) else {
        return skipped("a_password_is_used_and_never_told", "no docker-registry");
    };
    registry.push("team/app", "v1", &TestImage::new("locked")).await;
    let reference = format!("{}/team/app:v1", registry.address);
    let ann = |password: &str| Credentials { username: "ann".into(), password: password.into() };
    for auth in [None, Some(ann("wrong-horse"))] {
        let error = store.pull(&reference, auth, None, &quiet).await.unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Unauthorized, "{error}");
        assert!(!format!("{error} {error:?}").contains("wrong-horse"));
    }
    let pulled = store.pull(&reference, Some(ann(PASSWORD)), None, &quiet).await.unwrap();
    check_image(&pulled, "locked");
    let found = Command::new("grep").args(["-rl", PASSWORD]).arg(dir.path().join("images")).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "the password is nowhere in the store");
}
