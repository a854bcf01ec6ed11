//! The editor in the browser: where its program is in a box, and its command line.
//!
//! It listens on the loopback only and asks for no password: whoever reaches it has come through an endpoint that authenticates.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::PlanError;

const PROGRAM: &str = "code-server";
/// Where its installers put it, after the PATH.
const FOLDERS: [&str; 5] = [
    "/usr/local/bin",
    "/usr/bin",
    "/usr/lib/code-server/bin",
    "/usr/local/lib/code-server/bin",
    "/opt/code-server/bin",
];
/// The same below the home folder.
const HOME_FOLDERS: [&str; 2] = [".local/bin", ".local/lib/code-server/bin"];

/// What is to be said of an editor; everything else follows from the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CodeServer {
    /// The folder that it opens.
    pub folder: PathBuf,
    /// Where it keeps settings and state; its own default when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_dir: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions_dir: Option<PathBuf>,
    /// The program, when it is in no folder where it is looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
}

/// The image has no editor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "code-server is not installed: not found {}; add it to the image in its Dockerfile or setup hook, for instance with \
     `npm install --global code-server`",
    .looked.join(", ")
)]
pub struct NotInstalled {
    /// Where it was looked for.
    pub looked: Vec<String>,
}

impl CodeServer {
    /// Where it says whether it is up.
    pub const HEALTH: &'static str = "/healthz";

    /// An editor of one folder.
    pub fn of(folder: impl Into<PathBuf>) -> Self {
        CodeServer { folder: folder.into(), user_data_dir: None, extensions_dir: None, program: None }
    }

    pub(crate) fn check(&self, at: &str) -> Result<(), PlanError> {
        let fields = [
            ("folder", Some(&self.folder)),
            ("userDataDir", self.user_data_dir.as_ref()),
            ("extensionsDir", self.extensions_dir.as_ref()),
            ("program", self.program.as_ref()),
        ];
        match fields.iter().find(|(_, path)| path.is_some_and(|path| !path.is_absolute())) {
            Some((field, _)) => Err(PlanError::new(format!("{at}.{field}"), "must be an absolute path")),
            None => Ok(()),
        }
    }

    /// Finds the program: the named one, else on the PATH, else where installers put it.
    pub fn find(&self, path: Option<&str>, home: Option<&str>) -> Result<PathBuf, NotInstalled> {
        if let Some(program) = &self.program {
            let missing = || NotInstalled { looked: vec![format!("at {}", program.display())] };
            return Some(program.clone()).filter(|program| is_program(program)).ok_or_else(missing);
        }
        let of_path = path.unwrap_or_default().split(':').filter(|folder| folder.starts_with('/'));
        let home = home.filter(|home| home.starts_with('/')).map(Path::new);
        let of_home =
            home.into_iter().flat_map(|home| HOME_FOLDERS.iter().map(move |folder| home.join(folder)));
        let folders = of_path.chain(FOLDERS).map(PathBuf::from).chain(of_home);
        folders.map(|folder| folder.join(PROGRAM)).find(|program| is_program(program)).ok_or_else(|| {
            NotInstalled { looked: vec!["on the PATH".into(), "in the folders of its installers".into()] }
        })
    }

    /// The command line of a found program.
    pub fn command(&self, program: &Path, port: u16) -> Vec<String> {
        let mut argv = vec![
            program.display().to_string(),
            "--bind-addr".into(),
            format!("127.0.0.1:{port}"),
            // A PORT in the environment, which many applications want, would win over the address.
            "--port".into(),
            port.to_string(),
            "--auth".into(),
            "none".into(),
            // It knows itself by the address in the box and would refuse every page of the address that people use.
            "--trusted-origins".into(),
            "*".into(),
            "--disable-telemetry".into(),
            "--disable-update-check".into(),
        ];
        let mut folder = |option: &str, path: &Option<PathBuf>| {
            if let Some(path) = path {
                argv.extend([option.to_owned(), path.display().to_string()]);
            }
        };
        folder("--user-data-dir", &self.user_data_dir);
        folder("--extensions-dir", &self.extensions_dir);
        argv.push(self.folder.display().to_string());
        argv
    }
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(folder: &Path, mode: u32) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let program = folder.join(PROGRAM);
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        program
    }

    #[test]
    fn it_is_found_on_the_path_before_the_home() {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join("home");
        let in_home = place(&home.join(".local/bin"), 0o755);
        let on_path = place(&root.path().join("bin"), 0o755);
        place(&root.path().join("data"), 0o644);
        let text = |path: PathBuf| path.display().to_string();
        let editor = CodeServer::of("/workspace");
        let path = format!("relative:{}:{}", text(root.path().join("data")), text(root.path().join("bin")));
        assert_eq!(editor.find(Some(&path), Some(&text(home.clone()))), Ok(on_path));
        assert_eq!(editor.find(None, Some(&text(home))), Ok(in_home));
    }

    #[test]
    fn a_missing_one_is_said_to_be_missing() {
        let missing = CodeServer { program: Some("/nowhere/code-server".into()), ..CodeServer::of("/w") };
        assert_eq!(
            missing.find(None, None).unwrap_err().to_string(),
            "code-server is not installed: not found at /nowhere/code-server; add it to the image in its Dockerfile or \
             setup hook, for instance with `npm install --global code-server`"
        );
    }

    #[test]
    fn it_listens_where_it_is_told() {
        let editor = CodeServer { user_data_dir: Some("/data".into()), ..CodeServer::of("/workspace/web") };
        let argv = editor.command(Path::new("/usr/bin/code-server"), 8080);
        assert_eq!(
            argv.join(" "),
            "/usr/bin/code-server --bind-addr 127.0.0.1:8080 --port 8080 --auth none --trusted-origins * \
             --disable-telemetry --disable-update-check --user-data-dir /data /workspace/web"
        );
        let relative = CodeServer { user_data_dir: Some("data".into()), ..CodeServer::of("/w") };
        assert_eq!(relative.check("e").unwrap_err().to_string(), "e.userDataDir must be an absolute path");
    }
}
