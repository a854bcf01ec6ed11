//! Everything around the handlers: errors, routes, authentication, hostile input, the port bridge, metrics.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::support::{Agent, parse, until};

#[test]
fn ping_routes_and_errors() {
    let agent = Agent::start_with(&["--access-token", "tok"], &[]);
    let ping = agent.get("/ping");
    assert_eq!((ping.status, ping.header("content-length"), ping.body.len()), (200, Some("0"), 0));
    assert_eq!(agent.get("/metrics").status, 401);
    let with =
        |method: &str, target: &str| agent.send(method, target, &[("X-EXECD-ACCESS-TOKEN", "tok")], b"");
    for target in ["/", "/nope", "/files", "/files/nope", "/command/x"] {
        let answer = with("GET", target);
        assert_eq!(answer.status, 404, "{target}");
        assert!(answer.json()["code"].is_string() && answer.json()["message"].is_string());
        assert_eq!(answer.header("content-type"), Some("application/json; charset=utf-8"));
    }
    assert_eq!(with("GET", "/metrics/").header("location"), Some("/metrics"));
    assert_eq!(with("GET", "//evil.example/").header("location"), Some("/evil.example"));
}

#[test]
fn what_cannot_be_a_directory_or_a_language_is_refused_in_few_words() {
    let agent = Agent::start();
    for target in ["/session", "/pty"] {
        let answer = agent.post(target, &serde_json::json!({ "cwd": "/tmp/\u{0}" }));
        assert_eq!(
            (answer.status, &answer.json()["code"]),
            (400, &"INVALID_REQUEST_BODY".into()),
            "{target}"
        );
    }
    let answer = agent.post("/code/context", &serde_json::json!({ "language": "x".repeat(100_000) }));
    assert!(answer.status == 500 && answer.body.len() < 300, "{} {}", answer.status, answer.body.len());
}

#[test]
fn hostile_bytes_do_not_end_the_agent() {
    let agent = Agent::start();
    let bodies: [&[u8]; 6] = [b"", b"{", b"[]", b"\xff\xfe", b"null", b"{\"command\":{\"a\":1}}"];
    for body in bodies {
        for target in
            ["/command", "/files/mv", "/files/permissions", "/files/replace", "/directories", "/files/upload"]
        {
            let status = agent.send("POST", target, &[], body).status;
            assert!(
                (200..=500).contains(&status) && (status != 500 || target != "/command"),
                "{target} {body:?} {status}"
            );
        }
    }
    let deep = "[".repeat(100_000);
    assert_eq!(agent.send("POST", "/command", &[], deep.as_bytes()).status, 400);
    for raw in [&b"\x00\x01\x02\r\n\r\n"[..], b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", &[b'a'; 100_000]] {
        let mut stream = agent.connect();
        let _ = stream.write_all(raw);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    for target in [
        "/files/info?path=%00",
        "/files/info?path=%ff%fe",
        "/files/download?path=$",
        "/%ff%00",
        "/command/%2f/logs",
    ] {
        assert!(agent.get(target).status >= 400, "{target}");
    }
    assert_eq!(agent.get("/ping").status, 200);
}

#[test]
fn many_idle_connections_do_not_lock_out_a_client_of_a_small_agent() {
    // With fewer descriptors than connections, accept fails until some come back.
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -n 40; exec \"$@\"", "sh", crate::support::BINARY]);
    let agent = Agent::launch(limited, &[], &[]);
    let idle: Vec<_> = (0..60).map(|_| agent.connect()).collect();
    std::thread::sleep(std::time::Duration::from_millis(200));
    drop(idle);
    assert_eq!(agent.get("/ping").status, 200);
}

#[test]
fn local_connections_are_few_and_must_ask() {
    let agent = Agent::start();
    let mut kept = agent.connect();
    kept.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let ask = |stream: &mut TcpStream| {
        stream.write_all(b"GET /ping HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
        let mut raw = Vec::new();
        while !raw.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            raw.push(byte[0]);
        }
        assert_eq!(parse(&raw).status, 200);
    };
    ask(&mut kept);
    let start = Instant::now();
    let mut idle: Vec<_> = (0..200).map(|_| agent.connect()).collect();
    // Half a head is not one.
    let _ = idle[0].write_all(b"GET /ping HTTP/1.1\r\nX: ");
    let closed = |stream: &mut TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0; 512]);
        stream.set_nonblocking(false).unwrap();
        !read.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let mut refused = || idle.iter_mut().skip(1).filter_map(|s| closed(s).then_some(())).count();
    until(|| (refused() >= 72).then_some(()));
    assert!(refused() <= 74, "{}", refused());
    // One that is connected keeps its slot, and goes on being served.
    ask(&mut kept);
    let _ = idle[0].read_to_end(&mut Vec::new());
    assert!(start.elapsed() >= Duration::from_secs(9), "a head may take ten seconds");
    until(|| idle.iter_mut().all(closed).then_some(()));
    ask(&mut kept);
    assert_eq!(agent.get("/ping").status, 200);
}

