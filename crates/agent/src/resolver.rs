//! The address of a host name without libc, which a static binary cannot use for this: /etc/hosts, then one UDP
//! question for an IPv4 address to each name server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::accounts::read_text;

const PATIENCE: Duration = Duration::from_secs(2);
const MAX_SERVERS: usize = 3;
const MAX_NAMES: usize = 6;
const DNS_PORT: u16 = 53;

pub(crate) async fn resolve(host: &str) -> Option<IpAddr> {
    if let Ok(address) = host.trim_matches(['[', ']']).parse() {
        return Some(address);
    }
    if let Some(address) = in_hosts(&read_text("/etc/hosts".as_ref()), host) {
        return Some(address);
    }
    if host.eq_ignore_ascii_case("localhost") {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    let config = read_text("/etc/resolv.conf".as_ref());
    let servers: Vec<IpAddr> =
        values(&config, "nameserver").filter_map(|s| s.parse().ok()).take(MAX_SERVERS).collect();
    for name in names(&config, host) {
        for server in &servers {
            if let Some(address) = ask(SocketAddr::new(*server, DNS_PORT), &name).await {
                return Some(address.into());
            }
        }
    }
    None
}

fn in_hosts(text: &str, host: &str) -> Option<IpAddr> {
    let matching = text.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let address: IpAddr = words.next()?.parse().ok()?;
        words.any(|name| name.eq_ignore_ascii_case(host)).then_some(address)
    });
    // The collector is rarely on an IPv6-only address, and a box rarely has a route to one.
    matching.min_by_key(IpAddr::is_ipv6)
}

fn values<'a>(config: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> + 'a {
    config
        .lines()
        .filter_map(move |line| {
            let mut words = line.split_whitespace();
            (words.next()? == key).then_some(words)
        })
        .flatten()
}

/// What to ask for: the name itself first when it has a dot in it.
fn names(config: &str, host: &str) -> Vec<String> {
    let plain = host.trim_end_matches('.').to_owned();
    if host.ends_with('.') {
        return vec![plain];
    }
    let searched = values(config, "search").map(|domain| format!("{plain}.{}", domain.trim_end_matches('.')));
    let mut all: Vec<String> = searched.take(MAX_NAMES).collect();
    all.insert(if plain.contains('.') { 0 } else { all.len() }, plain.clone());
    all
}

async fn ask(server: SocketAddr, name: &str) -> Option<Ipv4Addr> {
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { "::".parse().ok()? };
    let socket = UdpSocket::bind((any, 0)).await.ok()?;
    socket.connect(server).await.ok()?;
    let id: [u8; 2] = uuid::Uuid::new_v4().as_bytes()[..2].try_into().ok()?;
    socket.send(&question(id, name)?).await.ok()?;
    let mut answer = [0; 1500];
    timeout(PATIENCE, async {
        loop {
            let length = socket.recv(&mut answer).await.ok()?;
            // Anything else is a late answer to somebody who asked before.
            if answer[..length].starts_with(&id) {
                return address(&answer[..length]);
            }
        }
    })
    .await
    .ok()?
}

fn question(id: [u8; 2], name: &str) -> Option<Vec<u8>> {
    // Recursion desired, one question.
    let mut out = vec![id[0], id[1], 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        let length = u8::try_from(label.len()).ok().filter(|l| (1..64).contains(l))?;
        out.push(length);
        out.extend_from_slice(label.as_bytes());
    }
    out.extend_from_slice(&[0, 0, 1, 0, 1]);
    Some(out)
}

/// The first IPv4 address of an answer.
fn address(answer: &[u8]) -> Option<Ipv4Addr> {
    let number = |at: usize| Some(u16::from_be_bytes([*answer.get(at)?, *answer.get(at + 1)?]));
    let (questions, records) = (number(4)?, number(6)?);
    let mut at = 12;
    for _ in 0..questions {
        at = after_name(answer, at)? + 4;
    }
    for _ in 0..records {
        at = after_name(answer, at)?;
        let (kind, length) = (number(at)?, usize::from(number(at + 8)?));
        at += 10;
        if kind == 1 && length == 4 {
            let bytes: [u8; 4] = answer.get(at..at + 4)?.try_into().ok()?;
            return Some(bytes.into());
        }
        at += length;
    }
    None
}

fn after_name(answer: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *answer.get(at)? {
            0 => return Some(at + 1),
            pointer if pointer >= 0xc0 => return Some(at + 2),
            length => at += 1 + usize::from(length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_names() {
        let hosts = "::1 localhost ip6\n127.0.0.1\tlocalhost # collector\n10.0.0.1 a Collector\n";
        assert_eq!(in_hosts(hosts, "localhost"), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(in_hosts(hosts, "collector"), Some([10, 0, 0, 1].into()));
        assert_eq!(in_hosts(hosts, "b"), None);
        let config = "nameserver 10.0.0.2\nsearch x.y z.\n";
        assert_eq!(names(config, "otel"), ["otel.x.y", "otel.z", "otel"]);
        assert_eq!(names(config, "otel.ns"), ["otel.ns", "otel.ns.x.y", "otel.ns.z"]);
        assert_eq!(names(config, "a.b."), ["a.b"]);
        assert_eq!(question([1, 2], "a..b"), None);
    }

    #[test]
    fn answers() {
        let mut answer = question([1, 2], "a.b").unwrap();
        answer[7] = 2;
        // An alias, then the address, both with a name that points back.
        answer.extend_from_slice(b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x00\x01\x00\x04\x01c\xc0\x0e");
        answer.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x01\x00\x04\x0a\x01\x02\x03");
        assert_eq!(address(&answer), Some([10, 1, 2, 3].into()));
        for length in 0..answer.len() {
            assert_eq!(address(&answer[..length]), None, "{length}");
        }
    }

    #[tokio::test]
    async fn a_server_is_asked() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = server.local_addr().unwrap();
        let answering = tokio::spawn(async move {
            let mut asked = [0; 512];
            let (length, from) = server.recv_from(&mut asked).await.unwrap();
            let mut answer = asked[..length].to_vec();
            (answer[2], answer[7]) = (0x81, 1);
            answer.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x01\x00\x04\x01\x02\x03\x04");
            server.send_to(b"xx", from).await.unwrap();
            server.send_to(&answer, from).await.unwrap();
        });
        assert_eq!(ask(at, "collector.example").await, Some([1, 2, 3, 4].into()));
        answering.await.unwrap();
    }
}
