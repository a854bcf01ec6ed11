//! The encoding of messages and attributes.

pub const REQUEST: u16 = libc::NLM_F_REQUEST as u16;
pub const ACK: u16 = libc::NLM_F_ACK as u16;
pub const CREATE: u16 = libc::NLM_F_CREATE as u16;
pub const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
pub const REPLACE: u16 = libc::NLM_F_REPLACE as u16;
pub const APPEND: u16 = libc::NLM_F_APPEND as u16;
pub const DUMP: u16 = libc::NLM_F_DUMP as u16;

pub(crate) const HEADER: usize = 16;
const NESTED: u16 = libc::NLA_F_NESTED as u16;

/// One message under construction.
#[derive(Clone, Debug)]
pub struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// `fixed` is the family's header, such as `ifinfomsg`.
    pub fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(flags | REQUEST).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(fixed);
        let mut message = Self { bytes };
        message.pad();
        message
    }

    /// Attributes without a header, to become part of a message with [`Message::raw`].
    pub(crate) fn fragment() -> Self {
        Self { bytes: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = (value.len() + 4) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// A zero-terminated string.
    pub fn string(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// A number in the machine's order, as rtnetlink wants.
    pub fn native(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// A number in network order, as nfnetlink wants.
    pub fn network(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// An attribute that holds attributes; `fill` may put a fixed header first with [`Message::raw`].
    pub fn nest(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        let mut filled = fill(self);
        let length = (filled.bytes.len() - start) as u16;
        filled.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        filled
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self.pad();
        self
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    pub(crate) fn ask_for_answer(&mut self) {
        let flags = (self.flags() | ACK).to_ne_bytes();
        self.bytes[6..8].copy_from_slice(&flags);
    }

    pub(crate) fn wants_answer(&self) -> bool {
        self.flags() & (ACK | DUMP) != 0
    }

    fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.bytes[6], self.bytes[7]])
    }

    pub(crate) fn finish(&mut self, sequence: u32) {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
    }
}

/// The header of nfnetlink messages.
pub(crate) fn family_header(family: u8, resource: u16) -> [u8; 4] {
    let resource = resource.to_be_bytes();
    [family, 0, resource[0], resource[1]]
}

/// The attributes in the body of an answer, behind its fixed header.
pub fn attributes(body: &[u8], fixed: usize) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    let mut rest = body.get(fixed.next_multiple_of(4)..).unwrap_or_default();
    while rest.len() >= 4 {
        let length = u16::from_ne_bytes([rest[0], rest[1]]) as usize;
        if length < 4 || length > rest.len() {
            break;
        }
        let kind = u16::from_ne_bytes([rest[2], rest[3]]) & libc::NLA_TYPE_MASK as u16;
        found.push((kind, &rest[4..length]));
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    found
}

/// The value of the first attribute of a kind.
pub fn find<'a>(attributes: &[(u16, &'a [u8])], kind: u16) -> Option<&'a [u8]> {
    attributes.iter().find(|(found, _)| *found == kind).map(|(_, value)| *value)
}

/// A number in network order.
pub fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nests_know_their_length() {
        let mut message = Message::new(16, ACK, &[0; 16]).string(3, "ab").nest(18, |m| m.native(1, 7));
        message.finish(5);
        assert_eq!(message.bytes.len(), 16 + 16 + 8 + 12);
        assert_eq!(&message.bytes[..4], &52_u32.to_ne_bytes());
        let found = attributes(&message.bytes[16..], 16);
        assert_eq!(found[0], (3, &b"ab\0"[..]));
        assert_eq!(found[1].0, 18);
        assert_eq!(attributes(found[1].1, 0), vec![(1, &7_u32.to_ne_bytes()[..])]);
    }

    #[test]
    fn a_torn_answer_does_not_panic() {
        assert!(attributes(&[0, 0, 0, 0, 200, 0, 1, 0], 4).is_empty());
        assert!(attributes(&[], 16).is_empty());
    }
}