#[test]
fn the_bridge_streams_and_hides_the_token() {
    let agent = Agent::start_with(&["--access-token", "tok"], &[]);
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = target.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\nbody") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        stream
            .write_all(
                b"HTTP/1.1 201 Created\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            )
            .unwrap();
        String::from_utf8(head).unwrap()
    });
    let headers = [("X-EXECD-ACCESS-TOKEN", "tok"), ("X-Other", "kept"), ("X-Forwarded-Host", "h")];
    let answer = agent.send("POST", &format!("/proxy/{port}/a/b%20c?q=1&r=%2F"), &headers, b"body");
    assert_eq!((answer.status, answer.header("x-a"), answer.text().as_str()), (201, Some("b"), "abc"));
    let seen = server.join().unwrap().to_ascii_lowercase();
    assert!(seen.starts_with("post /a/b%20c?q=1&r=%2f http/1.1\r\n"), "{seen}");
    assert!(
        seen.contains("x-other: kept")
            && seen.contains("x-forwarded-for: 127.0.0.1")
            && seen.contains("x-forwarded-proto: http")
    );
    assert!(!seen.contains("tok") && !seen.contains("forwarded-host"), "{seen}");

    let token = [("X-EXECD-ACCESS-TOKEN", "tok")];
    let own = |path: &str| agent.send("GET", &format!("/proxy/{}/{path}", agent.port), &token, b"");
    assert_eq!((own("ping").status, own("ping").header("content-length")), (200, Some("0")));
    assert_eq!(own(&format!("proxy/{}/metrics", agent.port)).status, 200);
    assert_eq!(agent.get(&format!("/proxy/{}/metrics", agent.port)).status, 401);
    let nobody = agent.send("GET", "/proxy/1/x", &token, b"");
    assert_eq!((nobody.status, nobody.text().as_str()), (502, "Bad Gateway"));
    assert_eq!(nobody.header("content-type"), Some("text/plain; charset=utf-8"));
    for (path, status) in [
        ("/proxy/", 400),
        ("/proxy/0/x", 400),
        ("/proxy/80@evil/x", 400),
        ("/proxy/70000/x", 400),
        ("/proxy/1/x", 502),
    ] {
        assert_eq!(agent.send("GET", path, &token, b"").status, status, "{path}");
    }
}

#[test]
fn the_bridge_passes_upgrades() {
    let agent = Agent::start();
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = target.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = target.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        stream
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello",
            )
            .unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).unwrap();
        stream.write_all(&echo).unwrap();
        String::from_utf8(head).unwrap()
    });
    let mut stream = agent.connect();
    write!(stream, "GET /proxy/{port}/ws HTTP/1.1\r\nHost: b\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n").unwrap();
    let mut raw = Vec::new();
    while !raw.ends_with(b"hello") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        raw.push(byte[0]);
    }
    let answer = parse(&raw);
    assert_eq!((answer.status, answer.header("upgrade")), (101, Some("websocket")));
    stream.write_all(b"\x00\xffab").unwrap();
    let mut echo = [0; 4];
    stream.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"\x00\xffab");
    assert!(server.join().unwrap().to_ascii_lowercase().contains("sec-websocket-key: k"));
}

#[test]
fn metrics_have_their_five_numbers() {
    let agent = Agent::start();
    let metrics = agent.get("/metrics").json();
    for key in ["cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib", "timestamp"] {
        assert!(metrics[key].is_number(), "{key}");
    }
    assert!(metrics["mem_total_mib"].as_f64() >= metrics["mem_used_mib"].as_f64());
    let mut stream = agent.connect();
    stream.write_all(b"GET /metrics/watch HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.contains("}\n") {
        let count = stream.read(&mut buffer).unwrap();
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    assert!(text.contains("text/event-stream") && text.contains("\"cpu_count\""));
}
