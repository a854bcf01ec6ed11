//! The rules that decide: those that always apply before those of the policy, indexed for look-ups.
//!
//! Names are decided by the first rule that covers them; addresses by any rule that denies them, then by any that allows them, whatever
//! their order.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use ipnet::IpNet;

use super::always::Always;
use super::document::Policy;
use super::spans::Spans;
use super::target::Target;
use super::{Action, Rules, Verdict};

/// An immutable set of rules. A change makes another one.
#[derive(Debug)]
pub struct Effective {
    default_action: Action,
    names_matter: bool,
    written: Vec<Written>,
    /// Name to the first rule for exactly it; parent to the first rule for all below it.
    exact: HashMap<String, usize>,
    below: HashMap<String, usize>,
    denied: Vec<(IpNet, usize)>,
    allowed: Vec<(IpNet, usize)>,
    denied_spans: Spans,
    allowed_spans: Spans,
}

#[derive(Debug)]
struct Written {
    action: Action,
    text: String,
}

impl Effective {
    /// Puts the rules together: always denied, always allowed, then the policy's in their order.
    pub fn new(always: &Always, policy: &Policy) -> Self {
        let mut rules = Self {
            default_action: policy.default_action,
            names_matter: false,
            written: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
            denied: Vec::new(),
            allowed: Vec::new(),
            denied_spans: Spans::default(),
            allowed_spans: Spans::default(),
        };
        for target in &always.deny {
            rules.add(Action::Deny, target, " (always)");
        }
        for target in &always.allow {
            rules.add(Action::Allow, target, " (always)");
        }
        for rule in &policy.egress {
            rules.add(rule.action, &rule.target, "");
        }
        rules.names_matter = rules.has_names_against_the_default();
        rules.denied_spans = Spans::new(&rules.denied);
        rules.allowed_spans = Spans::new(&rules.allowed);
        rules
    }

    fn add(&mut self, action: Action, target: &str, mark: &str) {
        let index = self.written.len();
        match Target::read(target) {
            Target::Network(network) if action == Action::Deny => self.denied.push((network, index)),
            Target::Network(network) => self.allowed.push((network, index)),
            Target::Exact(name) => _ = self.exact.entry(name).or_insert(index),
            Target::Below(parent) => _ = self.below.entry(parent).or_insert(index),
            Target::Nothing => return,
        }
        self.written.push(Written { action, text: format!("{} {target}{mark}", action.word()) });
    }

    /// Whether names decide anything: what is allowed is found by name, or some names are denied.
    pub fn names_matter(&self) -> bool {
        self.names_matter
    }

    /// The same text for the same rules.
    pub fn written(&self) -> Vec<u8> {
        let rules: Vec<&str> = self.written.iter().map(|rule| rule.text.as_str()).collect();
        serde_json::to_vec(&(self.default_action, rules)).expect("an action and texts")
    }

    fn has_names_against_the_default(&self) -> bool {
        let mut deciding = self.exact.values().chain(self.below.values());
        deciding.any(|&index| self.written[index].action != self.default_action)
    }

    fn verdict(&self, index: Option<usize>) -> Option<Verdict> {
        let rule = &self.written[index?];
        Some(Verdict { action: rule.action, rule: rule.text.clone() })
    }
}

impl Rules for Effective {
    fn name(&self, name: &str) -> Verdict {
        let parents = name.match_indices('.').map(|(at, _)| &name[at + 1..]);
        let below = parents.filter_map(|parent| self.below.get(parent));
        let first = self.exact.get(name).into_iter().chain(below).min().copied();
        self.verdict(first)
            .unwrap_or_else(|| Verdict { action: self.default_action, rule: "default".to_owned() })
    }

    fn address(&self, address: IpAddr) -> Option<Verdict> {
        let address = address.to_canonical();
        self.verdict(self.denied_spans.rule(address).or_else(|| self.allowed_spans.rule(address)))
    }

    fn default_action(&self) -> Action {
        self.default_action
    }

    fn networks(&self) -> Vec<(Action, IpNet)> {
        let denied = self.denied.iter().map(|&(network, _)| (Action::Deny, network));
        let allowed = self.allowed.iter().map(|&(network, _)| (Action::Allow, network));
        denied.chain(allowed).collect()
    }
}

/// The rules that every gate asks; swapped as one.
#[derive(Debug)]
pub struct InForce(RwLock<Arc<Effective>>);

