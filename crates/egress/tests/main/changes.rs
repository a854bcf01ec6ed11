//! Changes of the rules: of any size, whole or not at all.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv6Addr};
use std::process::Command;
use std::time::Duration;

use ipnet::{IpNet, Ipv6Net};
use sandglass_egress::firewall::{Doh, Firewall, Placement, Plan, Ports};
use sandglass_egress::policy::Action;
use sandglass_netlink::nft::batch::{Batch, Holding, Key, Set};
use sandglass_netlink::socket::Socket;

use crate::stage::{Fake, MARK, SERVERS, Stage, by_address, by_name, echoes};

const LONG_LIVED: Duration = Duration::from_secs(600);

/// Whether this process runs where nothing can be forced on the machine; starts one that does if not.
fn is_confined(test: &str) -> bool {
    const CONFINED: &str = "SANDGLASS_TEST_CONFINED";
    if std::env::var_os(CONFINED).is_some() {
        return true;
    }
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net"]).arg(this).args(["--exact", test, "--nocapture"]);
    let output = command.env(CONFINED, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

fn address(number: u32) -> IpAddr {
    Ipv6Addr::from(0x2001_0db8_0000_0000_0000_0000_0000_0000 + (u128::from(number) << 16)).into()
}

/// As much of everything as there may be, and more.
fn largest() -> Plan {
    let network = |number: u32| -> IpNet {
        let IpAddr::V6(six) = address(number) else { unreachable!() };
        Ipv6Net::new(six, 127).unwrap().into()
    };
    let half = |first: u32| (first..first + 8192).map(network);
    let allowed = half(0).map(|network| (Action::Allow, network));
    Plan {
        networks: allowed.chain(half(10_000).map(|network| (Action::Deny, network))).collect(),
        dynamic: (0..20_000).map(|number| (address(30_000 + number), LONG_LIVED)).collect(),
        intercept: (1..=1024).collect(),
        doh: Doh::Refuse(half(60_000).collect()),
        dns_exempt: (0..1000).map(|number| address(80_000 + number)).collect(),
        ..by_name(&[])
    }
}

#[test]
fn size_does_not_matter_where_nothing_can_be_forced_on_the_machine() {
    if !is_confined("changes::size_does_not_matter_where_nothing_can_be_forced_on_the_machine") {
        return;
    }
    let mut firewall = Firewall::open(Placement::Shared { mark: MARK }, Ports::default()).unwrap();
    for plan in [largest(), Plan { default: Action::Allow, ..largest() }, Plan::deny_all(), largest()] {
        firewall.apply(&plan).unwrap();
        assert_eq!(firewall.cut(&|_| false).unwrap(), 0);
    }
    // Nor does what the box makes us resolve.
    for answer in 0..300 {
        let addresses: Vec<_> =
            (0..32).map(|number| (address(100_000 + 32 * answer + number), LONG_LIVED * 2)).collect();
        firewall.admit(&addresses).unwrap();
    }
    firewall.apply(&by_name(&[])).unwrap();
}

#[test]
fn one_answer_is_enough_for_a_transaction_of_any_length() {
    if !is_confined("changes::one_answer_is_enough_for_a_transaction_of_any_length") {
        return;
    }
    let mut socket = Socket::netfilter().unwrap();
    let mut batch = Batch::new();
    batch.add_table("long");
    // Answers take more room than what they answer.
    (0..1500).for_each(|number| batch.add_chain("long", &format!("chain{number}")));
    assert!(batch.length() < 200_000);
    batch.commit(&mut socket).unwrap();
    // An error in the middle is heard, and nothing of it is left for what follows.
    let mut batch = Batch::new();
    batch.add_table("other");
    (0..1000).for_each(|number| batch.delete_set("long", &format!("none{number}")));
    (0..10).for_each(|number| batch.add_chain("other", &format!("chain{number}")));
    assert_eq!(batch.commit(&mut socket).unwrap_err().kind(), ErrorKind::NotFound);
    let mut batch = Batch::new();
    batch.delete_table("long");
    batch.commit(&mut socket).unwrap();
    let mut batch = Batch::new();
    batch.delete_table("other");
    assert_eq!(batch.commit(&mut socket).unwrap_err().kind(), ErrorKind::NotFound);
    Batch::new().commit(&mut socket).unwrap();
}

#[test]
fn what_cannot_be_loaded_leaves_what_was() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &[], &[]));
        program.apply(by_address(&["192.0.2.1/32"], &[]));
        // Somebody has taken a name of the next generation.
        program.with(|_| {
            let mut batch = Batch::new();
            let taken = Set { name: "exempt6_2", key: Key::Port, holding: Holding::Values, size: None };
            batch.add_set("sandglass-egress", &taken);
            batch.commit(&mut Socket::netfilter().unwrap()).unwrap();
        });
        let other = by_address(&["192.0.2.2/32"], &[]);
        let next = other.clone();
        program.with(move |firewall| firewall.apply(&next)).unwrap_err();
        echoes(&mut stage.dial(SERVERS[0], 443).unwrap(), b"as before").unwrap();
        assert_eq!(stage.dial(SERVERS[1], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        program.apply(other);
        echoes(&mut stage.dial(SERVERS[1], 443).unwrap(), b"now").unwrap();
        assert_eq!(stage.dial(SERVERS[0], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}

#[test]
fn of_more_addresses_than_fit_the_first_to_expire_go() {
    let stage = Stage::shared();
    let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
    program.apply(by_name(&[]));
    let timed = |address: &str, minutes: u64| (address.parse().unwrap(), Duration::from_secs(60 * minutes));
    let [early, late] = [timed(SERVERS[0], 1), timed(SERVERS[1], 30)];
    program.with(move |firewall| {
        firewall.admit(&[early, late]).unwrap();
        let others: Vec<_> = (0..8191).map(|number| (address(number), LONG_LIVED)).collect();
        others.chunks(700).for_each(|some| firewall.admit(some).unwrap());
    });
    assert_eq!(stage.dial(SERVERS[0], 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    stage.dial(SERVERS[1], 443).unwrap();
    // It comes back when it is asked for again.
    program.with(move |firewall| firewall.admit(&[early])).unwrap();
    stage.dial(SERVERS[0], 443).unwrap();
}
