//! As much of the protobuf encoding as OTLP needs: a message is bytes that fields are appended to.
//!
//! Field numbers are those of opentelemetry-proto 1.x, which never change their meaning.

/// A message that is being written.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        loop {
            let low = (value & 0x7f) as u8;
            value >>= 7;
            if value == 0 {
                self.0.push(low);
                return;
            }
            self.0.push(low | 0x80);
        }
    }

    fn tag(&mut self, field: u32, kind: u32) {
        self.varint(u64::from(field << 3 | kind));
    }

    /// `uint32`, `bool` and enumerations. Zero is written too: inside a `oneof` it is a value like others.
    pub(super) fn number(mut self, field: u32, value: u64) -> Self {
        self.tag(field, 0);
        self.varint(value);
        self
    }

    /// `int64`.
    pub(super) fn signed(self, field: u32, value: i64) -> Self {
        self.number(field, value.cast_unsigned())
    }

    /// `fixed64`.
    pub(super) fn fixed(mut self, field: u32, value: u64) -> Self {
        self.tag(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// `fixed32`.
    pub(super) fn short(mut self, field: u32, value: u32) -> Self {
        self.tag(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// `sfixed64`.
    pub(super) fn signed_fixed(self, field: u32, value: i64) -> Self {
        self.fixed(field, value.cast_unsigned())
    }

    /// `double`.
    pub(super) fn double(self, field: u32, value: f64) -> Self {
        self.fixed(field, value.to_bits())
    }

    /// `bytes`.
    pub(super) fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.tag(field, 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    /// `string`.
    pub(super) fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// A message within.
    pub(super) fn message(self, field: u32, inner: &Self) -> Self {
        self.bytes(field, &inner.0)
    }

    /// Several of them.
    pub(super) fn messages(self, field: u32, inner: impl IntoIterator<Item = Self>) -> Self {
        inner.into_iter().fold(self, |message, inner| message.message(field, &inner))
    }

    /// Packed `fixed64`.
    pub(super) fn packed_fixed(self, field: u32, values: &[u64]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.bytes(field, &bytes)
    }

    /// Packed `double`.
    pub(super) fn packed_doubles(self, field: u32, values: impl IntoIterator<Item = f64>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(f64::to_le_bytes).collect();
        self.bytes(field, &bytes)
    }
}

/// The value of an attribute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Any<'a> {
    Text(&'a str),
    Int(i64),
    Flag(bool),
}

/// `KeyValue`.
pub(super) fn attribute(name: &str, value: Any<'_>) -> Message {
    let any = match value {
        Any::Text(text) => Message::new().text(1, text),
        Any::Flag(flag) => Message::new().number(2, u64::from(flag)),
        Any::Int(number) => Message::new().signed(3, number),
    };
    Message::new().text(1, name).message(2, &any)
}

/// `InstrumentationScope`.
pub(super) fn scope(name: &str) -> Message {
    Message::new().text(1, name).text(2, env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_encoded_as_the_specification_shows() {
        // The examples of the protobuf encoding guide.
        assert_eq!(Message::new().number(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(Message::new().text(2, "testing").into_bytes(), b"\x12\x07testing");
        let inner = Message::new().number(1, 150);
        assert_eq!(Message::new().message(3, &inner).into_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let minus_two = [0x08, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(Message::new().signed(1, -2).into_bytes(), minus_two);
        assert_eq!(Message::new().fixed(1, 1).into_bytes(), [0x09, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Message::new().short(16, 1).into_bytes(), [0x85, 0x01, 1, 0, 0, 0]);
        assert_eq!(Message::new().packed_fixed(4, &[1, 2]).into_bytes()[..3], [0x22, 16, 1]);
    }
}
