//! Tests of connections, packet by packet.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use proptest::prelude::*;
use sandglass_netlink::conntrack::Tuple;

use super::first_tests::{hello, server_hello};
use super::flows::{Flows, Word};
use super::packet::{ACK, FIN, Packet, RST, SYN, Segment, URG};
use crate::audit::{Event, Gate};
use crate::firewall::Opened;
use crate::policy::{Action, Rules, Verdict};

const GOOD: &[u8] = b"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n";
const EVIL: &[u8] = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n";

#[derive(Default)]
struct Only {
    withdrawn: AtomicBool,
}

impl Rules for Only {
    fn name(&self, name: &str) -> Verdict {
        let good = name == "good.example" && !self.withdrawn.load(Ordering::Relaxed);
        let action = if good { Action::Allow } else { Action::Deny };
        Verdict { action, rule: "default".into() }
    }

    fn address(&self, _: IpAddr) -> Option<Verdict> {
        None
    }

    fn default_action(&self) -> Action {
        Action::Deny
    }

    fn networks(&self) -> Vec<(Action, IpNet)> {
        Vec::new()
    }
}

/// A client whose first byte has the number 1001, and a server whose first byte has the number 5001.
struct Talk {
    flows: Flows,
    opened: Opened,
    rules: Arc<Only>,
    port: u16,
    now: Instant,
}

impl Talk {
    fn new() -> Self {
        let opened = Opened::default();
        let rules = Arc::new(Only::default());
        Self {
            flows: Flows::new(rules.clone(), opened.clone()),
            opened,
            rules,
            port: 40000,
            now: Instant::now(),
        }
    }

    fn begun() -> Self {
        let mut talk = Self::new();
        assert_eq!(talk.client(1000, SYN, b""), Word::Pass);
        assert_eq!(talk.server(5000, 1001, SYN | ACK, b""), Word::Pass);
        assert_eq!(talk.client(1001, ACK, b""), Word::Pass);
        talk
    }

    fn tuple(&self) -> Tuple {
        Tuple {
            protocol: 6,
            source: "10.0.0.1".parse().unwrap(),
            destination: "192.0.2.1".parse().unwrap(),
            source_port: self.port,
            destination_port: 443,
        }
    }

    fn judged(&mut self, sequence: u32, flags: u8, bytes: &[u8]) -> (Word, Option<Event>) {
        self.judged_with(&[], sequence, flags, bytes)
    }

    fn judged_with(
        &mut self,
        options: &[u8],
        sequence: u32,
        flags: u8,
        bytes: &[u8],
    ) -> (Word, Option<Event>) {
        let tcp = Some(Segment { sequence, acknowledged: 5001, flags, options, bytes });
        let tuple = self.tuple();
        self.flows.judge_at(&Packet { tuple, tcp }, self.now)
    }

    fn client(&mut self, sequence: u32, flags: u8, bytes: &[u8]) -> Word {
        self.judged(sequence, flags, bytes).0
    }

    fn server(&mut self, sequence: u32, acknowledged: u32, flags: u8, bytes: &[u8]) -> Word {
        let there = self.tuple();
        let tuple = Tuple {
            source: there.destination,
            destination: there.source,
            source_port: there.destination_port,
            destination_port: there.source_port,
            ..there
        };
        let tcp = Some(Segment { sequence, acknowledged, flags, options: &[], bytes });
        self.flows.judge_at(&Packet { tuple, tcp }, self.now).0
    }
}

