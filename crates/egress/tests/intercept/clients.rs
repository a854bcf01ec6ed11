//! Programs as they are used in sandboxes: curl, git, Node, npm and Python, all of which know only a host name and the sandbox's authority.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::stack::{Body, Handler, NAME, SECRET, Seen, Stack, bearer, recorder, text};

const HTTPS: &str = "192.0.2.10:443";

pub struct Run {
    pub succeeded: bool,
    pub output: String,
}

/// Runs a program with as few of this machine's settings as possible; nothing if it is not installed.
pub async fn run(
    directory: &Path,
    program: &str,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Option<Run> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", path)
        .env("HOME", directory)
        .envs(environment.iter().copied());
    let output = match command.current_dir(directory).stdin(Stdio::null()).kill_on_drop(true).output().await {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("{program} is not installed: left out");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(!text.contains(SECRET), "{text}");
    Some(Run { succeeded: output.status.success(), output: text })
}

async fn stack(protocols: &[&[u8]]) -> (Stack, Seen, tempfile::TempDir) {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, protocols);
    stack.serve(HTTPS, Some(tls), handler).await;
    let directory = tempfile::tempdir().unwrap();
    stack.authority.export(directory.path()).unwrap();
    (stack, seen, directory)
}

#[tokio::test]
async fn curl_gets_through_with_both_protocols() {
    let (mut stack, seen, directory) = stack(&[b"h2", b"http/1.1"]).await;
    let through = stack.intercept(HTTPS).await;
    let place = format!("::127.0.0.1:{}", through.port());
    for version in ["--http1.1", "--http2"] {
        let arguments = [
            "-q",
            "-sSi",
            version,
            "--cacert",
            "mitmproxy-ca-cert.pem",
            "--connect-to",
            &place,
            "-d",
            "x=1",
            &format!("https://{NAME}/v1"),
        ];
        let Some(run) = run(directory.path(), "curl", &arguments, &[]).await else { return };
        assert!(
            run.succeeded && run.output.contains("hello") && run.output.contains("x-echo: [REDACTED]"),
            "{}",
            run.output
        );
        assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
        assert_eq!(seen.last().1, "x=1");
    }
}

#[tokio::test]
async fn python_and_node_trust_the_authority() {
    let (mut stack, seen, directory) = stack(&[b"http/1.1"]).await;
    let Some(through) = stack.intercept_at_its_port(HTTPS).await else { return };
    let place = through.ip();
    let python = format!(
        "import socket, ssl, urllib.request\n\
         found = socket.getaddrinfo\n\
         socket.getaddrinfo = lambda host, *rest, **more: found('{place}', *rest, **more)\n\
         context = ssl.create_default_context(cafile='mitmproxy-ca-cert.pem')\n\
         context.verify_flags |= ssl.VERIFY_X509_STRICT\n\
         answer = urllib.request.urlopen('https://{NAME}/py', context=context)\n\
         print(answer.status, answer.headers['x-echo'], answer.read())"
    );
    if let Some(run) = run(directory.path(), "python3", &["-c", &python], &[]).await {
        assert!(run.succeeded && run.output.contains("200 [REDACTED] b'hello'"), "{}", run.output);
        assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
    }
    let node = format!(
        "require('https').get({{host: '{place}', servername: '{NAME}', path: '/js', headers: {{Host: '{NAME}'}}}},\
         answer => {{ console.log(answer.statusCode, answer.headers['x-echo']); answer.resume() }})"
    );
    let trusted = [("NODE_EXTRA_CA_CERTS", "mitmproxy-ca-cert.pem")];
    if let Some(run) = run(directory.path(), "node", &["-e", &node], &trusted).await {
        assert!(run.succeeded && run.output.contains("200 [REDACTED]"), "{}", run.output);
        assert_eq!(seen.last().0.uri(), "/js");
        assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
    }
}

fn unauthorized() -> Response<Body> {
    Response::builder()
        .status(StatusCode::UNAUTHORIZED)
        .header("www-authenticate", "Basic realm=\"x\"")
        .body(text("no"))
        .unwrap()
}

/// A registry that knows one package and asks for a token.
fn registry() -> Handler {
    Arc::new(|request| {
        Box::pin(async move {
            if request.headers().get("authorization").is_none_or(|value| value != &format!("Bearer {SECRET}"))
            {
                return unauthorized();
            }
            let document = r#"{"name":"thing","dist-tags":{"latest":"1.2.3"},"versions":{"1.2.3":{"name":"thing","version":"1.2.3","dist":{"tarball":"https://api.example.com/thing.tgz"}}}}"#;
            Response::builder().header("content-type", "application/json").body(text(document)).unwrap()
        })
    })
}

