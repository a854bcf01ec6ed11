//! What is in force: which binding a request matches and what it gets from it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use http::header::{HeaderName, HeaderValue};

use super::binding::{Binding, Match, Scheme, Surface};
use super::path::{self, Readings};
use super::redaction::Redactor;
use super::state::Contents;
use super::substitution::{BodyKind, Encoding, Overlong, Replacer};
use super::texts::{PLACES, Place, injected, replaced, secrets};

/// The vault could not be read, so that nobody knows what a request should get: it has to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("credential proxy unavailable")]
pub struct Unreadable;

/// What the vault lends at this moment. Clones see the same.
#[derive(Clone, Debug)]
pub struct Lent(Arc<RwLock<Result<Option<Arc<Active>>, Unreadable>>>);

impl Lent {
    /// Of a vault that has not been read yet.
    #[must_use]
    pub fn unreadable() -> Self {
        Self(Arc::new(RwLock::new(Err(Unreadable))))
    }

    /// The bindings in force, or none if there is no vault.
    pub fn now(&self) -> Result<Option<Arc<Active>>, Unreadable> {
        self.0.read().map_err(|_| Unreadable)?.clone()
    }

    pub(super) fn set(&self, active: Option<Arc<Active>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Ok(active);
    }
}

/// One revision of the vault, made ready for requests.
#[derive(Debug)]
pub struct Active {
    pub revision: u64,
    pub redactor: Redactor,
    loans: Vec<Loan>,
}

/// What one binding gives to the requests that it matches.
pub struct Loan {
    pub name: String,
    pub injections: Vec<Injection>,
    matches: Match,
    /// The path patterns with one layer of percent-encoding less.
    decoded: Vec<Vec<u8>>,
    replacers: Vec<(Place, Replacer)>,
}

/// A header to be set, whatever the request says.
#[derive(Clone, Debug)]
pub struct Injection {
    pub name: HeaderName,
    /// Marked as sensitive: it prints nothing and is not indexed in HTTP/2.
    pub value: HeaderValue,
}

/// What of a request decides.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub scheme: Scheme,
    /// Lower case, without port and trailing dot.
    pub host: &'a str,
    /// Where the connection goes.
    pub port: u16,
    pub method: &'a str,
    /// Raw, without the query.
    pub path: &'a str,
}

/// Which binding a request gets.
#[derive(Debug)]
pub enum Selection<'a> {
    None,
    One(&'a Loan),
    /// More than one, equally well.
    Ambiguous,
    /// It depends on how the path is read.
    Misleading,
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Active {
    pub(super) fn of(contents: &Contents) -> Self {
        let loans = contents.bindings.values().map(|binding| Loan::of(binding, contents)).collect();
        let secrets = secrets(contents);
        let redactor = Redactor::new(secrets.iter().map(String::as_str));
        Self { revision: contents.revision, redactor, loans }
    }

    /// Whether any request to this host could get something.
    #[must_use]
    pub fn covers(&self, scheme: Scheme, host: &str) -> bool {
        self.loans
            .iter()
            .any(|loan| loan.matches.schemes.contains(&scheme) && loan.precedence(host).is_some())
    }

    /// The binding for a request.
    #[must_use]
    pub fn select(&self, target: Target<'_>) -> Selection<'_> {
        let candidates: Vec<(u8, &Loan)> = self
            .loans
            .iter()
            .filter(|loan| {
                target.port == target.scheme.port() && loan.matches.schemes.contains(&target.scheme)
            })
            // Another case is another method, which servers understand in ways of their own.
            .filter(|loan| loan.matches.methods.iter().any(|method| method == target.method))
            .filter_map(|loan| Some((loan.precedence(target.host)?, loan)))
            .collect();
        if candidates.is_empty() {
            return Selection::None;
        }
        let Readings::Clear(readings) = path::readings(target.path) else { return Selection::Misleading };
        let narrow = candidates.iter().any(|(_, loan)| !loan.has_every_path());
        if narrow && path::is_ambiguous(&readings) {
            return Selection::Misleading;
        }
        let mut choices = readings.iter().enumerate().map(|(layer, path)| choose(&candidates, path, layer));
        let first = choices.next().expect("the raw path is a reading");
        if choices.any(|choice| !choice.same(&first)) {
            return Selection::Misleading;
        }
        first
    }
}

impl Selection<'_> {
    fn same(&self, other: &Selection<'_>) -> bool {
        match (self, other) {
            (Self::None, Selection::None) | (Self::Ambiguous, Selection::Ambiguous) => true,
            (Self::One(a), Selection::One(b)) => a.name == b.name,
            _ => false,
        }
    }
}

fn choose<'a>(candidates: &[(u8, &'a Loan)], path: &[u8], layer: usize) -> Selection<'a> {
    let fitting = candidates.iter().filter(|(_, loan)| loan.has_path(path, layer));
    let Some(best) = fitting.clone().map(|(precedence, _)| *precedence).max() else { return Selection::None };
    let mut best = fitting.filter(|(precedence, _)| *precedence == best);
    match (best.next(), best.next()) {
        (Some((_, loan)), None) => Selection::One(loan),
        _ => Selection::Ambiguous,
    }
}

