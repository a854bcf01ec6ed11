//! Visits every declared key and fills it from the file and the environment.
//!
//! The sections declare their keys by calling [`Section::key`]; this file decides precedence (environment over file over
//! default), remembers origins, and finds what nobody declared. Without a file and with an empty environment the same
//! visit yields the table of all keys.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::document::{self, Node, Position, Raw, Table};
use super::environment::Environment;
use super::kinds::{Context, Kind, Shape, nearest};
use super::problem::{Origin, Problem, Warning};

/// Our own variables are `SANDGLASS_<SECTION>__<KEY>`.
pub(super) const PREFIX: &str = "SANDGLASS_";

/// Variables of the reference server that set one key: key, variable.
pub(super) const UPSTREAM_VARIABLES: &[(&str, &str)] = &[
    ("server.api_key", "OPENSANDBOX_SERVER_API_KEY"),
    ("store.postgresql.dsn", "OPENSANDBOX_STORE_POSTGRESQL_DSN"),
    ("ingress.secure_access.keys", "OPENSANDBOX_SECURE_ACCESS_KEYS"),
    ("ingress.secure_access.active_key", "OPENSANDBOX_SECURE_ACCESS_ACTIVE_KEY"),
    ("tenants.file", "SANDBOX_TENANTS_CONFIG_PATH"),
];

/// Keys of older reference versions: they warn, so that an old file still starts.
const OLD_KEYS: &[&str] = &["service_account", "informer_enabled", "snapshot_create_timeout_seconds"];

/// Sections whose unknown keys warn instead of failing, because what they configure is not part of Sandglass.
const LENIENT_SECTIONS: &[&str] = &["kubernetes", "agent_sandbox"];

/// One key with its effective value, as `config show` and the reference page need it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Dotted path, for example `renew_intent.redis.dsn`.
    pub key: String,
    /// `null` for unset, `"***"` for a secret.
    pub value: Value,
    pub default: Value,
    pub origin: Origin,
    /// What it accepts, in words.
    pub expects: String,
    /// What it means.
    pub about: &'static str,
    /// The variables that set it, the one that wins first.
    pub variables: Vec<String>,
}

/// A section's own line in the reference page.
#[derive(Clone, Debug)]
pub(super) struct Heading {
    pub(super) path: String,
    pub(super) about: &'static str,
    pub(super) origin: Option<Origin>,
}

/// Whether the section around a table is there; if so the table's required keys are required too.
#[derive(Clone, Copy, PartialEq)]
enum Parent {
    Present,
    Absent,
}

struct Unknown {
    section: String,
    key: String,
    at: Position,
}