#[tokio::test]
async fn npm_reads_a_registry_that_asks_for_a_token() {
    let mut stack = Stack::bound();
    let tls = stack.identity(NAME, &[b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), registry()).await;
    let Some(through) = stack.intercept_at_its_port(HTTPS).await else { return };
    let directory = tempfile::tempdir().unwrap();
    stack.authority.export(directory.path()).unwrap();
    std::fs::write(
        directory.path().join("resolve.js"),
        format!(
            "const dns = require('dns'); const found = dns.lookup; dns.lookup = (host, ...rest) => found('{}', ...rest);",
            through.ip()
        ),
    )
    .unwrap();
    let environment = [
        ("NODE_EXTRA_CA_CERTS", "mitmproxy-ca-cert.pem"),
        ("NODE_OPTIONS", "--require ./resolve.js"),
        // This machine's settings may name authorities of their own.
        ("npm_config_globalconfig", "/nonexistent"),
    ];
    let registry = format!("--registry=https://{NAME}/");
    let arguments = ["view", "thing", "version", &registry, "--no-update-notifier", "--fetch-retries=0"];
    let Some(run) = run(directory.path(), "npm", &arguments, &environment).await else { return };
    assert!(run.succeeded && run.output.trim().ends_with("1.2.3"), "{}", run.output);
}

/// The smart HTTP protocol by git's own backend, for those who know the token.
fn repositories(root: std::path::PathBuf, expected: String) -> Handler {
    Arc::new(move |request| {
        let (root, expected) = (root.clone(), expected.clone());
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            if parts.headers.get("authorization").is_none_or(|value| value != &expected) {
                return unauthorized();
            }
            let header = |name: &str| {
                parts.headers.get(name).map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default()
            };
            let body = body.collect().await.unwrap().to_bytes();
            let mut backend = Command::new("git")
                .arg("http-backend")
                .env("GIT_PROJECT_ROOT", &root)
                .env("GIT_HTTP_EXPORT_ALL", "1")
                .env("REMOTE_USER", "somebody")
                .env("REQUEST_METHOD", parts.method.as_str())
                .env("PATH_INFO", parts.uri.path())
                .env("QUERY_STRING", parts.uri.query().unwrap_or_default())
                .env("CONTENT_TYPE", header("content-type"))
                .env("HTTP_CONTENT_ENCODING", header("content-encoding"))
                .env("GIT_PROTOCOL", header("git-protocol"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            backend.stdin.take().unwrap().write_all(&body).await.unwrap();
            let output = backend.wait_with_output().await.unwrap().stdout;
            let end = output.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
            let mut response = Response::builder();
            for line in std::str::from_utf8(&output[..end]).unwrap().split("\r\n") {
                let (name, value) = line.split_once(": ").unwrap();
                response = match name {
                    "Status" => response.status(&value[..3]),
                    name => response.header(name, value),
                };
            }
            let body = Full::new(Bytes::copy_from_slice(&output[end + 4..]))
                .map_err(|never| match never {})
                .boxed_unsync();
            response.body(body).unwrap()
        })
    })
}

#[tokio::test]
async fn git_clones_and_pushes_with_a_token_it_does_not_know() {
    use base64::Engine;
    let mut stack = Stack::new();
    let pair = base64::engine::general_purpose::STANDARD.encode(format!("user:{SECRET}"));
    let vault = bearer("").replace(SECRET, &pair).replace("bearer", "basic");
    stack.write(Method::POST, &vault, StatusCode::CREATED);
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    stack.authority.export(at).unwrap();
    if run(at, "git", &["init", "-q", "--bare", "-b", "main", "remotes/thing.git"], &[]).await.is_none() {
        return;
    }
    run(at, "git", &["-C", "remotes/thing.git", "config", "http.receivepack", "true"], &[]).await;
    let tls = stack.identity(NAME, &[b"h2", b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), repositories(at.join("remotes"), format!("Basic {pair}"))).await;
    let Some(through) = stack.intercept_at_its_port(HTTPS).await else { return };
    let url = format!("https://{NAME}/thing.git");
    let resolve = format!("http.curloptResolve={NAME}:443:{}", through.ip());
    let ca = format!("http.sslCAInfo={}", at.join("mitmproxy-ca-cert.pem").display());
    let environment = [("GIT_TERMINAL_PROMPT", "0"), ("GIT_CONFIG_NOSYSTEM", "1")];
    let remote = ["-c", &resolve, "-c", &ca];
    let identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"];
    let steps: [Vec<&str>; 5] = [
        [&remote[..], &["clone", "-q", &url, "one"]].concat(),
        vec!["-C", "one", "add", "-A"],
        [&identity[..], &["-C", "one", "commit", "-q", "-m", "first"]].concat(),
        [&remote[..], &["-C", "one", "push", "-q", "origin", "HEAD:main"]].concat(),
        [&remote[..], &["clone", "-q", &url, "two"]].concat(),
    ];
    for step in steps {
        let run = run(at, "git", &step, &environment).await.unwrap();
        assert!(run.succeeded, "{step:?}: {}", run.output);
        assert!(!run.output.contains(&pair));
        if step.contains(&"one") && step.contains(&"clone") {
            // More than git sends in one piece, and nothing that it could make smaller.
            let noise: Vec<u8> = (0_u64..3 << 18)
                .flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[..4].to_vec())
                .collect();
            std::fs::write(at.join("one/noise"), noise).unwrap();
        }
    }
    let log = run(at, "git", &["-C", "two", "log", "--oneline"], &environment).await.unwrap();
    assert!(log.output.contains("first"), "{}", log.output);
    assert!(!stack.told().contains(&pair) && stack.told().contains(r#""kind":"injected""#));
}
