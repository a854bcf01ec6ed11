//! When something periodic happens: five-field cron, `@daily` and its like, `@every`, each with a time zone in front.
//!
//! Pure: the clock is the caller's. Zones come from the data that this program carries, never from the machine, so that
//! the server that accepts a schedule and the agent that keeps it agree.
//! Invariant: a schedule that was parsed has a next time.

use std::{str::FromStr, time::Duration};

use jiff::{civil, tz::TimeZone};

use crate::time::Timestamp;

/// Longer texts are no schedules.
const MAX_TEXT: usize = 256;
/// The longest possible distance between two times: 29 February around a year that is no leap year.
const MAX_DAYS: i64 = 8 * 366 + 1;
const MAX_INTERVAL: Duration = Duration::from_secs(10 * 366 * 86_400);

/// Why a text is no schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("is longer than {MAX_TEXT} bytes")]
    TooLong,
    #[error("has {0} fields; a schedule has five: minute, hour, day of month, month, day of week")]
    Fields(usize),
    #[error("the {field} {text:?} {reason}")]
    Field { field: &'static str, text: String, reason: String },
    #[error(
        "{0:?} is not known; there are @yearly, @monthly, @weekly, @daily, @hourly and @every <duration>"
    )]
    Descriptor(String),
    #[error("@every {0:?} must be a duration of whole seconds, at least one, such as 90s or 1h30m")]
    Interval(String),
    #[error("the time zone {0:?} is not known")]
    Zone(String),
    #[error("never happens")]
    Never,
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Every(Duration),
    Cron { fields: Fields, zone: TimeZone },
}

/// Which values match, one bit a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    minutes: u64,
    hours: u64,
    days: u64,
    months: u64,
    weekdays: u64,
    /// One of the two day fields is unrestricted; otherwise either of them is enough.
    both_days: bool,
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        if text.len() > MAX_TEXT {
            return Err(ScheduleError::TooLong);
        }
        let text = text.trim();
        let (zone, rest) = match text.strip_prefix("CRON_TZ=").or_else(|| text.strip_prefix("TZ=")) {
            Some(named) => {
                let (name, rest) = named.split_once(char::is_whitespace).unwrap_or((named, ""));
                (zone(name)?, rest.trim_start())
            }
            None => (TimeZone::UTC, text),
        };
        if let Some(descriptor) = rest.strip_prefix('@') {
            if let Some(interval) = descriptor.strip_prefix("every") {
                return interval_of(interval).map(|interval| Self(Kind::Every(interval)));
            }
            let fields = of_descriptor(descriptor)
                .ok_or_else(|| ScheduleError::Descriptor(format!("@{descriptor}")))?;
            return Ok(Self(Kind::Cron { fields: Fields::parse(fields)?, zone }));
        }
        let fields = Fields::parse(rest)?;
        if !fields.ever() {
            return Err(ScheduleError::Never);
        }
        Ok(Self(Kind::Cron { fields, zone }))
    }
}

impl Schedule {
    /// The distance between two times, for `@every`: it is kept by a clock that nobody sets.
    pub fn interval(&self) -> Option<Duration> {
        match self.0 {
            Kind::Every(interval) => Some(interval),
            Kind::Cron { .. } => None,
        }
    }

    /// The first time after `now`. `None` at the end of the calendar.
    ///
    /// A time that the clocks skip happens when they have skipped it; one that they show twice happens at the first
    /// one, unless every hour is meant.
    pub fn next_after(&self, now: Timestamp) -> Option<Timestamp> {
        let at = match &self.0 {
            Kind::Every(interval) => return now.checked_add(*interval),
            Kind::Cron { fields, zone } => {
                let now = jiff::Timestamp::from_millisecond(now.as_millis()).ok()?;
                match fields.hours == all(0, 23) {
                    true => fields.next_by_offset(now, zone),
                    false => fields.next_by_clock(now, zone),
                }
            }
        };
        Timestamp::from_millis(at?.as_millisecond())
    }
}