impl InForce {
    pub fn new(rules: Effective) -> Self {
        Self(RwLock::new(Arc::new(rules)))
    }

    /// The set of this moment.
    pub fn current(&self) -> Arc<Effective> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on every gate asks these.
    pub fn swap(&self, rules: Arc<Effective>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = rules;
    }
}

impl Rules for InForce {
    fn name(&self, name: &str) -> Verdict {
        self.current().name(name)
    }

    fn address(&self, address: IpAddr) -> Option<Verdict> {
        self.current().address(address)
    }

    fn default_action(&self) -> Action {
        self.current().default_action
    }

    fn networks(&self) -> Vec<(Action, IpNet)> {
        self.current().networks()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::document::Rule;
    use super::*;

    fn effective(policy: &str) -> Effective {
        Effective::new(&Always::default(), &Policy::parse(policy).unwrap())
    }

    fn decided(rules: &Effective, name: &str) -> (Action, String) {
        let verdict = rules.name(name);
        (verdict.action, verdict.rule)
    }

    #[test]
    fn the_first_rule_that_covers_a_name_decides() {
        let rules = effective(
            r#"{"defaultAction":"allow","egress":[
                {"action":"allow","target":"api.example.com"},
                {"action":"deny","target":"*.example.com"},
                {"action":"allow","target":"www.example.com"},
                {"action":"deny","target":"198.51.100.1"},
                {"action":"deny","target":"Other.Test."}]}"#,
        );
        assert_eq!(decided(&rules, "api.example.com"), (Action::Allow, "allow api.example.com".into()));
        assert_eq!(decided(&rules, "www.example.com"), (Action::Deny, "deny *.example.com".into()));
        assert_eq!(decided(&rules, "example.com"), (Action::Allow, "default".into()));
        assert_eq!(decided(&rules, "other.test"), (Action::Deny, "deny Other.Test.".into()));
        assert!(rules.names_matter());
    }

    #[test]
    fn for_addresses_a_denial_wins_wherever_it_stands() {
        let rules = effective(
            r#"{"egress":[
                {"action":"allow","target":"192.0.2.0/24"},
                {"action":"deny","target":"192.0.2.7"},
                {"action":"allow","target":"192.0.2.7"}]}"#,
        );
        assert_eq!(rules.address("192.0.2.7".parse().unwrap()).unwrap().rule, "deny 192.0.2.7");
        assert_eq!(rules.address("192.0.2.8".parse().unwrap()).unwrap().rule, "allow 192.0.2.0/24");
        assert_eq!(rules.address("::ffff:192.0.2.8".parse().unwrap()).unwrap().action, Action::Allow);
        assert_eq!(rules.address("192.0.3.1".parse().unwrap()), None);
        assert!(!rules.names_matter());
        assert_eq!(rules.networks().len(), 3);
    }

    #[test]
    fn what_always_applies_comes_first() {
        let always =
            Always { deny: vec!["bad.test".into()], allow: vec!["*.test".into()], ..Always::default() };
        let policy = Policy::parse(
            r#"{"egress":[{"action":"allow","target":"bad.test"},{"action":"deny","target":"a.test"}]}"#,
        );
        let rules = Effective::new(&always, &policy.unwrap());
        assert_eq!(decided(&rules, "bad.test"), (Action::Deny, "deny bad.test (always)".into()));
        assert_eq!(decided(&rules, "a.test"), (Action::Allow, "allow *.test (always)".into()));
    }

    proptest! {
        #[test]
        fn the_index_decides_as_reading_the_list_would(
            rules in prop::collection::vec((any::<bool>(), "(\\*\\.)?([ab]\\.){0,2}[ab]\\.?|\\*|10\\.0\\.0\\.[0-3]"), 0..10),
            name in "([ab]\\.){0,3}[ab]",
        ) {
            let egress: Vec<_> = rules.into_iter().map(|(allow, target)| Rule {
                action: if allow { Action::Allow } else { Action::Deny }, target,
            }).collect();
            let policy = Policy { egress, default_action: Action::Deny };
            let by_reading = policy.egress.iter()
                .find(|rule| Target::read(&rule.target).covers_name(&name))
                .map_or(Action::Deny, |rule| rule.action);
            prop_assert_eq!(Effective::new(&Always::default(), &policy).name(&name).action, by_reading);
        }
    }
}