pub(super) struct Reader<'a> {
    env: &'a dyn Environment,
    context: Context,
    path: Arc<Path>,
    root: &'a Table,
    unknown: Vec<Unknown>,
    pub(super) entries: Vec<Entry>,
    pub(super) headings: Vec<Heading>,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(root: &'a Table, path: Arc<Path>, env: &'a dyn Environment) -> Self {
        Self {
            env,
            context: Context { home: env.home() },
            path,
            root,
            unknown: Vec::new(),
            entries: Vec::new(),
            headings: Vec::new(),
            problems: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Visits a section of the document's top level.
    pub(super) fn section<T>(
        &mut self,
        name: &'static str,
        about: &'static str,
        slot: &mut T,
        keys: Keys<T>,
    ) {
        let node = self.root.get(name);
        self.visit(name.to_owned(), about, node, Parent::Absent, |section| keys(slot, section));
    }

    /// Visits a section whose presence means something; the slot is filled only when it is present.
    pub(super) fn optional<T: Default>(
        &mut self,
        name: &'static str,
        about: &'static str,
        slot: &mut Option<T>,
        keys: Keys<T>,
    ) {
        let node = self.root.get(name);
        let mut value = T::default();
        if self.visit(name.to_owned(), about, node, Parent::Absent, |section| keys(&mut value, section)) {
            *slot = Some(value);
        }
    }

    /// Returns whether anything in the file or the environment speaks of the section.
    fn visit(
        &mut self,
        path: String,
        about: &'static str,
        node: Option<&'a Node>,
        parent: Parent,
        keys: impl FnOnce(&mut Section<'_, 'a>),
    ) -> bool {
        let table = match node.map(|node| (&node.raw, node.at)) {
            Some((Raw::Table(table), _)) => Some(table),
            Some((_, at)) => {
                self.problem(&path, self.in_file(at), format!("expected a table: write `[{path}]`"));
                None
            }
            None => None,
        };
        let present = table.is_some() || self.environment_mentions(&path);
        let origin = table.and(node).map(|node| self.in_file(node.at));
        self.headings.push(Heading { path: path.clone(), about, origin });
        let mut section = Section {
            reader: self,
            path,
            table,
            required: present || parent == Parent::Present,
            known: BTreeSet::new(),
        };
        keys(&mut section);
        section.collect_unknown();
        present
    }

    fn environment_mentions(&self, section: &str) -> bool {
        let ours = format!("{}__", variable(section));
        let inside = format!("{section}.");
        let upstream = |(key, name): &(&str, &str)| {
            // The tenants file's variable names a place; only `[tenants]` itself turns tenants on.
            *key != "tenants.file" && key.starts_with(&inside) && self.env.get(name).is_some()
        };
        UPSTREAM_VARIABLES.iter().any(upstream) || self.env.names().iter().any(|name| name.starts_with(&ours))
    }

    pub(super) fn in_file(&self, at: Position) -> Origin {
        Origin::File { path: Arc::clone(&self.path), line: at.line, column: at.column }
    }

    pub(super) fn problem(&mut self, key: &str, origin: Origin, message: impl Into<String>) {
        self.problems.push(Problem { key: key.to_owned(), origin, message: message.into() });
    }

    pub(super) fn warning(&mut self, key: &str, origin: Origin, message: impl Into<String>) {
        self.warnings.push(Warning(Problem { key: key.to_owned(), origin, message: message.into() }));
    }

    /// Reports what no section declared. Comes last, when all keys are known.
    pub(super) fn report_unknown(&mut self) {
        let sections: Vec<String> = self
            .headings
            .iter()
            .map(|heading| heading.path.clone())
            .filter(|path| !path.contains('.'))
            .collect();
        for (name, node) in self.root {
            if !sections.iter().any(|section| section == name) {
                let message = self.unknown_top_level(name, &node.raw, &sections);
                self.problem(name, self.in_file(node.at), message);
            }
        }
        for unknown in std::mem::take(&mut self.unknown) {
            self.report_unknown_key(&unknown);
        }
        self.report_unknown_variables(&sections);
    }

    fn unknown_top_level(&self, name: &str, raw: &Raw, sections: &[String]) -> String {
        let suffix = format!(".{name}");
        if let (false, Some(entry)) =
            (matches!(raw, Raw::Table(_)), self.entries.iter().find(|entry| entry.key.ends_with(&suffix)))
        {
            return format!("a key outside of any section; did you mean `{}`?", entry.key);
        }
        match nearest(name, sections.iter().map(String::as_str)) {
            Some(section) => format!("unknown section; did you mean `[{section}]`?"),
            None => format!("unknown section; known are {}", sections.join(", ")),
        }
    }

    fn report_unknown_key(&mut self, unknown: &Unknown) {
        let Unknown { section, key, at } = unknown;
        let path = format!("{section}.{key}");
        let origin = self.in_file(*at);
        if OLD_KEYS.contains(&key.as_str()) {
            self.warning(&path, origin, "a key of an older server version; it has no effect");
            return;
        }
        let message = format!("unknown key; {}", self.suggestion(section, key));
        let top = section.split('.').next().unwrap_or(section);
        if LENIENT_SECTIONS.contains(&top) {
            self.warning(&path, origin, message);
        } else {
            self.problem(&path, origin, message);
        }
    }

    fn suggestion(&self, section: &str, key: &str) -> String {
        let inside = format!("{section}.");
        let names: Vec<&str> =
            self.entries.iter().filter_map(|entry| entry.key.strip_prefix(&inside)).collect();
        let elsewhere = |entry: &&Entry| entry.key.rsplit('.').next() == Some(key);
        if let Some(name) = nearest(key, names.iter().copied()) {
            format!("did you mean `{name}`?")
        } else if let Some(entry) = self.entries.iter().find(elsewhere) {
            format!("did you mean `{}`?", entry.key)
        } else {
            format!("known here are {}", names.join(", "))
        }
    }

    /// `SANDGLASS_SERVER__PROT` is a mistake; `SANDGLASS_URL` is somebody else's.
    fn report_unknown_variables(&mut self, sections: &[String]) {
        let known: Vec<String> = self.entries.iter().map(|entry| variable(&entry.key)).collect();
        let mut names = self.env.names();
        names.sort();
        for name in names {
            if !name.starts_with(PREFIX) || known.contains(&name) {
                continue;
            }
            let origin = Origin::Env { name: name.clone() };
            let in_section =
                sections.iter().any(|section| name.starts_with(&format!("{}__", variable(section))));
            let hint = match nearest(&name, known.iter().map(String::as_str)) {
                Some(near) => format!("did you mean {near}?"),
                None => "see docs/configuration.md for all names".to_owned(),
            };
            if in_section {
                self.problem("", origin, format!("unknown variable; {hint}"));
            } else if name.contains("__") || known.iter().any(|known| known.replace("__", "_") == name) {
                // Not an error: a Kubernetes service named `sandglass-server` also injects such names.
                self.warning("", origin, format!("this variable has no effect; {hint}"));
            }
        }
    }
}

/// `renew_intent.redis.dsn` is set by `SANDGLASS_RENEW_INTENT__REDIS__DSN`.
pub(super) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "__").to_uppercase())
}

/// What a section provides: a function that declares all of its keys.
pub(super) type Keys<T> = fn(&mut T, &mut Section<'_, '_>);

pub(super) struct Section<'r, 'a> {
    reader: &'r mut Reader<'a>,
    path: String,
    table: Option<&'a Table>,
    /// Whether its required keys must be given.
    required: bool,
    known: BTreeSet<&'static str>,
}

