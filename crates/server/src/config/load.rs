//! Finds the file, reads it with the environment over it, and checks the whole.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Config;
use super::check;
use super::document::{self, Table};
use super::environment::Environment;
use super::kinds::expand_home;
use super::problem::{ConfigErrors, Origin, Problem, Warning};
use super::reader::{Entry, Heading, Reader};
use super::runtime::RuntimeKind;

/// The variable that names the file when no option does.
pub const PATH_VARIABLE: &str = "SANDBOX_CONFIG_PATH";

const DEFAULT_PATH: &str = "~/.sandbox.toml";

/// Larger than any configuration, small enough to read a wrong path (a device, a log) without harm.
const LARGEST_FILE: u64 = 1 << 20;

/// Where to look.
#[derive(Clone)]
pub struct LoadOptions<'a> {
    /// The `--config` option. A file named here must exist.
    pub path: Option<PathBuf>,
    pub env: &'a dyn Environment,
}

/// A valid configuration, with the story of how it came about.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// The file that was read; `None` when there was none.
    pub path: Option<PathBuf>,
    /// Every key in the order of the reference page.
    pub entries: Vec<Entry>,
    pub warnings: Vec<Warning>,
}

impl Loaded {
    /// Where the value of a key such as `server.port` came from; `None` for a key that does not exist.
    #[must_use]
    pub fn origin(&self, key: &str) -> Option<&Origin> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.origin)
    }
}

/// Loads and checks the configuration.
///
/// # Errors
///
/// All problems at once, none of them containing a value.
pub fn load(options: LoadOptions<'_>) -> Result<Loaded, ConfigErrors> {
    let source = Source::find(&options)?;
    let text = source.read()?;
    let mut loaded = read(text.as_deref().unwrap_or_default(), &source.path, options.env)?;
    if text.is_some() {
        loaded.path = Some(source.path.clone());
    } else if source.named_by == NamedBy::Variable {
        let origin = Origin::Env { name: PATH_VARIABLE.to_owned() };
        let message = format!("there is no file {}; the defaults apply", source.path.display());
        loaded.warnings.push(Warning(Problem { key: String::new(), origin, message }));
    }
    Ok(loaded)
}

/// Reads a configuration from text; `path` only names it in messages.
///
/// # Errors
///
/// As [`load`].
pub fn read(text: &str, path: &Path, env: &dyn Environment) -> Result<Loaded, ConfigErrors> {
    let path: Arc<Path> = Arc::from(path);
    let root = document::parse(text).map_err(|errors| {
        let problem = |error: document::SyntaxError| Problem {
            key: String::new(),
            origin: Origin::File { path: Arc::clone(&path), line: error.at.line, column: error.at.column },
            message: error.message,
        };
        ConfigErrors::new(errors.into_iter().map(problem).collect())
    })?;
    let mut config = Config::default();
    let mut reader = Reader::new(&root, path, env);
    config.keys(&mut reader);
    reader.report_unknown();
    place_store(&mut config, &mut reader.entries);
    check::check(&config, &mut reader);
    let Reader { entries, problems, warnings, .. } = reader;
    if problems.is_empty() {
        Ok(Loaded { config, path: None, entries, warnings })
    } else {
        Err(ConfigErrors::new(problems))
    }
}

/// The table of all keys with their defaults, and the headings of their sections.
pub(super) fn catalogue() -> (Vec<Entry>, Vec<Heading>) {
    let nothing = std::collections::BTreeMap::new();
    let root = Table::new();
    let mut reader = Reader::new(&root, Arc::from(Path::new("")), &nothing);
    Config::default().keys(&mut reader);
    (reader.entries, reader.headings)
}

/// With the embedded runtime everything lives in one directory, the database too, unless it was placed explicitly.
fn place_store(config: &mut Config, entries: &mut [Entry]) {
    let Some(entry) = entries.iter_mut().find(|entry| entry.key == "store.path") else { return };
    if config.runtime.kind == RuntimeKind::Embedded && entry.origin == Origin::Default {
        config.store.path = config.embedded.state_dir.join("server.db");
        entry.value = config.store.path.to_string_lossy().into();
    }
}

#[derive(Clone, Copy, PartialEq)]
enum NamedBy {
    Option,
    Variable,
    Nobody,
}

struct Source {
    path: PathBuf,
    named_by: NamedBy,
}

impl Source {
    fn find(options: &LoadOptions<'_>) -> Result<Self, ConfigErrors> {
        let variable = options.env.get(PATH_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let (path, named_by) = match (options.path.clone(), variable) {
            (Some(path), _) => (path, NamedBy::Option),
            (None, Some(path)) => (path, NamedBy::Variable),
            (None, None) => (PathBuf::from(DEFAULT_PATH), NamedBy::Nobody),
        };
        match (expand_home(&path, options.env.home().as_deref()), named_by) {
            (Some(path), _) => Ok(Self { path, named_by }),
            // Without a home there is no default file either.
            (None, NamedBy::Nobody) => Ok(Self { path, named_by }),
            (None, _) => {
                let message = format!("cannot expand `~` in {}: HOME is not set", path.display());
                Err(failure(message, Origin::Default))
            }
        }
    }

    fn read(&self) -> Result<Option<String>, ConfigErrors> {
        let fail = |error: &std::io::Error| {
            let message = format!("cannot read the configuration file {}: {error}", self.path.display());
            failure(message, Origin::Default)
        };
        let file = match std::fs::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound && self.named_by != NamedBy::Option => {
                return Ok(None);
            }
            Err(error) => return Err(fail(&error)),
        };
        let mut bytes = Vec::new();
        file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(|error| fail(&error))?;
        if bytes.len() as u64 > LARGEST_FILE {
            let message =
                format!("{} is larger than 1 MiB and not a configuration file", self.path.display());
            return Err(failure(message, Origin::Default));
        }
        let not_text = |_| failure(format!("{} is not UTF-8", self.path.display()), Origin::Default);
        String::from_utf8(bytes).map(Some).map_err(not_text)
    }
}

fn failure(message: String, origin: Origin) -> ConfigErrors {
    ConfigErrors::new(vec![Problem { key: String::new(), origin, message }])
}
