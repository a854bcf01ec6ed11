//! What lists are narrowed by: states, metadata, pages.

use std::collections::BTreeMap;

use sandglass_api::page::{DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, PageRequest};

use super::{
    error::{ApiError, ApiResult, Code},
    fields::Findings,
    parse::{QueryString, percent_decode},
};

/// Which page is wanted; 422 outside the bounds.
pub fn page(query: &QueryString) -> ApiResult<PageRequest> {
    let mut findings = Findings::new("query");
    let mut number = |name: &str, default: u64, max: i64| match query.last(name) {
        None => Some(default),
        Some(text) => {
            findings.within(name, |f| f.integer_text(text, 1, max)).and_then(|n| u64::try_from(n).ok())
        }
    };
    let page = number("page", 1, i64::MAX);
    let page_size = number("pageSize", DEFAULT_PAGE_SIZE, i64::try_from(MAX_PAGE_SIZE).unwrap_or(i64::MAX));
    findings.finish(page.zip(page_size).map(|(page, page_size)| PageRequest { page, page_size }))
}

/// States to keep; none given keeps all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct States(Vec<String>);

impl States {
    /// Whether this state was asked for by its name.
    pub fn name(&self, state: &str) -> bool {
        self.0.iter().any(|wanted| wanted.eq_ignore_ascii_case(state))
    }

    /// Whether a state is kept; case does not matter.
    pub fn matches(&self, state: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|wanted| wanted.eq_ignore_ascii_case(state))
    }
}

/// The `state` parameters. Unknown words match nothing.
pub fn states(query: &QueryString) -> States {
    States(query.all("state").map(str::to_owned).collect())
}

/// Pairs that must all be present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(BTreeMap<String, String>);

impl Metadata {
    /// Whether there is no condition.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every pair is in `actual`.
    pub fn matches(&self, actual: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| actual.get(key) == Some(value))
    }
}

/// The `metadata` parameter: itself a query string, encoded once more by clients.
pub fn metadata(query: &QueryString) -> ApiResult<Metadata> {
    let text = query.last("metadata").unwrap_or_default();
    if text.is_empty() {
        return Ok(Metadata::default());
    }
    text.split('&')
        .map(|segment| {
            let (key, value) = segment.split_once('=').ok_or_else(|| {
                ApiError::new(Code::InvalidMetadataFormat, "metadata must be key=value pairs joined by &")
            })?;
            Ok((percent_decode(key), percent_decode(value)))
        })
        .collect::<ApiResult<_>>()
        .map(Metadata)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(text: &str) -> String {
        text.bytes()
            .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
            .collect()
    }

    #[test]
    fn pages_have_bounds() {
        let parse = |raw| page(&QueryString::parse(Some(raw)));
        assert_eq!(parse("").unwrap(), PageRequest { page: 1, page_size: 20 });
        assert_eq!(parse("page=2&pageSize=200").unwrap(), PageRequest { page: 2, page_size: 200 });
        assert_eq!(parse("page_size=7").unwrap().page_size, 20);
        // Far past the end is still a page.
        assert_eq!(parse("page=99999999999999999999").unwrap().page_size, 20);
        for bad in ["page=0", "page=-1", "page=x", "pageSize=0", "pageSize=201"] {
            assert_eq!(parse(bad).unwrap_err().status, 422, "{bad}");
        }
    }

    #[test]
    fn states_ignore_case_and_unknown_words_match_nothing() {
        let parse = |raw| states(&QueryString::parse(Some(raw)));
        assert!(parse("").matches("Running"));
        assert!(parse("state=RUNNING&state=paused").matches("Paused"));
        assert!(!parse("state=Running,Paused").matches("Paused"));
        assert!(!parse("state=").matches("Running"));
    }

    #[test]
    fn malformed_metadata_is_refused() {
        let parse = |raw| metadata(&QueryString::parse(Some(raw)));
        assert_eq!(parse("metadata=a").unwrap_err().code, "INVALID_METADATA_FORMAT");
        assert_eq!(parse("metadata=a%3Db%26c").unwrap_err().code, "INVALID_METADATA_FORMAT");
        assert!(parse("metadata=").unwrap().is_empty());
        let seen = parse("metadata=k%3Dv%2525%2526%253D").unwrap();
        assert!(seen.matches(&BTreeMap::from([("k".into(), "v%&=".into())])));
    }

    proptest! {
        #[test]
        fn what_clients_encode_twice_is_what_is_compared(pairs in prop::collection::btree_map("[^\u{0}]{1,8}", "[^\u{0}]{0,8}", 0..4)) {
            let inner: Vec<String> = pairs.iter().map(|(k, v)| format!("{}={}", encode(k), encode(v))).collect();
            let raw = format!("metadata={}", encode(&inner.join("&")));
            let parsed = metadata(&QueryString::parse(Some(&raw))).unwrap();
            prop_assert_eq!(parsed, Metadata(pairs));
        }
    }
}
