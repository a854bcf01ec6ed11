//! What the policy lets through, and what becomes of connections when it changes.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

use super::client::{ask, ask_by_stream, connect, echo, get, resolve, tls};
use super::program::{Home, Program, call, change};
use super::stage::{Place, Stage};
use super::world::World;

const GOOD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 10));
const BAD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 11));
const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 12));

const SOME: &str = r#"{"egress":[{"action":"allow","target":"good.test"},{"action":"allow","target":"*.good.test"},
    {"action":"allow","target":"203.0.113.12"}]}"#;

fn names_and_addresses_are_decided(place: Place) {
    let stage = Stage::new(place);
    let world = World::start(&stage.world);
    let home = Home::new(SOME);
    let mut program = Program::start(&stage, &home);
    let authority = world.authority.clone();
    stage.sandbox.within(|| {
        connect(GOOD, 8080).expect_err("nobody has asked for a name that leads there");
        let denied = ask("bad.test", RecordType::A).unwrap();
        assert_eq!(denied.code, ResponseCode::NXDomain);
        assert_eq!(denied.reason.unwrap(), (15, "blocked by the network policy: default".into()));
        assert_eq!(ask("good.test", RecordType::HTTPS).unwrap().code, ResponseCode::NoError);
        assert_eq!(ask_by_stream("bad.test", RecordType::A).unwrap().code, ResponseCode::NXDomain);
        assert_eq!(ask_by_stream("www.good.test", RecordType::A).unwrap().addresses, [GOOD]);

        assert_eq!(resolve("good.test"), [GOOD]);
        let body = get(connect(GOOD, 80).unwrap(), "good.test", "/a").unwrap();
        assert!(body.ends_with("served GET /a HTTP/1.1"), "{body}");
        let body = get(connect(GOOD, 8080).unwrap(), "good.test", "/b").unwrap();
        assert!(body.ends_with("served GET /b HTTP/1.1"), "{body}");
        let secure = tls(connect(GOOD, 443).unwrap(), "good.test", &authority).unwrap();
        assert!(get(secure, "good.test", "/c").unwrap().ends_with("served GET /c HTTP/1.1"));

        // The same server under a name that is not allowed.
        let retried = tls(connect(GOOD, 8443).unwrap(), "good.test", &authority).unwrap();
        assert!(get(retried, "good.test", "/again").unwrap().ends_with("served GET /again HTTP/1.1"));
        tls(connect(GOOD, 443).unwrap(), "neighbour.test", &authority).expect_err("the name is not allowed");
        let answer = get(connect(GOOD, 80).unwrap(), "neighbour.test", "/d");
        assert!(!answer.unwrap_or_default().contains("served"));

        connect(BAD, 443).expect_err("no rule allows the address");
        connect(BAD, 7).expect_err("no rule allows the address");
        echo(&mut connect(OTHER, 7).unwrap()).unwrap();
    });
    program.await_line(|line| line["event"]["by"] == "dns" && line["event"]["host"] == "bad.test");
    program.await_line(|line| line["event"]["host"] == "neighbour.test");
    program
        .await_line(|line| line["event"]["by"] == "firewall" && line["event"]["address"] == "203.0.113.11");
    let served = world.requests.lock().unwrap().join("");
    assert!(!served.contains("neighbour"), "{served}");
}

#[test]
fn a_gateway_decides_about_names_and_addresses() {
    names_and_addresses_are_decided(Place::Gateway);
}

#[test]
fn a_shared_network_decides_about_names_and_addresses() {
    names_and_addresses_are_decided(Place::Shared);
}