impl Loan {
    fn of(binding: &Binding, contents: &Contents) -> Self {
        let injections = injected(binding, contents).map(|(name, value)| Injection {
            name: HeaderName::from_bytes(name.as_bytes()).expect("it was checked when it was written"),
            value: sensitive(value.as_bytes()).expect("it was checked when it was written"),
        });
        let replacers = PLACES.into_iter().filter_map(|place| {
            let mut pairs = replaced(binding, contents, place).flatten().peekable();
            pairs.peek()?;
            Some((place, Replacer::new(pairs)))
        });
        Self {
            name: binding.name.clone(),
            injections: injections.collect(),
            matches: binding.matches.clone(),
            decoded: binding
                .matches
                .paths
                .iter()
                .map(|pattern| path::decode(pattern.as_bytes()).into_owned())
                .collect(),
            replacers: replacers.collect(),
        }
    }

    /// How well it fits a host: exactly, by a wildcard, or not at all.
    fn precedence(&self, host: &str) -> Option<u8> {
        let fit = |pattern: &String| match pattern.strip_prefix('*') {
            Some(suffix) => (host.len() > suffix.len() && host.ends_with(suffix)).then_some(1),
            None => (host == pattern).then_some(2),
        };
        self.matches.hosts.iter().filter_map(fit).max()
    }

    fn has_path(&self, path: &[u8], layer: usize) -> bool {
        let fits = |pattern: &[u8]| match pattern.strip_suffix(b"*") {
            Some(prefix) => path.starts_with(prefix),
            None => path == pattern,
        };
        if layer == 0 {
            self.matches.paths.iter().any(|pattern| fits(pattern.as_bytes()))
        } else {
            self.decoded.iter().any(|pattern| fits(pattern))
        }
    }

    /// Whether the path decides nothing.
    fn has_every_path(&self) -> bool {
        self.matches.paths.iter().any(|pattern| pattern == "/*")
    }

    /// Whether anything may be replaced there.
    #[must_use]
    pub fn replaces(&self, surface: Surface) -> bool {
        self.replacers.iter().any(|(place, _)| place.surface == surface)
    }

    /// The raw path or query with its placeholders replaced, or nothing if it has none.
    pub fn in_target(&self, surface: Surface, raw: &str, longest: usize) -> Result<Option<String>, Overlong> {
        let Some(replacer) = self.replacer(surface, Encoding::Percent) else { return Ok(None) };
        Ok(replacer.apply(raw.as_bytes(), longest)?.and_then(|replaced| String::from_utf8(replaced).ok()))
    }

