//! What the grammar of a repository specification lets through, and what it refuses.

use proptest::prelude::*;
use sandglass_repository::{
    Code, Credential, HostAllowList, Policy, Reference, RepositorySpec, RepositoryUrl, Secret, WorkspaceRoot,
};

fn policy() -> Policy {
    Policy {
        hosts: HostAllowList::parse(["github.com", "*.example.com"]).unwrap(),
        allow_file: false,
        allow_http: false,
        root: WorkspaceRoot::default(),
    }
}

fn spec(json: &str) -> RepositorySpec {
    serde_json::from_str(json).unwrap()
}

#[test]
fn addresses_are_brought_to_one_form() {
    for (given, normal, key) in [
        ("https://GitHub.com/acme/web.git", "https://github.com/acme/web.git", "github.com/acme/web"),
        ("https://github.com:443/acme/web/", "https://github.com/acme/web", "github.com/acme/web"),
        ("https://github.com:8443/Acme/web", "https://github.com:8443/Acme/web", "github.com:8443/Acme/web"),
        ("git@github.com:acme/web.git", "ssh://git@github.com/acme/web.git", "github.com/acme/web"),
        ("ssh://git@github.com:22/acme/web.git", "ssh://git@github.com/acme/web.git", "github.com/acme/web"),
        ("ssh://git@[::1]:2222/acme/web", "ssh://git@[::1]:2222/acme/web", "[::1]:2222/acme/web"),
        ("me@host:~/x", "ssh://me@host/~/x", "host/~/x"),
        ("ssh://me@host/~bob/x", "ssh://me@host/~bob/x", "host/~bob/x"),
        ("file:///srv/git/web.git", "file:///srv/git/web.git", "file/srv/git/web"),
        ("https://host/a/b%20c", "https://host/a/b%20c", "host/a/b%20c"),
    ] {
        let url = RepositoryUrl::parse(given).unwrap_or_else(|error| panic!("{given}: {error}"));
        assert_eq!(url.to_string(), normal, "{given}");
        assert_eq!(url.repository_key(), key, "{given}");
        assert_eq!(RepositoryUrl::parse(normal).unwrap(), url, "normal form is stable");
    }
}

/// What has been used against programs that run git.
const HOSTILE: &[&str] = &[
    "git@github.com:/~",
    "git@github.com:/~bob/x",
    "",
    "--upload-pack=touch /tmp/x",
    "-u",
    "--upload-pack=x:y@z",
    "ext::sh -c id",
    "ext::sh%20-c%20id",
    "fd::17/foo",
    "transport::https://github.com/a/b",
    "https://user:password@github.com/a/b",
    "https://token@github.com/a/b",
    "https://@github.com/a/b",
    "ssh://git:secret@github.com/a/b",
    "ssh://-oProxyCommand=id/a/b",
    "ssh://-oProxyCommand=id@github.com/a/b",
    "ssh://git@-oProxyCommand=id/a/b",
    "-oProxyCommand=id@github.com:a/b",
    "git@-oProxyCommand=id:a/b",
    "git@github.com:-a/b",
    "https://github.com/-a/b",
    "https://github.com/a/%2db",
    "https://github.com/a/../b",
    "https://github.com/a/%2e%2e/b",
    "https://github.com/a/b%2f..%2f..",
    "https://github.com/a//b",
    "https://github.com",
    "https://github.com/",
    "https:///a/b",
    "https://github.com/.git",
    "https://github.com/%2egit",
    "https://github.com/a/...git",
    "https://github.com/a/%2e.git",
    "https://github.com/a\nb",
    "https://github.com/a\0b",
    "https://github.com/a b",
    "https://github.com/a%0ab",
    "https://github.com/a%00b",
    "https://github.com/a%c2%85b",
    "https://github.com/a%ffb",
    "https://github.com/a?x=1",
    "https://github.com/a#b",
    "https://github.com/a\\b",
    "https://github.com\\@evil.example/a",
    "https://github.com/$(id)",
    "https://github.com/`id`",
    "https://github.com/a;id",
    "https://gіthub.com/a/b",
    "https://127.1/a/b",
    "https://2130706433/a/b",
    "https://github.com:0/a/b",
    "https://github.com:99999/a/b",
    "https://github.com:+1/a/b",
    "https://[::1/a/b",
    "https://github..com/a/b",
    "http//github.com/a",
    "git://github.com/a/b",
    "ftp://github.com/a/b",
    "javascript://github.com/a/b",
    "github.com:a/b",
    "C:\\repo",
    "/srv/git/web.git",
    "../web.git",
    "file://host",
    "file://host/x",
    "git@github.com:",
    "git@github.com:a/../../etc",
];

