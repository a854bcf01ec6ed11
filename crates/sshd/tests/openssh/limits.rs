//! Peers that ask for too much, or take their time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use sandglass_sshd::Limits;

use crate::host::{Host, Options, text};

fn host(limits: Limits) -> Host {
    Host::with(Options { limits, ..Options::default() })
}

/// Reads to the end, which has to come.
fn ends(mut stream: TcpStream) {
    stream.set_read_timeout(Some(crate::host::PATIENCE)).unwrap();
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn who_does_not_sign_in_is_closed_at_the_deadline() {
    let host = host(Limits { login_grace: Duration::from_millis(700), ..Limits::default() });
    let connect = || TcpStream::connect(("127.0.0.1", host.port)).unwrap();
    // One that says nothing, one that gives its name and no more, one that says a byte now and then.
    let silent = connect();
    let mut named = connect();
    named.write_all(b"SSH-2.0-test\r\n").unwrap();
    let mut slow = connect();
    let drops = std::thread::spawn(move || {
        for byte in b"SSH-2.0-".iter().cycle() {
            std::thread::sleep(Duration::from_millis(50));
            if slow.write_all(&[*byte]).is_err() {
                return;
            }
        }
    });
    ends(silent);
    ends(named);
    drops.join().unwrap();
}

#[test]
fn a_session_outlives_the_deadline_of_signing_in() {
    let host = host(Limits { login_grace: Duration::from_secs(5), ..Limits::default() });
    assert_eq!(text(host.ssh(&[]).arg("sleep 6; echo still here")), "still here");
}

#[test]
fn too_many_connections_are_closed_at_once_and_places_come_free() {
    let host = host(Limits { connections: 2, ..Limits::default() });
    let connect = || TcpStream::connect(("127.0.0.1", host.port)).unwrap();
    let mut held: Vec<_> = (0..2).map(|_| connect()).collect();
    for stream in &mut held {
        // Served once there is something to read.
        stream.read_exact(&mut [0; 4]).unwrap();
    }
    let mut third = connect();
    third.set_read_timeout(Some(crate::host::PATIENCE)).unwrap();
    assert_eq!(third.read(&mut [0; 64]).unwrap_or(0), 0);
    drop(held);
    host.wait_for("a place to come free", || host.ssh(&[]).arg("true").status().unwrap().success());
}

#[test]
fn attempts_to_sign_in_are_limited() {
    let host = host(Limits { auth_attempts: 2, ..Limits::default() });
    let mut identities = Vec::new();
    for number in 0..4 {
        let name = format!("wrong-{number}");
        host.make_key(&name);
        identities.push(format!("-oIdentityFile={}", host.path(&name).display()));
    }
    identities.push(format!("-oIdentityFile={}", host.path("user").display()));
    let identities: Vec<&str> = identities.iter().map(String::as_str).collect();
    // The right key would be the fifth.
    let output = host.ssh_as("tester", "wrong-0", &identities[1..]).arg("true").output().unwrap();
    assert_eq!(output.status.code(), Some(255));
    assert_eq!(host.refusals.lock().unwrap().len(), 1);
}

#[test]
fn sessions_of_a_connection_are_limited() {
    let host = host(Limits { sessions: 1, ..Limits::default() });
    let control = format!("-oControlPath={}", host.path("control").display());
    let mut master = host.ssh(&["-oControlMaster=yes", &control]).arg("sleep 300").spawn().unwrap();
    host.wait_for("the first session", || host.server.activity().sessions() == 1);
    host.wait_for("the control socket", || host.path("control").exists());
    let second =
        host.ssh(&["-oControlMaster=no", &control, "-oProxyCommand=false"]).arg("echo in").output().unwrap();
    assert!(second.stdout.is_empty());
    master.kill().unwrap();
    master.wait().unwrap();
}

#[test]
fn fifty_sessions_at_once() {
    let host = Host::start();
    std::thread::scope(|scope| {
        for number in 0..50 {
            let host = &host;
            scope.spawn(move || {
                let output =
                    crate::host::run_with_input(host.ssh(&[]).arg("cat; sleep 1"), &[number; 10_000]);
                assert_eq!(output.stdout, [number; 10_000]);
            });
        }
    });
}
