//! What passes and what does not, the same in both placements.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use sandglass_egress::audit::{Event, Gate};
use sandglass_egress::firewall::{Asked, NameGate, Plan};
use sandglass_egress::policy::Action;

use crate::stage::{Fake, LONG, SERVERS, Stage, by_address, by_name, echoes, hello};

fn both(run: impl Fn(&Stage)) {
    for stage in [Stage::gateway(), Stage::shared()] {
        println!("{:?}", stage.placement);
        run(&stage);
    }
}

/// Whether a datagram comes back; refusals come as errors.
fn asks(stage: &Stage, address: &str, port: u16) -> std::io::Result<()> {
    let to = SocketAddr::new(address.parse().unwrap(), port);
    stage.boxed(move || {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.set_read_timeout(Some(LONG))?;
        socket.connect(to)?;
        socket.send(b"question")?;
        let mut buffer = [0; 100];
        socket.recv(&mut buffer).map(|_| ())
    })
}

#[test]
fn nothing_passes_before_there_is_a_plan_and_denials_fail_fast_afterwards() {
    both(|stage| {
        let rules = Fake::new(Action::Deny, &[], &[]);
        let program = stage.start(rules.clone());
        program.with(|_| ());
        let to = SocketAddr::new(SERVERS[0].parse().unwrap(), 443);
        let early =
            stage.boxed(move || std::net::TcpStream::connect_timeout(&to, Duration::from_millis(300)));
        assert_eq!(early.unwrap_err().kind(), ErrorKind::TimedOut);

        program.apply(Plan::deny_all());
        assert_eq!(stage.dial(SERVERS[0], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let refused = asks(stage, SERVERS[0], 9999).unwrap_err();
        assert!(
            matches!(
                refused.kind(),
                ErrorKind::HostUnreachable | ErrorKind::PermissionDenied | ErrorKind::ConnectionRefused
            ),
            "{refused:?}"
        );
        let told = rules.hears(|event| matches!(event, Event::Denied { port: Some(443), .. }));
        let Event::Denied { by, address, rule, .. } = told else { panic!() };
        assert_eq!((by, address, rule.as_str()), (Gate::Firewall, SERVERS[0].parse().ok(), "default"));
    });
}

#[test]
fn addresses_pass_by_rule_and_denials_win() {
    both(|stage| {
        let program = stage.start(Fake::new(Action::Deny, &[], &[]));
        program.apply(by_address(&["192.0.2.0/24"], &["192.0.2.2/32"]));
        echoes(&mut stage.dial(SERVERS[0], 443).unwrap(), b"anything").unwrap();
        asks(stage, SERVERS[0], 9999).unwrap();
        assert_eq!(stage.dial(SERVERS[1], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(stage.dial(SERVERS[2], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        // DNS over TLS never passes.
        assert_eq!(stage.dial(SERVERS[0], 853).unwrap_err().kind(), ErrorKind::ConnectionRefused);

        let open = Plan { default: Action::Allow, ..by_address(&[], &["198.51.100.0/24"]) };
        program.apply(open);
        echoes(&mut stage.dial(SERVERS[3], 443).unwrap(), b"anything").unwrap();
        assert_eq!(stage.dial(SERVERS[2], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn addresses_of_names_pass_with_an_allowed_name() {
    both(|stage| {
        let rules = Fake::new(Action::Deny, &["good.example"], &[]);
        let program = stage.start(rules.clone());
        program.apply(by_name(&[SERVERS[0]]));
        let mut good = stage.dial(SERVERS[0], 443).unwrap();
        echoes(&mut good, &hello(Some("good.example"))).unwrap();
        // From here on it is the kernel's alone.
        echoes(&mut good, &vec![7; 1 << 20]).unwrap();

        for bytes in [
            hello(Some("evil.example")),
            hello(None),
            b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_vec(),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        ] {
            let mut evil = stage.dial(SERVERS[0], 443).unwrap();
            assert_eq!(echoes(&mut evil, &bytes).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        let told = rules.hears(|event| matches!(event, Event::Denied { by: Gate::Sni, host: Some(_), .. }));
        let Event::Denied { host, rule, .. } = told else { panic!() };
        assert_eq!((host.as_deref(), rule.as_str()), (Some("evil.example"), "default"));
        rules.hears(|event| matches!(event, Event::Denied { by: Gate::Http, host: Some(host), .. } if host == "evil.example"));

        let request = b"POST /x HTTP/1.1\r\nHost: Good.Example:8443\r\nContent-Length: 3\r\n\r\nabc";
        echoes(&mut stage.dial(SERVERS[0], 8443).unwrap(), request).unwrap();
        // No names in it.
        echoes(&mut stage.dial(SERVERS[0], 8443).unwrap(), b"\x00\x01binary").unwrap();
        asks(stage, SERVERS[0], 9999).unwrap();
        // The server speaks first.
        let mut greeted = stage.dial(SERVERS[0], 22).unwrap();
        let mut greeting = [0; 14];
        greeted.read_exact(&mut greeting).unwrap();
        echoes(&mut greeted, &hello(Some("evil.example"))).unwrap();
        // QUIC falls back.
        asks(stage, SERVERS[0], 443).unwrap_err();
        rules.hears(|event| matches!(event, Event::Denied { by: Gate::Firewall, rule, port: Some(443), .. } if rule == "QUIC hides names"));
        // Not resolved.
        assert_eq!(stage.dial(SERVERS[1], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn quic_passes_by_rule_and_not_by_name_whatever_comes_before_it() {
    both(|stage| {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &["evil.example"]));
        let known = by_name(&[SERVERS[0]]);
        let open = Plan { default: Action::Allow, dynamic: Vec::new(), ..known.clone() };
        for plan in [known, open] {
            program.apply(Plan {
                networks: by_address(&["192.0.2.2/32"], &["198.51.100.1/32"]).networks,
                ..plan
            });
            let talk = |address: &'static str, port: u16, packets: [&'static [u8]; 2]| {
                stage.boxed(move || {
                    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                    socket.set_read_timeout(Some(LONG)).unwrap();
                    socket.connect((address, port)).unwrap();
                    packets.map(|packet| {
                        let _ = socket.take_error();
                        socket.send(packet).and_then(|_| socket.recv(&mut [0; 100])).is_ok()
                    })
                })
            };
            const QUIC: &[u8] = &[0xc3, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8];
            const OTHER: &[u8] = b"something else";
            assert_eq!(talk(SERVERS[0], 9999, [OTHER, QUIC]), [true, false]);
            assert_eq!(talk(SERVERS[0], 443, [OTHER, QUIC]), [false, false]);
            assert_eq!(talk(SERVERS[1], 9999, [OTHER, QUIC]), [true, true]);
            assert_eq!(talk(SERVERS[1], 443, [QUIC, OTHER]), [true, true]);
            assert_eq!(talk(SERVERS[2], 443, [QUIC, OTHER]), [false, false]);
        }
    });
}

#[test]
fn a_name_that_is_not_remembered_is_known_to_have_been_there() {
    both(|stage| {
        let rules = Fake::new(Action::Deny, &["good.example"], &[]);
        let program = stage.start(rules.clone());
        program.apply(by_name(&[SERVERS[0]]));
        let mut named = stage.dial(SERVERS[0], 443).unwrap();
        echoes(&mut named, &hello(Some("good.example"))).unwrap();
        let mut greeted = stage.dial(SERVERS[0], 22).unwrap();
        greeted.read_exact(&mut [0; 14]).unwrap();
        echoes(&mut greeted, b"hello").unwrap();
        drop(program);
        let program = stage.start(rules);
        program.apply(by_name(&[SERVERS[0]]));
        let ended = program.with(|firewall| firewall.cut(&|connection| connection.asked == Asked::Nothing));
        assert_eq!(ended.unwrap(), 1);
        assert_eq!(echoes(&mut named, b"more").unwrap_err().kind(), ErrorKind::ConnectionReset);
        echoes(&mut greeted, b"more").unwrap();
    });
}

#[test]
fn a_hello_in_pieces_is_read_whole() {
    both(|stage| {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        for (name, passes) in [("good.example", true), ("evil.example", false)] {
            let mut stream = stage.dial(SERVERS[0], 443).unwrap();
            stream.set_nodelay(true).unwrap();
            let bytes = hello(Some(name));
            let mut result = Ok(());
            for piece in bytes.chunks(37) {
                result = echoes(&mut stream, piece);
                if result.is_err() {
                    break;
                }
            }
            assert_eq!(result.is_ok(), passes, "{name}: {result:?}");
        }
    });
}

#[test]
fn by_default_everything_passes_but_denied_names() {
    both(|stage| {
        let rules = Fake::new(Action::Allow, &[], &["evil.example"]);
        let program = stage.start(rules.clone());
        program.apply(Plan { default: Action::Allow, names: NameGate::On, ..Plan::deny_all() });
        for bytes in [hello(Some("any.example")), hello(None), b"whatever".to_vec()] {
            echoes(&mut stage.dial(SERVERS[2], 443).unwrap(), &bytes).unwrap();
        }
        let mut evil = stage.dial(SERVERS[2], 443).unwrap();
        assert_eq!(
            echoes(&mut evil, &hello(Some("evil.example"))).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
        let told = rules.hears(|event| matches!(event, Event::Denied { host: Some(_), .. }));
        let Event::Denied { rule, .. } = told else { panic!() };
        assert_eq!(rule, "deny evil.example");
        asks(stage, SERVERS[2], 9999).unwrap();
    });
}

#[test]
fn admitted_addresses_expire_and_what_is_open_goes_on_until_it_is_cut() {
    both(|stage| {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[]));
        let address = SERVERS[0].parse().unwrap();
        stage.dial(SERVERS[0], 443).unwrap_err();
        program.with(move |firewall| {
            firewall.admit(&[(address, Duration::from_millis(200))]).unwrap();
            // The later end counts.
            firewall
                .admit(&[(address, Duration::from_secs(6)), (address, Duration::from_millis(100))])
                .unwrap();
            firewall.admit(&[(address, Duration::from_millis(100))]).unwrap();
        });
        std::thread::sleep(Duration::from_millis(400));
        let mut open = stage.dial(SERVERS[0], 443).unwrap();
        echoes(&mut open, &hello(Some("good.example"))).unwrap();
        let mut pending = stage.dial(SERVERS[0], 443).unwrap();
        while stage.dial(SERVERS[0], 443).is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
        // Begun in time.
        echoes(&mut pending, &hello(Some("good.example"))).unwrap();
        echoes(&mut open, b"more").unwrap();
        // Another policy that does not take it away.
        program.apply(by_name(&[SERVERS[1]]));
        echoes(&mut open, b"more").unwrap();

        let seen = program.with(|firewall| {
            let seen = std::sync::Mutex::new(Vec::new());
            let stay = |connection: &_| {
                seen.lock().unwrap().push(Clone::clone(connection));
                true
            };
            assert_eq!(firewall.cut(&stay).unwrap(), 0);
            seen.into_inner().unwrap()
        });
        let ours = seen.iter().filter(|seen| seen.asked == Asked::Host("good.example".into())).count();
        assert_eq!(ours, 2, "{seen:?}");
        assert!(seen.iter().all(|seen| seen.address == address && seen.port == 443), "{seen:?}");
        let cut = program.with(|firewall| firewall.cut(&|_| false)).unwrap();
        assert!(cut >= 2);
        assert_eq!(echoes(&mut open, b"more").unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(
            pending.write_all(b"more").and_then(|()| pending.read(&mut [0])).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
    });
}

#[test]
fn what_was_left_behind_goes_on_and_the_next_worker_starts_closed() {
    both(|stage| {
        let rules = Fake::new(Action::Deny, &["good.example"], &[]);
        let program = stage.start(rules.clone());
        program.apply(by_name(&[SERVERS[0]]));
        let mut open = stage.dial(SERVERS[0], 443).unwrap();
        echoes(&mut open, &hello(Some("good.example"))).unwrap();
        let mut half = stage.dial(SERVERS[0], 443).unwrap();
        drop(program);
        echoes(&mut open, b"without a worker").unwrap();
        let to = SocketAddr::new(SERVERS[0].parse().unwrap(), 443);
        let new = stage.boxed(move || std::net::TcpStream::connect_timeout(&to, Duration::from_millis(300)));
        assert_eq!(new.unwrap_err().kind(), ErrorKind::TimedOut);

        let program = stage.start(rules);
        program.with(|_| ());
        echoes(&mut open, b"closed").unwrap();
        program.apply(by_name(&[SERVERS[0]]));
        echoes(&mut open, b"open again").unwrap();
        // Nobody knows what it had sent.
        assert_eq!(
            echoes(&mut half, &hello(Some("good.example"))).unwrap_err().kind(),
            ErrorKind::ConnectionReset
        );
        echoes(&mut stage.dial(SERVERS[0], 443).unwrap(), &hello(Some("good.example"))).unwrap();
    });
}
