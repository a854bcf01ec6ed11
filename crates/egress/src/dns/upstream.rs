//! The resolvers that we ask, in order, with fresh questions: a new port and a new number for each.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout, timeout_at};

use crate::outbound::Mark;
use crate::settings::Dns;

use super::question::LARGEST_PACKET;

/// Records of an answer that are read at all.
const MOST_RECORDS: u16 = 512;

/// Packets are lost; a second question is sent on the same socket after this share of the time.
const SECOND_TRY_AFTER: u32 = 3;

/// Nobody answered in a way that can be used.
#[derive(Debug, Error)]
#[error("no resolver answered; the last one, {address}: {problem}")]
pub struct NoAnswer {
    pub address: SocketAddr,
    pub problem: Problem,
}

/// What went wrong with one resolver.
#[derive(Debug, Error)]
pub enum Problem {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer in time")]
    Late,
    #[error("it answered {0}")]
    Code(ResponseCode),
    #[error("its answer cannot be read")]
    Malformed,
}

/// The resolvers.
#[derive(Debug)]
pub struct Upstreams {
    servers: Vec<Server>,
    time: Duration,
}

#[derive(Debug)]
struct Server {
    address: SocketAddr,
    mark: Mark,
    alive: AtomicBool,
}

impl Upstreams {
    pub fn new(settings: &Dns, mark: Mark) -> Self {
        let server = |address: &SocketAddr| {
            let exempt = settings.exempt.contains(&address.ip());
            let mark = if exempt { Mark::None } else { mark };
            Server { address: *address, mark, alive: AtomicBool::new(true) }
        };
        Self { servers: settings.upstreams.iter().map(server).collect(), time: settings.timeout }
    }

    /// The first usable answer: that there is something, or that there is nothing.
    pub async fn ask(&self, name: &Name, kind: RecordType) -> Result<Message, NoAnswer> {
        let all_dead = self.servers.iter().all(|server| !server.alive.load(Ordering::Relaxed));
        let mut last = None;
        for server in self.servers.iter().filter(|server| all_dead || server.alive.load(Ordering::Relaxed)) {
            match server.ask(name, kind, self.time).await {
                Ok(answer) => return Ok(answer),
                Err(problem) => last = Some(NoAnswer { address: server.address, problem }),
            }
        }
        Err(last.unwrap_or_else(|| NoAnswer { address: ([0, 0, 0, 0], 53).into(), problem: Problem::Late }))
    }

    /// The addresses of a host, for ourselves.
    pub async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        let mut name = Name::from_utf8(host).map_err(io::Error::other)?;
        name.set_fqdn(true);
        let answer = self.ask(&name, RecordType::A).await.map_err(io::Error::other)?;
        Ok(answer.answers.iter().filter_map(|record| record.data.ip_addr()).collect())
    }

    /// Asks each for this name, and from now on leaves those out that do not answer.
    pub(super) async fn probe(&self, name: &Name, kind: RecordType) {
        for server in &self.servers {
            let alive =
                !matches!(server.ask(name, kind, self.time).await, Err(Problem::Io(_) | Problem::Late));
            server.alive.store(alive, Ordering::Relaxed);
        }
    }

    /// With one resolver there is nothing to choose from.
    pub(super) fn has_choice(&self) -> bool {
        self.servers.len() > 1
    }
}

impl Server {
    async fn ask(&self, name: &Name, kind: RecordType, time: Duration) -> Result<Message, Problem> {
        let mut question = Message::query();
        question.metadata.recursion_desired = true;
        question.queries.push(Query::query(name.clone(), kind));
        let mut edns = Edns::new();
        edns.set_max_payload(LARGEST_PACKET);
        question.edns = Some(edns);
        let bytes = question.to_vec().map_err(|_| Problem::Malformed)?;
        let mut answer = self.by_packet(&question, &bytes, time).await?;
        if answer.metadata.truncation {
            answer = timeout(time, self.by_stream(&question, &bytes)).await.map_err(|_| Problem::Late)??;
        }
        match answer.metadata.response_code {
            ResponseCode::NoError | ResponseCode::NXDomain => Ok(answer),
            code => Err(Problem::Code(code)),
        }
    }

