//! Whether two bindings could both apply to one request, so that neither would be the right one.

use super::binding::{Binding, Match};

/// The first two, in the order of their names, that can match the same request with the same precedence.
pub(super) fn first<'a>(bindings: impl Iterator<Item = &'a Binding>) -> Option<(&'a str, &'a str)> {
    let bindings: Vec<&Binding> = bindings.collect();
    bindings.iter().enumerate().find_map(|(at, one)| {
        let other = bindings[at + 1..].iter().find(|other| overlap(&one.matches, &other.matches))?;
        Some((one.name.as_str(), other.name.as_str()))
    })
}

fn overlap(a: &Match, b: &Match) -> bool {
    any(&a.schemes, &b.schemes, |x, y| x == y)
        && any(&a.hosts, &b.hosts, |x, y| hosts_overlap(x, y))
        && any(&a.methods, &b.methods, |x, y| x == y)
        && any(&a.paths, &b.paths, |x, y| paths_overlap(x, y))
}

fn any<T>(a: &[T], b: &[T], test: impl Fn(&T, &T) -> bool) -> bool {
    a.iter().any(|x| b.iter().any(|y| test(x, y)))
}

/// An exact host and a wildcard never compete: the exact one is preferred.
fn hosts_overlap(a: &str, b: &str) -> bool {
    match (a.strip_prefix('*'), b.strip_prefix('*')) {
        (None, None) => a == b,
        (Some(a), Some(b)) => a.ends_with(b) || b.ends_with(a),
        _ => false,
    }
}

fn paths_overlap(a: &str, b: &str) -> bool {
    match (a.strip_suffix('*'), b.strip_suffix('*')) {
        (None, None) => a == b,
        (Some(prefix), None) => b.starts_with(prefix),
        (None, Some(prefix)) => a.starts_with(prefix),
        (Some(a), Some(b)) => a.starts_with(b) || b.starts_with(a),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_overlap_when_one_lies_within_the_other() {
        assert!(hosts_overlap("*.example.com", "*.a.example.com"));
        assert!(hosts_overlap("a.example.com", "a.example.com"));
        assert!(!hosts_overlap("*.example.com", "*.badexample.com"));
        assert!(!hosts_overlap("*.example.com", "a.example.com"));
    }

    #[test]
    fn prefixes_overlap_with_what_they_begin() {
        assert!(paths_overlap("/v1/*", "/v1/users"));
        assert!(paths_overlap("/*", "/v1/*"));
        assert!(!paths_overlap("/v1/*", "/v2/*"));
        assert!(!paths_overlap("/v1", "/v1/"));
    }
}