#[test]
fn a_connection_is_opened_by_the_acknowledgement_of_an_allowed_name() {
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK, &GOOD[..10]), Word::Pass);
    assert_eq!(talk.server(5001, 1011, ACK, b""), Word::Pass);
    assert_eq!(talk.client(1011, ACK, &GOOD[10..]), Word::Pass);
    assert_eq!(talk.server(5001, 1011, ACK, b"early answer"), Word::Pass);
    let end = 1001 + GOOD.len() as u32;
    assert_eq!(talk.server(5001, end - 1, ACK, b""), Word::Pass);
    assert_eq!(talk.server(5001, end, ACK, b""), Word::OpenNamed);
    assert_eq!(talk.opened.host(&talk.tuple()).as_deref(), Some("good.example"));
    // What was on its way.
    assert_eq!(talk.client(end, ACK, EVIL), Word::OpenNamed);
    // Another connection between the same ends is another one.
    assert_eq!(talk.client(9000, SYN, b""), Word::Pass);
    assert_eq!(talk.opened.host(&talk.tuple()), None);
    assert_eq!(talk.client(9001, ACK, GOOD), Word::Drop);
}

#[test]
fn a_beginning_over_several_ways_is_refused_wherever_the_option_is() {
    let capable = [30, 4, 1, 0];
    let behind_others = [2, 4, 5, 180, 1, 1, 4, 2, 30, 12, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for options in [&capable[..], &behind_others, &[0, 30, 4, 1], &[30]] {
        let mut talk = Talk::new();
        let (word, event) = talk.judged_with(options, 1000, SYN, b"");
        assert_eq!(word, Word::Refuse, "{options:?}");
        assert!(event.is_some());
        assert_eq!(talk.flows.sizes(), (0, 0));
        // Nor does one become such.
        assert_eq!(talk.client(1000, SYN, b""), Word::Pass);
        assert_eq!(talk.judged_with(options, 1000, SYN, b"").0, Word::Drop);
    }
    let usual = [2, 4, 5, 180, 4, 2, 8, 10, 30, 30, 30, 30, 0, 0, 0, 0, 1, 3, 3, 7];
    for options in [&usual[..], &[], &[1, 1, 1, 0], &[3], &[2, 0, 0, 0]] {
        assert_eq!(Talk::new().judged_with(options, 1000, SYN, b"").0, Word::Pass, "{options:?}");
    }
}

#[test]
fn a_denied_name_is_refused_and_told() {
    let mut talk = Talk::begun();
    let (word, event) = talk.judged(1001, ACK, EVIL);
    assert_eq!(word, Word::Refuse);
    let Some(Event::Denied { by, host, port, .. }) = event else { panic!("{event:?}") };
    assert_eq!((by, host.as_deref(), port), (Gate::Http, Some("evil.example"), Some(443)));
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Refuse);
    assert_eq!(talk.server(5001, 1001, ACK, b""), Word::Refuse);
}

#[test]
fn what_the_server_did_not_take_decides_nothing() {
    // A decoy that the server ignores, then the real thing in its place.
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Pass);
    assert_eq!(talk.server(5001, 1001, ACK, b""), Word::Pass);
    assert_eq!(talk.client(1001, ACK, EVIL), Word::Drop);
    assert_eq!(talk.client(1001 + 20, ACK, &EVIL[20..]), Word::Drop);
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Pass);
    assert_eq!(talk.server(5001, 1001 + GOOD.len() as u32, ACK, b""), Word::OpenNamed);
}

#[test]
fn gaps_are_not_jumped_over_and_early_bytes_are_not_taken() {
    let mut talk = Talk::new();
    assert_eq!(talk.client(1000, SYN, GOOD), Word::Drop);
    assert_eq!(talk.client(1000, SYN, b""), Word::Pass);
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Drop);
    assert_eq!(talk.server(5000, 1001, SYN | ACK, b""), Word::Pass);
    assert_eq!(talk.client(1005, ACK, &GOOD[4..]), Word::Drop);
    assert_eq!(talk.client(900, ACK, GOOD), Word::Drop);
    assert_eq!(talk.client(1001, ACK, &GOOD[..4]), Word::Pass);
    // Overlapping, and the same.
    assert_eq!(talk.client(1003, ACK, &GOOD[2..]), Word::Pass);
    assert_eq!(talk.server(5001, 1001 + GOOD.len() as u32, ACK, b""), Word::OpenNamed);
}