fn zone(name: &str) -> Result<TimeZone, ScheduleError> {
    match name {
        "" | "UTC" | "Etc/UTC" => Ok(TimeZone::UTC),
        // Other forms that the library reads (POSIX rules, offsets) are no names that people share.
        _ => {
            jiff::tz::TimeZoneDatabase::bundled().get(name).map_err(|_| ScheduleError::Zone(name.to_owned()))
        }
    }
}

fn of_descriptor(name: &str) -> Option<&'static str> {
    Some(match name {
        "yearly" | "annually" => "0 0 1 1 *",
        "monthly" => "0 0 1 * *",
        "weekly" => "0 0 * * 0",
        "daily" | "midnight" => "0 0 * * *",
        "hourly" => "0 * * * *",
        _ => return None,
    })
}

fn interval_of(text: &str) -> Result<Duration, ScheduleError> {
    let asked = text.trim();
    let spaced = text.starts_with(char::is_whitespace);
    parse_duration(asked)
        .filter(|interval| spaced && interval.subsec_nanos() == 0)
        .filter(|interval| (Duration::from_secs(1)..=MAX_INTERVAL).contains(interval))
        .ok_or_else(|| ScheduleError::Interval(asked.to_owned()))
}

/// A duration as Go spells it: `1h30m`, `1.5h`, `200ms`, `0`. Never negative.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest.is_empty() {
        return None;
    }
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(end);
        let unit_end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        let unit: u128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || number.len() > 20 {
            return None;
        }
        let digits = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<u128>().ok() };
        let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
        nanos = nanos.checked_add(digits(whole)?.checked_mul(unit)?)?;
        nanos = nanos.checked_add(digits(fraction)?.checked_mul(unit)? / scale)?;
        rest = after;
    }
    let seconds = u64::try_from(nanos / 1_000_000_000).ok()?;
    let left = u32::try_from(nanos % 1_000_000_000).ok()?;
    Some(Duration::new(seconds, left))
}

const MONTHS: &[&str] = &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// What one field may hold.
struct Field {
    name: &'static str,
    least: u32,
    most: u32,
    words: &'static [&'static str],
}

const FIELDS: [Field; 5] = [
    Field { name: "minute", least: 0, most: 59, words: &[] },
    Field { name: "hour", least: 0, most: 23, words: &[] },
    Field { name: "day of month", least: 1, most: 31, words: &[] },
    Field { name: "month", least: 1, most: 12, words: MONTHS },
    // Sunday is 0 and 7.
    Field { name: "day of week", least: 0, most: 7, words: WEEKDAYS },
];

fn all(least: u32, most: u32) -> u64 {
    (least..=most).fold(0, |bits, value| bits | 1 << value)
}

impl Field {
    /// The values of a list, and whether it is unrestricted.
    fn parse(&self, text: &str) -> Result<(u64, bool), ScheduleError> {
        let mut bits = 0;
        let mut free = false;
        for part in text.split(',') {
            let (values, star) = self.part(part).map_err(|reason| ScheduleError::Field {
                field: self.name,
                text: text.to_owned(),
                reason,
            })?;
            bits |= values;
            free |= star;
        }
        Ok((bits, free))
    }

    fn part(&self, text: &str) -> Result<(u64, bool), String> {
        let (range, step) = match text.split_once('/') {
            Some((range, step)) => {
                let step = number(step).filter(|step| *step > 0);
                (range, Some(step.ok_or("has a step that is no number above zero")?))
            }
            None => (text, None),
        };
        let star = matches!(range, "*" | "?");
        let (from, to) = if star {
            // 7 is another name of 0.
            (self.least, if self.most == 7 { 6 } else { self.most })
        } else if let Some((from, to)) = range.split_once('-') {
            (self.value(from)?, self.value(to)?)
        } else {
            let from = self.value(range)?;
            (from, if step.is_some() { self.most } else { from })
        };
        if from > to {
            return Err("has a range that begins after its end".into());
        }
        let step = step.unwrap_or(1);
        let bits = (from..=to).step_by(step as usize).fold(0, |bits, value| bits | 1_u64 << value);
        Ok((bits, star && step == 1))
    }

