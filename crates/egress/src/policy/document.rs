//! The policy as people write it: parsed, normalised, patched. What it decides is elsewhere.

use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use super::Action;

/// Bytes of all targets of a policy: patches must not make it grow without end.
const MOST_BYTES: usize = 4 << 20;

/// A policy as it was set, with its words normalised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Policy {
    pub egress: Vec<Rule>,
    #[serde(rename = "defaultAction")]
    pub default_action: Action,
}

/// One rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rule {
    pub action: Action,
    pub target: String,
}

/// Why a policy, rules or targets were not accepted.
#[derive(Debug, Error)]
pub enum Invalid {
    #[error("not the expected JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{place}: unsupported action {word:?} (use allow or deny)")]
    Action { place: String, word: String },
    #[error("egress[{0}]: the target is empty")]
    EmptyTarget(usize),
    #[error("the body is empty; send a JSON array")]
    EmptyBody,
    #[error("the array is empty")]
    EmptyArray,
    #[error("{found} rules are more than the {limit} that this sandbox may have")]
    TooManyRules { found: usize, limit: usize },
    #[error("the targets of all rules together are longer than {MOST_BYTES} bytes")]
    TooLong,
}

impl Invalid {
    /// Stable, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Json(_) => "POLICY_NOT_JSON",
            Self::Action { .. } => "POLICY_UNSUPPORTED_ACTION",
            Self::EmptyTarget(_) => "POLICY_EMPTY_TARGET",
            Self::EmptyBody | Self::EmptyArray => "POLICY_NOTHING_GIVEN",
            Self::TooManyRules { .. } => "POLICY_TOO_MANY_RULES",
            Self::TooLong => "POLICY_TOO_LONG",
        }
    }
}

/// A JSON object and nothing else: a derived reader of a structure takes an array for it as well.
type Object = serde_json::Map<String, Value>;

impl Policy {
    /// Nothing is let out. What a missing or empty policy means.
    pub fn deny_all() -> Self {
        Self { egress: Vec::new(), default_action: Action::Deny }
    }

    /// Reads a whole policy; an empty text and `null` are the policy that lets nothing out.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if text.trim().is_empty() {
            return Ok(Self::deny_all());
        }
        let Some(mut written) = serde_json::from_str::<Option<Object>>(text)? else {
            return Ok(Self::deny_all());
        };
        let egress = match written.remove("egress") {
            None => Vec::new(),
            Some(given) => serde_json::from_value::<Option<_>>(given)?.unwrap_or_default(),
        };
        Ok(Self {
            default_action: action(word(&mut written, "defaultAction")?, || "defaultAction".into())?,
            egress: rules(egress)?,
        })
    }

    /// The rules of the array come first; old rules about the same targets are gone. The default action stays.
    pub fn patched(&self, new: Vec<Rule>) -> Self {
        let mut seen = std::collections::HashSet::new();
        let mut egress = Vec::with_capacity(new.len() + self.egress.len());
        for rule in new {
            if seen.insert(key(&rule.target)) {
                egress.push(rule);
            }
        }
        egress.extend(self.egress.iter().filter(|rule| !seen.contains(&key(&rule.target))).cloned());
        Self { egress, default_action: self.default_action }
    }

    /// What is left without the rules about these targets, compared as texts.
    pub fn without(&self, targets: &[String]) -> Self {
        let gone: std::collections::HashSet<_> = targets.iter().map(|target| key(target)).collect();
        let egress = self.egress.iter().filter(|rule| !gone.contains(&key(&rule.target))).cloned().collect();
        Self { egress, default_action: self.default_action }
    }

    /// The word for it that clients show.
    pub fn mode(&self) -> &'static str {
        match (self.default_action, self.egress.is_empty()) {
            (Action::Deny, true) => "deny_all",
            (Action::Allow, true) => "allow_all",
            _ => "enforcing",
        }
    }

    /// Refuses more rules than the limit, and more than memory is meant for; a limit of zero is none.
    pub fn within(self, limit: usize) -> Result<Self, Invalid> {
        let bytes: usize = self.egress.iter().map(|rule| rule.target.len()).sum();
        match self.egress.len() {
            found if limit > 0 && found > limit => Err(Invalid::TooManyRules { found, limit }),
            _ if bytes > MOST_BYTES => Err(Invalid::TooLong),
            _ => Ok(self),
        }
    }
}

