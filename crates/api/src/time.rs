//! Instants as the wire spells them: UTC RFC 3339 ending in `Z`, six fractional digits or none.
//!
//! Strict parsers in five languages read what this writes, so there is one place that writes it.

use std::{borrow::Cow, fmt};

use sandglass_sandbox::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        RefOr, Schema,
        schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type},
    },
};

/// A [`Timestamp`] that serializes as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WireTime(pub Timestamp);

impl From<Timestamp> for WireTime {
    fn from(at: Timestamp) -> Self {
        Self(at)
    }
}

impl fmt::Display for WireTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for WireTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WireTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        let at: jiff::Timestamp = text.parse().map_err(de::Error::custom)?;
        Ok(Self(Timestamp::clamped(at.as_millisecond())))
    }
}

impl PartialSchema for WireTime {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::DateTime)))
            .into()
    }
}

impl ToSchema for WireTime {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("DateTime")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips() {
        for text in ["\"2030-01-01T00:00:00Z\"", "\"2030-01-01T00:00:00.500000Z\""] {
            let at: WireTime = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&at).unwrap(), text);
        }
    }
}
