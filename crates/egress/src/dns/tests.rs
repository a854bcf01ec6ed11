use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_proto::op::{Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

use super::gate::{Families, NameGate};
use super::question::{self, Asked, Question};
use super::server::Sockets;
use super::upstream::Upstreams;
use crate::audit::{Event, Gate};
use crate::outbound::Mark;
use crate::policy::document::Policy;
use crate::rehearsal::{Free, Rehearsal, settings};

const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

/// A resolver that does what it is told to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Answer,
    Refuse,
    /// Sends guesses with wrong numbers and names first.
    Guess,
    /// Has more than fits into a packet.
    Truncate,
    Nothing,
}

struct Resolver {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

async fn resolver(does: Does) -> Resolver {
    // A port that is free for one protocol may be in use for the other.
    let (socket, listener) = loop {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if let Ok(listener) = TcpListener::bind(socket.local_addr().unwrap()).await {
            break (socket, listener);
        }
    };
    let address = socket.local_addr().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    tokio::spawn(async move {
        let mut packet = [0; 2048];
        loop {
            let (length, asker) = socket.recv_from(&mut packet).await.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            for answer in answers(does, &packet[..length]) {
                socket.send_to(&answer.to_vec().unwrap(), asker).await.unwrap();
            }
        }
    });
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut packet = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut packet).await.unwrap();
            let bytes = answered(&packet).to_vec().unwrap();
            stream.write_u16(bytes.len() as u16).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        }
    });
    Resolver { address, asked }
}

fn answered(packet: &[u8]) -> Message {
    let mut message = Message::from_vec(packet).unwrap();
    message.metadata.message_type = MessageType::Response;
    message.edns = None;
    let query = message.queries[0].clone();
    let data = match query.query_type {
        RecordType::A => RData::A(A([192, 0, 2, 1].into())),
        _ => RData::TXT(TXT::new(vec!["x".repeat(200); 10])),
    };
    message.answers.push(Record::from_rdata(query.name, 30, data));
    message
}

fn answers(does: Does, packet: &[u8]) -> Vec<Message> {
    let right = answered(packet);
    match does {
        Does::Answer => vec![right],
        Does::Nothing => Vec::new(),
        Does::Refuse => {
            let mut refused = right;
            refused.metadata.response_code = ResponseCode::Refused;
            vec![refused]
        }
        Does::Truncate => {
            let mut short = right;
            short.metadata.truncation = true;
            short.answers.clear();
            vec![short]
        }
        Does::Guess => {
            let evil = RData::A(A([192, 0, 2, 66].into()));
            let mut other_number = right.clone();
            other_number.metadata.id = right.metadata.id.wrapping_add(1);
            other_number.answers[0].data = evil.clone();
            let mut other_name = right.clone();
            other_name.queries[0].name = Name::from_ascii("other.test.").unwrap();
            other_name.answers[0].data = evil;
            vec![other_number, other_name, right]
        }
    }
}

struct Stand {
    gate: Arc<NameGate>,
    rehearsal: Rehearsal,
}

fn stand(resolvers: &[&Resolver], policy: &str) -> Stand {
    let upstreams: Vec<_> = resolvers.iter().map(|resolver| resolver.address.to_string()).collect();
    let settings = settings(&[
        ("OPENSANDBOX_EGRESS_RULES", policy),
        ("OPENSANDBOX_EGRESS_DNS_UPSTREAM", &upstreams.join(",")),
        ("OPENSANDBOX_EGRESS_DNS_UPSTREAM_TIMEOUT", "1"),
        ("SANDGLASS_EGRESS_ALWAYS_DIR", "/nonexistent"),
    ]);
    let rehearsal = Rehearsal::new(&settings, Free);
    let gate = NameGate {
        plane: rehearsal.plane.clone(),
        upstreams: Arc::new(Upstreams::new(&settings.dns, Mark::None)),
        audit: rehearsal.notebook.clone(),
        families: Families::Four,
    };
    Stand { gate: Arc::new(gate), rehearsal }
}