    async fn by_packet(&self, question: &Message, bytes: &[u8], time: Duration) -> Result<Message, Problem> {
        let socket = self.mark.udp(self.address).await?;
        let end = Instant::now() + time;
        socket.send(bytes).await?;
        let first = timeout(time / SECOND_TRY_AFTER, answer_to(&socket, question)).await;
        if let Ok(answer) = first {
            return answer;
        }
        socket.send(bytes).await?;
        timeout_at(end, answer_to(&socket, question)).await.map_err(|_| Problem::Late)?
    }

    async fn by_stream(&self, question: &Message, bytes: &[u8]) -> Result<Message, Problem> {
        let mut stream = self.mark.tcp(self.address).await?;
        let length = u16::try_from(bytes.len()).map_err(|_| Problem::Malformed)?;
        stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await?;
        let length = stream.read_u16().await?;
        let mut answer = vec![0; usize::from(length)];
        stream.read_exact(&mut answer).await?;
        read(&answer, question).ok_or(Problem::Malformed)
    }
}

/// Packets that answer something else are ignored: they are late, or somebody's guesses.
async fn answer_to(socket: &UdpSocket, question: &Message) -> Result<Message, Problem> {
    let mut packet = [0; 4096];
    loop {
        let length = socket.recv(&mut packet).await?;
        if let Some(answer) = read(&packet[..length], question) {
            return Ok(answer);
        }
    }
}

/// The message, if it answers exactly this question.
fn read(packet: &[u8], question: &Message) -> Option<Message> {
    let counts = packet.get(..12)?;
    let few = [6, 8, 10].iter().all(|&at| u16::from_be_bytes([counts[at], counts[at + 1]]) <= MOST_RECORDS);
    let one = counts[4..6] == [0, 1];
    let same_number = counts[..2] == question.metadata.id.to_be_bytes();
    if !(few && one && same_number) {
        return None;
    }
    let answer = Message::from_vec(packet).or_else(|error| truncated(packet).ok_or(error)).ok()?;
    let (asked, told) = (question.queries.first()?, answer.queries.first()?);
    let same = asked.name == told.name
        && asked.query_type == told.query_type
        && asked.query_class == told.query_class;
    (answer.metadata.message_type == MessageType::Response && same).then_some(answer)
}

/// A truncated answer may end in the middle of a record: only its question is read.
fn truncated(packet: &[u8]) -> Option<Message> {
    let is_truncated = packet.get(2)? & 0x02 != 0;
    let mut head = packet.to_vec();
    head.get_mut(6..12)?.fill(0);
    is_truncated.then(|| Message::from_vec(&head).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{RData, Record};

    use super::*;

    fn question() -> Message {
        let mut question = Message::query();
        question.queries.push(Query::query(Name::from_ascii("a.test.").unwrap(), RecordType::A));
        question
    }

    fn answer(change: impl FnOnce(&mut Message)) -> (Message, Vec<u8>) {
        let question = question();
        let mut answer = question.clone();
        answer.metadata.message_type = MessageType::Response;
        let data = RData::A(A([192, 0, 2, 1].into()));
        answer.answers.push(Record::from_rdata(Name::from_ascii("a.test.").unwrap(), 5, data));
        change(&mut answer);
        let bytes = answer.to_vec().unwrap();
        (question, bytes)
    }

    #[test]
    fn only_an_answer_to_the_question_is_one() {
        let told = |change: fn(&mut Message)| {
            let (question, bytes) = answer(change);
            read(&bytes, &question).is_some()
        };
        assert!(told(|_| {}));
        assert!(told(|m| m.queries[0].name = Name::from_ascii("A.TEST.").unwrap()));
        assert!(!told(|m| m.metadata.id = m.metadata.id.wrapping_add(1)));
        assert!(!told(|m| m.queries[0].name = Name::from_ascii("b.test.").unwrap()));
        assert!(!told(|m| m.queries[0].query_type = RecordType::AAAA));
        assert!(!told(|m| m.metadata.message_type = MessageType::Query));
        assert!(!told(|m| m.queries.clear()));
    }

    #[test]
    fn an_answer_that_was_cut_is_one_that_has_more() {
        let (question, mut bytes) = answer(|m| m.metadata.truncation = true);
        bytes.truncate(bytes.len() - 3);
        assert!(read(&bytes, &question).unwrap().metadata.truncation);
        let (question, mut bytes) = answer(|_| {});
        bytes.truncate(bytes.len() - 3);
        assert!(read(&bytes, &question).is_none());
    }
}
