//! Commands and shells: bytes in, bytes out, how they end.

use sha2::{Digest, Sha256};

use crate::host::{Host, noise, run, run_with_input, text};

#[test]
fn a_command_has_its_own_output_errors_and_status() {
    let host = Host::start();
    let output = host.ssh(&[]).arg("echo out; echo err >&2; exit 37").output().unwrap();
    assert_eq!(output.status.code(), Some(37));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
}

#[test]
fn every_byte_passes_both_ways_and_the_end_of_input_is_seen() {
    let host = Host::start();
    let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let output = run_with_input(host.ssh(&[]).arg("cat; echo end"), &bytes);
    assert_eq!(output.stdout, [bytes.as_slice(), b"end\n"].concat());
}

#[test]
fn a_program_that_a_signal_ends_is_told_so() {
    let host = Host::start();
    let output = host.ssh(&[]).arg("kill -TERM $$").output().unwrap();
    // The client has no status to pass on.
    assert_eq!(output.status.code(), Some(255));
}

#[test]
fn a_program_that_is_not_there_is_status_127() {
    let host = Host::start();
    assert_eq!(host.ssh(&[]).arg("no-such-program").output().unwrap().status.code(), Some(127));
}

#[test]
fn a_shell_reads_commands_without_a_terminal() {
    let host = Host::start();
    let output = run_with_input(&mut host.ssh(&[]), b"echo $0; tty\nexit 5\n");
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "-bash\nnot a tty\n");
}

#[test]
fn the_environment_is_that_of_a_login() {
    let host = Host::start();
    let said = text(
        host.ssh(&["-oSendEnv=LC_TEST", "-oSendEnv=HIDDEN", "-oSetEnv=LC_OTHER=o LD_PRELOAD=/x SSH_TTY=/x"])
            .env("LC_TEST", "t")
            .env("HIDDEN", "h")
            .arg("echo $USER $LOGNAME $HOME $SHELL $PWD $LC_TEST $LC_OTHER [$HIDDEN$LD_PRELOAD$SSH_TTY]; echo $SSH_CONNECTION"),
    );
    let home = host.path("home").display().to_string();
    let (first, second) = said.split_once('\n').unwrap();
    assert_eq!(first, format!("tester tester {home} /bin/bash {home} t o []"));
    let words: Vec<_> = second.split(' ').collect();
    assert_eq!((words[0], words[2], words[3]), ("127.0.0.1", "127.0.0.1", host.port.to_string().as_str()));
}

#[test]
fn a_hundred_megabytes_pass_through_a_program_and_back() {
    let host = Host::start();
    let bytes = noise(100 << 20);
    let output = run_with_input(host.ssh(&[]).arg("cat"), &bytes);
    assert!(output.status.success());
    assert_eq!(output.stdout.len(), bytes.len());
    assert_eq!(Sha256::digest(&output.stdout), Sha256::digest(&bytes));
}

#[test]
fn a_program_that_reads_late_gets_everything() {
    let host = Host::start();
    let bytes = noise(20 << 20);
    let output = run_with_input(host.ssh(&[]).arg("sleep 2; sha256sum"), &bytes);
    let sum = String::from_utf8(output.stdout).unwrap();
    let expected: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(sum.split(' ').next(), Some(expected.as_str()));
}

#[test]
fn a_reader_that_takes_its_time_misses_nothing_that_came_before_the_end() {
    let host = Host::start();
    let mut ssh = host.ssh(&[]);
    let ssh = ssh.arg("head -c 8000000 /dev/zero").stdout(std::process::Stdio::piped());
    let mut child = ssh.spawn().unwrap();
    // Longer than a session waits for output of processes left behind.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let mut count = 0;
    let mut buffer = [0; 65536];
    let mut stdout = child.stdout.take().unwrap();
    loop {
        match std::io::Read::read(&mut stdout, &mut buffer).unwrap() {
            0 => break,
            read => count += read,
        }
    }
    assert_eq!(count, 8_000_000);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_process_left_behind_with_the_output_does_not_hold_the_session() {
    let host = Host::start();
    let said = text(host.ssh(&[]).arg("sleep 300 & echo $!"));
    assert!(crate::host::lives(&said));
    run(std::process::Command::new("kill").arg(&said));
}

#[test]
fn input_that_nobody_reads_does_not_hold_the_session() {
    let host = Host::start();
    let output = run_with_input(host.ssh(&[]).arg("exit 3"), &noise(5 << 20));
    assert_eq!(output.status.code(), Some(3));
}
