//! A question of the sandbox, and messages that answer it.

use hickory_proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, RecordType};

/// Largest answer that is sent as one packet: what passes everywhere without being cut.
pub const LARGEST_PACKET: u16 = 1232;

const SMALLEST_PACKET: u16 = 512;

/// Bytes of the fixed head of a message.
const HEAD: usize = 12;

/// Records that a question may carry besides: the one for extensions, and room for a signature or cookie that is ignored.
const MOST_ADDITIONAL: u16 = 4;

/// Why an answer is not what was asked for, told with it (RFC 8914).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    code: u16,
    text: String,
}

const EXTENDED_ERROR: u16 = 15;

impl Reason {
    /// The policy does not allow the name.
    pub fn blocked(rule: &str) -> Self {
        Self { code: 15, text: format!("blocked by the network policy: {rule}") }
    }

    /// The answer had addresses that it must not have.
    pub fn filtered(rule: &str) -> Self {
        Self { code: 17, text: format!("addresses left out: {rule}") }
    }

    /// No resolver answered.
    pub fn unreachable() -> Self {
        Self { code: 22, text: "no resolver answered".into() }
    }

    fn option(&self) -> EdnsOption {
        let mut data = self.code.to_be_bytes().to_vec();
        // Longer texts than this are of no use and make answers that do not fit.
        data.extend(self.text.bytes().take(200));
        EdnsOption::Unknown(EXTENDED_ERROR, data)
    }
}

/// A question that can be decided upon.
#[derive(Clone, Debug)]
pub struct Question {
    asked: Metadata,
    pub query: Query,
    /// The name in the form in which rules are asked about it.
    pub name: String,
    /// What fits into a packet, if the asker understands extensions.
    payload: Option<u16>,
}

/// What can be done with bytes that came in.
pub enum Asked {
    Question(Box<Question>),
    /// It is answered without a decision.
    Answer(Vec<u8>),
    /// It deserves no answer.
    Nothing,
}

/// Reads a message of the sandbox.
pub fn read(packet: &[u8]) -> Asked {
    let Some(head) = packet.get(..HEAD) else { return Asked::Nothing };
    let number = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let (id, is_answer, code) = (number(0), head[2] & 0x80 != 0, OpCode::from_u8(head[2] >> 3 & 15));
    let [questions, answers, authorities, additional] = [4, 6, 8, 10].map(number);
    if is_answer {
        return Asked::Nothing;
    }
    let refuse = |why| Asked::Answer(encode(&Message::error_msg(id, code, why), u16::MAX));
    match (code, questions) {
        (OpCode::Query, 0) => return refuse(ResponseCode::NoError),
        (OpCode::Query, 1) if answers == 0 && authorities == 0 && additional <= MOST_ADDITIONAL => {}
        (OpCode::Query, _) => return refuse(ResponseCode::FormErr),
        _ => return refuse(ResponseCode::NotImp),
    }
    let Ok(message) = Message::from_vec(packet) else { return refuse(ResponseCode::FormErr) };
    let Some(query) = message.queries.first().cloned() else { return refuse(ResponseCode::FormErr) };
    let payload = message.edns.as_ref().map(Edns::max_payload);
    let question = Question { asked: message.metadata, name: host_name(&query), query, payload };
    match (
        message.edns.map_or(0, |edns| edns.version()),
        question.query.query_class,
        question.query.query_type,
    ) {
        (1.., ..) => Asked::Answer(question.encode(&question.refused(ResponseCode::BADVERS), u16::MAX)),
        (_, DNSClass::IN, RecordType::AXFR | RecordType::IXFR) => {
            Asked::Answer(question.encode(&question.refused(ResponseCode::NotImp), u16::MAX))
        }
        (_, DNSClass::IN, _) => Asked::Question(Box::new(question)),
        _ => Asked::Answer(question.encode(&question.refused(ResponseCode::Refused), u16::MAX)),
    }
}

impl Question {
    /// Whether the name is one that hosts have. Rules are about such names; others could be taken for a different one by somebody.
    pub fn is_about_a_host(&self) -> bool {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        self.query.name.iter().all(|label| label.iter().all(plain))
    }

    /// An answer without records.
    pub fn empty(&self, code: ResponseCode, reason: Option<&Reason>) -> Message {
        let mut message = self.refused(code);
        if let (Some(edns), Some(reason)) = (message.edns.as_mut(), reason) {
            edns.options_mut().insert(reason.option());
        }
        message
    }

    fn refused(&self, code: ResponseCode) -> Message {
        let mut message = Message::new(self.asked.id, MessageType::Response, OpCode::Query);
        message.metadata.recursion_desired = self.asked.recursion_desired;
        message.metadata.checking_disabled = self.asked.checking_disabled;
        message.metadata.recursion_available = true;
        message.metadata.response_code = code;
        message.queries.push(self.query.clone());
        if self.payload.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(LARGEST_PACKET);
            message.edns = Some(edns);
        }
        message
    }

    /// The bytes of an answer; if they are more than the limit, only the word that there is more.
    pub fn encode(&self, message: &Message, limit: u16) -> Vec<u8> {
        encode(message, limit)
    }

    /// Bytes that fit into a packet to the asker.
    pub fn packet_limit(&self) -> u16 {
        self.payload.unwrap_or(SMALLEST_PACKET).clamp(SMALLEST_PACKET, LARGEST_PACKET)
    }
}

