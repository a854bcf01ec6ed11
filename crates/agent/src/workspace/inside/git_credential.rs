//! `execd git-credential SOCKET get`: git's credential helper, which asks the agent.

use std::collections::HashMap;
use std::io::{self, BufRead, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use sandglass_bridge::wire::{GitCredential, GitCredentialRequest};

use super::super::broker::Answer;

/// The agent waits for its server, but not as long as this.
const PATIENCE: Duration = Duration::from_secs(120);
const MAX_ANSWER: u64 = 64 << 10;
const MAX_QUESTION: u64 = 64 << 10;

/// Git goes on without a credential whatever happens here; a refusal is told to the person at the terminal.
pub(super) fn run(args: &[String]) -> ExitCode {
    let [socket, operation] = args else { return ExitCode::FAILURE };
    if operation != "get" {
        // Nothing is stored, so nothing is to be forgotten.
        return ExitCode::SUCCESS;
    }
    let Some(request) = question(io::stdin().lock()) else { return ExitCode::SUCCESS };
    match ask(socket.as_ref(), &request) {
        Ok(credential) => answer(&credential),
        Err(reason) => {
            let _ = writeln!(io::stderr(), "no credential for {}/{}: {reason}", request.host, request.path);
            ExitCode::SUCCESS
        }
    }
}

/// What git asks for; none without a path, for a whole host is nobody's repository.
fn question(input: impl Read) -> Option<GitCredentialRequest> {
    let lines = io::BufReader::new(input.take(MAX_QUESTION)).lines().map_while(Result::ok);
    let mut fields: HashMap<String, String> = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    if !matches!(fields.get("protocol").map(String::as_str), Some("https" | "http")) {
        return None;
    }
    Some(GitCredentialRequest { host: fields.remove("host")?, path: fields.remove("path")? })
}

/// Asks the agent behind a socket.
pub(super) fn ask(socket: &Path, request: &GitCredentialRequest) -> Result<GitCredential, String> {
    let wrong = |error: io::Error| format!("the agent does not answer: {error}");
    let mut stream = UnixStream::connect(socket).map_err(wrong)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(wrong)?;
    let mut text = serde_json::to_vec(request).map_err(|error| error.to_string())?;
    text.push(b'\n');
    stream.write_all(&text).map_err(wrong)?;
    let mut line = String::new();
    io::BufReader::new(stream.take(MAX_ANSWER)).read_line(&mut line).map_err(wrong)?;
    match serde_json::from_str(&line) {
        Ok(Answer::Credential(credential)) => Ok(credential),
        Ok(Answer::Refused(reason)) => Err(reason),
        Err(_) => Err("the agent's answer is not understood".into()),
    }
}

fn answer(credential: &GitCredential) -> ExitCode {
    if credential.known_hosts.is_some() {
        // A key of ssh is nothing to show to a web server at the same address.
        return ExitCode::SUCCESS;
    }
    let password = credential.password.reveal();
    // A line each: what holds a line break cannot be handed over.
    if [&credential.username, password].iter().any(|text| text.contains(['\n', '\0'])) {
        return ExitCode::SUCCESS;
    }
    let mut text = format!("username={}\npassword={password}\n", credential.username);
    if let Some(expires) = credential.expires_at {
        text.push_str(&format!("password_expiry_utc={}\n", expires.as_second()));
    }
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_needs_its_path() {
        let asked = |text: &str| question(text.as_bytes()).map(|q| (q.host, q.path));
        assert_eq!(
            asked("protocol=https\nhost=git.example:8443\npath=acme/web.git\n\nignored=1\n"),
            Some(("git.example:8443".into(), "acme/web.git".into()))
        );
        assert_eq!(asked("protocol=https\nhost=git.example\n\n"), None);
        assert_eq!(asked("protocol=ssh\nhost=git.example\npath=a\n\n"), None);
        assert_eq!(asked(""), None);
    }
}