fn packet(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::query();
    message.queries.push(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

fn asked(name: &str, kind: RecordType) -> Question {
    match question::read(&packet(name, kind)) {
        Asked::Question(question) => *question,
        _ => panic!("no question"),
    }
}

fn addresses(message: &Message) -> Vec<IpAddr> {
    message.answers.iter().filter_map(|record| record.data.ip_addr()).collect()
}

const POLICY: &str = r#"{"egress":[{"action":"allow","target":"a.test"}]}"#;

#[tokio::test]
async fn an_answer_leaves_after_its_addresses_are_open() {
    let resolver = resolver(Does::Answer).await;
    let stand = stand(&[&resolver], POLICY);
    let answer = stand.gate.answer(&asked("A.test.", RecordType::A)).await;
    assert_eq!(addresses(&answer), [ADDRESS]);
    assert_eq!(stand.rehearsal.kernel.lock().admitted, [(ADDRESS, std::time::Duration::from_secs(90))]);

    stand.rehearsal.kernel.lock().broken = Some("admit");
    let answer = stand.gate.answer(&asked("a.test.", RecordType::A)).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    assert!(answer.answers.is_empty());
}

#[tokio::test]
async fn what_is_denied_or_hidden_is_never_asked_for() {
    let resolver = resolver(Does::Answer).await;
    let stand = stand(&[&resolver], POLICY);
    for (name, kind, code) in [
        ("b.test.", RecordType::A, ResponseCode::NXDomain),
        ("secret.b.test.", RecordType::TXT, ResponseCode::NXDomain),
        ("a.test.", RecordType::HTTPS, ResponseCode::NoError),
        ("a.test.", RecordType::SVCB, ResponseCode::NoError),
        ("a.test.", RecordType::AAAA, ResponseCode::NoError),
    ] {
        let answer = stand.gate.answer(&asked(name, kind)).await;
        assert_eq!(answer.metadata.response_code, code, "{name} {kind}");
        assert!(answer.answers.is_empty());
    }
    assert_eq!(resolver.asked.load(Ordering::Relaxed), 0);
    let told = stand.rehearsal.notebook.events();
    assert!(
        matches!(&told[0], Event::Denied { by: Gate::Dns, host: Some(host), rule, .. } if host == "b.test" && rule == "default")
    );
    assert_eq!(told.len(), 2);
}

#[tokio::test]
async fn resolvers_are_asked_in_order_until_one_answers() {
    let (refusing, silent, good) =
        (resolver(Does::Refuse).await, resolver(Does::Nothing).await, resolver(Does::Answer).await);
    let all = stand(&[&refusing, &silent, &good], POLICY);
    assert_eq!(addresses(&all.gate.answer(&asked("a.test.", RecordType::A)).await), [ADDRESS]);
    assert_eq!(refusing.asked.load(Ordering::Relaxed), 1);
    assert_eq!(silent.asked.load(Ordering::Relaxed), 2, "packets are lost: it was asked again");

    // The silent one is found out, the refusing one lives.
    all.gate.upstreams.probe(&Name::root(), RecordType::NS).await;
    let before = silent.asked.load(Ordering::Relaxed);
    all.gate.answer(&asked("a.test.", RecordType::A)).await;
    assert_eq!(silent.asked.load(Ordering::Relaxed), before);

    let none = stand(&[&refusing], POLICY);
    let answer = none.gate.answer(&asked("a.test.", RecordType::A)).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
}

#[tokio::test]
async fn guesses_are_not_answers() {
    let resolver = resolver(Does::Guess).await;
    let stand = stand(&[&resolver], POLICY);
    assert_eq!(addresses(&stand.gate.answer(&asked("a.test.", RecordType::A)).await), [ADDRESS]);
}

#[tokio::test]
async fn what_does_not_fit_into_a_packet_comes_by_stream() {
    let resolver = resolver(Does::Truncate).await;
    let stand = stand(&[&resolver], POLICY);
    let sockets = Sockets {
        packets: vec![UdpSocket::bind("127.0.0.1:0").await.unwrap()],
        streams: vec![TcpListener::bind("127.0.0.1:0").await.unwrap()],
    };
    let (by_packet, by_stream) =
        (sockets.packets[0].local_addr().unwrap(), sockets.streams[0].local_addr().unwrap());
    let serving = tokio::spawn(sockets.serve(stand.gate.clone()));

    let asker = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    asker.send_to(&packet("a.test.", RecordType::TXT), by_packet).await.unwrap();
    let mut bytes = [0; 2048];
    let length = asker.recv(&mut bytes).await.unwrap();
    assert!(length <= 512);
    assert!(Message::from_vec(&bytes[..length]).unwrap().metadata.truncation);

    let mut stream = tokio::net::TcpStream::connect(by_stream).await.unwrap();
    for _ in 0..2 {
        let question = packet("a.test.", RecordType::TXT);
        stream.write_u16(question.len() as u16).await.unwrap();
        stream.write_all(&question).await.unwrap();
        let mut answer = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(Message::from_vec(&answer).unwrap().answers.len(), 1);
    }
    serving.abort();
}

#[tokio::test]
async fn a_name_that_is_denied_meanwhile_is_not_opened() {
    let silent = resolver(Does::Nothing).await;
    let good = resolver(Does::Answer).await;
    let stand = stand(&[&silent, &good], POLICY);
    let question = asked("a.test.", RecordType::A);
    let (answer, ()) = tokio::join!(stand.gate.answer(&question), async {
        while silent.asked.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        stand.rehearsal.plane.lock().unwrap().set(Policy::deny_all()).unwrap();
    });
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    assert!(stand.rehearsal.kernel.lock().admitted.is_empty());
}
