//! What is counted as going on, and what ends with a connection.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use crate::host::{Host, lives, noise, run};

/// A session that prints the number of a process of its own, and the process.
fn session(host: &Host, command: &str) -> (Child, String) {
    let mut child = host.ssh(&[]).arg(command).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

#[test]
fn sessions_are_counted_while_they_run() {
    let host = Host::start();
    let activity = host.server.activity();
    assert_eq!(activity.sessions(), 0);
    let (mut first, _) = session(&host, "echo $$; exec sleep 300");
    let (mut second, _) = session(&host, "echo $$; exec sleep 300");
    assert_eq!(activity.sessions(), 2);
    first.kill().unwrap();
    second.kill().unwrap();
    first.wait().unwrap();
    second.wait().unwrap();
    host.wait_for("no session", || activity.sessions() == 0);
    run(host.ssh(&[]).arg("true"));
    host.wait_for("no session", || activity.sessions() == 0);
}

#[test]
fn a_connection_that_ends_takes_its_processes_with_it() {
    let host = Host::start();
    // Deaf to the hangup, and with a child in the same group.
    let (mut client, pid) = session(&host, "trap '' HUP; sleep 300 & echo $!; wait; sleep 300");
    assert!(lives(&pid));
    client.kill().unwrap();
    client.wait().unwrap();
    host.wait_for("the process to end", || !lives(&pid));
    host.wait_for("the session to end", || host.server.activity().sessions() == 0);
}

#[test]
fn the_end_of_the_server_ends_every_session() {
    let host = Host::start();
    let (mut client, pid) = session(&host, "echo $$; exec sleep 300");
    host.runtime.block_on(host.server.shut_down());
    assert!(!lives(&pid));
    assert_eq!(client.wait().unwrap().code(), Some(255));
    assert!(!host.ssh(&[]).arg("true").stderr(Stdio::null()).status().unwrap().success());
}

#[test]
fn what_a_peer_sent_before_it_went_is_still_written_down() {
    let host = Host::start();
    let control = format!("-oControlPath={}", host.path("control").display());
    let mut master = host.ssh(&["-N", "-oControlMaster=yes", &control]).spawn().unwrap();
    host.wait_for("the control socket", || host.path("control").exists());
    // The client of a shared connection that is killed closes its channel and nothing else.
    let mut ssh = host.ssh(&["-oControlMaster=no", &control]);
    let mut client =
        ssh.arg("echo $$; sleep 1; cat > late").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let bytes = noise(300_000);
    client.stdin.take().unwrap().write_all(&bytes).unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    host.wait_for("the program to end", || !lives(line.trim()));
    let written = std::fs::read(host.home("late")).unwrap_or_default();
    assert!(!written.is_empty() && bytes.starts_with(&written), "{} bytes", written.len());
    master.kill().unwrap();
    master.wait().unwrap();
}
