//! How long creates took as clients saw them: `opensandbox.sandbox.create.duration`, reported by SDKs.
//!
//! Language and version come from whoever sends the report, so how many there can be is bounded here.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::{
    family::{Family, Label},
    sharded::Histogram,
};

const BOUNDS: &[u32] = &[100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000];
const BUCKETS: usize = BOUNDS.len() + 1;
/// Different clients told apart; later ones are recorded as `other`.
const CLIENTS: usize = 128;
const LONGEST_VERSION: usize = 48;
const LONGEST_LANGUAGE: usize = 24;

/// Which SDK sent a request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sdk {
    pub language: Cow<'static, str>,
    pub version: Cow<'static, str>,
}

impl Sdk {
    const fn named(name: &'static str) -> Self {
        Self { language: Cow::Borrowed(name), version: Cow::Borrowed(name) }
    }

    /// Finds `OpenSandbox-<language>-SDK/<version>` anywhere in a User-Agent, in any case.
    pub fn of(user_agent: Option<&str>) -> Self {
        user_agent.and_then(parse).unwrap_or(Self::named("unknown"))
    }
}

fn parse(user_agent: &str) -> Option<Sdk> {
    const BEFORE: &str = "opensandbox-";
    const BETWEEN: &str = "-sdk/";
    // ASCII lower case keeps every offset.
    let lower = user_agent.to_ascii_lowercase();
    lower.match_indices(BEFORE).find_map(|(at, _)| {
        let rest = &lower[at + BEFORE.len()..];
        let length = rest.bytes().take_while(u8::is_ascii_alphanumeric).count();
        let version_at = at + BEFORE.len() + length + BETWEEN.len();
        if length == 0 || !rest[length..].starts_with(BETWEEN) {
            return None;
        }
        let version = user_agent[version_at..].split(|c: char| c.is_whitespace() || ",;()".contains(c));
        let version: String = version.take(1).flat_map(str::chars).take(LONGEST_VERSION).collect();
        let language = rest[..length.min(LONGEST_LANGUAGE)].to_owned();
        (!version.is_empty()).then_some(Sdk { language: language.into(), version: version.into() })
    })
}

/// The durations that clients reported.
#[derive(Debug, Default)]
pub struct Creates(Mutex<BTreeMap<(Sdk, bool), Box<Histogram<BUCKETS>>>>);

impl Creates {
    /// Records one report.
    pub fn record(&self, sdk: Sdk, success: bool, duration: Duration) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = seen.len() >= CLIENTS;
        let known = !full || seen.contains_key(&(sdk.clone(), success));
        let key = (if known { sdk } else { Sdk::named("other") }, success);
        seen.entry(key).or_insert_with(|| Box::new(Histogram::new(BOUNDS))).record(duration);
    }

    /// What was reported so far.
    pub fn family(&self) -> Family {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let labels = |sdk: &Sdk, success: bool| {
            vec![
                ("sdk.language", Label::Text(sdk.language.clone())),
                ("sdk.version", Label::Text(sdk.version.clone())),
                ("success", success.into()),
            ]
        };
        let points = seen
            .iter()
            .map(|((sdk, success), durations)| (labels(sdk, *success), durations.read()))
            .collect();
        let about = "Time that creating a sandbox took, as clients report it.";
        Family::durations("opensandbox.sandbox.create.duration", about, BOUNDS, points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::family::Points;

    fn seen(user_agent: &str) -> (String, String) {
        let sdk = Sdk::of(Some(user_agent));
        (sdk.language.into_owned(), sdk.version.into_owned())
    }

    #[test]
    fn sdks_are_found_in_user_agents() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(seen("OpenSandbox-Python-SDK/0.1.4"), pair("python", "0.1.4"));
        assert_eq!(seen("axios/1 opensandbox-JS-sdk/2.0.0-RC1 (x)"), pair("js", "2.0.0-RC1"));
        assert_eq!(seen("OpenSandbox-x OpenSandbox-Go-SDK/v1;y"), pair("go", "v1"));
        for nothing in ["", "curl/8", "OpenSandbox--SDK/1", "OpenSandbox-a_b-SDK/1", "OpenSandbox-go-SDK/"] {
            assert_eq!(seen(nothing), pair("unknown", "unknown"), "{nothing}");
        }
        assert_eq!(Sdk::of(None), Sdk::named("unknown"));
        assert_eq!(seen("é OpenSandbox-Kotlin-SDK/1é").1, "1é");
        assert_eq!(seen(&format!("OpenSandbox-go-SDK/{}", "9".repeat(500))).1.len(), LONGEST_VERSION);
    }

    #[test]
    fn clients_cannot_make_up_series_without_end() {
        let creates = Creates::default();
        for n in 0..1000 {
            creates.record(Sdk::of(Some(&format!("OpenSandbox-go-SDK/{n}"))), n % 2 == 0, Duration::ZERO);
        }
        let Points::Histogram { points, .. } = creates.family().points else { panic!("a histogram") };
        assert_eq!(points.len(), CLIENTS + 2);
        assert_eq!(points.iter().map(|(_, read)| read.count()).sum::<u64>(), 1000);
    }
}