fn encode(message: &Message, limit: u16) -> Vec<u8> {
    match message.to_vec() {
        Ok(bytes) if bytes.len() <= usize::from(limit) => bytes,
        Ok(_) => message.truncate().to_vec().unwrap_or_default(),
        Err(_) => {
            let (id, code) = (message.metadata.id, message.metadata.op_code);
            Message::error_msg(id, code, ResponseCode::ServFail).to_vec().unwrap_or_default()
        }
    }
}

fn host_name(query: &Query) -> String {
    let text = query.name.to_ascii();
    text.strip_suffix('.').unwrap_or(&text).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::Name;
    use proptest::prelude::*;

    use super::*;

    fn packet(name: &str, kind: RecordType, change: impl FnOnce(&mut Message)) -> Vec<u8> {
        let mut message = Message::query();
        message.queries.push(Query::query(Name::from_ascii(name).unwrap(), kind));
        change(&mut message);
        message.to_vec().unwrap()
    }

    fn question(packet: &[u8]) -> Question {
        match read(packet) {
            Asked::Question(question) => *question,
            _ => panic!("no question"),
        }
    }

    fn code(packet: &[u8]) -> ResponseCode {
        match read(packet) {
            Asked::Answer(bytes) => Message::from_vec(&bytes).unwrap().metadata.response_code,
            _ => panic!("no answer"),
        }
    }

    #[test]
    fn names_are_read_as_rules_know_them() {
        assert_eq!(question(&packet("WWW.Example.COM.", RecordType::A, |_| {})).name, "www.example.com");
        assert!(question(&packet("_dmarc.a-b.test.", RecordType::TXT, |_| {})).is_about_a_host());
        for odd in [&b"a.b"[..], b"a\0", b"a b", b"*"] {
            let name = Name::from_labels([odd, b"test"]).unwrap();
            let asked = packet("x.", RecordType::A, |m| m.queries[0].name = name);
            assert!(!question(&asked).is_about_a_host(), "{odd:?}");
        }
    }

    #[test]
    fn what_is_no_plain_question_is_not_passed_on() {
        assert_eq!(code(&packet("a.test.", RecordType::A, |m| m.queries.clear())), ResponseCode::NoError);
        let twice = packet("a.test.", RecordType::A, |m| m.queries.push(m.queries[0].clone()));
        assert_eq!(code(&twice), ResponseCode::FormErr);
        assert_eq!(
            code(&packet("a.test.", RecordType::A, |m| m.metadata.op_code = OpCode::Update)),
            ResponseCode::NotImp
        );
        assert_eq!(code(&packet("a.test.", RecordType::AXFR, |_| {})), ResponseCode::NotImp);
        let chaos = packet("version.bind.", RecordType::TXT, |m| m.queries[0].query_class = DNSClass::CH);
        assert_eq!(code(&chaos), ResponseCode::Refused);
        let future = packet("a.test.", RecordType::A, |m| {
            let mut edns = Edns::new();
            edns.set_version(1);
            m.edns = Some(edns);
        });
        // The number of this code has two names.
        assert_eq!(u16::from(code(&future)), u16::from(ResponseCode::BADVERS));
        let answer = packet("a.test.", RecordType::A, |m| m.metadata.message_type = MessageType::Response);
        assert!(matches!(read(&answer), Asked::Nothing));
        assert!(matches!(read(&[0; 11]), Asked::Nothing));
    }

    #[test]
    fn a_reason_is_told_to_those_who_understand_it() {
        let old = question(&packet("a.test.", RecordType::A, |_| {}));
        let reason = Reason::blocked("deny a.test");
        assert!(old.empty(ResponseCode::NXDomain, Some(&reason)).edns.is_none());
        let new = question(&packet("a.test.", RecordType::A, |m| m.edns = Some(Edns::new())));
        let message = new.empty(ResponseCode::NXDomain, Some(&reason));
        let bytes = new.encode(&message, 512);
        let read = Message::from_vec(&bytes).unwrap();
        let told = read.edns.unwrap().options().as_ref()[0].clone();
        assert_eq!(told.1, reason.option());
        assert_eq!(read.queries[0].name.to_ascii(), "a.test.");
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_odd(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        #[test]
        fn no_question_with_changed_bytes_is_too_odd(changes in prop::collection::vec((0..60usize, any::<u8>()), 1..6)) {
            let mut bytes = packet("some.name.test.", RecordType::A, |m| m.edns = Some(Edns::new()));
            let length = bytes.len();
            for (at, byte) in changes {
                bytes[at % length] = byte;
            }
            let _ = read(&bytes);
        }
    }
}
