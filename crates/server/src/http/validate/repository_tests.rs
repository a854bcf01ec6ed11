use std::time::Duration;

use async_trait::async_trait;
use sandglass_repository::{HostAllowList, Policy, RepositorySpec, WorkspaceRoot};
use sandglass_sandbox::{
    ImageBuildId, ImageId, SandboxId,
    lifecycle::boot::{Failure, Reason},
    source::{FoundImage, ImageNews},
};
use serde_json::json;

use super::*;
use crate::{http::decode, workspace::Wanted};

/// Checks as a server does that allows one host.
struct OneHost;

#[async_trait]
impl Images for OneHost {
    fn check(&self, repository: &RepositorySpec) -> Result<Source, SpecError> {
        let hosts = HostAllowList::parse(["git.example.com"]).unwrap();
        let root = WorkspaceRoot::default();
        repository.validate(&Policy { hosts, allow_file: false, allow_http: false, root })
    }

    fn longest_build(&self) -> Option<Duration> {
        Some(Duration::from_secs(7200))
    }

    async fn find(
        &self,
        _: Wanted<'_>,
        _: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure> {
        Err(Failure::new(Reason::RuntimeError, "nothing is built here"))
    }

    async fn newest(&self, _: ImageId) -> Option<ImageId> {
        None
    }

    async fn made(&self, _: ImageId, _: bool) {}

    async fn release(&self, _: SandboxId, _: Option<ImageBuildId>, _: Option<ImageId>) -> Result<(), String> {
        Ok(())
    }

    async fn release_absent(&self, _: &(dyn Fn(SandboxId) -> bool + Sync)) {}
}

const URL: &str = "https://git.example.com/acme/web.git";

fn run(changes: Value) -> ApiResult<(RepositorySource, Confidential)> {
    let mut body = json!({"repository": {"url": URL}});
    if let (Value::Object(body), Value::Object(changes)) = (&mut body, changes) {
        body.extend(changes);
    }
    let request = decode::create::create(&body)?;
    Asked::of(&request).expect("it has a repository").check(&OneHost)
}

#[test]
fn every_refusal_has_its_code() {
    let parameter = "SANDBOX::INVALID_PARAMETER";
    let repository = |changes: Value| {
        let mut repository = json!({"url": URL});
        if let (Value::Object(repository), Value::Object(changes)) = (&mut repository, changes) {
            repository.extend(changes);
        }
        json!({"repository": repository})
    };
    let probed = |numbers: Value| {
        let mut probe = json!({"type": "tcp"});
        if let (Value::Object(probe), Value::Object(numbers)) = (&mut probe, numbers) {
            probe.extend(numbers);
        }
        json!({"services": [{"name": "app", "command": ["x"], "port": 80, "probe": probe}]})
    };
    for (changes, code) in [
        (repository(json!({"url": "ftp://git.example.com/a/b"})), "REPOSITORY::INVALID_URL"),
        (repository(json!({"url": "https://u:p@git.example.com/a/b"})), "REPOSITORY::INVALID_URL"),
        (repository(json!({"url": "--upload-pack=x"})), "REPOSITORY::INVALID_URL"),
        (repository(json!({"url": "https://evil.example.org/a/b"})), "REPOSITORY::HOST_NOT_ALLOWED"),
        (repository(json!({"ref": "--x"})), "REPOSITORY::INVALID_REF"),
        (repository(json!({"ref": "a..b"})), "REPOSITORY::INVALID_REF"),
        (repository(json!({"path": "/workspace/../etc"})), "REPOSITORY::INVALID_PATH"),
        (repository(json!({"path": "/etc"})), "REPOSITORY::INVALID_PATH"),
        (
            repository(json!({"additional": [{"url": "https://git.example.com/other/web"}]})),
            "REPOSITORY::INVALID_PATH",
        ),
        (repository(json!({"credential": {"secretRef": "x"}})), parameter),
        (json!({"image": {"uri": "x"}}), parameter),
        (json!({"snapshotId": "x"}), parameter),
        (json!({"templateId": "x"}), parameter),
        (json!({"env": {"SANDGLASS_X": "1"}}), parameter),
        (json!({"env": {"A B": "1"}}), parameter),
        (json!({"platform": {"os": "windows", "arch": "amd64"}}), parameter),
        (json!({"platform": {"os": "linux", "arch": "sparc"}}), parameter),
        (json!({"imageBuild": {"tag": "a b"}}), parameter),
        (json!({"imageBuild": {"recipe": {"type": "magic"}}}), parameter),
        (json!({"imageBuild": {"secrets": {"a-b": "x"}}}), parameter),
        (json!({"agent": {"heartbeatIntervalSeconds": 30, "heartbeatTimeoutSeconds": 30}}), parameter),
        (json!({"imageBuild": {"timeoutSeconds": 7201}}), parameter),
        (probed(json!({"intervalSeconds": 0})), parameter),
        (probed(json!({"intervalSeconds": 3601})), parameter),
        (probed(json!({"intervalSeconds": u64::MAX})), parameter),
        (probed(json!({"timeoutSeconds": 0})), parameter),
        (probed(json!({"timeoutSeconds": u64::MAX})), parameter),
        (probed(json!({"threshold": 101})), parameter),
        (json!({"services": [{"name": "ssh", "authorizedKeys": ["ssh-rsa AAAAB3 me"]}]}), parameter),
        (json!({"services": [{"name": "ssh", "authorizedKeys": ["ssh-ed25519 AAAAC3 me", "x"]}]}), parameter),
        (
            json!({"services": [{"name": "ssh", "authorizedKeys": ["ssh-ed25519 AAAAC3\nssh-rsa AAAAB3"]}]}),
            parameter,
        ),
        (json!({"services": [{"name": "app"}]}), parameter),
        (json!({"services": [{"name": "bridge", "command": ["x"]}]}), parameter),
        (json!({"services": [{"name": "ssh"}, {"name": "ssh"}]}), parameter),
        (json!({"services": [{"name": "terminal", "command": ["x"]}]}), parameter),
        (json!({"services": [{"name": "a", "command": ["x"], "port": 44772}]}), "SERVICE::PORT_CONFLICT"),
        (
            json!({"services": [{"name": "ssh"}, {"name": "a", "command": ["x"], "port": 2222}]}),
            "SERVICE::PORT_CONFLICT",
        ),
    ] {
        let refused = run(changes.clone()).expect_err(&changes.to_string());
        assert_eq!((refused.status.as_u16(), refused.code), (400, code), "{changes}: {refused}");
    }
}

#[test]
fn a_secret_by_name_is_read_from_the_folder_of_the_operator() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("git"), "hunter2\n").unwrap();
    let credential = json!({"username": "bot", "secretRef": "git"});
    let body = json!({"repository": {"url": URL, "credential": credential}});
    let asked = Asked::of(&decode::create::create(&body).unwrap()).unwrap();
    let known = asked.clone().with_secrets(SecretFiles(Some(dir.path())), None).unwrap();
    let (source, confidential) = known.check(&OneHost).unwrap();
    assert!(source.repositories[0].credential);
    assert!(!serde_json::to_string(&source).unwrap().contains("hunter"));
    assert!(confidential.repository.to_string().contains("hunter2"));
    for (folder, tenant) in [(None, None), (Some(dir.path()), Some("other"))] {
        let refused = asked.clone().with_secrets(SecretFiles(folder), tenant).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.code), (400, "SANDBOX::INVALID_PARAMETER"));
        assert!(refused.message.starts_with("repository.credential.secretRef: "), "{refused}");
    }
    std::fs::write(dir.path().join("git.hosts"), "git.example.com\n").unwrap();
    let files = SecretFiles(Some(dir.path()));
    assert!(asked.with_secrets(files, None).is_ok());
    let more = json!([{"url": "https://evil.example.org/a/b", "credential": credential}]);
    let body = json!({"repository": {"url": URL, "additional": more}});
    let asked = Asked::of(&decode::create::create(&body).unwrap()).unwrap();
    let refused = asked.with_secrets(files, None).unwrap_err();
    assert_eq!((refused.status.as_u16(), refused.code), (400, "SANDBOX::INVALID_PARAMETER"));
    let said =
        "repository.additional[0].credential.secretRef: the secret is not for the host evil.example.org";
    assert!(refused.message.starts_with(said), "{refused}");
}

