//! Jupyter's messages: made, signed, checked and taken apart.
//!
//! Invariant: a message whose signature is not the kernel's is not a message.

use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::zmtp::Multipart;

const DELIMITER: &[u8] = b"<IDS|MSG>";
const BLOCK: usize = 64;
/// The version of the messaging protocol that requests are written in.
const VERSION: &str = "5.3";

/// Where a message came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channel {
    Shell,
    Iopub,
}

/// A message of a kernel, as far as anybody here looks at it.
#[derive(Debug)]
pub(super) struct Message {
    pub channel: Channel,
    pub kind: String,
    /// The id of the request that this is about; empty when it is about none.
    pub parent: String,
    /// JSON text; empty when it was too large to be kept.
    pub content: Vec<u8>,
    /// Bytes of the message that were too many.
    pub dropped: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Header {
    msg_id: String,
    msg_type: String,
}

/// A request as both ways to a kernel send it.
pub(super) struct Request {
    pub id: String,
    pub header: Value,
    pub content: Value,
}

/// Makes requests of one session.
pub(super) struct Session(String);

impl Session {
    pub(super) fn new() -> Self {
        Session(uuid::Uuid::new_v4().simple().to_string())
    }

    pub(super) fn request(&self, kind: &str, content: Value) -> Request {
        let id = uuid::Uuid::new_v4().to_string();
        let header = json!({
            "msg_id": id,
            "session": self.0,
            "username": "sandbox",
            "date": jiff::Timestamp::now().to_string(),
            "msg_type": kind,
            "version": VERSION,
        });
        Request { id, header, content }
    }

    pub(super) fn execute(&self, code: &str) -> Request {
        self.request(
            "execute_request",
            json!({
                "code": code,
                "silent": false,
                "store_history": true,
                "user_expressions": {},
                "allow_stdin": false,
                "stop_on_error": true,
            }),
        )
    }
}

/// The key that a kernel and its client share.
pub(super) struct Key(String);

impl Key {
    pub(super) fn new() -> Self {
        Key(uuid::Uuid::new_v4().to_string())
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// The parts of a request on a socket.
    pub(super) fn seal(&self, request: &Request) -> [Vec<u8>; 6] {
        let (header, content) = (request.header.to_string(), request.content.to_string());
        let signature = sign(self.0.as_bytes(), &[header.as_bytes(), b"{}", b"{}", content.as_bytes()]);
        [
            DELIMITER.to_vec(),
            signature.into_bytes(),
            header.into_bytes(),
            b"{}".to_vec(),
            b"{}".to_vec(),
            content.into_bytes(),
        ]
    }

    /// What a kernel said; `None` for what no kernel with this key says.
    pub(super) fn open(&self, channel: Channel, message: Multipart) -> Option<Message> {
        let mut parts = message.parts;
        let at = parts.iter().position(|part| part == DELIMITER)?;
        let [signature, header, parent, metadata, content, ..] = &mut parts[at + 1..] else { return None };
        if message.dropped == 0 {
            let expected = sign(self.0.as_bytes(), &[header, parent, metadata, content]);
            if !bool::from(expected.as_bytes().ct_eq(signature)) {
                return None;
            }
        }
        let content = std::mem::take(content);
        assemble(channel, (header, parent), content).map(|made| Message { dropped: message.dropped, ..made })
    }
}

/// A message from the JSON texts of its headers and its content.
pub(super) fn assemble(
    channel: Channel,
    (header, parent): (&[u8], &[u8]),
    content: Vec<u8>,
) -> Option<Message> {
    let header: Header = serde_json::from_slice(header).ok()?;
    let parent: Header = serde_json::from_slice(parent).unwrap_or_default();
    Some(Message { channel, kind: header.msg_type, parent: parent.msg_id, content, dropped: 0 })
}

/// HMAC-SHA256 in hexadecimal.
fn sign(key: &[u8], parts: &[&[u8]]) -> String {
    let mut block = [0; BLOCK];
    if key.len() > BLOCK {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let mut inner = Sha256::new_with_prefix(block.map(|byte| byte ^ 0x36));
    for part in parts {
        inner.update(part);
    }
    let outer = Sha256::new_with_prefix(block.map(|byte| byte ^ 0x5c)).chain_update(inner.finalize());
    outer.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_the_standard() {
        assert_eq!(
            sign(b"Jefe", &[b"what do ya ", b"want for nothing?"]),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            sign(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"]),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    #[test]
    fn only_what_the_key_signed_is_opened() {
        let key = Key::new();
        let request = Session::new().execute("1+1");
        let mut parts = vec![b"topic".to_vec()];
        parts.extend(key.seal(&request));
        let message = |parts: &[Vec<u8>]| Multipart { parts: parts.to_vec(), dropped: 0 };
        let opened = key.open(Channel::Iopub, message(&parts)).unwrap();
        assert_eq!((opened.kind.as_str(), opened.parent.as_str()), ("execute_request", ""));
        assert!(Key::new().open(Channel::Iopub, message(&parts)).is_none());
        assert!(key.open(Channel::Iopub, message(&parts[..4])).is_none());
        parts[6].push(b' ');
        assert!(key.open(Channel::Iopub, message(&parts)).is_none());
    }
}
