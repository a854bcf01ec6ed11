//! Numbers, flags and the quantities made of them, read as leniently as the reference does (`"8080"` is an integer).

use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;

use super::{Context, Kind};
use crate::config::document::Raw;
use crate::config::values::ByteSize;

/// A longest time that still can be added to any date.
const LONGEST_SECONDS: f64 = u32::MAX as f64;

fn whole(raw: &Raw) -> Option<i128> {
    match raw {
        Raw::Int(value) => Some(*value),
        // Exact up to 2^53, and nothing larger is a sensible setting.
        Raw::Float(value) if value.fract() == 0.0 && value.abs() < 9e15 => Some(*value as i128),
        Raw::Text(text) => text.trim().replace('_', "").parse().ok(),
        _ => None,
    }
}

fn real(raw: &Raw) -> Option<f64> {
    let value = match raw {
        Raw::Int(value) => *value as f64,
        Raw::Float(value) => *value,
        Raw::Text(text) => text.trim().parse().ok()?,
        _ => return None,
    };
    value.is_finite().then_some(value)
}

fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { Value::from(value as i64) } else { Value::from(value) }
}

/// A whole number within bounds.
pub(in crate::config) struct Int<T> {
    min: i128,
    max: Option<i128>,
    of: PhantomData<T>,
}

impl<T> Int<T> {
    pub(in crate::config) fn at_least(min: i128) -> Self {
        Self { min, max: None, of: PhantomData }
    }

    pub(in crate::config) fn within(range: RangeInclusive<i128>) -> Self {
        Self { min: *range.start(), max: Some(*range.end()), of: PhantomData }
    }

    fn checked(&self, raw: &Raw) -> Option<i128> {
        whole(raw).filter(|value| *value >= self.min && self.max.is_none_or(|max| *value <= max))
    }
}

impl<T: Copy + TryFrom<i128> + TryInto<i128>> Kind for Int<T> {
    type Value = T;

    fn expects(&self) -> String {
        match self.max {
            Some(max) => format!("an integer from {} to {max}", self.min),
            None => format!("an integer of at least {}", self.min),
        }
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<T, String> {
        self.checked(raw).and_then(|value| T::try_from(value).ok()).map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &T) -> Value {
        (*value).try_into().ok().and_then(|value| u64::try_from(value).ok()).map_or(Value::Null, Value::from)
    }
}

/// A cap that zero switches off.
pub(in crate::config) struct Cap;

impl Kind for Cap {
    type Value = Option<usize>;

    fn expects(&self) -> String {
        "an integer of at least 0 (0 = no cap)".to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<Self::Value, String> {
        let value = whole(raw).and_then(|value| usize::try_from(value).ok());
        value.map_or_else(|| self.mismatch(), |value| Ok((value != 0).then_some(value)))
    }

    fn show(&self, value: &Self::Value) -> Value {
        Value::from(value.unwrap_or(0))
    }
}

/// A number that may have a fraction.
pub(in crate::config) struct Float {
    pub(in crate::config) min: f64,
}

impl Kind for Float {
    type Value = f64;

    fn expects(&self) -> String {
        format!("a number of at least {}", self.min)
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<f64, String> {
        real(raw).filter(|value| *value >= self.min).map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &f64) -> Value {
        number(*value)
    }
}

/// A length of time, written in the unit that the key's name ends in.
pub(in crate::config) struct Span {
    unit: &'static str,
    units_a_second: f64,
    min: f64,
    grain: Grain,
}

#[derive(PartialEq)]
enum Grain {
    Whole,
    /// May have a fraction; zero is refused.
    Positive,
    /// May have a fraction.
    AtLeast,
}

impl Span {
    pub(in crate::config) fn seconds(min: u32) -> Self {
        Self { unit: "seconds", units_a_second: 1.0, min: f64::from(min), grain: Grain::Whole }
    }

    pub(in crate::config) fn milliseconds(min: u32) -> Self {
        Self { unit: "milliseconds", units_a_second: 1000.0, min: f64::from(min), grain: Grain::Whole }
    }

    pub(in crate::config) fn positive_seconds() -> Self {
        Self { grain: Grain::Positive, ..Self::seconds(0) }
    }

    pub(in crate::config) fn fractional_seconds(min: u32) -> Self {
        Self { grain: Grain::AtLeast, ..Self::seconds(min) }
    }

    fn allows(&self, value: f64) -> bool {
        let large_enough = match self.grain {
            Grain::Whole => value.fract() == 0.0 && value >= self.min,
            Grain::Positive => value > 0.0,
            Grain::AtLeast => value >= self.min,
        };
        large_enough && value / self.units_a_second <= LONGEST_SECONDS
    }
}

impl Kind for Span {
    type Value = Duration;

    fn expects(&self) -> String {
        match self.grain {
            Grain::Whole => format!("whole {} of at least {}", self.unit, self.min),
            Grain::Positive => format!("{} above 0 (may have a fraction)", self.unit),
            Grain::AtLeast => format!("{} of at least {} (may have a fraction)", self.unit, self.min),
        }
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<Duration, String> {
        let value = real(raw).filter(|value| self.allows(*value));
        let span = value.and_then(|value| Duration::try_from_secs_f64(value / self.units_a_second).ok());
        // A fraction below a nanosecond would become the zero that was just refused.
        let span = span.filter(|span| self.grain != Grain::Positive || !span.is_zero());
        span.map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &Duration) -> Value {
        number(value.as_secs_f64() * self.units_a_second)
    }
}

/// A number of bytes, plain or with a unit.
pub(in crate::config) struct Size {
    pub(in crate::config) min: u64,
}

impl Kind for Size {
    type Value = ByteSize;

    fn expects(&self) -> String {
        format!("bytes of at least {} (`104857600` or `\"100MiB\"`)", self.min)
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<ByteSize, String> {
        let plain = || whole(raw).and_then(|bytes| u64::try_from(bytes).ok()).map(ByteSize::from_bytes);
        let with_unit = || if let Raw::Text(text) = raw { ByteSize::parse(text) } else { None };
        let size = plain().or_else(with_unit).filter(|size| size.bytes() >= self.min);
        size.map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &ByteSize) -> Value {
        Value::from(value.bytes())
    }
}

/// On or off.
pub(in crate::config) struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn expects(&self) -> String {
        "true or false".to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<bool, String> {
        match raw {
            Raw::Bool(flag) => Ok(*flag),
            Raw::Int(0) => Ok(false),
            Raw::Int(1) => Ok(true),
            Raw::Text(text) => match text.trim().to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "1" | "t" | "y" => Ok(true),
                "false" | "no" | "off" | "0" | "f" | "n" => Ok(false),
                _ => self.mismatch(),
            },
            _ => self.mismatch(),
        }
    }

    fn show(&self, value: &bool) -> Value {
        Value::from(*value)
    }
}