#[test]
fn a_second_beginning_does_not_reset_the_first() {
    // Its bytes would end where the server's acknowledgements are already.
    let mut talk = Talk::begun();
    let earlier = 1000 - GOOD.len() as u32;
    assert_eq!(talk.client(earlier, SYN, b""), Word::Drop);
    assert_eq!(talk.client(earlier + 1, ACK, GOOD), Word::Drop);
    // Nor after it was given up: the server has to agree to the new beginning.
    assert_eq!(talk.client(1001, RST, b""), Word::Pass);
    assert_eq!(talk.client(earlier, SYN, b""), Word::Pass);
    assert_eq!(talk.server(5001, 1001, ACK, b""), Word::Pass);
    assert_eq!(talk.server(5001, 1001, SYN | ACK, b""), Word::Drop);
    assert_eq!(talk.client(earlier + 1, ACK, GOOD), Word::Drop);
    assert_eq!(talk.server(5001, 1001, ACK, b"data"), Word::Pass);
}

#[test]
fn what_is_withdrawn_before_the_server_has_seen_it_is_not_opened() {
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Pass);
    talk.rules.withdrawn.store(true, Ordering::Relaxed);
    assert_eq!(talk.server(5001, 1001 + GOOD.len() as u32, ACK, b""), Word::Refuse);
    assert_eq!(talk.client(1001 + GOOD.len() as u32, ACK, b"more"), Word::Refuse);
}

#[test]
fn urgent_bytes_and_unknown_connections_are_refused() {
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK | URG, GOOD), Word::Refuse);
    let mut talk = Talk::new();
    assert_eq!(talk.client(1001, ACK, GOOD), Word::Refuse);
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK | FIN, &GOOD[..5]), Word::Refuse);
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK | FIN, b""), Word::Pass);
}

#[test]
fn a_server_that_speaks_first_opens() {
    let mut talk = Talk::begun();
    assert_eq!(talk.server(5001, 1001, ACK, b""), Word::Pass);
    assert_eq!(talk.server(5001, 1001, ACK, b"220 ready\r\n"), Word::Open);
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK, b"G"), Word::Pass);
    assert_eq!(talk.server(5001, 1002, ACK, b"impatient"), Word::Pass);
}

#[test]
fn a_probe_of_the_server_is_not_its_first_word() {
    let mut talk = Talk::begun();
    assert_eq!(talk.server(5000, 1001, ACK, b"\0"), Word::Pass);
    assert_eq!(talk.client(1001, ACK, EVIL), Word::Refuse);
    // One that goes on behind it is.
    let mut talk = Talk::begun();
    assert_eq!(talk.server(5000, 1001, ACK, b"\0"), Word::Pass);
    assert_eq!(talk.server(5002, 1001, ACK, b"20 ready"), Word::Drop);
    assert_eq!(talk.server(5000, 1001, ACK, b"\x0022"), Word::Open);
}

