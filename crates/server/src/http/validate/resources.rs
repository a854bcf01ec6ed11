//! The grammar of `resourceLimits` on a single host.

use std::collections::BTreeMap;

use sandglass_sandbox::spec::Limits;

use crate::http::error::{ApiError, ApiResult};

/// Reads the limits that the runtime knows; other keys are ignored.
pub fn limits(asked: &BTreeMap<String, String>) -> ApiResult<Limits> {
    let get = |name: &str| asked.get(name).map(String::as_str);
    if get("gpu").is_some() {
        return Err(ApiError::invalid_parameter(
            "resourceLimits.gpu is not available on the embedded runtime",
        ));
    }
    Ok(Limits {
        cpu_millis: get("cpu").map(cpu).transpose()?,
        memory_bytes: get("memory").map(memory).transpose()?,
        pids: get("pids").map(pids).transpose()?,
        ..Limits::default()
    })
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
fn memory(text: &str) -> ApiResult<u64> {
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
            "memory",
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
    fn bytes() {
        for (text, bytes) in [
            ("1", 1),
            ("512Mi", 512 << 20),
            ("2G", 2_000_000_000),
            (" 1 gi ", 1 << 30),
            ("5kb", 5000),
            ("7B", 7),
        ] {
            assert_eq!(memory(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "0", "-1", "1.5Gi", "1MiB", "Gi", "99999999999999999999", "9999999Ti", "1 2"] {
            assert_eq!(memory(bad).unwrap_err().code, "SANDBOX::INVALID_PARAMETER", "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,20}") {
            let _ = (cpu(&text), memory(&text), pids(&text));
        }
    }
}