#[test]
fn hostile_addresses_are_refused() {
    for text in HOSTILE {
        let error = policy().check_url(text).expect_err(text);
        assert_eq!(error.code, Code::InvalidUrl, "{text}: {error}");
    }
    let error = RepositoryUrl::parse("https://bob:hunter2@github.com/a/b").unwrap_err();
    assert!(!error.to_string().contains("hunter2"));
}

#[test]
fn schemes_and_hosts_are_the_policys() {
    let code = |text: &str| policy().check_url(text).map_err(|error| error.code);
    assert_eq!(code("file:///srv/x"), Err(Code::InvalidUrl));
    assert_eq!(code("http://github.com/a/b"), Err(Code::InvalidUrl));
    assert_eq!(code("https://gitlab.com/a/b"), Err(Code::HostNotAllowed));
    assert_eq!(code("https://example.com/a/b"), Err(Code::HostNotAllowed));
    assert_eq!(code("https://notexample.com/a/b"), Err(Code::HostNotAllowed));
    assert_eq!(code("https://github.com.evil.org/a/b"), Err(Code::HostNotAllowed));
    assert!(code("https://git.example.com/a/b").is_ok());
    assert!(code("https://a.b.EXAMPLE.com./a/b").is_ok());
    let open = Policy { hosts: HostAllowList::Any, allow_file: true, ..policy() };
    assert!(open.check_url("file:///srv/x").is_ok());
    assert!(open.check_url("https://gitlab.com/a/b").is_ok());
}

#[test]
fn refs_follow_gits_rules() {
    for good in
        ["main", "feature/a", "v1.2.3", "refs/heads/main", "refs/pull/7/head", "a@b", "ünï", "deadbeef"]
    {
        Reference::parse(good).unwrap_or_else(|error| panic!("{good}: {error}"));
    }
    assert_eq!(Reference::parse("HEAD").unwrap(), Reference::Head);
    let id = "AB".repeat(20);
    assert_eq!(Reference::parse(&id).unwrap(), Reference::Commit(id.to_lowercase()));
    assert_eq!(Reference::parse("DEADBEEF").unwrap().abbreviated_commit().as_deref(), Some("deadbeef"));
    assert_eq!(Reference::parse("dead").unwrap().abbreviated_commit(), None);
    for bad in [
        "",
        "-x",
        "--upload-pack=id",
        "a..b",
        "..",
        "a/../b",
        ".a",
        "a/.b",
        "a.lock",
        "a.lock/b",
        "/a",
        "a/",
        "a//b",
        "a.",
        "@",
        "a@{1}",
        "a b",
        "a~1",
        "a^",
        "a:b",
        "a?",
        "a*",
        "a[",
        "a\\b",
        "a\nb",
        "a\x7f",
        "a\0",
        "refs",
    ] {
        assert_eq!(Reference::parse(bad).expect_err(bad).code, Code::InvalidRef, "{bad}");
    }
}

#[test]
fn a_whole_specification_is_checked_in_order() {
    let source = spec(
        r#"{"url":"https://github.com/acme/web.git","ref":"main","depth":5,"submodules":true,
            "credential":{"username":"bot","token":"t0ken-value"},
            "additional":[{"url":"https://github.com/acme/api"},{"url":"https://git.example.com/x/y","path":"/workspace/z/y"}]}"#,
    )
    .validate(&policy())
    .unwrap();
    let paths: Vec<_> = source.members.iter().map(|member| member.path.as_str()).collect();
    assert_eq!(paths, ["/workspace/web", "/workspace/api", "/workspace/z/y"]);
    assert!(source.members[1].credential.is_some(), "same host");
    assert!(source.members[2].credential.is_none(), "another host does not get the token");
}