fn changes_take_effect_at_once(place: Place) {
    let stage = Stage::new(place);
    let world = World::start(&stage.world);
    let home = Home::new(SOME);
    let _program = Program::start(&stage, &home);
    let held = stage.sandbox.within(|| {
        assert_eq!(resolve("good.test"), [GOOD]);
        let mut held = [connect(GOOD, 7).unwrap(), connect(OTHER, 7).unwrap()];
        held.iter_mut().for_each(|stream| echo(stream).unwrap());
        held
    });
    let [mut named, mut listed] = held;

    change(&stage, "PATCH", r#"[{"action":"allow","target":"bad.test"}]"#);
    stage.sandbox.within(|| {
        assert_eq!(resolve("bad.test"), [BAD]);
        echo(&mut connect(BAD, 7).unwrap()).unwrap();
        connect(GOOD, 7).expect("what was resolved before stays open");
        echo(&mut named).unwrap();
        echo(&mut listed).unwrap();
    });

    change(&stage, "PATCH", r#"[{"action":"deny","target":"good.test"}]"#);
    stage.sandbox.within(|| {
        assert_eq!(ask("good.test", RecordType::A).unwrap().code, ResponseCode::NXDomain);
        connect(GOOD, 7).expect_err("the name is denied now");
        echo(&mut named).expect_err("the connection was cut");
        echo(&mut listed).unwrap();
        connect(BAD, 7).expect("that one is allowed still");
    });

    change(&stage, "DELETE", r#"["203.0.113.12"]"#);
    stage.sandbox.within(|| {
        echo(&mut listed).expect_err("the connection was cut");
        connect(OTHER, 7).expect_err("the address is not allowed any more");
    });

    change(&stage, "PUT", "");
    stage.sandbox.within(|| {
        connect(BAD, 7).expect_err("nothing is allowed");
        assert_eq!(ask("bad.test", RecordType::A).unwrap().code, ResponseCode::NXDomain);
    });
    let (status, shown) = call(&stage, "GET", "/policy", "");
    assert_eq!(status, 200);
    assert!(shown.contains(r#""mode":"deny_all""#), "{shown}");
    drop(world);
}

#[test]
fn changes_take_effect_at_once_in_a_gateway() {
    changes_take_effect_at_once(Place::Gateway);
}

#[test]
fn changes_take_effect_at_once_in_a_shared_network() {
    changes_take_effect_at_once(Place::Shared);
}

fn names_do_not_lead_inside(place: Place) {
    let stage = Stage::new(place);
    let _world = World::start(&stage.world);
    let home = Home::new(SOME);
    let mut program = Program::start(&stage, &home);
    stage.sandbox.within(|| {
        let rebound = ask("rebound.good.test", RecordType::A).unwrap();
        assert_eq!((rebound.code, rebound.addresses.as_slice()), (ResponseCode::NoError, &[][..]));
        assert_eq!(rebound.reason.unwrap().0, 17);
        assert_eq!(resolve("mixed.good.test"), [IpAddr::from([203, 0, 113, 20])]);
        connect([10, 9, 9, 9], 7).expect_err("no rule allows the private address");
    });
    program.await_line(|line| line["event"]["host"] == "rebound.good.test");
    change(&stage, "PATCH", r#"[{"action":"allow","target":"10.9.0.0/16"}]"#);
    stage.sandbox.within(|| {
        assert_eq!(resolve("rebound.good.test"), [IpAddr::from([10, 9, 9, 9])]);
        echo(&mut connect([10, 9, 9, 9], 7).unwrap()).unwrap();
    });
}

#[test]
fn names_do_not_lead_inside_of_a_gateway() {
    names_do_not_lead_inside(Place::Gateway);
}

#[test]
fn names_do_not_lead_inside_of_a_shared_network() {
    names_do_not_lead_inside(Place::Shared);
}

#[test]
fn every_question_is_answered_though_both_ask_the_same_resolver() {
    let stage = Stage::new(Place::Shared);
    let _world = World::start(&stage.world);
    let home = Home::new(SOME);
    let _program = Program::start(&stage, &home);
    stage.sandbox.within(|| {
        for _ in 0..600 {
            assert_eq!(resolve("good.test"), [GOOD]);
        }
    });
}

fn denied_names_are_denied_where_all_else_is_allowed(place: Place) {
    let stage = Stage::new(place);
    let world = World::start(&stage.world);
    let policy = r#"{"defaultAction":"allow","egress":[{"action":"deny","target":"bad.test"},{"action":"deny","target":"203.0.113.12"}]}"#;
    let home = Home::new(policy);
    let _program = Program::start(&stage, &home);
    let authority = world.authority.clone();
    stage.sandbox.within(|| {
        assert_eq!(ask("bad.test", RecordType::A).unwrap().code, ResponseCode::NXDomain);
        assert_eq!(resolve("good.test"), [GOOD]);
        echo(&mut connect(GOOD, 7).unwrap()).unwrap();
        connect(OTHER, 7).expect_err("the address is denied");
        // Somebody else told the sandbox where the denied name lives.
        tls(connect(BAD, 443).unwrap(), "bad.test", &authority).expect_err("the name is denied");
        let answer = get(connect(BAD, 80).unwrap(), "bad.test", "/");
        assert!(!answer.unwrap_or_default().contains("served"));
        tls(connect(GOOD, 443).unwrap(), "good.test", &authority).unwrap();
    });
}

#[test]
fn denied_names_are_denied_in_a_gateway_where_all_else_is_allowed() {
    denied_names_are_denied_where_all_else_is_allowed(Place::Gateway);
}

#[test]
fn denied_names_are_denied_in_a_shared_network_where_all_else_is_allowed() {
    denied_names_are_denied_where_all_else_is_allowed(Place::Shared);
}

/// Whatever the sandbox sends while rules are exchanged, nothing that both rules deny gets out.
fn there_is_no_open_moment(place: Place) {
    let stage = Stage::new(place);
    let _world = World::start(&stage.world);
    let home = Home::new(SOME);
    let _program = Program::start(&stage, &home);
    let heard = stage.world.within(|| {
        let socket = UdpSocket::bind("203.0.113.11:9").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    });
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let sandbox = &stage.sandbox;
        scope.spawn(move || {
            sandbox.enter();
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            while let Err(std::sync::mpsc::TryRecvError::Empty) = stopped.try_recv() {
                let _ = socket.send_to(b"out", "203.0.113.11:9");
                assert!(connect(BAD, 7).is_err());
            }
        });
        for number in 0..40 {
            change(
                &stage,
                "PATCH",
                &format!(r#"[{{"action":"allow","target":"203.0.113.{}"}}]"#, 100 + number),
            );
        }
        drop(stop);
    });
    heard.recv(&mut [0; 8]).expect_err("a packet got out");
}

#[test]
fn there_is_no_open_moment_in_a_gateway() {
    there_is_no_open_moment(Place::Gateway);
}

#[test]
fn there_is_no_open_moment_in_a_shared_network() {
    there_is_no_open_moment(Place::Shared);
}

fn credentials_are_lent(place: Place) {
    let stage = Stage::new(place);
    let world = World::start(&stage.world);
    let home = Home::new(SOME)
        .trust(&world.authority)
        .with("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "true")
        .with("OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS", "198.51.100.1");
    let mut program = Program::start(&stage, &home);
    let shown = home.folder.path().join("shown/mitmproxy-ca-cert.pem");
    let authority = std::fs::read_to_string(&shown).unwrap();
    let vault = r#"{"credentials":[{"name":"key","source":{"value":"s3cret"}}],
        "bindings":[{"name":"api","match":{"hosts":["good.test"]},"auth":{"type":"bearer","credential":"key"}}]}"#;
    let (status, told) = call(&stage, "POST", "/credential-vault", vault);
    assert_eq!(status, 201, "{told}");
    let request = || {
        stage.sandbox.within(|| {
            assert_eq!(resolve("good.test"), [GOOD]);
            let secure = tls(connect(GOOD, 443).unwrap(), "good.test", &authority).unwrap();
            assert!(get(secure, "good.test", "/api").unwrap().ends_with("served GET /api HTTP/1.1"));
        });
        world.requests.lock().unwrap().last().unwrap().to_lowercase()
    };
    assert!(request().contains("authorization: bearer s3cret"));
    program.await_line(|line| line["event"]["kind"] == "injected");
    assert!(!format!("{:?}", program.told).contains("s3cret"));

    let (status, told) = call(&stage, "DELETE", "/policy", r#"["good.test"]"#);
    assert_eq!(status, 400, "{told}");

    // The vault and the authority that the sandbox trusts outlive the worker.
    rustix::process::kill_process(program.worker(), rustix::process::Signal::KILL).unwrap();
    program.await_line(|line| line["ready"] == true);
    assert!(request().contains("authorization: bearer s3cret"));
    assert_eq!(std::fs::read_to_string(&shown).unwrap(), authority);
}

#[test]
fn credentials_are_lent_in_a_gateway() {
    credentials_are_lent(Place::Gateway);
}

#[test]
fn credentials_are_lent_in_a_shared_network() {
    credentials_are_lent(Place::Shared);
}

#[test]
fn the_webhook_is_told_and_quiet_names_are_not() {
    let stage = Stage::new(Place::Gateway);
    let world = World::start(&stage.world);
    let home = Home::new(SOME).with("OPENSANDBOX_EGRESS_DENY_WEBHOOK", "http://hook.test:8080/denied?k=1");
    std::fs::create_dir(home.folder.path().join("always")).unwrap();
    std::fs::write(home.folder.path().join("always/deny.always"), "www.good.test # always\n").unwrap();
    std::fs::write(home.folder.path().join("always/log_skip.always"), "quiet.test\n").unwrap();
    let mut program = Program::start(&stage, &home);
    stage.sandbox.within(|| {
        for name in ["quiet.test", "www.good.test"] {
            assert_eq!(ask(name, RecordType::A).unwrap().code, ResponseCode::NXDomain);
        }
    });
    let told = program.await_line(|line| line["event"]["kind"] == "denied");
    assert_eq!(told["event"]["host"], "www.good.test");
    assert_eq!(told["event"]["rule"], "deny www.good.test (always)");
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while world.requests.lock().unwrap().len() < 2 {
        assert!(std::time::Instant::now() < end, "the webhook was not told");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(world.requests.lock().unwrap()[0].starts_with("POST /denied?k=1 HTTP/1.1\r\n"));
}
