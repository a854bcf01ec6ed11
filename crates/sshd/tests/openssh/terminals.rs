//! Terminals: their size and its changes, their modes, who may have one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use sandglass_sshd::{Account, Launch, LocalLaunch, Program, Stdio};

use crate::host::{Host, run_with_input};

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// A client in a terminal of its own, as a person has it.
struct Person {
    screen: File,
    client: i32,
    seen: String,
}

impl Person {
    fn sits_down(host: &Host, command: &str) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let screen = rustix::pty::openpt(flags).unwrap();
        rustix::pty::unlockpt(&screen).unwrap();
        let name = rustix::pty::ptsname(&screen, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let name = OsStr::from_bytes(name.as_bytes());
        let keyboard = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        tcsetwinsize(&screen, size(41, 132)).unwrap();
        let ssh = host.ssh(&["-t"]);
        let mut argv = vec!["ssh".into()];
        argv.extend(ssh.get_args().map(ToOwned::to_owned));
        argv.push(command.into());
        let ids = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let account = Account {
            name: "person".into(),
            uid: ids.0,
            gid: ids.1,
            groups: vec![],
            home: "/".into(),
            shell: "/bin/sh".into(),
            env: BTreeMap::new(),
        };
        let env = BTreeMap::from([("TERM".into(), "vt220".into()), ("HOME".into(), "/nonexistent".into())]);
        let program = Program {
            path: "/usr/bin/ssh".into(),
            argv,
            env,
            cwd: "/".into(),
            account,
            stdio: Stdio::Terminal(keyboard),
        };
        let inside = host.runtime.enter();
        let started = LocalLaunch::default().start(program).unwrap();
        host.runtime.spawn(started.exit);
        drop(inside);
        Person { screen: File::from(screen), client: started.pid, seen: String::new() }
    }

    fn sees(&mut self, what: &str) {
        let mut buffer = [0; 4096];
        while !self.seen.contains(what) {
            // A terminal whose last user has gone answers an error.
            let count = self.screen.read(&mut buffer).unwrap_or(0);
            assert!(count > 0, "{what:?} not seen in {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    }

    fn types(&mut self, what: &str) {
        self.screen.write_all(what.as_bytes()).unwrap();
    }
}

#[test]
fn a_terminal_has_the_size_and_kind_of_the_persons_own_and_follows_it() {
    let host = Host::start();
    let mut person = Person::sits_down(
        &host,
        // The change has no place among the keys: it may come after what is typed after it.
        "stty size; echo $TERM; tty; echo \"[$SSH_TTY]\"; read x; \
         for i in $(seq 600); do test \"$(stty size)\" = \"41 132\" || break; sleep 0.1; done; stty size; exit 3",
    );
    person.sees("41 132");
    person.sees("vt220");
    person.sees("/dev/pts/");
    person.sees("[/dev/pts/");
    tcsetwinsize(&person.screen, size(50, 100)).unwrap();
    let client = rustix::process::Pid::from_raw(person.client).unwrap();
    rustix::process::kill_process(client, Signal::WINCH).unwrap();
    person.types("go\n");
    person.sees("50 100");
}

#[test]
fn keys_like_ctrl_c_reach_what_is_in_front() {
    let host = Host::start();
    let mut person =
        Person::sits_down(&host, "trap 'echo interrupted; exit' INT; echo ready; sleep 300 & wait");
    person.sees("ready");
    person.types("\u{3}");
    person.sees("interrupted");
}

#[test]
fn commands_may_be_piped_into_a_shell_in_a_terminal() {
    let host = Host::start();
    let output = run_with_input(&mut host.ssh(&["-tt"]), b"echo hel''lo; exit 4\n");
    assert!(String::from_utf8_lossy(&output.stdout).contains("hello"));
    assert_eq!(output.status.code(), Some(4));
}

#[test]
fn a_key_may_be_denied_a_terminal() {
    let host = Host::start();
    host.authorize(&[&host.public_line("user", "no-pty ")]);
    let output = host.ssh(&["-tt"]).arg("tty").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("PTY allocation request failed"), "{stderr}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("/dev/"));
}