#[test]
fn refusals_name_the_field() {
    for (json, field, code) in [
        (r#"{"url":"x"}"#, "repository.url", Code::InvalidUrl),
        (r#"{"url":"https://gitlab.com/a/b"}"#, "repository.url", Code::HostNotAllowed),
        (r#"{"url":"https://github.com/a/b","ref":"-x"}"#, "repository.ref", Code::InvalidRef),
        (r#"{"url":"https://github.com/a/b","path":"/etc/x"}"#, "repository.path", Code::InvalidPath),
        (r#"{"url":"https://github.com/a/b","path":"/workspace"}"#, "repository.path", Code::InvalidPath),
        (
            r#"{"url":"https://github.com/a/b","path":"/workspace/../etc"}"#,
            "repository.path",
            Code::InvalidPath,
        ),
        (r#"{"url":"https://github.com/a/b","path":"/workspacex/a"}"#, "repository.path", Code::InvalidPath),
        (r#"{"url":"https://github.com/a/b","path":"workspace/a"}"#, "repository.path", Code::InvalidPath),
        (
            r#"{"url":"https://github.com/a/b","path":"/workspace/.git/hooks"}"#,
            "repository.path",
            Code::InvalidPath,
        ),
        (r#"{"url":"https://github.com/a/b","depth":0}"#, "repository.depth", Code::InvalidParameter),
        (
            r#"{"url":"https://github.com/a/b","additional":[{"url":"https://github.com/c/b"}]}"#,
            "repository.additional[0].path",
            Code::InvalidPath,
        ),
        (
            r#"{"url":"https://github.com/a/b","additional":[{"url":"https://github.com/c/d","path":"/workspace/b/d"}]}"#,
            "repository.additional[0].path",
            Code::InvalidPath,
        ),
        (
            r#"{"url":"https://github.com/a/b","credential":{"privateKey":"-----BEGIN OPENSSH PRIVATE KEY-----"}}"#,
            "repository.credential",
            Code::InvalidParameter,
        ),
        (
            r#"{"url":"https://github.com/a/b","credential":{"token":"a\nb"}}"#,
            "repository.credential",
            Code::InvalidParameter,
        ),
    ] {
        let error = spec(json).validate(&policy()).expect_err(json);
        assert_eq!((error.field.as_str(), error.code), (field, code), "{json}: {error}");
    }
    let many: Vec<_> = (0..10).map(|n| format!(r#"{{"url":"https://github.com/a/x{n}"}}"#)).collect();
    let json = format!(r#"{{"url":"https://github.com/a/b","additional":[{}]}}"#, many.join(","));
    assert_eq!(spec(&json).validate(&policy()).unwrap_err().field, "repository.additional");
}

#[test]
fn secrets_are_not_shown_and_unknown_fields_not_dropped() {
    let given = spec(r#"{"url":"https://github.com/a/b","credential":{"token":"hunter2hunter2"}}"#);
    assert!(!format!("{given:?}").contains("hunter2"));
    assert!(!serde_json::to_string(&given).unwrap().contains("hunter2"));
    assert!(!format!("{:?}", given.validate(&policy()).unwrap()).contains("hunter2"));
    assert_eq!(
        given.credential,
        Some(Credential::Token { username: None, token: Secret::new("hunter2hunter2") })
    );
    assert!(serde_json::from_str::<RepositorySpec>(r#"{"url":"x","shallow":true}"#).is_err());
    let unknown =
        serde_json::from_str::<RepositorySpec>(r#"{"url":"x","credential":{"password":"hunter2"}}"#);
    assert!(!unknown.unwrap_err().to_string().contains("hunter2"));
}

proptest! {
    #[test]
    fn whatever_is_accepted_is_safe_to_hand_to_git(text in "[ -~\\n]{0,40}") {
        for candidate in [text.clone(), format!("https://github.com/{text}"), format!("git@github.com:{text}"), format!("ssh://{text}")] {
            if let Ok(url) = RepositoryUrl::parse(&candidate) {
                let normal = url.to_string();
                prop_assert!(!normal.starts_with('-'));
                prop_assert!(!normal.chars().any(|c| c.is_control() || c.is_whitespace()));
                prop_assert!(!url.path().split('/').any(|part| part == ".." || part.starts_with('-')));
                prop_assert_eq!(RepositoryUrl::parse(&normal).unwrap(), url);
            }
        }
    }

    #[test]
    fn accepted_refs_are_not_options_or_ranges(text in "[ -~]{1,20}") {
        if Reference::parse(&text).is_ok() {
            prop_assert!(!text.starts_with('-') && !text.contains("..") && !text.contains(':'));
        }
    }
}
