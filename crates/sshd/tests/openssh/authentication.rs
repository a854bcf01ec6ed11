//! Who gets in: keys, certificates, and what they are limited to.

use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use crate::host::{Host, Options, run, text};

/// A certificate for the key `user`, by the authority `ca`.
fn certify(host: &Host, options: &[&str]) {
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-s"]).arg(host.path("ca")).args(["-I", "ann@example"]).args(options);
    run(keygen.arg(host.path("user.pub")).stdin(Stdio::null()));
}

fn with_authority() -> Host {
    let host = Host::start();
    host.make_key("ca");
    host.trust("ca");
    host
}

fn refused(host: &Host, command: &mut Command, reason: &str) {
    let output = command.arg("echo in").output().unwrap();
    assert_eq!(output.status.code(), Some(255));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Permission denied (publickey)"));
    let refusals = host.refusals.lock().unwrap();
    assert!(refusals.iter().any(|refusal| refusal == reason), "{reason:?} not in {refusals:?}");
}

#[test]
fn a_key_that_is_not_listed_and_a_login_that_does_not_exist_are_refused() {
    let host = Host::start();
    host.make_key("other");
    refused(&host, &mut host.ssh_as("tester", "other", &[]), "the key is not authorized");
    refused(&host, &mut host.ssh_as("stranger", "user", &[]), "no such account");
    assert_eq!(text(host.ssh(&[]).arg("echo in")), "in");
}

#[test]
fn a_key_that_is_taken_away_does_not_open_any_more() {
    let host = Host::start();
    assert_eq!(text(host.ssh(&[]).arg("echo in")), "in");
    host.authorize(&[]);
    refused(&host, &mut host.ssh(&[]), "the key is not authorized");
}

#[test]
fn ecdsa_keys_open_too() {
    let host = Host::start();
    let made =
        Command::new("ssh-keygen").args(["-q", "-t", "ecdsa", "-N", "", "-f"]).arg(host.path("ec")).status();
    assert!(made.unwrap().success());
    host.authorize(&[&host.public_line("ec", "")]);
    assert_eq!(text(host.ssh_as("tester", "ec", &[]).arg("echo in")), "in");
}

#[test]
fn a_certificate_for_the_login_or_the_sandbox_opens() {
    let host = with_authority();
    for principal in ["tester", "sb-1"] {
        certify(&host, &["-n", principal, "-V", "-1m:+5m"]);
        assert_eq!(text(host.ssh(&[]).arg("echo in")), "in");
    }
}

#[test]
fn the_key_of_a_certificate_does_not_open_by_itself() {
    let host = with_authority();
    refused(&host, &mut host.ssh(&[]), "the key is not authorized");
}

#[test]
fn a_certificate_for_somebody_else_is_refused() {
    let host = with_authority();
    certify(&host, &["-n", "ann,sb-2", "-V", "-1m:+5m"]);
    let reason = "none of the certificate's principals is the login name or the sandbox";
    refused(&host, &mut host.ssh(&[]), reason);
}

#[test]
fn a_certificate_of_another_authority_is_refused() {
    let host = with_authority();
    certify(&host, &["-n", "tester", "-V", "-1m:+5m"]);
    host.make_key("other");
    host.trust("other");
    refused(&host, &mut host.ssh(&[]), "the certificate's authority is not trusted");
}

#[test]
fn a_certificate_opens_in_its_time_only() {
    let host = with_authority();
    certify(&host, &["-n", "tester", "-V", "-10m:-5m"]);
    let output = host.ssh(&[]).arg("echo in").output().unwrap();
    assert_eq!(output.status.code(), Some(255));
    // By the server's clock, which here is ten minutes ahead of everybody's.
    let ahead = || SystemTime::now() + Duration::from_secs(600);
    let host = Host::with(Options { clock: ahead, ..Options::default() });
    host.make_key("ca");
    host.trust("ca");
    certify(&host, &["-n", "tester", "-V", "-1m:+5m"]);
    refused(&host, &mut host.ssh(&[]), "the certificate is not valid yet, or not any more");
    certify(&host, &["-n", "tester", "-V", "-1m:+15m"]);
    assert_eq!(text(host.ssh(&[]).arg("echo in")), "in");
}

#[test]
fn critical_options_of_a_certificate_hold() {
    let host = with_authority();
    certify(&host, &["-n", "tester", "-O", "force-command=echo forced: $SSH_ORIGINAL_COMMAND"]);
    assert_eq!(text(host.ssh(&[]).arg("echo in")), "forced: echo in");
    certify(&host, &["-n", "tester", "-O", "source-address=127.0.0.0/8"]);
    assert_eq!(text(host.ssh(&[]).arg("echo in")), "in");
    certify(&host, &["-n", "tester", "-O", "source-address=10.0.0.0/8"]);
    refused(&host, &mut host.ssh(&[]), "the key is not for this source address");
    certify(&host, &["-n", "tester", "-O", "critical:future@example=1"]);
    let reason = "the certificate's critical option \"future@example\" is not known or not valid";
    refused(&host, &mut host.ssh(&[]), reason);
}

#[test]
fn a_certificate_grants_a_terminal_only_if_it_says_so() {
    let host = with_authority();
    certify(&host, &["-n", "tester", "-O", "clear"]);
    let output = host.ssh(&["-tt"]).arg("tty").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("PTY allocation request failed"), "{stderr}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("/dev/"));
}

#[test]
fn a_forced_command_runs_whatever_is_asked_for() {
    let host = Host::start();
    host.authorize(&[&host.public_line("user", r#"restrict,command="echo \"<$SSH_ORIGINAL_COMMAND>\"" "#)]);
    assert_eq!(text(host.ssh(&[]).arg("rm -rf x")), "<rm -rf x>");
    assert_eq!(text(&mut host.ssh(&[])), "<>");
    assert_eq!(text(host.ssh(&["-s"]).arg("sftp")), "<sftp>");
}

#[test]
fn the_host_key_is_the_one_whose_fingerprint_is_told() {
    let host = Host::start();
    let scanned = Command::new("ssh-keyscan")
        .args(["-t", "ed25519", "-p", &host.port.to_string(), "127.0.0.1"])
        .output();
    std::fs::write(host.path("scanned"), scanned.unwrap().stdout).unwrap();
    let listed = text(Command::new("ssh-keygen").arg("-lf").arg(host.path("scanned")));
    assert!(listed.contains(&host.server.fingerprint()), "{listed}");
}
