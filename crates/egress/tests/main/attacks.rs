//! What somebody in the box may try. In a gateway that is root with every privilege over its own namespace.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, Protocol, SendFlags, SocketFlags, SocketType, sendto, socket_with};
use sandglass_egress::firewall::{NameGate, Plan};
use sandglass_egress::policy::Action;

use crate::stage::{
    BOXED, Fake, LONG, MARK, OWN, SERVERS, SERVERS_V6, Stage, by_address, by_name, echoes, hello, inside, ip,
};

/// A datagram that arrives, or whatever came before it.
struct Ear(UdpSocket);

impl Ear {
    fn at(stage: &Stage, part: &str, address: &str) -> Self {
        let at: SocketAddr = address.parse().unwrap();
        let socket = inside(&stage.space(part), move || UdpSocket::bind(at).unwrap());
        socket.set_read_timeout(Some(LONG)).unwrap();
        Self(socket)
    }

    fn hears(&self) -> Vec<u8> {
        let mut buffer = [0; 9000];
        loop {
            match self.0.recv(&mut buffer) {
                Ok(length) => return buffer[..length].to_vec(),
                // A wait with a limit is not resumed by itself.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn raw(protocol: u32) -> OwnedFd {
    let protocol = Protocol::from_raw(protocol.try_into().unwrap());
    socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol)).unwrap()
}

fn set(socket: &impl AsRawFd, level: i32, option: i32, value: &[u8]) -> std::io::Result<()> {
    // SAFETY: pointer and length are those of a slice that outlives the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), value.len() as u32)
    };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// UDP in IPv4 without checksum; the kernel fills in the header's.
fn datagram(source: Ipv4Addr, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
    let length = (28 + payload.len()) as u16;
    let mut bytes = vec![0x45, 0];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&[0, 0, 0, 0, 64, 17, 0, 0]);
    bytes.extend_from_slice(&source.octets());
    bytes.extend_from_slice(&to.ip().octets());
    bytes.extend_from_slice(&4000_u16.to_be_bytes());
    bytes.extend_from_slice(&to.port().to_be_bytes());
    bytes.extend_from_slice(&(length - 20).to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn nobody_speaks_for_another_address() {
    let stage = Stage::gateway();
    let program = stage.start(Fake::new(Action::Allow, &[], &[]));
    program.apply(Plan { default: Action::Allow, ..Plan::deny_all() });
    let ear = Ear::at(&stage, "w", "192.0.2.1:7000");
    stage.boxed(|| {
        let to = SocketAddrV4::new(SERVERS[0].parse().unwrap(), 7000);
        let socket = raw(libc::IPPROTO_RAW as u32);
        for source in [Ipv4Addr::new(10, 99, 0, 77), OWN, Ipv4Addr::new(169, 254, 1, 1), BOXED] {
            sendto(&socket, &datagram(source, to, &source.octets()), SendFlags::empty(), &to).unwrap();
        }
    });
    assert_eq!(ear.hears(), BOXED.octets());
}

#[test]
fn marks_of_the_box_mean_nothing() {
    let stage = Stage::gateway();
    let program = stage.start(Fake::new(Action::Deny, &[], &[]));
    program.apply(by_address(&["192.0.2.1/32"], &[]));
    let ear = Ear::at(&stage, "w", "[::]:7000");
    stage.boxed(|| {
        for mark in [MARK, 2, 0x5347_0001, 0x5347_0002, u32::MAX] {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            set(&socket, libc::SOL_SOCKET, libc::SO_MARK, &mark.to_ne_bytes()).unwrap();
            let _ = socket.send_to(b"forged", (SERVERS[1], 7000));
        }
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"honest", (SERVERS[0], 7000)).unwrap();
    });
    assert_eq!(ear.hears(), b"honest");
}

#[test]
fn the_control_port_is_the_host_s_and_everything_else_is_the_box_s() {
    let stage = Stage::gateway();
    let program = stage.start(Fake::new(Action::Allow, &[], &[]));
    program.apply(Plan { default: Action::Allow, ..Plan::deny_all() });
    let listen =
        |part: &str, at: &'static str| inside(&stage.space(part), move || TcpListener::bind(at).unwrap());
    let control = listen("m", "0.0.0.0:18080");
    let service = listen("b", "0.0.0.0:8080");
    let decoy = listen("b", "0.0.0.0:18080");
    let from_world = |port: u16| {
        inside(&stage.space("w"), move || TcpStream::connect_timeout(&(BOXED, port).into(), LONG).unwrap())
    };
    let asked = from_world(18080);
    let (_, peer) = control.accept().unwrap();
    assert_eq!(peer, asked.local_addr().unwrap());
    let asked = from_world(8080);
    assert_eq!(service.accept().unwrap().1, asked.local_addr().unwrap());
    // Neither the control port, nor the gates as such, nor anything else of the gateway.
    for to in ["169.254.1.1", "169.254.1.3"] {
        for port in [18080, 15353, 18081, 22, 443] {
            let refused = stage.dial(to, port).unwrap_err().kind();
            assert_eq!(refused, ErrorKind::ConnectionRefused, "{to}:{port}");
        }
    }
    decoy.set_nonblocking(true).unwrap();
    assert_eq!(decoy.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn questions_go_to_the_gate_wherever_they_are_sent_and_intercepted_ports_too() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        let plan = by_name(&[SERVERS[0]]);
        let exempt = vec![SERVERS[3].parse().unwrap()];
        program.apply(Plan { intercept: vec![80], dns_exempt: exempt, ..plan });
        let ear = Ear::at(&stage, stage.program(), "0.0.0.0:15353");
        let exempted = Ear::at(&stage, "w", "203.0.113.1:53");
        let space = stage.space(stage.program());
        let gate = inside(&space, || TcpListener::bind("0.0.0.0:18081").unwrap());
        stage.boxed(|| {
            let ask = |to| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.send_to(b"who", to).unwrap();
            };
            ask((SERVERS[1], 53));
            ask((SERVERS[3], 53));
        });
        assert_eq!((ear.hears(), exempted.hears()), (b"who".to_vec(), b"who".to_vec()));
        stage.dial(SERVERS[0], 80).unwrap();
        gate.accept().unwrap();
        // What may not be reached at all does not even get to the gate, nor does who talks to it directly.
        assert_eq!(stage.dial(SERVERS[1], 80).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(stage.dial("127.0.0.1", 18081).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}

#[test]
fn a_question_is_not_taken_for_more_of_one_of_ours() {
    let stage = Stage::shared();
    let program = stage.start(Fake::new(Action::Allow, &[], &[]));
    let ear = Ear::at(&stage, "w", "192.0.2.1:53");
    // One socket for all: a closed one lives on for a moment in a child that another test starts just then.
    let socket = Arc::new(stage.boxed(|| UdpSocket::bind("0.0.0.0:20000").unwrap()));
    for plan in [by_address(&["192.0.2.1/32"], &[]), Plan { default: Action::Allow, ..Plan::deny_all() }] {
        program.apply(plan);
        let send = |text: &'static [u8], mark: u32| {
            let socket = socket.clone();
            stage.boxed(move || {
                set(&*socket, libc::SOL_SOCKET, libc::SO_MARK, &mark.to_ne_bytes()).unwrap();
                // A refusal may be told at once.
                let _ = socket.send_to(text, (SERVERS[0], 53));
            });
        };
        // The answer makes it a connection that both know.
        send(b"ours", MARK);
        assert_eq!(ear.hears(), b"ours");
        ear.0.send_to(b"answer", (BOXED, 20000)).unwrap();
        send(b"theirs", 0);
        send(b"ours again", MARK);
        assert_eq!(ear.hears(), b"ours again");
    }
}

#[test]
fn other_protocols_pass_by_rule_only() {
    let stage = Stage::gateway();
    let program = stage.start(Fake::new(Action::Deny, &[], &[]));
    let mut plan = by_name(&[SERVERS[0]]);
    plan.networks = by_address(&["192.0.2.2/32"], &[]).networks;
    program.apply(plan);
    for protocol in [libc::IPPROTO_GRE, libc::IPPROTO_IPIP, 253] {
        let ear = inside(&stage.space("w"), move || raw(protocol as u32));
        stage.boxed(move || {
            let socket = raw(protocol as u32);
            for address in [SERVERS[0], SERVERS[2], SERVERS[1]] {
                let to = SocketAddrV4::new(address.parse().unwrap(), 0);
                // Refusals may come back in between.
                let _ = sendto(&socket, &[0; 40], SendFlags::empty(), &to);
            }
        });
        let mut buffer = [0; 200];
        let (length, _) = rustix::net::recv(&ear, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
        assert!(length >= 20);
        assert_eq!(buffer[16..20], [192, 0, 2, 2], "protocol {protocol}");
    }
}

#[test]
fn echo_requests_follow_addresses_and_fragments_are_judged_whole() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &[], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        let pings = |address: &'static str| {
            stage.boxed(move || {
                let socket = raw(libc::IPPROTO_ICMP as u32);
                let timeout = rustix::net::sockopt::Timeout::Recv;
                rustix::net::sockopt::set_socket_timeout(&socket, timeout, Some(LONG)).unwrap();
                let to = SocketAddrV4::new(address.parse().unwrap(), 0);
                let request = [8, 0, 0xf7, 0xfb, 0, 1, 0, 3];
                if sendto(&socket, &request, SendFlags::empty(), &to).is_err() {
                    return false;
                }
                loop {
                    let mut buffer = [0; 200];
                    let flags = rustix::net::RecvFlags::empty();
                    let (length, _) = rustix::net::recv(&socket, &mut buffer[..], flags).unwrap();
                    // Own requests are heard, too, where source and destination are here.
                    match (length > 20).then(|| buffer[20]) {
                        Some(0) => return true,
                        Some(3) => return false,
                        _ => {}
                    }
                }
            })
        };
        assert!(pings(SERVERS[0]));
        assert!(!pings(SERVERS[1]));
        let ear = Ear::at(&stage, "w", "[::]:7000");
        stage.boxed(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            let _ = socket.send_to(&[1; 4000], (SERVERS[1], 7000));
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.send_to(&[2; 4000], (SERVERS[0], 7000)).unwrap();
        });
        assert_eq!(ear.hears(), [2; 4000]);
    }
}

