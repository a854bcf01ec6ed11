//! Gauges of the whole box, read from /proc when they are exported.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

/// More than any of these files has in a box that still works.
const MAX_FILE: u64 = 16 << 20;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct System {
    pub(super) processes: u64,
    pub(super) received: u64,
    pub(super) sent: u64,
    pub(super) tcp: u64,
    pub(super) udp: u64,
}

impl System {
    pub(super) fn read() -> Self {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        let (received, sent) = traffic(lines("/proc/net/dev"));
        // A connection is one that is established, or any socket where there is no such thing.
        let established = |line: &String| line.split_whitespace().nth(3) == Some("01");
        System {
            processes: entries.filter(|entry| is_process(&entry.file_name())).count() as u64,
            received,
            sent,
            tcp: ["tcp", "tcp6"].map(|f| sockets(f).filter(established).count() as u64).iter().sum(),
            udp: ["udp", "udp6"].map(|f| sockets(f).count() as u64).iter().sum(),
        }
    }
}

fn sockets(table: &str) -> impl Iterator<Item = String> {
    lines(&format!("/proc/net/{table}")).skip(1)
}

fn lines(path: &str) -> impl Iterator<Item = String> + use<> {
    let file = File::open(path).ok();
    file.into_iter().flat_map(|file| BufReader::new(file.take(MAX_FILE)).lines().map_while(Result::ok))
}

/// Bytes received and sent on every interface that leads somewhere.
fn traffic(table: impl Iterator<Item = String>) -> (u64, u64) {
    let (mut received, mut sent) = (0_u64, 0_u64);
    for line in table {
        let Some((name, numbers)) = line.split_once(':') else { continue };
        if name.trim() == "lo" {
            continue;
        }
        let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        received = received.saturating_add(numbers.first().copied().unwrap_or(0));
        sent = sent.saturating_add(numbers.get(8).copied().unwrap_or(0));
    }
    (received, sent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_without_loopback() {
        let table = "Inter-| Receive | Transmit\n face |bytes x|bytes x\n    lo: 9 1 0 0 0 0 0 0 9 1\n\
            eth0:100 2 0 0 0 0 0 0 200 3 0\n  eth1: 1 0 0 0 0 0 0 0 2 0\n";
        assert_eq!(traffic(table.lines().map(str::to_owned)), (101, 202));
    }

    #[test]
    fn this_machine_has_processes() {
        assert!(System::read().processes > 0);
    }
}
