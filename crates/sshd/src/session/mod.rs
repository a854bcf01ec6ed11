//! What a session channel goes through: variables and a terminal are collected, then one program runs.

pub(crate) mod environment;
pub(crate) mod process;
pub(crate) mod signals;
pub(crate) mod terminal;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use russh::ChannelWriteHalf;
use russh::server::Msg;

use self::environment::Wishes;
use self::process::Leader;
use self::terminal::Terminal;
use crate::access::Grant;
use crate::launch::Account;
use crate::settings::SftpProgram;

pub(crate) type Writer = Arc<ChannelWriteHalf<Msg>>;

/// A forced command of this name is the file transfer program, whatever was asked for.
const INTERNAL_SFTP: &str = "internal-sftp";

/// A session channel, before and while its program runs.
pub(crate) struct Session {
    pub writer: Writer,
    pub wishes: Wishes,
    pub terminal: Option<Arc<Terminal>>,
    /// Set once a program was asked for; a second one is refused.
    pub leader: Option<Arc<Leader>>,
}

impl Session {
    pub(crate) fn new(writer: Writer) -> Self {
        Session { writer, wishes: Wishes::default(), terminal: None, leader: None }
    }
}

/// What the peer asked for.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Shell,
    Exec(OsString),
    Sftp,
}

impl Request {
    pub(crate) fn exec(command: &[u8]) -> Self {
        Request::Exec(OsString::from_vec(command.to_vec()))
    }
}

/// Which file to execute with which words.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Words {
    pub path: OsString,
    pub argv: Vec<OsString>,
    /// What a forced command finds in `SSH_ORIGINAL_COMMAND`.
    pub original: Option<OsString>,
}

/// None when there is no file transfer program to serve the request.
pub(crate) fn words(
    request: &Request,
    account: &Account,
    grant: &Grant,
    sftp: Option<&SftpProgram>,
) -> Option<Words> {
    let sftp_words = |original| {
        let sftp = sftp?;
        Some(Words { path: sftp.path.clone().into(), argv: sftp.argv.clone(), original })
    };
    let shell = account.shell.as_os_str();
    let name = account.shell.file_name().unwrap_or(shell);
    let run = |command: &OsStr, original| {
        let argv = vec![name.to_owned(), "-c".into(), command.to_owned()];
        Some(Words { path: shell.to_owned(), argv, original })
    };
    if let Some(forced) = &grant.command {
        let original = match request {
            Request::Shell => None,
            Request::Exec(command) => Some(command.clone()),
            Request::Sftp => Some("sftp".into()),
        };
        if forced == INTERNAL_SFTP || forced.starts_with("internal-sftp ") {
            return sftp_words(original);
        }
        return run(OsStr::from_bytes(forced.as_bytes()), original);
    }
    match request {
        Request::Shell => {
            let mut login = OsString::from("-");
            login.push(name);
            Some(Words { path: shell.to_owned(), argv: vec![login], original: None })
        }
        Request::Exec(command) => run(command, None),
        Request::Sftp => sftp_words(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account {
            name: "ann".into(),
            uid: 1,
            gid: 1,
            groups: vec![],
            home: "/home/ann".into(),
            shell: "/bin/zsh".into(),
            env: Default::default(),
        }
    }

    fn argv(request: Request, forced: Option<&str>) -> (Vec<OsString>, Option<OsString>) {
        let sftp = SftpProgram { path: "/agent".into(), argv: vec!["sftp-server".into()] };
        let grant = Grant { command: forced.map(str::to_owned), ..Grant::EVERYTHING };
        let words = words(&request, &account(), &grant, Some(&sftp)).unwrap();
        (words.argv, words.original)
    }

    #[test]
    fn a_shell_is_a_login_shell_and_a_command_is_not() {
        assert_eq!(argv(Request::Shell, None), (vec!["-zsh".into()], None));
        let command = Request::exec(b"ls -l");
        assert_eq!(argv(command, None), (vec!["zsh".into(), "-c".into(), "ls -l".into()], None));
    }

    #[test]
    fn a_forced_command_replaces_everything() {
        let forced: Vec<OsString> = vec!["zsh".into(), "-c".into(), "id".into()];
        assert_eq!(argv(Request::Shell, Some("id")), (forced.clone(), None));
        assert_eq!(argv(Request::exec(b"rm"), Some("id")), (forced.clone(), Some("rm".into())));
        assert_eq!(argv(Request::Sftp, Some("id")), (forced, Some("sftp".into())));
        let sftp = vec![OsString::from("sftp-server")];
        assert_eq!(argv(Request::exec(b"rm"), Some("internal-sftp")), (sftp, Some("rm".into())));
    }

    #[test]
    fn without_a_program_there_is_no_file_transfer() {
        assert_eq!(words(&Request::Sftp, &account(), &Grant::EVERYTHING, None), None);
    }
}
