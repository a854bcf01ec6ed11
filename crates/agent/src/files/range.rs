//! The `Range` header of a download.

/// What part of a file a Range header asks for.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Wanted {
    All,
    /// Never empty, and never beyond the end of the file.
    Part {
        from: u64,
        len: u64,
    },
    Malformed,
    Beyond,
}

/// Of several ranges the first that can be served counts.
pub fn parse(text: &str, size: u64) -> Wanted {
    let Some(list) = text.trim().strip_prefix("bytes=") else { return Wanted::Malformed };
    let mut first = None;
    let mut any = false;
    for part in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        any = true;
        let Some(part) = one(part, size) else { return Wanted::Malformed };
        if part.1 > 0 && first.is_none() {
            first = Some(part);
        }
    }
    match first {
        Some((from, len)) => Wanted::Part { from, len },
        None if any => Wanted::Beyond,
        None => Wanted::Malformed,
    }
}

/// Where one range begins and how much of the file it covers.
fn one(part: &str, size: u64) -> Option<(u64, u64)> {
    let (start, end) = part.split_once('-')?;
    match (start.trim(), end.trim()) {
        ("", suffix) => {
            let len = digits(suffix)?.min(size);
            Some((size - len, len))
        }
        (start, end) => {
            let from = digits(start)?;
            let last = if end.is_empty() { u64::MAX } else { digits(end).filter(|last| *last >= from)? };
            Some((from, size.saturating_sub(from).min((last - from).saturating_add(1))))
        }
    }
}

fn digits(text: &str) -> Option<u64> {
    // `parse` alone would accept a plus sign.
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let part = |from, len| Wanted::Part { from, len };
        assert_eq!(parse("bytes=0-4", 10), part(0, 5));
        assert_eq!(parse("bytes=5-", 10), part(5, 5));
        assert_eq!(parse("bytes=-3", 10), part(7, 3));
        assert_eq!(parse("bytes=-30", 10), part(0, 10));
        assert_eq!(parse("bytes=8-99", 10), part(8, 2));
        assert_eq!(parse("bytes=20-30, 1-2", 10), part(1, 2));
        assert_eq!(parse("bytes=10-", 10), Wanted::Beyond);
        assert_eq!(parse("bytes=0-18446744073709551615", 10), part(0, 10));
        for bad in
            ["bytes=", "bytes=a-b", "lines=1-2", "bytes=5-4", "bytes=1", "bytes=-", "bytes=+1-2", "bytes=--1"]
        {
            assert_eq!(parse(bad, 10), Wanted::Malformed, "{bad}");
        }
    }
}
