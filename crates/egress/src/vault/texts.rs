//! The texts of a vault: what is put into requests, and what is looked for in requests and answers.

use std::collections::{BTreeSet, HashSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::binding::{Auth, Binding, Surface};
use super::redaction;
use super::state::Contents;
use super::substitution::Encoding;

/// Where placeholders may be, and how text is written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) surface: Surface,
    pub(super) encoding: Encoding,
}

pub(super) const PLACES: [Place; 6] = [
    Place { surface: Surface::Path, encoding: Encoding::Percent },
    Place { surface: Surface::Query, encoding: Encoding::Percent },
    Place { surface: Surface::Header, encoding: Encoding::Raw },
    Place { surface: Surface::Body, encoding: Encoding::Json },
    Place { surface: Surface::Body, encoding: Encoding::Form },
    Place { surface: Surface::Body, encoding: Encoding::Raw },
];

/// The headers that a binding sets.
pub(super) fn injected<'a>(
    binding: &'a Binding,
    contents: &'a Contents,
) -> impl Iterator<Item = (&'a str, String)> + 'a {
    let named = match &binding.auth {
        Auth::Bearer { .. } | Auth::Basic { .. } => vec!["authorization"],
        Auth::ApiKey { name, .. } => vec![name.as_str()],
        Auth::CustomHeaders { headers } => headers.iter().map(|(name, _)| name.as_str()).collect(),
        Auth::Passthrough => Vec::new(),
    };
    let prefix = prefix(&binding.auth);
    let values = binding.auth.credentials().into_iter();
    named.into_iter().zip(values.map(move |name| format!("{prefix}{}", contents.value(name))))
}

const fn prefix(auth: &Auth) -> &'static str {
    match auth {
        Auth::Bearer { .. } => "Bearer ",
        Auth::Basic { .. } => "Basic ",
        _ => "",
    }
}

/// What is looked for and what replaces it, for each substitution there. Placeholders are also found as a client writes them there.
pub(super) fn replaced<'a>(
    binding: &'a Binding,
    contents: &'a Contents,
    place: Place,
) -> impl Iterator<Item = [(Vec<u8>, Vec<u8>); 2]> + 'a {
    let there = binding.substitutions.iter().filter(move |s| s.surfaces.contains(&place.surface));
    there.map(move |s| {
        let value = place.encoding.of(contents.value(&s.credential)).into_owned().into_bytes();
        let written = place.encoding.of(&s.placeholder).into_owned().into_bytes();
        [(s.placeholder.clone().into_bytes(), value.clone()), (written, value)]
    })
}

/// Every text that must not come back, each once: values, what a server could take out of them, headers, and placeholders.
pub(super) fn secrets(contents: &Contents) -> BTreeSet<String> {
    let mut texts = BTreeSet::new();
    let mut seen = HashSet::new();
    for binding in contents.bindings.values() {
        let prefix = prefix(&binding.auth);
        let injected = binding.auth.credentials().into_iter().map(|name| (prefix, name));
        let substituted = binding.substitutions.iter().map(|s| ("", s.credential.as_str()));
        for (prefix, name) in injected.chain(substituted).filter(|pair| seen.insert(*pair)) {
            let value = contents.value(name);
            texts.extend([value.to_owned(), format!("{prefix}{value}")]);
            if prefix == "Basic " {
                texts.extend(pair(value));
            }
        }
        texts.extend(binding.substitutions.iter().map(|s| s.placeholder.clone()));
    }
    texts
}

/// Bytes that are looked for and bytes that are put in, once everything is made ready; counted no further than these bounds.
pub(super) fn exceeds(contents: &Contents, searched: usize, inserted: usize) -> bool {
    let (mut searching, mut inserting) = (0, 0);
    let within = contents.bindings.values().all(|binding| {
        injected(binding, contents).all(|(_, value)| {
            inserting += value.len();
            inserting <= inserted
        }) && PLACES.into_iter().all(|place| {
            replaced(binding, contents, place).flatten().all(|(from, to)| {
                searching += from.len();
                inserting += to.len();
                searching <= searched && inserting <= inserted
            })
        })
    });
    !within
        || secrets(contents).iter().any(|text| {
            searching += redaction::forms(text).iter().map(String::len).sum::<usize>();
            searching > searched
        })
}

/// What a server takes out of the value of basic authentication. Where the password is next to nothing the user's name is the secret.
fn pair(value: &str) -> Vec<String> {
    let decoded = STANDARD.decode(value.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let Some(pair) = decoded else { return Vec::new() };
    let part = pair.split_once(':').map(|(user, password)| {
        if password.len() < redaction::SHORTEST { user.to_owned() } else { password.to_owned() }
    });
    part.into_iter().chain([pair]).collect()
}
