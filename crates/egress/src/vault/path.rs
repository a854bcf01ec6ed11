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

/// Whether some servers read it in ways of their own: bytes that are no UTF-8, among them the overlong forms of a slash,
/// `%u002f`, characters that become dots, slashes and percent signs when they are normalised, and dots with something around
/// them that is taken off.
pub(super) fn is_ambiguous(readings: &[Cow<'_, [u8]>]) -> bool {
    readings.iter().any(|reading| {
        let Ok(text) = std::str::from_utf8(reading) else { return true };
        text.contains(ALIKE) || text.contains("%u") || text.contains("%U") || text.split('/').any(padded_dots)
    })
}

/// One dot leader, two dot leader, small and fullwidth full stop; fraction and division slash, fullwidth solidus; set minus, small
/// and fullwidth reverse solidus; small and fullwidth percent sign.
const ALIKE: [char; 12] = [
    '\u{2024}', '\u{2025}', '\u{fe52}', '\u{ff0e}', '\u{2044}', '\u{2215}', '\u{ff0f}', '\u{2216}',
    '\u{fe68}', '\u{ff3c}', '\u{fe6a}', '\u{ff05}',
];

fn padded_dots(segment: &str) -> bool {
    let name = segment.split(';').next().unwrap_or_default();
    let padding = |c: char| {
        c.is_whitespace()
            || c == '+'
            || matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}')
    };
    matches!(name.trim_matches(padding), "." | "..")
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
    fn what_servers_read_in_ways_of_their_own_is_found() {
        let ambiguous = |path: &str| match readings(path) {
            Readings::Clear(readings) => is_ambiguous(&readings),
            Readings::Misleading => panic!("{path}"),
        };
        for path in [
            "/v1/%c0%ae%c0%ae/admin",
            "/v1/%C0%AFadmin",
            "/v1/%c1%9cadmin",
            "/v1/%e0%80%af",
            "/v1/%e9",
            "/v1/%25c0%25ae",
            "/v1/%u002e%u002e/admin",
            "/v1/%U2215admin",
            "/v1/%ef%bc%8e%ef%bc%8e/admin",
            "/v1/%ef%bc%8fadmin",
            "/v1/%ef%bc%bcadmin",
            "/v1/%e2%80%a4%e2%80%a4/admin",
            "/v1/..%20/admin",
            "/v1/..+/admin",
            "/v1/%2e%2e%c2%a0/admin",
            "/v1/%20../admin",
            "/v1/..%20;x/admin",
            "/v1/.%e2%80%8b/admin",
        ] {
            assert!(ambiguous(path), "{path}");
        }
        for path in [
            "/v1/users",
            "/a%20b",
            "/a+b/c.d",
            "/group%2Fproject",
            "/100%",
            "/a..b/...",
            "/caf%c3%a9",
            "/%e4%b8%ad",
        ] {
            assert!(!ambiguous(path), "{path}");
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