impl<'a> Section<'_, 'a> {
    /// Declares a key and reads it into `slot`, which holds the default.
    pub(super) fn key<K: Kind>(
        &mut self,
        name: &'static str,
        kind: K,
        slot: &mut K::Value,
        about: &'static str,
    ) {
        self.known.insert(name);
        let key = format!("{}.{name}", self.path);
        kind.complete(slot, &self.reader.context);
        let default = kind.show(slot);
        let mut origin = Origin::Default;
        if let Some(node) = self.table.and_then(|table| table.get(name)) {
            origin = self.reader.in_file(node.at);
            self.accept(&key, &kind, &node.raw, &origin, slot);
        }
        let variables = variables_of(&key);
        if let Some(name) = variables.iter().find(|name| self.reader.env.get(name).is_some()) {
            // The file's value is overridden, and so are complaints about it.
            self.reader.problems.retain(|problem| problem.key != key);
            origin = Origin::Env { name: name.clone() };
            self.accept_variable(&key, &kind, name, slot);
        }
        let value = kind.show(slot);
        let expects = kind.expects();
        self.reader.entries.push(Entry { key, value, default, origin, expects, about, variables });
    }

    /// A key that must be given whenever its section is there.
    pub(super) fn required<K: Kind>(
        &mut self,
        name: &'static str,
        kind: K,
        slot: &mut K::Value,
        about: &'static str,
    ) {
        self.key(name, kind, slot, about);
        let entry = self.reader.entries.last().expect("`key` has just pushed an entry");
        if self.required && entry.origin == Origin::Default {
            let key = entry.key.clone();
            let expects = entry.expects.clone();
            self.reader.problem(&key, Origin::Default, format!("required in `[{}]`: {expects}", self.path));
        }
    }

    /// A table inside this section.
    pub(super) fn table<T>(&mut self, name: &'static str, about: &'static str, slot: &mut T, keys: Keys<T>) {
        let parent = if self.required { Parent::Present } else { Parent::Absent };
        self.inner(name, about, parent, |section| keys(slot, section));
    }

    /// A table inside this section whose presence means something.
    pub(super) fn optional_table<T>(
        &mut self,
        name: &'static str,
        about: &'static str,
        slot: &mut Option<T>,
        mut blank: T,
        keys: Keys<T>,
    ) {
        if self.inner(name, about, Parent::Absent, |section| keys(&mut blank, section)) {
            *slot = Some(blank);
        }
    }

    fn inner(
        &mut self,
        name: &'static str,
        about: &'static str,
        parent: Parent,
        keys: impl FnOnce(&mut Section<'_, 'a>),
    ) -> bool {
        self.known.insert(name);
        let node = self.table.and_then(|table| table.get(name));
        self.reader.visit(format!("{}.{name}", self.path), about, node, parent, keys)
    }

    fn accept<K: Kind>(&mut self, key: &str, kind: &K, raw: &Raw, origin: &Origin, slot: &mut K::Value) {
        match kind.read(raw, &self.reader.context) {
            Ok(value) => *slot = value,
            Err(message) => self.reader.problem(key, origin.clone(), message),
        }
    }

    fn accept_variable<K: Kind>(&mut self, key: &str, kind: &K, name: &str, slot: &mut K::Value) {
        let origin = Origin::Env { name: name.to_owned() };
        let text = self.reader.env.get(name).unwrap_or_default();
        match text.into_string() {
            Ok(text) => self.accept(key, kind, &raw_of_variable(text, kind.shape()), &origin, slot),
            Err(_) => self.reader.problem(key, origin, "the value is not UTF-8"),
        }
    }

    fn collect_unknown(self) {
        for (key, node) in self.table.into_iter().flatten() {
            if !self.known.contains(key.as_str()) {
                let section = self.path.clone();
                self.reader.unknown.push(Unknown { section, key: key.clone(), at: node.at });
            }
        }
    }
}

fn variables_of(key: &str) -> Vec<String> {
    let upstream = UPSTREAM_VARIABLES.iter().filter(|(of, _)| *of == key).map(|(_, name)| (*name).to_owned());
    std::iter::once(variable(key)).chain(upstream).collect()
}

fn raw_of_variable(text: String, shape: Shape) -> Raw {
    let parts = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let node = |text: &str| Node { at: Position { line: 1, column: 1 }, raw: Raw::Text(text.to_owned()) };
    match shape {
        Shape::Scalar | Shape::Own => Raw::Text(text),
        Shape::List | Shape::Table if text.trim_start().starts_with(['[', '{']) => {
            document::parse_value(text.trim()).unwrap_or(Raw::Other)
        }
        Shape::List => Raw::List(parts().map(node).collect()),
        Shape::Table => parts()
            .map(|part| {
                part.split_once('=').map(|(name, value)| (name.trim().to_owned(), node(value.trim())))
            })
            .collect::<Option<Table>>()
            .map_or(Raw::Other, Raw::Table),
    }
}