    fn value(&self, text: &str) -> Result<u32, String> {
        let word = self.words.iter().position(|word| word.eq_ignore_ascii_case(text));
        let value = match word {
            Some(at) => u32::try_from(at).ok().map(|at| at + self.least),
            None => number(text),
        };
        value
            .filter(|value| (self.least..=self.most).contains(value))
            .ok_or_else(|| format!("has {text:?}, which is no value from {} to {}", self.least, self.most))
    }
}

fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.len() < 9 && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

impl Fields {
    fn parse(text: &str) -> Result<Self, ScheduleError> {
        let parts: Vec<&str> = text.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = parts[..] else {
            return Err(ScheduleError::Fields(parts.len()));
        };
        let [minutes, hours, days, months, weekdays] = &FIELDS;
        let (days, any_day) = days.parse(day)?;
        let (weekdays, any_weekday) = weekdays.parse(weekday)?;
        Ok(Self {
            minutes: minutes.parse(minute)?.0,
            hours: hours.parse(hour)?.0,
            days,
            months: months.parse(month)?.0,
            // Bit 7 is Sunday, too.
            weekdays: (weekdays | weekdays >> 7) & all(0, 6),
            both_days: any_day || any_weekday,
        })
    }

    fn matches(&self, date: civil::Date) -> bool {
        let bit = |bits: u64, value: i8| bits >> value & 1 == 1;
        let day = bit(self.days, date.day());
        let weekday = bit(self.weekdays, date.weekday().to_sunday_zero_offset());
        bit(self.months, date.month()) && if self.both_days { day && weekday } else { day || weekday }
    }

    /// Whether it has any time at all; 30 February has none.
    fn ever(&self) -> bool {
        self.after(civil::datetime(2000, 1, 1, 0, 0, 0, 0)).is_some()
    }

    /// The first minute on the calendar after `from`.
    fn after(&self, from: civil::DateTime) -> Option<civil::DateTime> {
        let mut date = from.date();
        let mut least = i32::from(from.hour()) * 60 + i32::from(from.minute()) + 1;
        for _ in 0..MAX_DAYS {
            if self.matches(date)
                && let Some(minute) = self.minute_from(least)
            {
                let (hour, minute) = (i8::try_from(minute / 60).ok()?, i8::try_from(minute % 60).ok()?);
                return Some(date.at(hour, minute, 0, 0));
            }
            date = date.tomorrow().ok()?;
            least = 0;
        }
        None
    }

    fn minute_from(&self, least: i32) -> Option<i32> {
        (least..24 * 60).find(|m| self.hours >> (m / 60) & 1 == 1 && self.minutes >> (m % 60) & 1 == 1)
    }

    fn next_by_clock(&self, now: jiff::Timestamp, zone: &TimeZone) -> Option<jiff::Timestamp> {
        let mut civil = zone.to_datetime(now);
        loop {
            civil = self.after(civil)?;
            let at = zone.to_ambiguous_timestamp(civil).compatible().ok()?;
            if at > now {
                return Some(at);
            }
        }
    }

    /// As if clocks were never changed, from one change to the next: no real hour is left out.
    fn next_by_offset(&self, now: jiff::Timestamp, zone: &TimeZone) -> Option<jiff::Timestamp> {
        let mut from = now;
        loop {
            let change = zone.following(from).next().map(|change| change.timestamp());
            let offset = zone.to_offset(from);
            let at = offset.to_timestamp(self.after(offset.to_datetime(from))?).ok()?;
            match change {
                Some(change) if at >= change => {
                    let offset = zone.to_offset(change);
                    let minute = jiff::SignedDuration::from_mins(1);
                    let before = offset.to_datetime(change).checked_sub(minute).ok()?;
                    let first = offset.to_timestamp(self.after(before)?).ok()?;
                    if zone.following(change).next().is_none_or(|next| first < next.timestamp()) {
                        return Some(first);
                    }
                    from = change;
                }
                _ => return Some(at),
            }
        }
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
