//! Where the hooks of an agent come from that got no boot configuration: a variable, else a file.
//!
//! The file is for hooks that arrived over HTTP: a container that is started again must still have them.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sandglass_sandbox::hooks::Hooks;

/// Hooks are smaller; reading stops here.
const MAX_FILE: u64 = 256 << 10;

/// What the environment says about hooks.
#[derive(Debug, Default)]
pub struct Told {
    pub json: Option<String>,
    /// The file, when it was named.
    pub file: Option<PathBuf>,
    pub home: Option<PathBuf>,
}

impl Told {
    /// Reads the variables, the older name included.
    pub fn by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let text = |name: &str| variable(name).filter(|text| !text.trim().is_empty());
        Told {
            json: text(sandglass_sandbox::hooks::VARIABLE).or_else(|| text("OPEN_SANDBOX_LIFECYCLE")),
            file: text("EXECD_LIFECYCLE_CONFIG").map(PathBuf::from),
            home: text("HOME").map(PathBuf::from),
        }
    }

    /// The hooks, and where they are wrong.
    pub fn hooks(&self) -> Result<Hooks, String> {
        if let Some(json) = &self.json {
            return Hooks::parse(json).map_err(|e| e.to_string());
        }
        let Some(path) = self.path() else { return Ok(Hooks::default()) };
        match read(&path) {
            Ok(Some(text)) => of_toml(&text).map_err(|e| format!("{}: {e}", path.display())),
            // A file that was named must be there.
            Ok(None) if self.file.is_some() => Err(format!("{} does not exist", path.display())),
            Ok(None) => Ok(Hooks::default()),
            Err(error) => Err(format!("cannot read {}: {error}", path.display())),
        }
    }

    /// Where hooks are kept that arrive later.
    pub fn path(&self) -> Option<PathBuf> {
        self.file.clone().or_else(|| Some(self.home.as_ref()?.join(".execd/lifecycle.toml")))
    }
}

fn of_toml(text: &str) -> Result<Hooks, String> {
    let hooks: Hooks = toml::from_str(text).map_err(|e| e.message().to_owned())?;
    hooks.check().map_err(|e| e.to_string())?;
    Ok(hooks)
}

fn read(path: &Path) -> io::Result<Option<String>> {
    use crate::envs::NonblockingOpen;
    use std::io::Read;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(Some(text))
}

/// Keeps hooks, readable by their owner only; a reader sees the old ones or the new ones.
pub fn keep(path: &Path, hooks: &Hooks) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let _ = std::fs::remove_file(&fresh);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(toml::to_string(hooks).map_err(io::Error::other)?.as_bytes())?;
    std::fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"preStart":{"command":["true"]}}"#;

    #[test]
    fn the_variable_wins_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap().to_owned();
        let told = |pairs: &[(&str, &str)]| {
            let mut pairs: Vec<_> = pairs.to_vec();
            pairs.push(("HOME", &home));
            Told::by(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
        };
        assert!(told(&[]).hooks().unwrap().is_empty());
        keep(&told(&[]).path().unwrap(), &Hooks::parse(JSON).unwrap()).unwrap();
        assert_eq!(told(&[]).hooks().unwrap().to_json(), JSON);
        assert!(told(&[("OPENSANDBOX_LIFECYCLE", "{}")]).hooks().unwrap().is_empty());
        assert_eq!(told(&[("OPEN_SANDBOX_LIFECYCLE", JSON)]).hooks().unwrap().to_json(), JSON);
        let blank = told(&[("OPENSANDBOX_LIFECYCLE", "  ")]);
        assert_eq!(blank.hooks().unwrap().to_json(), JSON);
        let missing = told(&[("EXECD_LIFECYCLE_CONFIG", "/nowhere/hooks")]).hooks().unwrap_err();
        assert!(missing.contains("/nowhere/hooks does not exist"), "{missing}");
        let wrong = told(&[("OPENSANDBOX_LIFECYCLE", "{\"periodic\": 3}")]).hooks().unwrap_err();
        assert!(wrong.starts_with("lifecycle "), "{wrong}");
    }
}