/// Reads the array of rules of a patch.
pub fn parse_rules(text: &str) -> Result<Vec<Rule>, Invalid> {
    rules(array(text)?)
}

/// Reads the array of targets of a deletion.
pub fn parse_targets(text: &str) -> Result<Vec<String>, Invalid> {
    array(text)
}

fn array<T: serde::de::DeserializeOwned>(text: &str) -> Result<Vec<T>, Invalid> {
    if text.trim().is_empty() {
        return Err(Invalid::EmptyBody);
    }
    let items: Vec<T> = serde_json::from_str(text)?;
    if items.is_empty() { Err(Invalid::EmptyArray) } else { Ok(items) }
}

fn rules(written: Vec<Object>) -> Result<Vec<Rule>, Invalid> {
    let read = |(index, mut rule): (usize, Object)| {
        let target = word(&mut rule, "target")?.unwrap_or_default().trim().to_owned();
        if target.is_empty() {
            return Err(Invalid::EmptyTarget(index));
        }
        let action = action(word(&mut rule, "action")?, || format!("egress[{index}]"))?;
        Ok(Rule { action, target })
    };
    written.into_iter().enumerate().map(read).collect()
}

/// A text, `null` or nothing.
fn word(object: &mut Object, name: &str) -> Result<Option<String>, Invalid> {
    object.remove(name).map_or(Ok(None), |value| serde_json::from_value(value).map_err(Invalid::from))
}

fn action(word: Option<String>, place: impl FnOnce() -> String) -> Result<Action, Invalid> {
    let word = word.unwrap_or_default();
    match word.trim().to_ascii_lowercase().as_str() {
        "" | "deny" => Ok(Action::Deny),
        "allow" => Ok(Action::Allow),
        _ => Err(Invalid::Action { place: place(), word }),
    }
}

