//! Flags as programs written in Go read them: one dash or two, `-flag value` or `-flag=value`, switches without a value.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// A flag that exists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    pub(super) takes: Takes,
    /// As the help shows it; empty when there is none.
    pub(super) default: &'static str,
    pub(super) about: &'static str,
}

/// Whether a flag can stand alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Value,
    /// `=false` switches it off.
    Switch,
}

/// What was given.
#[derive(Debug)]
pub(super) struct Given {
    values: HashMap<&'static str, String>,
    table: &'static [Flag],
}

/// A command line was read.
#[derive(Debug)]
pub(super) enum Parsed {
    Help,
    Given(Given),
}

/// Reads a command line. Of a flag that is given twice the last one counts.
pub(super) fn parse(table: &'static [Flag], arguments: &[String]) -> Result<Parsed> {
    let mut values = HashMap::new();
    let mut left = arguments.iter();
    while let Some(argument) = left.next() {
        let Some(text) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
            bail!("unexpected argument; every setting is a flag, see --help");
        };
        let (name, inline) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        if matches!(name, "h" | "help") {
            return Ok(Parsed::Help);
        }
        ensure!(!name.is_empty() && !name.starts_with('-'), "bad flag syntax");
        let Some(flag) = table.iter().find(|flag| flag.name == name) else {
            bail!("there is no flag -{name}; see --help");
        };
        let value = match (flag.takes, inline) {
            (_, Some(value)) => value,
            (Takes::Switch, None) => "true".to_owned(),
            (Takes::Value, None) => left.next().with_context(|| format!("-{name} needs a value"))?.clone(),
        };
        values.insert(flag.name, value);
    }
    Ok(Parsed::Given(Given { values, table }))
}

impl Given {
    /// What was given, if anything.
    pub(super) fn given(&self, name: &str) -> Option<&str> {
        debug_assert!(self.table.iter().any(|flag| flag.name == name), "{name}");
        self.values.get(name).map(String::as_str)
    }

    /// What was given, else the default.
    pub(super) fn text(&self, name: &str) -> &str {
        let default = || self.table.iter().find(|flag| flag.name == name).map_or("", |flag| flag.default);
        self.given(name).unwrap_or_else(default)
    }

    /// The same as a number.
    pub(super) fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T> {
        self.text(name).trim().parse().ok().with_context(|| format!("-{name} is not a number in its range"))
    }

    /// The same as a duration: `3s`, `1m30s`, `50ms`.
    pub(super) fn duration(&self, name: &str) -> Result<Duration> {
        duration(self.text(name)).with_context(|| format!("-{name} is not a duration such as 3s or 50ms"))
    }

    /// The same as yes or no.
    pub(super) fn switch(&self, name: &str) -> Result<bool> {
        match self.text(name) {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
            "" | "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
            _ => bail!("-{name} is true or false; give the value as -{name}=true"),
        }
    }
}

fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut total, mut rest) = (Duration::ZERO, text);
    while !rest.is_empty() || total.is_zero() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(digits);
        let unit_end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let (unit, next) = after.split_at(unit_end);
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        total =
            total.checked_add(Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?)?;
        if next.is_empty() {
            return Some(total);
        }
        rest = next;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Flag] = &[
        Flag { name: "port", takes: Takes::Value, default: "28888", about: "" },
        Flag { name: "on", takes: Takes::Switch, default: "false", about: "" },
        Flag { name: "wait", takes: Takes::Value, default: "3s", about: "" },
    ];

    fn given(line: &str) -> Result<Given> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match parse(TABLE, &arguments)? {
            Parsed::Given(given) => Ok(given),
            Parsed::Help => bail!("help"),
        }
    }

    #[test]
    fn flags_have_one_dash_or_two() {
        for line in ["-port 1 -on", "--port=1 --on=true", "--port 1 -on=1", "-port=2 -port 1 -on=T"] {
            let given = given(line).unwrap();
            assert_eq!(
                (given.number::<u16>("port").unwrap(), given.switch("on").unwrap()),
                (1, true),
                "{line}"
            );
        }
        let nothing = given("").unwrap();
        assert_eq!((nothing.number::<u16>("port").unwrap(), nothing.switch("on").unwrap()), (28888, false));
        assert_eq!(given("-on=false").unwrap().switch("on").ok(), Some(false));
        assert!(given("--port 65536").unwrap().number::<u16>("port").is_err());
        for wrong in ["port", "-", "--", "---port 1", "-port", "-nope", "-on true", "-=1"] {
            assert!(given(wrong).is_err(), "{wrong}");
        }
        assert!(given("-on=maybe").unwrap().switch("on").is_err());
        assert!(given("-port 1 --help").is_err() && given("-h").is_err());
    }

    #[test]
    fn durations_are_gos() {
        for (text, millis) in
            [("3s", 3000), ("50ms", 50), ("1m30s", 90_000), ("1.5s", 1500), ("0", 0), ("0s", 0)]
        {
            assert_eq!(duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for wrong in ["", "3", "s", "3x", "-1s", "1s2", "1..5s"] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
        assert_eq!(given("").unwrap().duration("wait").unwrap(), Duration::from_secs(3));
    }
}
