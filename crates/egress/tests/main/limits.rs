//! How many connections one sandbox may have.

use std::net::UdpSocket;
use std::time::Duration;

use sandglass_egress::audit::Event;
use sandglass_egress::firewall::Plan;
use sandglass_egress::policy::Action;
use sandglass_netlink::conntrack;
use sandglass_netlink::nft::batch::{Base, Batch, ChainKind, Holding, Hook, Key, Otherwise, Set};
use sandglass_netlink::nft::meter::Meter;
use sandglass_netlink::nft::rule::{Field, Rule, Verdict};
use sandglass_netlink::socket::Socket;

use crate::stage::{Fake, LONG, SERVERS, Stage, by_address, inside};

/// Sends from so many ports, to an address that answers, and returns how many answers there were.
fn answered(stage: &Stage, connections: u16) -> usize {
    stage.boxed(move || {
        let sockets: Vec<_> = (0..connections)
            .map(|_| {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                let _ = socket.send_to(b"new", (SERVERS[0], 9999));
                socket
            })
            .collect();
        sockets.iter().filter(|socket| socket.recv(&mut [0; 8]).is_ok()).count()
    })
}

#[test]
fn one_sandbox_does_not_fill_the_table_of_connections() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let world = Fake::new(Action::Allow, &[], &[]);
        let program = stage.start(world.clone());
        program.apply(Plan { default: Action::Allow, ..by_address(&[], &[]) });
        let kept = stage.boxed(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(LONG)).unwrap();
            socket.connect((SERVERS[0], 9999)).unwrap();
            socket.send(b"first").unwrap();
            socket.recv(&mut [0; 8]).unwrap();
            socket
        });
        // One socket, because a process may not have so many: each destination is another connection.
        stage.boxed(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for port in 10_000..30_000 {
                let _ = socket.send_to(b"flood", (SERVERS[2], port));
            }
        });
        let too_many =
            |event: &Event| matches!(event, Event::Denied { rule, .. } if rule == "too many connections");
        world.hears(too_many);
        let open = inside(&stage.space(stage.program()), || {
            conntrack::connections(&mut Socket::netfilter().unwrap()).unwrap().len()
        });
        assert!((4000..12_000).contains(&open), "{open}");
        // What there was goes on.
        kept.send(b"more").unwrap();
        kept.recv(&mut [0; 8]).unwrap();
    }
}

#[test]
fn open_connections_are_counted() {
    let stage = Stage::gateway();
    let most = 10;
    inside(&stage.space("w"), move || {
        let mut batch = Batch::new();
        let hook = Hook::Prerouting;
        let first = Base { kind: ChainKind::Nat, hook, priority: -110, otherwise: Otherwise::Accept };
        batch.renew_table("counting");
        batch.add_base_chain("counting", "first", first);
        let set = Set { name: "links", key: Key::Interface, holding: Holding::Connections, size: Some(100) };
        batch.add_set("counting", &set);
        let over = Rule::new().over_for_each(Field::InputInterfaceIndex, "links", Meter::Connections(most));
        batch.add_rule("counting", "first", &over.counted().verdict(Verdict::Drop));
        batch.commit(&mut Socket::netfilter().unwrap()).unwrap();
    });
    let program = stage.start(Fake::new(Action::Allow, &[], &[]));
    program.apply(Plan { default: Action::Allow, ..by_address(&[], &[]) });
    assert_eq!(answered(&stage, 15), most as usize);
    // They are still open: the kernel forgets them after half a minute, and each that is not answered takes two seconds.
    assert_eq!(answered(&stage, 1), 0);
}
