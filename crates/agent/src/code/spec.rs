//! The kernels an image has: Jupyter's kernel specifications, found where Jupyter looks for them.
//!
//! Reads files, so it is for a blocking thread. Bounded in files, their size and their number.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::envs::{self, Env, NonblockingOpen as _};

const MAX_FILE: u64 = 1 << 20;
const MAX_SPECS: usize = 256;
/// Kernels that run without a specification when their module can be imported.
const MODULES: [(&str, &str); 2] = [("python", "ipykernel_launcher"), ("bash", "bash_kernel")];

/// How a kernel wants to be interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub(super) enum Interrupt {
    #[default]
    Signal,
    Message,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spec {
    pub name: String,
    pub language: String,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub interrupt: Interrupt,
    pub folder: PathBuf,
}

#[derive(Deserialize)]
struct KernelFile {
    argv: Vec<String>,
    #[serde(default)]
    language: String,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    interrupt_mode: Interrupt,
}

/// The kernel for a language: one that is named like it, else any other than the default one of Jupyter itself, else
/// that one, else a module that needs no specification.
pub(super) fn find(language: &str, env: &Env, home: &str) -> Option<Spec> {
    let mut specs = installed(env, home);
    specs.retain(|spec| spec.language.eq_ignore_ascii_case(language));
    specs.sort_by_key(|spec| (spec.name != language, spec.name == "python3", spec.name.clone()));
    specs.into_iter().next().or_else(|| module(language))
}

fn module(language: &str) -> Option<Spec> {
    let (_, module) = MODULES.iter().find(|(known, _)| *known == language)?;
    let argv = ["python3", "-m", module, "-f", "{connection_file}"].map(str::to_owned);
    Some(Spec {
        name: (*module).to_owned(),
        language: language.to_owned(),
        argv: argv.to_vec(),
        env: BTreeMap::new(),
        interrupt: Interrupt::Signal,
        folder: PathBuf::new(),
    })
}

/// Every specification; of several with one name the first on the path counts.
fn installed(env: &Env, home: &str) -> Vec<Spec> {
    let mut found: Vec<Spec> = Vec::new();
    for folder in data_folders(env, home) {
        let Ok(entries) = std::fs::read_dir(folder.join("kernels")) else { continue };
        for entry in entries.flatten().take(MAX_SPECS) {
            let name = entry.file_name().to_string_lossy().to_lowercase();
            if found.len() >= MAX_SPECS || found.iter().any(|spec| spec.name == name) {
                continue;
            }
            found.extend(read(&entry.path(), name));
        }
    }
    found
}

fn read(folder: &Path, name: String) -> Option<Spec> {
    let file = File::options().read(true).custom_flags_nonblocking().open(folder.join("kernel.json")).ok()?;
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text).ok()?;
    let spec: KernelFile = serde_json::from_slice(&text).ok()?;
    let KernelFile { argv, language, env, interrupt_mode: interrupt } = spec;
    (!argv.is_empty()).then(|| Spec { name, language, argv, env, interrupt, folder: folder.to_owned() })
}

/// Jupyter's data directories, in its order; every prefix on `PATH` stands in for the Python that Jupyter runs in.
fn data_folders(env: &Env, home: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    let mut add = |folder: PathBuf| {
        if folder.is_absolute() && !folders.contains(&folder) {
            folders.push(folder);
        }
    };
    let given = env.get("JUPYTER_PATH").map_or("", String::as_str);
    given.split(':').filter(|part| !part.is_empty()).for_each(|part| add(part.into()));
    match env.get("JUPYTER_DATA_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => add(dir.into()),
        None => {
            let share = env.get("XDG_DATA_HOME").filter(|dir| !dir.is_empty());
            add(share.map_or_else(|| Path::new(home).join(".local/share"), PathBuf::from).join("jupyter"));
        }
    }
    for dir in envs::search_path(env).split(':').map(Path::new) {
        if let Some(prefix) = dir.parent().filter(|_| dir.ends_with("bin")) {
            add(prefix.join("share/jupyter"));
        }
    }
    add("/usr/local/share/jupyter".into());
    add("/usr/share/jupyter".into());
    folders
}

impl Spec {
    /// The command that starts the kernel with this connection file.
    pub(super) fn command(&self, connection: &Path) -> Vec<String> {
        let connection = connection.to_string_lossy();
        let folder = self.folder.to_string_lossy();
        let mut argv: Vec<String> = self
            .argv
            .iter()
            .map(|word| word.replace("{connection_file}", &connection).replace("{resource_dir}", &folder))
            .collect();
        if is_python(&argv[0]) {
            argv[0] = self.python();
        }
        argv
    }