#[test]
fn no_ipv6_passes_a_gateway_and_a_shared_namespace_judges_it() {
    let gateway = Stage::gateway();
    let [boxed, middle, world] = ["b", "m", "w"].map(|part| gateway.space(part));
    for line in [
        format!("-n {boxed} addr add 2001:db8::2/64 dev eth0 nodad"),
        format!("-n {boxed} route add default via 2001:db8::1"),
        format!("-n {middle} addr add 2001:db8::1/64 dev down nodad"),
        format!("-n {middle} addr add 2001:db8:f::1/64 dev up nodad"),
        format!("-n {middle} route add default via 2001:db8:f::2"),
        format!("-n {world} addr add 2001:db8:f::2/64 dev near nodad"),
        format!("-n {world} route add default via 2001:db8:f::1"),
    ] {
        ip(&line);
    }
    let forward = "/proc/sys/net/ipv6/conf/all/forwarding";
    inside(&middle, move || std::fs::write(forward, "1").unwrap());
    let ear = Ear::at(&gateway, "w", "[::]:7000");
    let tell = |stage: &Stage, text: &'static [u8], to: &'static str| {
        stage.boxed(move || {
            let any = if to.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let _ = UdpSocket::bind(any).unwrap().send_to(text, (to, 7000));
        });
    };
    // It would work.
    tell(&gateway, b"before", SERVERS_V6[0]);
    assert_eq!(ear.hears(), b"before");
    let program = gateway.start(Fake::new(Action::Allow, &[], &[]));
    program.apply(Plan { default: Action::Allow, ..by_address(&["::/0", "0.0.0.0/0"], &[]) });
    tell(&gateway, b"six", SERVERS_V6[0]);
    tell(&gateway, b"four", SERVERS[0]);
    assert_eq!(ear.hears(), b"four");
    drop(program);

    let shared = Stage::shared();
    let program = shared.start(Fake::new(Action::Deny, &["good.example"], &[]));
    let mut plan = by_name(&[SERVERS_V6[0]]);
    plan.networks = by_address(&["2001:db8:2::/48"], &[]).networks;
    program.apply(plan);
    echoes(&mut shared.dial(SERVERS_V6[0], 443).unwrap(), &hello(Some("good.example"))).unwrap();
    let mut evil = shared.dial(SERVERS_V6[0], 443).unwrap();
    assert_eq!(
        echoes(&mut evil, &hello(Some("evil.example"))).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    echoes(&mut shared.dial(SERVERS_V6[1], 443).unwrap(), b"anything").unwrap();
    assert_eq!(shared.dial("2001:db8::1", 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn what_was_cut_does_not_come_back_from_the_far_side() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &[], &[]));
        program.apply(by_address(&["192.0.2.1/32"], &[]));
        let server = inside(&stage.space("w"), || TcpListener::bind("192.0.2.1:7001").unwrap());
        let datagrams = Ear::at(&stage, "w", "192.0.2.1:7000");
        let mut client = stage.dial(SERVERS[0], 7001).unwrap();
        let mut accepted = server.accept().unwrap().0;
        let socket = stage.boxed(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            socket.connect((SERVERS[0], 7000)).unwrap();
            socket.send(b"allowed").unwrap();
            socket
        });
        datagrams.hears();
        let back = SocketAddr::new(BOXED.into(), socket.local_addr().unwrap().port());

        program.apply(by_address(&[], &[]));
        assert_eq!(program.with(|firewall| firewall.cut(&|_| false)).unwrap(), 2);
        // The far side goes on as if nothing had happened, which must not make the box's answers into replies.
        accepted.write_all(b"still there?").unwrap();
        datagrams.0.send_to(b"still there?", back).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        assert_eq!(client.read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(socket.recv(&mut [0; 20]).unwrap_err().kind(), ErrorKind::WouldBlock);
        socket.send(b"no").ok();
        client.write_all(b"no").ok();
        client.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(client.read(&mut [0; 20]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn in_a_shared_namespace_loopback_is_free_and_marked_packets_are_the_program_s() {
    let stage = Stage::shared();
    let program = stage.start(Fake::new(Action::Deny, &[], &[]));
    program.apply(by_address(&[], &[]));
    let local = stage.boxed(|| TcpListener::bind("127.0.0.1:0").unwrap());
    stage.dial("127.0.0.1", local.local_addr().unwrap().port()).unwrap();
    stage.dial(&BOXED.to_string(), 1).unwrap_err();
    let ear = Ear::at(&stage, "w", "[::]:7000");
    stage.boxed(|| {
        let _ = UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"box", (SERVERS[0], 7000));
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        set(&socket, libc::SOL_SOCKET, libc::SO_MARK, &MARK.to_ne_bytes()).unwrap();
        socket.send_to(b"program", (SERVERS[0], 7000)).unwrap();
    });
    assert_eq!(ear.hears(), b"program");
    // Whoever reaches in gets answers.
    let service = stage.boxed(|| TcpListener::bind("0.0.0.0:8080").unwrap());
    let mut outside =
        inside(&stage.space("w"), || TcpStream::connect_timeout(&(BOXED, 8080).into(), LONG).unwrap());
    let mut accepted = service.accept().unwrap().0;
    outside.write_all(b"ping").unwrap();
    accepted.read_exact(&mut [0; 4]).unwrap();
    accepted.write_all(b"pong").unwrap();
    outside.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn header_options_do_not_lead_elsewhere() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Allow, &[], &[]));
        program.apply(Plan { default: Action::Allow, names: NameGate::Off, ..Plan::deny_all() });
        let ear = Ear::at(&stage, "w", "[::]:7000");
        stage.boxed(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            // Record route: harmless where it works, and an option like those which are not.
            let option = [7, 7, 4, 0, 0, 0, 0, 0];
            set(&socket, libc::IPPROTO_IP, libc::IP_OPTIONS, &option).unwrap();
            let _ = socket.send_to(b"with options", (SERVERS[0], 7000));
            UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"without", (SERVERS[0], 7000)).unwrap();
        });
        assert_eq!(ear.hears(), b"without");
    }
}

