//! A patch: deletions, replacements, additions, each name in one of them only.

use std::collections::{BTreeMap, HashSet};

use super::binding::{self, Binding, Credential};
use super::request::{self, Mutations};
use super::state::Scope;

/// Something with a name that is kept under it.
trait Named {
    fn name(&self) -> &str;
}

impl Named for Credential {
    fn name(&self) -> &str {
        &self.name
    }
}

impl Named for Binding {
    fn name(&self) -> &str {
        &self.name
    }
}

/// The first contents: a list of unique names.
pub(super) fn credentials(
    raw: Vec<request::Credential>,
    revision: u64,
) -> Result<BTreeMap<String, Credential>, String> {
    collect(raw, "credential", |raw| binding::credential(raw, revision))
}

pub(super) fn bindings(
    raw: Vec<request::Binding>,
    scope: Scope,
) -> Result<BTreeMap<String, Binding>, String> {
    collect(raw, "binding", |raw| binding::binding(raw, scope))
}

pub(super) fn patch_credentials(
    held: &mut BTreeMap<String, Credential>,
    raw: Mutations<request::Credential>,
    revision: u64,
) -> Result<(), String> {
    apply(held, raw, "credential", |raw| binding::credential(raw, revision))
}

pub(super) fn patch_bindings(
    held: &mut BTreeMap<String, Binding>,
    raw: Mutations<request::Binding>,
    scope: Scope,
) -> Result<(), String> {
    apply(held, raw, "binding", |raw| binding::binding(raw, scope))
}

fn collect<R, T: Named>(
    raw: Vec<R>,
    what: &str,
    normal: impl Fn(R) -> Result<T, String>,
) -> Result<BTreeMap<String, T>, String> {
    let mut items = BTreeMap::new();
    for raw in raw {
        let item = normal(raw)?;
        if items.contains_key(item.name()) {
            return Err(format!("duplicate {what} name {:?}", item.name()));
        }
        items.insert(item.name().to_owned(), item);
    }
    Ok(items)
}

fn apply<R, T: Named>(
    held: &mut BTreeMap<String, T>,
    raw: Mutations<R>,
    what: &str,
    normal: impl Fn(R) -> Result<T, String>,
) -> Result<(), String> {
    let mut mentioned = HashSet::new();
    let twice = |name: &str| format!("{what} {name:?} mentioned by multiple operations");
    for name in raw.delete {
        let name = name.trim().to_owned();
        if name.is_empty() {
            return Err(format!("{what} delete name cannot be blank"));
        }
        if mentioned.contains(&name) {
            return Err(twice(&name));
        }
        if held.remove(&name).is_none() {
            return Err(format!("{what} {name:?} does not exist"));
        }
        mentioned.insert(name);
    }
    for raw in raw.replace {
        let item = normal(raw)?;
        if !mentioned.insert(item.name().to_owned()) {
            return Err(twice(item.name()));
        }
        match held.get_mut(item.name()) {
            Some(old) => *old = item,
            None => return Err(format!("{what} {:?} does not exist", item.name())),
        }
    }
    let mut added = HashSet::new();
    for raw in raw.add {
        let item = normal(raw)?;
        if mentioned.contains(item.name()) {
            return Err(twice(item.name()));
        }
        if !added.insert(item.name().to_owned()) {
            return Err(format!("duplicate {what} add name {:?}", item.name()));
        }
        if held.contains_key(item.name()) {
            return Err(format!("{what} {:?} already exists", item.name()));
        }
        held.insert(item.name().to_owned(), item);
    }
    Ok(())
}
