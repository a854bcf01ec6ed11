//! Out, but not to the host and not to each other.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;

use sandglass_shim::host_network;

use crate::stage::{Outside, eventually, skip, stage};

/// Whether the box can open a TCP connection.
fn reaches(boxed: &crate::stage::TestBox, address: &str, port: u16) -> bool {
    boxed.run(&format!("echo | nc -w 1 {address} {port} >/dev/null 2>&1")).1 == 0
}

fn host_addresses() -> Vec<String> {
    let out = Command::new("ip").args(["-4", "-o", "addr"]).output().expect("`ip` of iproute2 for the tests");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    text.lines()
        .filter_map(|line| {
            line.split_whitespace().nth(3)?.split_once('/').map(|(address, _)| address.to_owned())
        })
        .collect()
}

#[test]
fn the_host_is_out_of_reach_but_reaches_in() {
    let stage = stage();
    let boxed = stage.boxed();
    let everywhere = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let port = everywhere.local_addr().unwrap().port();
    let addresses = host_addresses();
    assert!(addresses.len() >= 2, "{addresses:?}");
    for address in addresses.iter().map(String::as_str).chain(["169.254.1.1"]) {
        assert!(!reaches(&boxed, address, port), "the box reaches the host at {address}");
    }
    assert_eq!(boxed.run("ping -c 1 -W 1 169.254.1.1 >/dev/null").1, 1);
    assert_eq!(boxed.run("echo in").0, "in");
    let rules = Command::new("nft").args(["list", "table", "inet", &stage.prefix]).output();
    match rules {
        Ok(rules) => println!("{}", String::from_utf8_lossy(&rules.stdout)),
        Err(_) => skip("`nft` is not installed, so the rules are not shown"),
    }
    let conf = |family: &str, key: &str| {
        let interface = &boxed.spec.network.as_ref().unwrap().host_interface;
        std::fs::read_to_string(format!("/proc/sys/net/{family}/conf/{interface}/{key}"))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(conf("ipv4", "rp_filter"), "1");
    if std::path::Path::new("/proc/sys/net/ipv6").exists() {
        assert_eq!(conf("ipv6", "disable_ipv6"), "1");
        assert_eq!(boxed.run("cat /proc/net/if_inet6 | grep -vc lo").0, "0");
    }
}

#[test]
fn boxes_do_not_reach_each_other() {
    let stage = stage();
    let (one, two) = (stage.boxed(), stage.boxed());
    assert!(!reaches(&one, &two.address().to_string(), crate::stage::PORT));
    assert!(!reaches(&two, &one.address().to_string(), crate::stage::PORT));
    assert!(reaches(&one, "127.0.0.1", crate::stage::PORT));
    // Also not with a foreign source address, which would come back to somebody else.
    one.run(&format!("ip addr add {}/32 dev eth0", two.address()));
    assert_eq!(two.run("echo alive").0, "alive");
}

#[test]
fn a_box_without_network_has_only_itself() {
    let stage = stage();
    let mut spec = stage.spec();
    spec.network = None;
    spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), "ls /sys/class/net; cat /etc/hosts".into()];
    let boxed = stage.create(spec).unwrap_or_else(|error| panic!("{error:?}"));
    boxed.wait_exited();
    let log = std::fs::read_to_string(boxed.dir.join("console.log")).unwrap();
    assert!(log.contains("stdout lo") && !log.contains("eth0"), "{log}");
}

#[test]
fn the_world_is_reached_by_translation_and_reaches_nothing() {
    let stage = stage();
    let boxed = stage.boxed();
    let world = stage.home.join("world");
    std::fs::create_dir_all(&world).unwrap();
    std::fs::write(world.join("hello"), "from the world").unwrap();
    let outside = Outside::set_up("net", 0, &world);
    eventually("the box reaches the outside", || {
        // Not wget: the static busybox of some distributions crashes in it.
        let ask = format!("printf 'GET /hello HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {} 9000", Outside::there(0));
        boxed.run(&ask).0.contains("from the world")
    });
    // The outside has no route to the box's network, so an answer proves the translation. Given a route, it is
    // still refused.
    let ip = |line: String| Command::new("ip").args(line.split(' ')).status().unwrap();
    assert!(
        ip(format!("-n {} route add {}/32 via {}", outside.name, boxed.address(), Outside::here(0)))
            .success()
    );
    let attempt =
        format!("netns exec {} busybox nc -w 1 {} {}", outside.name, boxed.address(), crate::stage::PORT);
    assert!(!ip(attempt).success(), "the outside reaches the box");
    // Link-local addresses hold the metadata services of clouds.
    assert!(ip(format!("-n {} addr add 169.254.169.254/32 dev far", outside.name)).success());
    assert!(ip(format!("route add 169.254.169.254/32 dev {}", outside.near)).success());
    assert!(!reaches(&boxed, "169.254.169.254", 9000));
}

#[test]
fn the_rules_are_replaced_whole_and_removed_whole() {
    let subnet = host_network::Subnet { address: Ipv4Addr::new(10, 212, 0, 0), prefix_len: 16 };
    let prefix = format!("sgz{:04x}", std::process::id() & 0xffff);
    for _ in 0..3 {
        assert_eq!(host_network::ensure(&prefix, subnet).unwrap(), host_network::Limits::Kept);
    }
    if let Ok(listed) = Command::new("nft").args(["list", "table", "inet", &prefix]).output() {
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let expected = [
            format!("iifname \"{prefix}*\" oifname \"{prefix}*\" drop"),
            format!("iifname \"{prefix}*\" ip saddr != 10.212.0.0/16 drop"),
            format!("iifname \"{prefix}*\" ip daddr 169.254.0.0/16 drop"),
            format!("oifname \"{prefix}*\" ct state established,related accept"),
            format!("ip saddr 10.212.0.0/16 oifname != \"{prefix}*\" masquerade"),
            // By the link, and once for each.
            format!(
                "iifname \"{prefix}*\" update @rates {{ iif timeout 1m limit rate over 800/second burst 4096 packets }}"
            ),
            format!("iifname \"{prefix}*\" add @connections {{ iif ct count over 16384 }}"),
        ];
        for line in expected {
            assert_eq!(text.matches(&line).count(), 1, "{line} in {text}");
        }
    }
    host_network::remove(&prefix).unwrap();
    host_network::remove(&prefix).unwrap();
    if let Ok(listed) = Command::new("nft").args(["list", "tables"]).output() {
        assert!(!String::from_utf8_lossy(&listed.stdout).contains(&prefix));
    }
}

#[test]
fn a_taken_subnet_is_not_picked() {
    let parse = |text: &str| {
        let (address, len) = text.split_once('/').unwrap();
        host_network::Subnet { address: address.parse().unwrap(), prefix_len: len.parse().unwrap() }
    };
    let (taken, free) = (parse("127.0.0.0/16"), parse("10.199.0.0/16"));
    assert_eq!(host_network::pick_free_subnet(&[taken, free]).unwrap(), Some(free));
    assert_eq!(host_network::pick_free_subnet(&[taken]).unwrap(), None);
}
