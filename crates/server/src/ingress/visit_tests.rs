//! Visits by browser and tunnels, between real sockets on loopback.

use std::net::IpAddr;

use axum::extract::{WebSocketUpgrade, ws::Message};
use axum::response::Response;
use axum::routing::any;
use http::HeaderMap;
use sandglass_ingress::Moment;

use super::tests::{Stage, ask, closed, handshake, mirror, serve, stage};
use super::*;

/// A link to a port, in the form of its path and query.
fn link(stage: &Stage, id: &str, port: u16) -> String {
    let invitation = invite(&stage.known.targets[id], id, port, Moment::now().wall).unwrap();
    format!("/v1/sandboxes/{id}/proxy/{port}{}", invitation.path_and_query)
}

fn header<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The cookie that an exchange answers, as a browser sends it back.
fn cookie(answer: &str) -> String {
    let line = header(answer, "set-cookie").unwrap_or_else(|| panic!("{answer}"));
    format!("Cookie: theirs=1; {}\r\n", line.split(';').next().unwrap())
}

/// Says what cookies came with the handshake.
async fn greet(handshake: WebSocketUpgrade, headers: HeaderMap) -> Response {
    let cookie = headers["cookie"].to_str().unwrap().to_owned();
    handshake.on_upgrade(|mut socket| async move {
        let _ = socket.send(Message::text(format!("hi {cookie}"))).await;
    })
}

#[tokio::test]
async fn a_link_is_exchanged_for_a_cookie_that_the_program_does_not_see() {
    let address = IpAddr::from([127, 77, 0, 41]);
    let port = serve((address, 0), mirror("app").route("/ws", any(greet))).await.port();
    let stage = stage(address, closed()).await;
    let own = format!("/v1/sandboxes/guarded/proxy/{port}");
    let exchange = ask(stage.api, &format!("GET {}&folder=%2Fa", link(&stage, "guarded", port)), "").await;
    assert!(exchange.starts_with("HTTP/1.1 303"), "{exchange}");
    assert_eq!(header(&exchange, "location"), Some(&*format!("{own}/?folder=%2Fa")));
    assert_eq!(header(&exchange, "cache-control"), Some("no-store"));
    let set = header(&exchange, "set-cookie").unwrap();
    let attributes = format!("; Path={own}; Max-Age=43200; HttpOnly; SameSite=Lax");
    assert!(set.ends_with(&attributes), "{set}");
    assert!(stage.known.used.lock().unwrap().is_empty(), "nobody came in yet");

    let answer = ask(stage.api, &format!("GET {own}/x"), &cookie(&exchange)).await;
    assert!(answer.contains("app GET /x\n") && answer.contains("\ncookie: theirs=1\n"), "{answer}");
    assert!(!answer.contains("sandglass-access"), "{answer}");
    let (_, frame, _) = handshake(stage.api, &format!("{own}/ws"), &cookie(&exchange)).await;
    assert_eq!(&frame[2..], b"hi theirs=1");
    for elsewhere in [
        format!("/v1/sandboxes/running/proxy/{port}/"),
        "/v1/sandboxes/guarded/proxy/9/".to_owned(),
        "/v1/sandboxes/guarded/proxy/44772/pty".to_owned(),
    ] {
        let answer = ask(stage.api, &format!("GET {elsewhere}"), &cookie(&exchange)).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{elsewhere}: {answer}");
    }
}

#[tokio::test]
async fn what_does_not_navigate_is_let_in_by_the_link_itself() {
    let address = IpAddr::from([127, 77, 0, 42]);
    let port = serve((address, 0), mirror("app")).await.port();
    let stage = stage(address, closed()).await;
    let answer = ask(stage.api, &format!("POST {}&a=1", link(&stage, "running", port)), "").await;
    assert!(answer.contains("app POST /?a=1\n"), "{answer}");
    let answer = ask(stage.api, &format!("POST {}", link(&stage, "running", port)), "").await;
    assert!(answer.contains("app POST /\n"), "{answer}");
}

#[tokio::test]
async fn a_link_that_is_over_or_wrong_opens_nothing() {
    let address = IpAddr::from([127, 77, 0, 43]);
    let stage = stage(address, closed()).await;
    let late = invite(&stage.known.targets["running"], "running", 9, Moment::now().wall - 301).unwrap();
    let wrong = link(&stage, "running", 9).replace("/9/", "/10/");
    for path in [
        format!("/v1/sandboxes/running/proxy/9{}", late.path_and_query),
        wrong,
        link(&stage, "running", 9).replace("running", "unknown"),
        "/v1/sandboxes/running/proxy/9/?sandglass-access=".to_owned(),
    ] {
        let answer = ask(stage.api, &format!("GET {path}"), "").await;
        assert!(
            answer.starts_with("HTTP/1.1 401") && answer.contains("link has expired"),
            "{path}: {answer}"
        );
        assert!(header(&answer, "set-cookie").is_none());
    }
    let nobody = Target { route_token: String::new(), ..stage.known.targets["running"].clone() };
    assert_eq!(invite(&nobody, "running", 9, 0), None);
}

#[tokio::test]
async fn of_the_agent_visitors_see_terminals_alone() {
    let address = IpAddr::from([127, 77, 0, 44]);
    serve((address, AGENT_PORT), mirror("agent")).await;
    let stage = stage(address, closed()).await;
    let link = link(&stage, "running", AGENT_PORT);
    assert!(link.contains("/proxy/44772/pty?"), "{link}");
    let answer = ask(stage.api, &format!("POST {link}"), "").await;
    assert!(answer.contains("agent POST /pty\n") && answer.contains("x-execd-access-token: agent-token"));
    let exchange = ask(stage.api, &format!("GET {link}"), "").await;
    assert!(
        header(&exchange, "set-cookie").unwrap().contains("; Path=/v1/sandboxes/running/proxy/44772/pty;")
    );
    let inside = ask(stage.api, "GET /v1/sandboxes/running/proxy/44772/pty/a/ws", &cookie(&exchange)).await;
    assert!(inside.contains("agent GET /pty/a/ws\n"), "{inside}");
    for path in ["command", "ptyx", "files/info", ""] {
        let asked = format!("POST /v1/sandboxes/running/proxy/44772/{path}");
        let answer = ask(stage.api, &asked, &cookie(&exchange)).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{path}: {answer}");
    }
}
