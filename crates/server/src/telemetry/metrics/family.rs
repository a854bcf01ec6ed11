//! What was measured, at one moment, in a shape that both the Prometheus page and the OTLP export are written from.

use std::borrow::Cow;

use super::sharded::Distribution;

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Label {
    Text(Cow<'static, str>),
    Int(i64),
    Flag(bool),
}

impl From<&'static str> for Label {
    fn from(text: &'static str) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<String> for Label {
    fn from(text: String) -> Self {
        Self::Text(Cow::Owned(text))
    }
}

impl From<bool> for Label {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<u16> for Label {
    fn from(number: u16) -> Self {
        Self::Int(i64::from(number))
    }
}

/// Attributes by name, as OTLP spells them (`sdk.language`).
pub type Labels = Vec<(&'static str, Label)>;

/// What kind of numbers a family holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Points {
    /// Only grow, from zero at the start of the process.
    Counter(Vec<(Labels, u64)>),
    /// Go up and down.
    Gauge(Vec<(Labels, i64)>),
    /// Durations in milliseconds.
    Histogram { bounds: &'static [u32], points: Vec<(Labels, Distribution)> },
}

/// One metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// As OTLP spells it, with dots.
    pub name: &'static str,
    pub about: &'static str,
    /// OTLP's unit: `ms`, or `1` for things that are counted.
    pub unit: &'static str,
    pub points: Points,
}

impl Family {
    /// A family of things that are counted.
    pub fn counter(name: &'static str, about: &'static str, points: Vec<(Labels, u64)>) -> Self {
        Self { name, about, unit: "1", points: Points::Counter(points) }
    }

    /// A family of things that are there.
    pub fn gauge(name: &'static str, about: &'static str, points: Vec<(Labels, i64)>) -> Self {
        Self { name, about, unit: "1", points: Points::Gauge(points) }
    }

    /// A family of durations.
    pub fn durations(
        name: &'static str,
        about: &'static str,
        bounds: &'static [u32],
        points: Vec<(Labels, Distribution)>,
    ) -> Self {
        Self { name, about, unit: "ms", points: Points::Histogram { bounds, points } }
    }
}