    /// The same for a header's value.
    pub fn in_header(&self, value: &HeaderValue, longest: usize) -> Result<Option<HeaderValue>, Overlong> {
        let Some(replacer) = self.replacer(Surface::Header, Encoding::Raw) else { return Ok(None) };
        Ok(replacer.apply(value.as_bytes(), longest)?.and_then(|replaced| sensitive(&replaced)))
    }

    /// The same for a body; nothing too for one that is no text.
    pub fn in_body(&self, kind: BodyKind, body: &[u8], longest: usize) -> Result<Option<Vec<u8>>, Overlong> {
        let Some(replacer) = self.replacer(Surface::Body, kind.encoding()) else { return Ok(None) };
        if std::str::from_utf8(body).is_err() {
            return Ok(None);
        }
        replacer.apply(body, longest)
    }

    fn replacer(&self, surface: Surface, encoding: Encoding) -> Option<&Replacer> {
        let there = Place { surface, encoding };
        self.replacers.iter().find(|(place, _)| *place == there).map(|(_, replacer)| replacer)
    }
}

fn sensitive(value: &[u8]) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_bytes(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::binding::{Auth, Credential};
    use super::super::secret::Secret;
    use super::*;

    fn contents(bindings: Vec<(Vec<String>, Vec<String>, Vec<String>)>) -> Contents {
        let token = Credential {
            name: "t".into(),
            source: "inline".into(),
            value: Secret::new("secret"),
            revision: 1,
        };
        let bindings = bindings.into_iter().enumerate().map(|(number, (hosts, methods, paths))| {
            let matches = Match { schemes: vec![Scheme::Https], ports: vec![443], hosts, methods, paths };
            let auth = Auth::Bearer { credential: "t".into() };
            let name = format!("b{number}");
            (name.clone(), Binding { name, matches, auth, substitutions: Vec::new() })
        });
        let credentials = BTreeMap::from([("t".to_owned(), token)]);
        Contents { revision: 1, credentials, bindings: bindings.collect() }
    }

    fn hosts() -> impl Strategy<Value = Vec<String>> {
        let host = prop_oneof![Just("a.x.y"), Just("b.x.y"), Just("*.x.y"), Just("*.y"), Just("*.a.x.y")];
        proptest::collection::vec(host.prop_map(str::to_owned), 1..3)
    }

    fn methods() -> impl Strategy<Value = Vec<String>> {
        proptest::collection::vec(prop_oneof![Just("GET".to_owned()), Just("POST".to_owned())], 1..3)
    }

    fn paths() -> impl Strategy<Value = Vec<String>> {
        let path = prop_oneof![Just("/*"), Just("/v1/*"), Just("/v1/a"), Just("/v1/a*"), Just("/v2")];
        proptest::collection::vec(path.prop_map(str::to_owned), 1..3)
    }

    /// The rule as it is written down, without any of the readings.
    fn expected(contents: &Contents, host: &str, method: &str, path: &str) -> Vec<String> {
        let mut found: Vec<(u8, String)> = Vec::new();
        for binding in contents.bindings.values() {
            let m = &binding.matches;
            let path_fits = m
                .paths
                .iter()
                .any(|p| p.strip_suffix('*').map_or(path == p, |prefix| path.starts_with(prefix)));
            let exact = m.hosts.iter().any(|h| h == host);
            let wild = m
                .hosts
                .iter()
                .any(|h| h.strip_prefix("*.").is_some_and(|s| host.ends_with(&format!(".{s}"))));
            if path_fits && m.methods.iter().any(|x| x == method) && (exact || wild) {
                found.push((if exact { 2 } else { 1 }, binding.name.clone()));
            }
        }
        let best = found.iter().map(|(p, _)| *p).max().unwrap_or(0);
        found.into_iter().filter(|(p, _)| *p == best).map(|(_, name)| name).collect()
    }

    proptest! {
            #[test]
            fn the_best_binding_is_chosen_or_none(
                bindings in proptest::collection::vec((hosts(), methods(), paths()), 0..4),
                host in prop_oneof![Just("a.x.y"), Just("b.x.y"), Just("c.a.x.y"), Just("x.y"), Just("ax.y"), Just("y")],
                method in prop_oneof![Just("GET"), Just("POST"), Just("PUT")],
                path in prop_oneof![Just("/"), Just("/v1/a"), Just("/v1/ab"), Just("/v1"), Just("/v2"), Just("/v2/")],
            ) {
                let contents = contents(bindings);
                let active = Active::of(&contents);
                let target = Target { scheme: Scheme::Https, host, port: 443, method, path };
                let chosen = match active.select(target) {
                    Selection::None => Vec::new(),
                    Selection::One(loan) => vec![loan.name.clone()],
                    Selection::Ambiguous => expected(&contents, host, method, path),
                    Selection::Misleading => panic!("none of these paths is"),
                };
                prop_assert_eq!(&chosen, &expected(&contents, host, method, path));
                prop_assert!(chosen.is_empty() || active.covers(Scheme::Https, host));
                let elsewhere = active.select(Target { port: 8443, ..target });
                let plain = active.select(Target { scheme: Scheme::Http, port: 80, ..target });
                let none = matches!((elsewhere, plain), (Selection::None, Selection::None));
                prop_assert!(none);
            }

            /// However a path is written, it gets the binding of what it says, or nothing at all.
            #[test]
            fn no_spelling_of_a_path_gets_another_binding(path in "/(v1|admin|%76%31|%2e%2e|\\.\\.|a|%2f|%252e|%5c|;|/){0,6}") {
                let contents = contents(vec![
                    (vec!["a.x.y".into()], vec!["GET".into()], vec!["/v1/*".into()]),
                ]);
                let active = Active::of(&contents);
                let target = Target { scheme: Scheme::Https, host: "a.x.y", port: 443, method: "GET", path: &path };
                if let Selection::One(_) = active.select(target) {
                    let decoded = percent_encoding::percent_decode_str(&path).decode_utf8_lossy().into_owned();
                    prop_assert!(path.starts_with("/v1/") && decoded.starts_with("/v1/"));
    let dots = decoded.split('/').any(|segment| matches!(segment.split(';').next(), Some("." | "..")));
                    prop_assert!(!dots);
                }
            }
        }

    #[test]
    fn a_method_in_another_case_is_another_one() {
        let contents = contents(vec![(vec!["a.x.y".into()], vec!["GET".into()], vec!["/*".into()])]);
        let active = Active::of(&contents);
        for (method, lent) in [("GET", true), ("get", false), ("Get", false)] {
            let target = Target { scheme: Scheme::Https, host: "a.x.y", port: 443, method, path: "/" };
            assert_eq!(matches!(active.select(target), Selection::One(_)), lent, "{method}");
        }
    }

    #[test]
    fn odd_paths_get_nothing_where_the_path_decides() {
        let bound =
            |path: &str| contents(vec![(vec!["a.x.y".into()], vec!["GET".into()], vec![path.into()])]);
        let (narrow, wide) = (Active::of(&bound("/v1/*")), Active::of(&bound("/*")));
        let target =
            Target { scheme: Scheme::Https, host: "a.x.y", port: 443, method: "GET", path: "/v1/%c0%af" };
        assert!(matches!(narrow.select(target), Selection::Misleading));
        assert!(matches!(wide.select(target), Selection::One(_)));
    }

    #[test]
    fn what_is_in_force_prints_no_secret() {
        let contents = contents(vec![(vec!["a.x.y".into()], vec!["GET".into()], vec!["/*".into()])]);
        let printed = format!("{:?} {:?}", Active::of(&contents), contents);
        assert!(!printed.contains("secret"), "{printed}");
    }
}
