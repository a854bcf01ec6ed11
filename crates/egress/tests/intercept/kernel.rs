//! The real redirection, in a network namespace of the test's own.

use std::process::Command;
use std::sync::Arc;

use http::Method;
use sandglass_egress::intercept::Kernel;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::clients::run;
use crate::stack::{NAME, SECRET, Stack, recorder};

/// The sandbox's connections are redirected, those with the mark of the interceptor are not.
const RULES: &str = "table ip test { chain out { type nat hook output priority -100; \
    meta mark 0x1 accept; ip daddr 192.0.2.0/24 tcp dport { 80, 443, 8080 } redirect to :18081; }; }";

#[test]
fn redirected_connections_reach_where_they_wanted_to_go() {
    let works = |arguments: &[&str]| {
        Command::new("unshare").args(arguments).output().is_ok_and(|o| o.status.success())
    };
    if !works(&["-n", "nft", "list", "ruleset"]) {
        eprintln!("no root or no nft here: left out");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let inside = ["kernel::inside_a_namespace", "--exact", "--ignored", "--nocapture"];
    let output = Command::new("unshare").arg("-n").arg(program).args(inside).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "changes its network: run by the test above, in a namespace"]
async fn inside_a_namespace() {
    for arguments in ["ip link set lo up", "ip address add 192.0.2.10/32 dev lo"] {
        let mut words = arguments.split(' ');
        assert!(Command::new(words.next().unwrap()).args(words).status().unwrap().success());
    }
    assert!(Command::new("nft").arg(RULES).status().unwrap().success());

    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[b"h2", b"http/1.1"]);
    for (port, tls) in [(443, Some(tls.clone())), (80, None), (8080, None)] {
        let listener = TcpListener::bind(("192.0.2.10", port)).await.unwrap();
        stack.serve_on(listener, tls, Arc::clone(&handler));
    }
    let listener = TcpListener::bind("127.0.0.1:18081").await.unwrap();
    stack.intercept_by(listener, Arc::new(Kernel { mark: Some(1) }));
    let directory = tempfile::tempdir().unwrap();
    stack.authority.export(directory.path()).unwrap();

    let resolve = |port: u16| format!("{NAME}:{port}:192.0.2.10");
    let (tls, plain, extra) = (resolve(443), resolve(80), resolve(8080));
    let known = [
        "-q",
        "-sS",
        "--cacert",
        "mitmproxy-ca-cert.pem",
        "--resolve",
        &tls,
        "--resolve",
        &plain,
        "--resolve",
        &extra,
    ];
    for (url, lent) in [
        ("https://api.example.com/", true),
        ("http://api.example.com/", false),
        ("http://api.example.com:8080/", false),
    ] {
        let run = run(directory.path(), "curl", &[&known[..], &[url]].concat(), &[])
            .await
            .expect("curl is installed");
        assert!(run.succeeded && run.output == "hello", "{url}: {}", run.output);
        assert_eq!(seen.header("authorization"), lent.then(|| format!("Bearer {SECRET}")), "{url}");
    }
    let denied = ["--resolve", "other.example.com:80:192.0.2.10", "http://other.example.com/"];
    let run =
        run(directory.path(), "curl", &[&known[..], &denied].concat(), &[]).await.expect("curl is installed");
    assert!(run.output.contains("denied by this sandbox's egress policy"), "{}", run.output);
    assert_eq!(seen.count(), 3);

    // Nobody is served who was not redirected.
    let mut stream = TcpStream::connect("127.0.0.1:18081").await.unwrap();
    let _ = stream.write_all(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n").as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.is_empty());
    stack.write(Method::DELETE, "", http::StatusCode::NO_CONTENT);
}