fn key(target: &str) -> String {
    target.trim().to_lowercase()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(action: Action, target: &str) -> Rule {
        Rule { action, target: target.into() }
    }

    #[test]
    fn nothing_given_lets_nothing_out() {
        for text in ["", "  \n", "null", "{}", r#"{"egress":null}"#, r#"{"defaultAction":null,"egress":[]}"#]
        {
            let policy = Policy::parse(text).unwrap();
            assert_eq!(policy, Policy::deny_all(), "{text}");
            assert_eq!(policy.mode(), "deny_all");
        }
    }

    #[test]
    fn words_are_read_in_any_case_and_shown_normalised() {
        let text = r#"{"defaultAction":"ALLOW","egress":[{"action":"Deny","target":" a.example "},{"target":"b.example"}]}"#;
        let policy = Policy::parse(text).unwrap();
        assert_eq!(policy.mode(), "enforcing");
        assert_eq!(
            serde_json::to_string(&policy).unwrap(),
            r#"{"egress":[{"action":"deny","target":"a.example"},{"action":"deny","target":"b.example"}],"defaultAction":"allow"}"#
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_place() {
        for (text, told) in [
            (r#"{"defaultAction":"maybe"}"#, "defaultAction: unsupported action \"maybe\""),
            (r#"{"egress":[{"action":"log","target":"x"}]}"#, "egress[0]: unsupported action \"log\""),
            (r#"{"egress":[{"action":"allow","target":" "}]}"#, "egress[0]: the target is empty"),
            (r#"{"egress":[{"action":"allow"}]}"#, "egress[0]: the target is empty"),
            (r#"{"egress":{}}"#, "not the expected JSON"),
            (r#"{} x"#, "not the expected JSON"),
            ("[]", "not the expected JSON"),
            (r#"{"egress":[["allow","a.test"]]}"#, "not the expected JSON"),
            (r#"{"egress":[{"action":1,"target":"x"}]}"#, "not the expected JSON"),
        ] {
            let told_us = Policy::parse(text).unwrap_err().to_string();
            assert!(told_us.contains(told), "{text}: {told_us}");
        }
        assert!(matches!(parse_rules(""), Err(Invalid::EmptyBody)));
        assert!(matches!(parse_rules("[]"), Err(Invalid::EmptyArray)));
        assert!(matches!(parse_rules("{}"), Err(Invalid::Json(_))));
        assert!(matches!(parse_targets("[1]"), Err(Invalid::Json(_))));
    }

    #[test]
    fn patched_rules_come_first_and_replace_their_targets() {
        let old = Policy {
            default_action: Action::Deny,
            egress: vec![rule(Action::Allow, "a.example"), rule(Action::Allow, "B.example")],
        };
        let new = old.patched(vec![
            rule(Action::Deny, "b.EXAMPLE"),
            rule(Action::Allow, "c.example"),
            rule(Action::Allow, "B.example"),
        ]);
        assert_eq!(
            new.egress,
            [
                rule(Action::Deny, "b.EXAMPLE"),
                rule(Action::Allow, "c.example"),
                rule(Action::Allow, "a.example"),
            ]
        );
    }

    #[test]
    fn targets_are_deleted_as_texts() {
        let old = Policy {
            default_action: Action::Allow,
            egress: vec![rule(Action::Deny, "A.example"), rule(Action::Deny, "10.0.0.0/8")],
        };
        let left = old.without(&[" a.EXAMPLE ".into(), "10.0.0.1/8".into()]);
        assert_eq!(left.egress, [rule(Action::Deny, "10.0.0.0/8")]);
        assert_eq!(left.default_action, Action::Allow);
    }

    #[test]
    fn a_limit_of_zero_is_none() {
        let policy = Policy { default_action: Action::Deny, egress: vec![rule(Action::Deny, "x"); 3] };
        assert!(policy.clone().within(0).is_ok());
        assert!(policy.clone().within(3).is_ok());
        assert!(matches!(policy.within(2), Err(Invalid::TooManyRules { found: 3, limit: 2 })));
        let long = "x".repeat(MOST_BYTES / 2 + 1);
        let policy = Policy { default_action: Action::Deny, egress: vec![rule(Action::Deny, &long); 2] };
        assert!(matches!(policy.within(0), Err(Invalid::TooLong)));
    }

    fn some_rule() -> impl Strategy<Value = Rule> {
        let target = "[a-cA-C]\\.(x|X)|\\*\\.[ab]\\.x|10\\.0\\.[0-3]\\.0/24|192\\.0\\.2\\.[0-9]";
        (any::<bool>(), target)
            .prop_map(|(allow, target)| rule(if allow { Action::Allow } else { Action::Deny }, &target))
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".{0,200}") {
            let _ = Policy::parse(&text);
            let _ = parse_rules(&text);
            let _ = parse_targets(&text);
        }

        #[test]
        fn what_is_shown_parses_to_the_same(egress in prop::collection::vec(some_rule(), 0..12), allow: bool) {
            let default_action = if allow { Action::Allow } else { Action::Deny };
            let policy = Policy { egress, default_action };
            prop_assert_eq!(Policy::parse(&serde_json::to_string(&policy).unwrap()).unwrap(), policy);
        }

        #[test]
        fn a_patch_decides_about_its_targets_and_leaves_the_others_in_order(
            old in prop::collection::vec(some_rule(), 0..12),
            new in prop::collection::vec(some_rule(), 1..6),
        ) {
            let before = Policy { egress: old.clone(), default_action: Action::Deny };
            let after = before.patched(new.clone());
            for target in new.iter().map(|rule| key(&rule.target)) {
                let first = new.iter().find(|rule| key(&rule.target) == target).unwrap();
                let all: Vec<_> = after.egress.iter().filter(|rule| key(&rule.target) == target).collect();
                prop_assert_eq!(all, vec![first]);
            }
            let named = |rule: &&Rule| new.iter().any(|fresh| key(&fresh.target) == key(&rule.target));
            let kept: Vec<_> = old.iter().filter(|rule| !named(rule)).collect();
            prop_assert_eq!(after.egress[after.egress.len() - kept.len()..].iter().collect::<Vec<_>>(), kept);
            prop_assert_eq!(after.patched(new), after.clone());
            let targets: Vec<_> = after.egress.iter().map(|rule| rule.target.clone()).collect();
            prop_assert!(after.without(&targets).egress.is_empty());
        }
    }
}
