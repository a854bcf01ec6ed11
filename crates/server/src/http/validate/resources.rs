//! The grammar of `resourceLimits` on a single host.

use std::collections::BTreeMap;

use sandglass_sandbox::spec::{Gpu, Limits};

use super::rules::RuntimeRules;
use crate::http::error::{ApiError, ApiResult};

/// What is limited, which decides what the limits mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// A container: limits are ceilings.
    Container,
    /// A Windows machine: limits are its size, and too small a one does not start.
    Windows,
}

const LEAST_WINDOWS_CPU_MILLIS: u64 = 2000;
const LEAST_WINDOWS_MEMORY: u64 = 4_000_000_000;
const LEAST_WINDOWS_DISK: u64 = 64_000_000_000;

/// Reads the limits that the runtime knows; other keys are ignored.
pub fn limits(asked: &BTreeMap<String, String>, guest: Guest, rules: &RuntimeRules) -> ApiResult<Limits> {
    let get = |name: &str| asked.get(name).map(String::as_str);
    let mut limits = Limits {
        cpu_millis: get("cpu").map(cpu).transpose()?,
        memory_bytes: get("memory").map(|text| bytes("memory", text)).transpose()?,
        pids: get("pids").map(pids).transpose()?,
        ..Limits::default()
    };
    if guest == Guest::Windows {
        let disk = ["disk", "storage", "ephemeral-storage"];
        let disk = disk.into_iter().find_map(|name| get(name).map(|text| (name, text)));
        limits.disk_bytes = disk.map(|(name, text)| bytes(name, text)).transpose()?;
        windows_size(&limits)?;
        return Ok(limits);
    }
    limits.gpu = get("gpu").map(|text| gpu(text, rules)).transpose()?;
    if limits.cpu_millis.is_some_and(|millis| millis < rules.least_cpu_millis) {
        return refused("cpu", &format!("must be at least {}m", rules.least_cpu_millis));
    }
    if limits.memory_bytes.is_some_and(|bytes| bytes < rules.least_memory) {
        return refused("memory", &format!("must be at least {}Mi", rules.least_memory >> 20));
    }
    Ok(limits)
}

fn windows_size(limits: &Limits) -> ApiResult<()> {
    let below = |given: Option<u64>, least: u64| given.is_some_and(|given| given < least);
    if below(limits.cpu_millis, LEAST_WINDOWS_CPU_MILLIS) {
        return refused("cpu", "must be at least 2 for a Windows sandbox");
    }
    if below(limits.memory_bytes, LEAST_WINDOWS_MEMORY) {
        return refused("memory", "must be at least 4G for a Windows sandbox");
    }
    if below(limits.disk_bytes, LEAST_WINDOWS_DISK) {
        return refused("disk", "must be at least 64G for a Windows sandbox");
    }
    Ok(())
}

fn gpu(text: &str, rules: &RuntimeRules) -> ApiResult<Gpu> {
    if !rules.capabilities.gpu {
        return refused("gpu", &format!("is not available on the {} runtime", rules.name));
    }
    let text = text.trim();
    if text.eq_ignore_ascii_case("all") {
        return Ok(Gpu::All);
    }
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u32>() {
        // The engine counts in 31 bits.
        Ok(count) if digits && count > 0 && i32::try_from(count).is_ok() => Ok(Gpu::Count(count)),
        _ => refused("gpu", "must be a positive whole number or \"all\""),
    }
}

fn refused<T>(field: &str, why: &str) -> ApiResult<T> {
    Err(ApiError::invalid_parameter(format!("resourceLimits.{field} {why}")))
}

/// Processors as `0.5`, `2` or `500m`. At least one thousandth.
fn cpu(text: &str) -> ApiResult<u64> {
    let text = text.trim();
    let (number, scale) = match text.strip_suffix(['m', 'M']) {
        Some(number) => (number, 1.0),
        None => (text, 1000.0),
    };
    let plain = !number.is_empty()
        && number.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    let millis = number.parse::<f64>().ok().filter(|_| plain).map(|n| n * scale);
    // The bound is the largest count of billionths that 63 bits hold.
    match millis {
        Some(millis) if millis.is_finite() && millis > 0.0 && millis * 1e6 <= i64::MAX as f64 => {
            Ok((millis.round() as u64).max(1))
        }
        _ => refused("cpu", "must be a positive number of processors such as \"0.5\" or \"500m\""),
    }
}

