use proptest::prelude::*;

use super::*;

fn at(text: &str) -> Timestamp {
    Timestamp::clamped(text.parse::<jiff::Timestamp>().unwrap().as_millisecond())
}

fn schedule(text: &str) -> Schedule {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// The next times after `from`, as far as they are named.
fn follows(text: &str, from: &str, times: &[&str]) {
    let schedule = schedule(text);
    let mut now = at(from);
    for time in times {
        now = schedule.next_after(now).unwrap();
        assert_eq!(now, at(time), "{text}: {now}");
    }
}

#[test]
fn every_form_of_a_field() {
    let from = "2026-03-10T10:07:30Z";
    follows("* * * * *", from, &["2026-03-10T10:08:00Z", "2026-03-10T10:09:00Z"]);
    follows("*/15 * * * *", from, &["2026-03-10T10:15:00Z", "2026-03-10T10:30:00Z"]);
    follows("5/20 10 * * *", from, &["2026-03-10T10:25:00Z", "2026-03-10T10:45:00Z", "2026-03-11T10:05:00Z"]);
    follows("0 8-10,22 * * *", from, &["2026-03-10T22:00:00Z", "2026-03-11T08:00:00Z"]);
    follows("30 6 * JAN-mar mon", from, &["2026-03-16T06:30:00Z"]);
    follows("0 0 ? * 7", from, &["2026-03-15T00:00:00Z"]);
    follows("0 0 * * 5-7", from, &["2026-03-13T00:00:00Z", "2026-03-14T00:00:00Z", "2026-03-15T00:00:00Z"]);
    follows("0 0 29 2 *", from, &["2028-02-29T00:00:00Z"]);
}

#[test]
fn two_restricted_day_fields_mean_either() {
    let from = "2026-03-10T00:00:00Z";
    follows("0 0 13 * fri", from, &["2026-03-13T00:00:00Z", "2026-03-20T00:00:00Z"]);
    follows("0 0 12 * fri", from, &["2026-03-12T00:00:00Z", "2026-03-13T00:00:00Z"]);
    // A step makes a star a restriction.
    follows("0 0 */15 * fri", from, &["2026-03-13T00:00:00Z", "2026-03-16T00:00:00Z"]);
}

#[test]
fn descriptors_and_intervals() {
    let from = "2026-03-10T10:07:30Z";
    for (text, next) in [
        ("@hourly", "2026-03-10T11:00:00Z"),
        ("@daily", "2026-03-11T00:00:00Z"),
        ("@midnight", "2026-03-11T00:00:00Z"),
        ("@weekly", "2026-03-15T00:00:00Z"),
        ("@monthly", "2026-04-01T00:00:00Z"),
        ("@annually", "2027-01-01T00:00:00Z"),
        ("@every 90s", "2026-03-10T10:09:00Z"),
        ("TZ=Europe/Berlin @daily", "2026-03-10T23:00:00Z"),
    ] {
        follows(text, from, &[next]);
    }
    assert_eq!(schedule("@every 1h30m").interval(), Some(Duration::from_secs(5400)));
    assert_eq!(schedule("@every 1.5m").interval(), Some(Duration::from_secs(90)));
    assert_eq!(schedule("CRON_TZ=Asia/Tokyo @every 1s").interval(), Some(Duration::from_secs(1)));
}

#[test]
fn zones_with_their_changes() {
    // 02:30 does not exist on 29 March in Berlin; the clocks show 03:30 at that moment.
    follows(
        "CRON_TZ=Europe/Berlin 30 2 * * *",
        "2026-03-28T12:00:00Z",
        &["2026-03-29T01:30:00Z", "2026-03-30T00:30:00Z"],
    );
    // 02:30 exists twice on 25 October; once is enough for something daily, and every real hour counts for the hourly.
    follows(
        "TZ=Europe/Berlin 30 2 * * *",
        "2026-10-24T12:00:00Z",
        &["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"],
    );
    follows(
        "TZ=Europe/Berlin 30 * * * *",
        "2026-10-24T23:40:00Z",
        &["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:30:00Z"],
    );
    // Half an hour of change, and no change at all.
    follows(
        "TZ=Australia/Lord_Howe 0 * * * *",
        "2026-04-04T14:50:00Z",
        &["2026-04-04T15:30:00Z", "2026-04-04T16:30:00Z"],
    );
    follows("TZ=Asia/Kathmandu 0 12 * * *", "2026-01-01T00:00:00Z", &["2026-01-01T06:15:00Z"]);
}

#[test]
fn what_is_refused_says_why() {
    for (text, says) in [
        ("", "0 fields"),
        ("* * * *", "4 fields"),
        ("0 * * * * *", "6 fields"),
        ("60 * * * *", "minute \"60\""),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day of month"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "day of week"),
        ("* * * foo *", "month \"foo\""),
        ("*/0 * * * *", "step"),
        ("*/x * * * *", "step"),
        ("5-1 * * * *", "begins after"),
        (", * * * *", "minute"),
        ("-5 * * * *", "minute"),
        ("0 0 30 2 *", "never happens"),
        ("0 0 31 4,6,9,11 *", "never happens"),
        ("@fortnightly", "@fortnightly"),
        ("@every", "@every"),
        ("@every 500ms", "whole seconds"),
        ("@every 1500ms", "whole seconds"),
        ("@every -5s", "whole seconds"),
        ("@every 5", "whole seconds"),
        ("@every5s", "whole seconds"),
        ("@every 99999999h", "whole seconds"),
        ("TZ=Mars/Olympus * * * * *", "Mars/Olympus"),
        ("TZ=Europe/Berlin", "0 fields"),
        ("TZ=Local * * * * *", "Local"),
    ] {
        let error = text.parse::<Schedule>().unwrap_err().to_string();
        assert!(error.contains(says), "{text:?}: {error}");
    }
}

#[test]
fn durations_as_go_spells_them() {
    for (text, millis) in [
        ("0", 0),
        ("200ms", 200),
        ("1s", 1000),
        ("1h2m3.5s", 3_723_500),
        (".5s", 500),
        ("+1m", 60_000),
        ("1500us", 1),
    ] {
        assert_eq!(parse_duration(text).unwrap().as_millis(), millis, "{text}");
    }
    for text in ["", "5", "-1s", "1x", "s", ".s", "1.2.3s", "1s ", "99999999999999999999999s", "1 s"] {
        assert_eq!(parse_duration(text), None, "{text}");
    }
}

fn field(least: u32, most: u32) -> impl Strategy<Value = String> {
    let value = least..=most;
    prop_oneof![
        3 => Just("*".to_owned()),
        2 => value.clone().prop_map(|v| v.to_string()),
        1 => (value.clone(), value.clone()).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b))),
        1 => (1..=most).prop_map(|step| format!("*/{step}")),
        1 => (value.clone(), value).prop_map(|(a, b)| format!("{a},{b}")),
    ]
}