#[test]
fn a_hello_behind_a_database_s_question_is_read() {
    const QUESTIONS: &[u8] = b"\0\0\0\x08\x04\xd2\x16\x30\0\0\0\x08\x04\xd2\x16\x2f";
    for questions in [&QUESTIONS[8..], QUESTIONS] {
        let asked = || {
            let mut talk = Talk::begun();
            let mut at = 0;
            for question in questions.chunks(8) {
                assert_eq!(talk.client(1001 + at, ACK, &question[..3]), Word::Pass);
                assert_eq!(talk.client(1004 + at, ACK, &question[3..]), Word::Pass);
                assert_eq!(talk.server(5001 + at / 8, 1009 + at, ACK, b"S"), Word::Pass);
                at += 8;
            }
            (talk, 1001 + at, 5001 + at / 8)
        };
        let (mut talk, client, _) = asked();
        assert_eq!(talk.client(client, ACK, &hello(Some("evil.example"))), Word::Refuse);
        let (mut talk, client, server) = asked();
        let first = hello(Some("good.example"));
        let end = client + first.len() as u32;
        assert_eq!(talk.client(client, ACK, &first), Word::Pass);
        assert_eq!(talk.server(server, end, ACK, b""), Word::Pass);
        assert_eq!(talk.server(server, end, ACK, &server_hello(Some([5; 32]))), Word::OpenNamed);
        // A second hello is asked for behind the answers to the questions.
        let (mut talk, client, server) = asked();
        assert_eq!(talk.client(client, ACK, &first), Word::Pass);
        let retry = server_hello(None);
        assert_eq!(talk.server(server, end, ACK, &retry), Word::Pass);
        assert_eq!(talk.client(end, ACK, &hello(Some("evil.example"))), Word::Refuse);
        // Without encryption it is a protocol without names.
        let (mut talk, client, server) = asked();
        assert_eq!(talk.client(client, ACK, b"\0\0\0\x20\0\x03\0\0user"), Word::Pass);
        assert_eq!(talk.server(server, client + 12, ACK, b"R"), Word::Open);
        // What is too long to say is not passed on unread.
        let (mut talk, client, _) = asked();
        let endless = [&b"GET / HTTP/1.1\r\nA: "[..], &[b'a'; 17_000]].concat();
        assert_eq!(talk.client(client, ACK, &endless), Word::Refuse);
    }
}

/// Up to the acknowledgement of the first hello, which opens nothing yet.
fn greeted() -> (Talk, u32) {
    let mut talk = Talk::begun();
    let first = hello(Some("good.example"));
    let end = 1001 + first.len() as u32;
    assert_eq!(talk.client(1001, ACK, &first), Word::Pass);
    assert_eq!(talk.server(5001, end, ACK, b""), Word::Pass);
    (talk, end)
}

#[test]
fn a_hello_opens_when_the_server_has_answered_it() {
    let (mut talk, end) = greeted();
    let answer = server_hello(Some([5; 32]));
    // Out of order, in pieces, and a probe before the beginning.
    assert_eq!(talk.server(5021, end, ACK, &answer[20..]), Word::Drop);
    assert_eq!(talk.server(5001, end, ACK, &answer[..20]), Word::Pass);
    assert_eq!(talk.server(5000, end, ACK, b"x"), Word::Pass);
    assert_eq!(talk.server(5011, end, ACK, &answer[10..]), Word::OpenNamed);
    let (mut talk, end) = greeted();
    assert_eq!(talk.server(5001, end, ACK, &[21, 3, 3, 0, 2, 2, 40]), Word::OpenNamed);
}

#[test]
fn a_second_hello_is_read_too() {
    let (mut talk, end) = greeted();
    let retry = server_hello(None);
    assert_eq!(talk.server(5001, end, ACK, &retry), Word::Pass);
    let again = [&[20, 3, 3, 0, 1, 1][..], &hello(Some("good.example"))].concat();
    assert_eq!(talk.client(end, ACK, &again[..50]), Word::Pass);
    assert_eq!(talk.server(5001 + retry.len() as u32, end + 50, ACK, b""), Word::Pass);
    assert_eq!(talk.client(end + 50, ACK, &again[50..]), Word::Pass);
    let end = end + again.len() as u32;
    assert_eq!(talk.server(5001 + retry.len() as u32, end, ACK, b""), Word::OpenNamed);
    assert_eq!(talk.opened.host(&talk.tuple()).as_deref(), Some("good.example"));
}