/// Bytes as an integer with an optional unit. `k` is 1000, `ki` 1024.
fn bytes(field: &str, text: &str) -> ApiResult<u64> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor: Option<u64> = match unit.trim() {
        "" | "b" => Some(1),
        "k" | "kb" => Some(1000),
        "ki" => Some(1 << 10),
        "m" | "mb" => Some(1_000_000),
        "mi" => Some(1 << 20),
        "g" | "gb" => Some(1_000_000_000),
        "gi" => Some(1 << 30),
        "t" | "tb" => Some(1_000_000_000_000),
        "ti" => Some(1 << 40),
        _ => None,
    };
    let digits_only = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    let bytes = factor
        .filter(|_| digits_only)
        .zip(number.parse::<u64>().ok())
        .and_then(|(factor, number)| number.checked_mul(factor))
        .filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok());
    match bytes {
        Some(bytes) => Ok(bytes),
        None => refused(
            field,
            "must be a positive whole number with an optional unit such as \"512Mi\" or \"2G\"",
        ),
    }
}

fn pids(text: &str) -> ApiResult<u64> {
    match text.trim().parse::<u64>() {
        Ok(n) if n > 0 && n <= 4_194_304 => Ok(n),
        _ => refused("pids", "must be a whole number from 1 to 4194304"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http::validate::rules::CreateRules;

    fn run(asked: &[(&str, &str)], guest: Guest) -> ApiResult<Limits> {
        let asked = asked.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        limits(&asked, guest, &CreateRules::docker(|_| {}).runtime)
    }

    #[test]
    fn what_can_never_work_is_refused() {
        for (name, value, accepted) in [
            ("memory", "1", false),
            ("memory", "6291455", false),
            ("memory", "6Mi", true),
            ("cpu", "9m", false),
            ("cpu", "10m", true),
            ("gpu", "0", false),
            ("gpu", "-1", false),
            ("gpu", "+1", false),
            ("gpu", "1.5", false),
            ("gpu", "", false),
            ("gpu", "4294967295", false),
            ("gpu", "2", true),
            ("gpu", " All ", true),
            ("disk", "nonsense", true),
        ] {
            let seen = run(&[(name, value)], Guest::Container);
            assert_eq!(seen.is_ok(), accepted, "{name} {value}");
            assert_eq!(seen.map_or(None, |limits| limits.disk_bytes), None);
        }
        assert_eq!(run(&[("gpu", "2")], Guest::Container).unwrap().gpu, Some(Gpu::Count(2)));
        let asked = BTreeMap::from([("gpu".to_owned(), "1".to_owned())]);
        assert!(limits(&asked, Guest::Container, &CreateRules::embedded().runtime).is_err());
    }

    #[test]
    fn windows_machines_have_a_least_size() {
        for (name, value, accepted) in [
            ("cpu", "1.9", false),
            ("cpu", "2", true),
            ("memory", "3G", false),
            ("memory", "4G", true),
            ("disk", "63G", false),
            ("storage", "1Gi", false),
            ("ephemeral-storage", "64Gi", true),
            ("gpu", "nonsense", true),
        ] {
            assert_eq!(run(&[(name, value)], Guest::Windows).is_ok(), accepted, "{name} {value}");
        }
        let size = run(&[("disk", "64G"), ("storage", "1")], Guest::Windows).unwrap();
        assert_eq!((size.disk_bytes, size.gpu), (Some(64_000_000_000), None));
    }

    #[test]
    fn processors() {
        for (text, millis) in
            [("1", 1000), ("0.5", 500), ("500m", 500), ("250M", 250), ("0.0001", 1), ("1e1", 10_000)]
        {
            assert_eq!(cpu(text).unwrap(), millis, "{text}");
        }
        for bad in ["", "0", "-1", "x", "1x", "inf", "nan", "1e40", "m", "0m"] {
            assert_eq!(cpu(bad).unwrap_err().code, "SANDBOX::INVALID_PARAMETER", "{bad}");
        }
    }

    #[test]
    fn sizes() {
        for (text, expected) in [
            ("1", 1),
            ("512Mi", 512 << 20),
            ("2G", 2_000_000_000),
            (" 1 gi ", 1 << 30),
            ("5kb", 5000),
            ("7B", 7),
        ] {
            assert_eq!(bytes("memory", text).unwrap(), expected, "{text}");
        }
        for bad in ["", "0", "-1", "1.5Gi", "1MiB", "Gi", "99999999999999999999", "9999999Ti", "1 2"] {
            let refused = bytes("memory", bad).unwrap_err();
            assert_eq!(refused.code, "SANDBOX::INVALID_PARAMETER", "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let rules = CreateRules::docker(|_| {}).runtime;
            let _ = (cpu(&text), bytes("memory", &text), pids(&text), gpu(&text, &rules));
        }
    }
}
