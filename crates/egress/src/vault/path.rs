//! The paths that a server could make of the one that is sent.

use std::borrow::Cow;

/// Layers of percent-encoding that are taken off.
const LAYERS: usize = 4;

/// What a raw path, without its query, can be read as.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Readings<'a> {
    /// As it is, and once decoded, and so on until nothing changes.
    Clear(Vec<Cow<'a, [u8]>>),
    /// It may lead elsewhere than it says.
    Misleading,
}

pub(super) fn readings(raw: &str) -> Readings<'_> {
    let mut readings = vec![Cow::Borrowed(raw.as_bytes())];
    if misleading(raw.as_bytes()) {
        return Readings::Misleading;
    }
    for layer in 0..=LAYERS {
        let last = readings.last().expect("the raw path is in it");
        let next = decode(last);
        if *next == **last {
            return Readings::Clear(readings);
        }
        // A separator that was hidden twice is hidden from somebody; once is how a separator within a name is written.
        let hidden = layer > 0 && count(&next, b'/') != count(last, b'/');
        if misleading(&next) || hidden {
            return Readings::Misleading;
        }
        readings.push(Cow::Owned(next.into_owned()));
    }
    Readings::Misleading
}

/// One layer of percent-encoding less; what is no encoding stays.
pub(super) fn decode(path: &[u8]) -> Cow<'_, [u8]> {
    percent_encoding::percent_decode(path).into()
}

fn misleading(path: &[u8]) -> bool {
    path.iter().any(|b| *b == b'\\' || b.is_ascii_control()) || path.split(|b| *b == b'/').any(dots)
}

/// `.`, `..` and what some servers read as them: `..;parameter`.
fn dots(segment: &[u8]) -> bool {
    let name = segment.split(|b| *b == b';').next().unwrap_or_default();
    matches!(name, b"." | b"..")
}

fn count(path: &[u8], byte: u8) -> usize {
    path.iter().filter(|b| **b == byte).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_lead_elsewhere_is_found() {
        for path in [
            "/v1/../admin",
            "/v1/%2e%2e/admin",
            "/v1/.%2E/admin",
            "/v1/%252e%252e/admin",
            "/v1/..;x=1/admin",
            "/v1\\..\\admin",
            "/v1/%5cadmin",
            "/v1/%255cadmin",
            "/v1/%252fadmin",
            "/v1/%25252fadmin",
            "/v1/%00",
            "/v1/.",
            "/%252525252525252541",
        ] {
            assert_eq!(readings(path), Readings::Misleading, "{path}");
        }
    }

    #[test]
    fn ordinary_paths_are_clear() {
        for (path, layers) in [
            ("/v1/users", 1),
            ("/a%20b", 2),
            ("/group%2Fproject", 2),
            ("/100%", 1),
            ("/a..b/...", 1),
            ("/%2541", 3),
        ] {
            let Readings::Clear(found) = readings(path) else { panic!("{path}") };
            assert_eq!(found.len(), layers, "{path}");
        }
    }
}