#[test]
fn what_is_inspected_does_not_run_out_of_hops() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        let ear = inside(&stage.space("w"), || raw(libc::IPPROTO_TCP as u32));
        let mut stream = stage.boxed(|| {
            let kind = SocketType::STREAM;
            let socket = socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None).unwrap();
            // Enough for a gateway, not for what comes behind it.
            set(&socket, libc::IPPROTO_IP, libc::IP_TTL, &2_u32.to_ne_bytes()).unwrap();
            let to = SocketAddrV4::new(SERVERS[0].parse().unwrap(), 443);
            rustix::net::connect(&socket, &to).unwrap();
            TcpStream::from(socket)
        });
        echoes(&mut stream, &hello(Some("good.example"))).unwrap();
        // Beginning, acknowledgement, first bytes.
        for _ in 0..3 {
            let mut buffer = [0; 4096];
            rustix::net::recv(&ear, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
            assert_eq!(buffer[8], 64);
        }
    }
}

#[test]
fn what_is_inspected_goes_one_way() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        let ear = inside(&stage.space("w"), || raw(libc::IPPROTO_TCP as u32));
        let connected = stage.boxed(|| {
            let multipath = Protocol::from_raw((libc::IPPROTO_MPTCP as u32).try_into().unwrap());
            let socket =
                socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, Some(multipath))?;
            let to = SocketAddrV4::new(SERVERS[0].parse().unwrap(), 443);
            rustix::net::connect(&socket, &to)?;
            std::io::Result::Ok(TcpStream::from(socket))
        });
        match connected {
            // The option was taken out: ordinary TCP for both sides.
            Ok(mut stream) => {
                echoes(&mut stream, &hello(Some("good.example"))).unwrap();
                let mut buffer = [0; 4096];
                let (length, _) =
                    rustix::net::recv(&ear, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
                // The beginning's options: of some kinds, none of them this one.
                let mut options = &buffer[40..length];
                while let [kind, rest @ ..] = options {
                    assert_ne!(*kind, 30);
                    let rest_of_it = if *kind < 2 { 0 } else { usize::from(rest[0]) - 1 };
                    options = &rest[rest_of_it..];
                }
            }
            // This kernel has no such sockets, or cannot take it out.
            Err(error) => match error.raw_os_error() {
                Some(libc::EPROTONOSUPPORT | libc::ENOPROTOOPT) => eprintln!("no MPTCP here: {error}"),
                Some(libc::ECONNREFUSED) => eprintln!("refused, not taken out"),
                _ => panic!("{error}"),
            },
        }
    }
}
