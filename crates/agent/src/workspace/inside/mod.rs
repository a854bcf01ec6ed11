//! What this binary is when it is started as a helper of PID 1 or of git: nothing of the agent's state is here.
//!
//! Each helper reads its task from the standard input and says what happens on the standard output, a line of JSON at a time.

mod git_credential;
pub mod git_sync;
pub mod ssh;

use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde::Serialize;
use serde::de::DeserializeOwned;

pub(super) const GIT_SYNC: &str = "git-sync";
pub(super) const GIT_CREDENTIAL: &str = "git-credential";
pub(super) const SSHD: &str = "sshd";
pub(super) const SFTP_SERVER: &str = "sftp-server";

/// Runs the helper that the first word names; `None` when it names none.
pub fn run(args: &[String]) -> Option<ExitCode> {
    let (word, rest) = args.split_first()?;
    Some(match word.as_str() {
        GIT_SYNC => on_runtime(git_sync::run),
        SSHD => on_runtime(ssh::run),
        GIT_CREDENTIAL => git_credential::run(rest),
        SFTP_SERVER => match sandglass_sshd::sftp::serve_standard_streams() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        _ => return None,
    })
}

fn on_runtime<T: DeserializeOwned, F: Future<Output = ExitCode>>(work: fn(T) -> F) -> ExitCode {
    let mut text = Vec::new();
    let task = io::stdin().read_to_end(&mut text).map_err(|error| error.to_string());
    let task = task.and_then(|_| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let code = match (task, runtime) {
        (Ok(task), Ok(runtime)) => {
            let code = runtime.block_on(work(task));
            runtime.shutdown_background();
            return code;
        }
        (Err(error), _) => error,
        (_, Err(error)) => error.to_string(),
    };
    let _ = writeln!(io::stderr(), "execd: {code}");
    ExitCode::FAILURE
}

/// One line to whoever started this. A reader that is gone is no reason to stop.
fn say(line: &impl Serialize) {
    let Ok(mut text) = serde_json::to_vec(line) else { return };
    text.push(b'\n');
    let mut out = io::stdout().lock();
    let _ = out.write_all(&text).and_then(|()| out.flush());
}