#[test]
fn what_goes_with_a_repository_goes_with_nothing_else() {
    for field in ["imageBuild", "boot", "agent"] {
        let body = json!({"image": {"uri": "x"}, "entrypoint": ["x"], "resourceLimits": {}, field: {}});
        let refused = decode::create::create(&body).unwrap_err();
        assert!(refused.status == 400 && refused.message.contains(field), "{refused}");
    }
}

#[test]
fn the_example_of_the_contract() {
    let (source, confidential) = run(json!({
        "repository": {"url": URL, "ref": "main", "depth": 100, "path": "/workspace/web",
            "credential": {"username": "x-access-token", "token": "hunter2"},
            "additional": [{"url": "https://git.example.com/acme/lib", "ref": "v1"}]},
        "imageBuild": {"policy": "ifMissing", "match": "exact", "tag": "latest", "recipe": {"type": "auto"},
            "secrets": {"NPM_TOKEN": "hunter3"}, "timeoutSeconds": 1800},
        "boot": {"onSetupFailure": "fail", "setupTimeoutSeconds": 300, "startTimeoutSeconds": 120},
        "services": [{"name": "code-server"}, {"name": "ssh", "authorizedKeys": ["ssh-ed25519 AAAA"]},
            {"name": "app", "command": ["npm", "start"], "port": 3000, "required": true,
                "probe": {"type": "http", "path": "/ok"}}],
        "policies": {"onExpire": "terminate", "expireReserveSeconds": 300, "idleTimeoutSeconds": null,
            "idleAction": "terminate", "maxPresenceExtensionSeconds": 3600},
        "agent": {"heartbeatIntervalSeconds": 15, "heartbeatTimeoutSeconds": 45},
        "timeout": 3600, "env": {}, "metadata": {}, "resourceLimits": {}, "volumes": [], "extensions": {},
    }))
    .unwrap();
    let stored = serde_json::to_string(&source).unwrap();
    assert!(!stored.contains("hunter"), "{stored}");
    assert_eq!(source.repositories[1].path, "/workspace/lib");
    assert!(source.repositories[0].credential && source.repositories[1].credential, "the same host");
    assert_eq!(source.ttl_seconds, Some(3600));
    assert_eq!(source.image_build.fit, BuildMatch::Exact);
    assert!(source.image_build.recipe.is_null());
    assert_eq!(source.services[0].port, Some(CODE_SERVER_PORT));
    let key = "command=\"echo hi\",no-pty sk-ssh-ed25519@openssh.com AAAAG me@here";
    assert!(run(json!({"services": [{"name": "ssh", "authorizedKeys": [key]}]})).is_ok());
    assert_eq!(confidential.build_secrets["NPM_TOKEN"], "hunter3");
    let (least, _) = run(json!({})).unwrap();
    assert_eq!((least.lease, least.repositories[0].path.as_str()), (Lease::default(), "/workspace/web"));
}
