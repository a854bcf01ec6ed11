//! Wall-clock time as the control plane uses it: absolute instants in whole milliseconds.
//!
//! Deadlines are stored as instants, never as remaining durations, so that neither a restart nor a pause moves them.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Milliseconds since the Unix epoch, UTC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(i64);

/// Year 9999, the last instant that four-digit RFC 3339 years can spell.
const LAST_MS: i64 = 253_402_300_799_999;

impl Timestamp {
    /// From Unix milliseconds; `None` outside the years 1970–9999.
    pub fn from_millis(ms: i64) -> Option<Self> {
        (0..=LAST_MS).contains(&ms).then_some(Self(ms))
    }

    /// From Unix milliseconds read back from our own files; out-of-range values are clamped.
    pub fn clamped(ms: i64) -> Self {
        Self(ms.clamp(0, LAST_MS))
    }

    /// Unix milliseconds.
    pub fn as_millis(self) -> i64 {
        self.0
    }

    /// `self + duration`, `None` when the result leaves the years that can be written.
    pub fn checked_add(self, duration: Duration) -> Option<Self> {
        let ms = i64::try_from(duration.as_millis()).ok()?;
        Self::from_millis(self.0.checked_add(ms)?)
    }

    /// How long from `self` until `later`; zero when `later` is not later.
    pub fn until(self, later: Self) -> Duration {
        Duration::from_millis(u64::try_from(later.0.saturating_sub(self.0)).unwrap_or(0))
    }
}

impl fmt::Display for Timestamp {
    /// RFC 3339 in UTC ending in `Z`; six fractional digits, or none at all when the fraction is zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = jiff::Timestamp::from_millisecond(self.0).map_err(|_| fmt::Error)?;
        if self.0 % 1000 == 0 { write!(f, "{at:.0}") } else { write!(f, "{at:.6}") }
    }
}

/// For what is stored as text because people and other programs read it: `#[serde(default, with = "…::time::text")]`.
pub mod text {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use super::Timestamp;

    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(at: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
        match at {
            Some(at) => serializer.collect_str(at),
            None => serializer.serialize_none(),
        }
    }

    /// # Errors
    /// When it is no instant of RFC 3339.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let at: jiff::Timestamp = text.parse().map_err(de::Error::custom)?;
        Ok(Some(Timestamp::clamped(at.as_millisecond())))
    }
}

/// The only source of "now" for decisions. Monotonic time is for measuring only.
pub trait Clock: Send + Sync + 'static {
    /// The current instant.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::clamped(jiff::Timestamp::now().as_millisecond())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_has_six_or_no_fraction_digits() {
        assert_eq!(Timestamp::clamped(1_893_456_000_000).to_string(), "2030-01-01T00:00:00Z");
        assert_eq!(Timestamp::clamped(1_893_456_000_500).to_string(), "2030-01-01T00:00:00.500000Z");
    }

    #[test]
    fn addition_stops_at_the_last_writable_year() {
        let t = Timestamp::clamped(LAST_MS - 10);
        assert_eq!(t.checked_add(Duration::from_millis(10)).map(Timestamp::as_millis), Some(LAST_MS));
        assert_eq!(t.checked_add(Duration::from_millis(11)), None);
        assert_eq!(t.checked_add(Duration::MAX), None);
    }
}