    /// The Python that the specification was installed with, else the one on `PATH`.
    fn python(&self) -> String {
        // <prefix>/share/jupyter/kernels/<name>
        let own = self.folder.ancestors().nth(4).map(|prefix| prefix.join("bin/python3"));
        let own = own.filter(|python| self.folder.components().count() > 4 && python.is_file());
        own.map_or_else(|| "python3".to_owned(), |python| python.to_string_lossy().into_owned())
    }

    /// Adds the variables the specification asks for.
    pub(super) fn extend(&self, env: &mut Env) {
        let base = env.clone();
        for (name, value) in &self.env {
            let known = |name: &str| base.get(name).cloned().unwrap_or_else(|| format!("${{{name}}}"));
            env.insert(name.clone(), envs::expand(value, known));
        }
    }
}

/// The name that Jupyter takes for "the Python that I run in".
fn is_python(program: &str) -> bool {
    let version = program.strip_prefix("python");
    version.is_some_and(|version| version.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Image(tempfile::TempDir);

    impl Image {
        fn with(specs: &[(&str, &str)]) -> Self {
            let image = Image(tempfile::tempdir().unwrap());
            for (folder, text) in specs {
                let folder = image.path(folder);
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(folder.join("kernel.json"), text).unwrap();
            }
            image
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn env(&self) -> Env {
            let prefix = self.path("prefix/bin").display().to_string();
            Env::from([
                ("PATH".into(), format!("relative/bin:{prefix}")),
                ("JUPYTER_PATH".into(), self.path("given").display().to_string()),
                ("WHO".into(), "me".into()),
            ])
        }

        fn find(&self, language: &str) -> Option<Spec> {
            find(language, &self.env(), &self.path("home").display().to_string())
        }
    }

    const PYTHON: &str = r#"{"argv": ["python", "-f", "{connection_file}"], "language": "python"}"#;

    #[test]
    fn a_kernel_named_like_its_language_is_preferred_and_the_default_one_is_the_last_resort() {
        let image = Image::with(&[
            ("prefix/share/jupyter/kernels/python3", PYTHON),
            ("home/.local/share/jupyter/kernels/other", PYTHON),
            ("given/kernels/broken", "{"),
            ("given/kernels/Bash", r#"{"argv": ["b"], "language": "bash", "interrupt_mode": "message"}"#),
        ]);
        assert_eq!(image.find("python").unwrap().name, "other");
        std::fs::remove_dir_all(image.path("home")).unwrap();
        assert_eq!(image.find("python").unwrap().name, "python3");
        let bash = image.find("bash").unwrap();
        assert_eq!((bash.name.as_str(), bash.interrupt), ("bash", Interrupt::Message));
        assert_eq!(image.find("java"), None);
        assert_eq!(Image::with(&[]).find("python").unwrap().name, "ipykernel_launcher");
    }

    #[test]
    fn the_first_folder_on_the_path_wins() {
        let named = |who: &str| format!(r#"{{"argv": ["{who}"], "language": "python"}}"#);
        let image = Image::with(&[
            ("prefix/share/jupyter/kernels/python", &named("prefix")),
            ("given/kernels/python", &named("given")),
        ]);
        assert_eq!(image.find("python").unwrap().argv, ["given"]);
    }

    #[test]
    fn commands_and_variables_are_completed() {
        let text = r#"{"argv": ["python3.11", "{resource_dir}/x", "{connection_file}"], "language": "python",
            "env": {"A": "<${WHO}>", "B": "${NOBODY}"}}"#;
        let image = Image::with(&[("prefix/share/jupyter/kernels/python3", text)]);
        let spec = image.find("python").unwrap();
        let folder = image.path("prefix/share/jupyter/kernels/python3").display().to_string();
        assert_eq!(spec.command(Path::new("/c.json")), ["python3", &format!("{folder}/x"), "/c.json"]);
        std::fs::create_dir_all(image.path("prefix/bin")).unwrap();
        std::fs::write(image.path("prefix/bin/python3"), "").unwrap();
        assert_eq!(spec.command(Path::new("/c"))[0], image.path("prefix/bin/python3").display().to_string());
        let mut env = image.env();
        spec.extend(&mut env);
        assert_eq!((env["A"].as_str(), env["B"].as_str()), ("<me>", "${NOBODY}"));
    }
}
