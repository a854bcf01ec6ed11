//! Secrets in output: every form, cut anywhere; tokens by their shape.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use sandglass_repository::redact::{Needles, Redactor, TokenKind, scan};

const SECRET: &str = "s3cr3t/Value+1=";

fn redacted(redactor: &Redactor, text: &str) -> String {
    String::from_utf8(redactor.redact(text.as_bytes())).unwrap()
}

#[test]
fn a_value_is_replaced_in_every_form() {
    let redactor = Redactor::new([SECRET]);
    assert_eq!(redacted(&redactor, &format!("a{SECRET}b")), "a***b");
    assert_eq!(redacted(&redactor, "s3cr3t%2FValue%2B1%3D"), "***");
    assert_eq!(redacted(&redactor, "s3cr3t%2fValue%2b1%3d"), "***");
    for user in ["", "a", "ab", "abc", "x-access-token:"] {
        let encoded = STANDARD.encode(format!("{user}{SECRET}"));
        let shown = redacted(&redactor, &encoded);
        assert!(shown.contains("***"), "{user}: {encoded} -> {shown}");
        let left = shown.replace("***", "");
        assert!(left.len() <= user.len() * 4 / 3 + 4, "{user}: {shown}");
        let trailing = STANDARD.encode(format!("{user}{SECRET}@host"));
        assert!(redacted(&redactor, &trailing).contains("***"), "{user}");
    }
    let quoted = Redactor::new(["pass\"word\\x"]);
    assert_eq!(redacted(&quoted, r#"{"p":"pass\"word\\x"}"#), r#"{"p":"***"}"#);
}

#[test]
fn a_value_is_found_in_a_file_in_every_form_and_wherever_it_stands() {
    let long =
        "p4ssphrase-of-many-words-that-no-encoder-would-leave-in-a-single-line-of-its-output-0123456789";
    let needles = Needles::new([SECRET, long, "short"]);
    let wrapped = |text: &str, width: usize, between: &str| -> String {
        let groups: Vec<&str> =
            (0..text.len()).step_by(width).map(|at| &text[at..text.len().min(at + width)]).collect();
        groups.join(between)
    };
    let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut texts = vec![
        SECRET.to_owned(),
        format!("\0\0{SECRET}\0"),
        "s3cr3t%2FValue%2B1%3D".to_owned(),
        hex(SECRET),
        hex(SECRET).to_uppercase(),
        wrapped(&hex(SECRET), 2, " "),
        wrapped(&hex(long), 60, "\n"),
    ];
    for before in ["", "a", "ab", "user:"] {
        texts.push(STANDARD.encode(format!("{before}{SECRET}\n")));
        texts.push(wrapped(&STANDARD.encode(format!("{before}{long}\n")), 76, "\n"));
    }
    for text in texts {
        for position in [0, 256 * 1024 - 9, 256 * 1024 + 1] {
            let file = [vec![b'.'; position], text.clone().into_bytes(), vec![b'.'; 300_000]].concat();
            assert!(needles.occur_in_stream(file.as_slice()).unwrap(), "{text:?} at {position}");
        }
    }
    // Only what is encoded is put together again.
    for clean in ["s3cr3t/ Value+1=", "short", "", "s3cr3t"] {
        assert!(!needles.occur_in_stream(clean.as_bytes()).unwrap(), "{clean:?}");
    }
    assert!(Needles::new(["short"]).is_empty() && !needles.is_empty());
}

#[test]
fn keys_of_several_lines_are_replaced_line_by_line_too() {
    let key = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\nAAAAAAAABAAAAMwAAAAtzc2gtZWQyNT\n-----END OPENSSH PRIVATE KEY-----\n";
    let redactor = Redactor::new([key]);
    assert_eq!(redacted(&redactor, &format!("x{key}y")), "x***y");
    assert_eq!(redacted(&redactor, "  > AAAAAAAABAAAAMwAAAAtzc2gtZWQyNT <\r\n"), "  > *** <\r\n");
}

#[test]
fn the_longer_of_two_secrets_wins_and_short_ones_are_reported() {
    let redactor = Redactor::new(["abcdef", "abcdefghij", "x", ""]);
    assert_eq!(redactor.too_short(), 1);
    let mut stream = redactor.stream();
    let mut out = stream.push(b"1abcdef");
    assert_eq!(out, b"1");
    out.extend(stream.push(b"ghi"));
    out.extend(stream.push(b"j2abcdefgh"));
    out.extend(stream.finish());
    assert_eq!(String::from_utf8(out).unwrap(), "1***2***gh");
    assert!(!format!("{redactor:?}").contains("abcdef"));
    assert!(Redactor::new([]).stream().push(b"as it is") == b"as it is");
}

#[test]
fn output_is_not_held_back_without_need() {
    let redactor = Redactor::new([SECRET]);
    let mut stream = redactor.stream();
    assert_eq!(stream.push(b"building...\n"), b"building...\n");
    assert_eq!(stream.push(b"prefix s3cr3t"), b"prefix ");
    assert_eq!(stream.push(b"ly so\n"), b"s3cr3tly so\n");
}

proptest! {
    #[test]
    fn cutting_a_stream_changes_nothing(
        parts in prop::collection::vec(prop_oneof![Just(SECRET.to_owned()), Just("hunter2!".to_owned()), "[a-z3/\n]{0,9}", Just("s3cr".to_owned())], 0..12),
        cuts in prop::collection::vec(0usize..200, 0..12),
    ) {
        let redactor = Redactor::new([SECRET, "hunter2!", "hunter2!hunter2!x"]);
        let text = parts.concat();
        let whole = redactor.redact(text.as_bytes());
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).chain([0, text.len()]).collect();
        cuts.sort_unstable();
        let mut stream = redactor.stream();
        let mut out = Vec::new();
        for pair in cuts.windows(2) {
            out.extend(stream.push(&text.as_bytes()[pair[0]..pair[1]]));
        }
        out.extend(stream.finish());
        prop_assert_eq!(&out, &whole);
        prop_assert!(!redactor.occurs_in(&whole));
    }
}

#[test]
fn tokens_are_known_by_their_shape() {
    let long = "aB3".repeat(20);
    let found = |text: &str| {
        scan(text.as_bytes())
            .unwrap()
            .into_iter()
            .map(|finding| (finding.offset, finding.kind))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&format!("x ghp_{} y", &long[..36])), [(2, TokenKind::GitHub)]);
    assert_eq!(found(&format!("github_pat_{}_{}", &long[..22], &long[..59])), [(0, TokenKind::GitHub)]);
    assert_eq!(found("token: glpat-abcdefghij0123456789"), [(7, TokenKind::GitLab)]);
    assert_eq!(
        found(&format!("//registry.npmjs.org/:_authToken=npm_{}\n", &long[..36])),
        [(33, TokenKind::Npm)]
    );
    assert_eq!(found(&format!("slack=xoxb-{}-{}", "1234567890", &long[..24])), [(6, TokenKind::Slack)]);
    assert_eq!(found("AKIAIOSFODNN7EXAMPLE"), [(0, TokenKind::AwsAccessKeyId)]);
    assert_eq!(
        found("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\n"),
        [(0, TokenKind::AwsSecretKey)]
    );
    let key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEAxxxxxxxxxxxxxxxx";
    assert_eq!(found(key), [(0, TokenKind::PrivateKey)]);
    assert_eq!(
        found(r#"{"k":"-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEAxxxxxxxxxxxxxxxx"#),
        [(6, TokenKind::PrivateKey)]
    );
    assert_eq!(found("https://bob:hunter2hunter2@example.com/x"), [(0, TokenKind::UrlPassword)]);
    for kind in [TokenKind::GitHub, TokenKind::GitLab, TokenKind::AwsAccessKeyId, TokenKind::UrlPassword] {
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.word());
    }
    for clean in [
        "ghp_short",
        "-----BEGIN PRIVATE KEY-----\"",
        "-----BEGIN PUBLIC KEY-----\nMIIEpAIBAAKCAQEAxxxxxxxxxxxx",
        "https://example.com:8080/x@y",
        "sk_AKIA",
    ] {
        assert_eq!(found(clean), [], "{clean}");
    }
}

#[test]
fn a_token_across_two_reads_is_found_once() {
    let token = format!("ghp_{}", "a1B2".repeat(9));
    for position in [256 * 1024 - 60, 256 * 1024 - 20, 256 * 1024 + 3, 1_000_000] {
        let mut text = vec![b' '; position];
        text.extend_from_slice(token.as_bytes());
        text.extend_from_slice(&[b' '; 300_000]);
        let found = scan(text.as_slice()).unwrap();
        assert_eq!(found.iter().map(|finding| finding.offset).collect::<Vec<_>>(), [position as u64]);
    }
}