#[test]
fn a_second_hello_with_another_name_is_refused() {
    let retry = server_hello(None);
    let evil = hello(Some("evil.example"));
    let (mut talk, end) = greeted();
    assert_eq!(talk.server(5001, end, ACK, &retry), Word::Pass);
    let (word, event) = talk.judged(end, ACK, &evil);
    assert_eq!(word, Word::Refuse);
    assert!(matches!(event, Some(Event::Denied { by: Gate::Sni, .. })), "{event:?}");
    // Sent ahead of the server's answer, and together with the first.
    let (mut talk, end) = greeted();
    assert_eq!(talk.client(end, ACK, &evil), Word::Pass);
    assert_eq!(talk.server(5001, end, ACK, &retry), Word::Refuse);
    let mut talk = Talk::begun();
    let both = [hello(Some("good.example")), evil].concat();
    assert_eq!(talk.client(1001, ACK, &both), Word::Pass);
    assert_eq!(talk.server(5001, 1001 + both.len() as u32, ACK, &retry), Word::Refuse);
    // Behind more than is looked at.
    let (mut talk, end) = greeted();
    assert_eq!(talk.client(end, ACK, &[23; 17000]), Word::Drop);
    assert_eq!(talk.server(5001, end, ACK, &retry), Word::Pass);
    assert_eq!(talk.client(end, ACK, &[23; 17000]), Word::Refuse);
}

#[test]
fn half_seen_connections_are_bounded() {
    let mut talk = Talk::new();
    for port in 0..5000 {
        talk.port = port;
        assert_eq!(talk.client(1000, SYN, b""), Word::Pass);
        assert_eq!(talk.server(5000, 1001, SYN | ACK, b""), Word::Pass);
        let mut line = b"GET / HTTP/1.1\r\nX: ".to_vec();
        line.resize(12000, b'y');
        talk.client(1001, ACK, &line);
    }
    assert!(talk.flows.sizes() <= (2048, 8 << 20), "{:?}", talk.flows.sizes());
    talk.port = 1;
    assert_eq!(talk.client(20000, ACK, GOOD), Word::Refuse);
}

#[test]
fn what_nobody_goes_on_with_is_given_up() {
    let mut talk = Talk::begun();
    assert_eq!(talk.client(1001, ACK, &GOOD[..10]), Word::Pass);
    assert_eq!(talk.flows.sizes(), (1, 10));
    // The same ends again: too early to be another connection, then late enough.
    assert_eq!(talk.client(7000, SYN, b""), Word::Drop);
    talk.now += Duration::from_secs(60);
    assert_eq!(talk.client(7000, SYN, b""), Word::Pass);
    assert_eq!(talk.flows.sizes(), (1, 0));
    assert_eq!(talk.server(5000, 7001, SYN | ACK, b""), Word::Pass);
    assert_eq!(talk.client(7001, ACK, &GOOD[..10]), Word::Pass);
    talk.now += Duration::from_secs(14 * 60);
    assert_eq!(talk.client(7001, ACK, &GOOD[..10]), Word::Pass, "it is alive");
    talk.now += Duration::from_secs(15 * 60);
    talk.port += 1;
    assert_eq!(talk.client(1000, SYN, b""), Word::Pass);
    assert_eq!(talk.flows.sizes(), (1, 0));
    talk.port -= 1;
    assert_eq!(talk.client(7011, ACK, &GOOD[10..]), Word::Refuse);
}

proptest! {
    #[test]
    fn pieces_in_any_order_decide_as_the_whole_does(
        evil in any::<bool>(),
        pieces in proptest::collection::vec((0_usize..45, 1_usize..45), 1..60),
    ) {
        let bytes = if evil { EVIL } else { GOOD };
        let mut talk = Talk::begun();
        let (mut taken, mut refused) = (0, false);
        for (start, length) in pieces.into_iter().chain([(0, bytes.len())]) {
            let start = start.min(bytes.len() - 1);
            let end = (start + length).min(bytes.len());
            let word = talk.client(1001 + start as u32, ACK, &bytes[start..end]);
            refused |= word == Word::Refuse;
            if word == Word::Pass {
                prop_assert!(start <= taken);
                taken = taken.max(end);
            }
            prop_assert!(!matches!(word, Word::Open | Word::OpenNamed));
        }
        prop_assert_eq!(refused, evil);
        let word = talk.server(5001, 1001 + bytes.len() as u32, ACK, b"");
        prop_assert_eq!(word, if evil { Word::Refuse } else { Word::OpenNamed });
    }

    #[test]
    fn packets_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        let _ = Packet::parse(&bytes);
        let _ = Packet::is_intact(&bytes);
    }
}
