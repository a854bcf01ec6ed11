//! The `since` parameter: `<n>` and one of `s`, `m`, `h`, `d`.

use std::time::Duration;

/// What is meant when the text means nothing.
const FALLBACK: Duration = Duration::from_secs(600);

/// How far back. Never fails: clients of the reference rely on ten minutes for whatever they send.
#[must_use]
pub fn parse(text: &str) -> Duration {
    exact(text).unwrap_or(FALLBACK)
}

fn exact(text: &str) -> Option<Duration> {
    let unit = text.chars().last()?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let number = &text[..text.len() - 1];
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_nonsense() {
        for (text, seconds) in [
            ("30s", 30),
            ("0s", 0),
            ("10m", 600),
            ("2h", 7200),
            ("1d", 86_400),
            ("007m", 420),
            ("", 600),
            ("m", 600),
            ("10", 600),
            ("10 m", 600),
            ("-1h", 600),
            ("1.5h", 600),
            ("10M", 600),
            ("5é", 600),
            ("99999999999999999999d", 600),
            ("18446744073709551615d", 600),
        ] {
            assert_eq!(parse(text), Duration::from_secs(seconds), "{text:?}");
        }
    }
}