const ZONES: [&str; 4] = ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns"];

proptest! {
    #[test]
    fn parsing_never_panics(text in ".{0,60}|[-0-9*/,?@a-z =TZ]{0,40}") {
        let _ = text.parse::<Schedule>();
        let _ = parse_duration(&text);
    }

    /// Where the clock skips it, the very moment of the change is the time.
    #[test]
    fn a_time_at_the_beginning_of_a_gap_is_its_end(day in 1_u32..=14) {
        let zone = jiff::tz::TimeZoneDatabase::bundled().get("America/St_Johns").unwrap();
        let fields = Fields::parse(&format!("* 2 {day} 3 *")).unwrap();
        let before = jiff::civil::date(2032, 3, day as i8).at(1, 59, 0, 0).to_zoned(zone.clone()).unwrap().timestamp();
        let next = Schedule(Kind::Cron { fields, zone: zone.clone() })
            .next_after(Timestamp::clamped(before.as_millisecond())).unwrap();
        let next = jiff::Timestamp::from_millisecond(next.as_millis()).unwrap();
        prop_assert_eq!(next.as_second() - before.as_second(), 60);
        prop_assert_eq!(zone.to_datetime(next).hour(), if day == 14 { 3 } else { 2 });
    }

    /// The next time matches, is later, and no minute in between matches.
    #[test]
    fn the_next_time_is_the_first_that_matches(
        minute in field(0, 59), hour in field(0, 23), day in field(1, 28), month in field(1, 12),
        weekday in field(0, 6), zone in 0..ZONES.len(), now in 1_700_000_000_i64..2_000_000_000,
    ) {
        let fields = Fields::parse(&format!("{minute} {hour} {day} {month} {weekday}")).unwrap();
        let zone = jiff::tz::TimeZoneDatabase::bundled().get(ZONES[zone]).unwrap();
        let now = jiff::Timestamp::from_second(now).unwrap();
        let next = Schedule(Kind::Cron { fields, zone: zone.clone() })
            .next_after(Timestamp::clamped(now.as_millisecond())).unwrap();
        let next = jiff::Timestamp::from_millisecond(next.as_millis()).unwrap();
        prop_assert!(next > now);
        let matches = |at: jiff::Timestamp| {
            let civil = zone.to_datetime(at);
            let minute = i32::from(civil.hour()) * 60 + i32::from(civil.minute());
            fields.matches(civil.date()) && fields.minute_from(minute) == Some(minute)
        };
        // A time that is skipped happens an hour later, where nothing matches.
        let soon = next + jiff::SignedDuration::from_secs(1);
        let skipped = zone.preceding(soon).next().is_some_and(|t| next.as_second() - t.timestamp().as_second() < 3600);
        prop_assert!(matches(next) || skipped);
        // Two days of minutes are enough to catch a step too far.
        let first = now.as_second() / 60 * 60 + 60;
        for second in (first..next.as_second().min(first + 2 * 86_400)).step_by(60) {
            let at = jiff::Timestamp::from_second(second).unwrap();
            // The second of two equal times is left out on purpose when not every hour is meant.
            let again = zone.to_ambiguous_timestamp(zone.to_datetime(at)).earlier().unwrap() != at;
            prop_assert!(!matches(at) || again, "{at} was left out");
        }
    }
}
