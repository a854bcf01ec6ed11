//! What boxes have mounted.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
};

use sandglass_sandbox::{
    SandboxId,
    ports::{
        RuntimeErrorKind,
        runtime::{Delivery, StartPlan},
    },
    spec::{Volume, VolumeSource},
};

use super::{Hands, Subject, plan, removed, said, started_as};

/// A directory that every user may write to.
pub(super) fn directory(parent: &Path, name: &str) -> PathBuf {
    let dir = parent.join(format!("{name}-{}", SandboxId::random()));
    fs::create_dir_all(&dir).expect("a directory");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).expect("its mode");
    dir
}

pub(super) fn of_host(path: &Path, target: &str, read_only: bool) -> Volume {
    let source = VolumeSource::Host { path: path.to_path_buf() };
    Volume { name: "shared".into(), source, target: target.into(), read_only }
}

fn named(claim: &str, create_if_missing: bool, delete_with_sandbox: bool) -> Volume {
    let source =
        VolumeSource::Named { claim: claim.into(), sub_path: None, create_if_missing, delete_with_sandbox };
    Volume { name: "data".into(), source, target: "/data".into(), read_only: false }
}

fn with(subject: &Subject, script: &str, volume: Volume) -> StartPlan {
    let mut plan = plan(subject, &["sh", "-c", &format!("{script}; echo complete; sleep 1000")]);
    plan.spec.volumes.push(volume);
    plan
}

fn hands(subject: &Subject) -> &dyn Hands {
    subject.hands.as_deref().expect("only run with hands")
}

pub(super) async fn a_directory_of_the_host_is_mounted(subject: &Subject) {
    let parent = subject.host_dir.as_deref().expect("only run with one");
    let dir = directory(parent, "mounted");
    fs::write(dir.join("in"), "from outside\n").expect("a file");
    let plan =
        with(subject, "cat /shared/in; echo from inside > /shared/out", of_host(&dir, "/shared", false));
    subject.runtime.admit(&plan.spec).await.expect("admit");
    let id = started_as(subject, &plan).await.id;
    assert_eq!(said(subject, id, "complete").await, ["from outside", "complete"]);
    assert_eq!(fs::read_to_string(dir.join("out")).expect("what it wrote"), "from inside\n");
    removed(subject, id).await;
    assert!(dir.join("in").exists(), "the caller's files went with the box");
}

pub(super) async fn what_the_server_delivers_is_shown_in_the_box(subject: &Subject) {
    let parent = subject.host_dir.as_deref().expect("only run with one");
    let dir = directory(parent, "delivered");
    let (file, folder) = (dir.join("document"), dir.join("folder"));
    fs::write(&file, "for this box\n").expect("a file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its mode");
    fs::create_dir(&folder).expect("a folder");
    let sockets = subject.runtime.capabilities().sockets;
    let script = "cat /run/.execd/document; (echo x > /run/.execd/document) 2>/dev/null || echo refused; \
                  stat -c %a:%u /run/.execd/document; \
                  while ! test -S /run/.execd/bridge/agent.sock; do sleep 0.05; done";
    let script = if sockets { script } else { script.split("; while").next().unwrap_or(script) };
    let mut plan = plan(subject, &["sh", "-c", &format!("{script}; echo complete; sleep 1000")]);
    plan.delivery.push(Delivery {
        source: file.clone(),
        target: "/run/.execd/document".into(),
        read_only: true,
    });
    if sockets {
        plan.delivery.push(Delivery {
            source: folder.clone(),
            target: "/run/.execd/bridge".into(),
            read_only: true,
        });
    }
    let id = started_as(subject, &plan).await.id;
    // Made when the box is there already.
    let _listener = sockets.then(|| UnixListener::bind(folder.join("agent.sock")).expect("a socket"));
    assert_eq!(said(subject, id, "complete").await, ["for this box", "refused", "600:0", "complete"]);
    removed(subject, id).await;
    assert_eq!(fs::read_to_string(&file).expect("the file"), "for this box\n");
}

pub(super) async fn a_read_only_directory_cannot_be_written(subject: &Subject) {
    let parent = subject.host_dir.as_deref().expect("only run with one");
    let dir = directory(parent, "read-only");
    fs::write(dir.join("in"), "readable\n").expect("a file");
    let script = "cat /shared/in; (echo x > /shared/out) 2>/dev/null || echo refused";
    let id = started_as(subject, &with(subject, script, of_host(&dir, "/shared", true))).await.id;
    assert_eq!(said(subject, id, "complete").await, ["readable", "refused", "complete"]);
    assert!(!dir.join("out").exists());
    removed(subject, id).await;
}

pub(super) async fn a_volume_that_is_missing_and_not_to_be_made_is_refused(subject: &Subject) {
    let name = format!("contract-{}", SandboxId::random());
    let plan = with(subject, "true", named(&name, false, false));
    let refused = subject.runtime.admit(&plan.spec).await.expect_err("admit");
    assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Invalid, "volume-missing"));
    assert!(!hands(subject).has_volume(&name).await, "asking made it");
    subject.runtime.admit(&with(subject, "true", named(&name, true, true)).spec).await.expect("admit");
    assert!(!hands(subject).has_volume(&name).await, "asking made it");
}

pub(super) async fn a_volume_made_for_a_box_goes_with_it_if_asked(subject: &Subject) {
    let name = format!("contract-{}", SandboxId::random());
    let id = started_as(subject, &with(subject, "echo x > /data/file", named(&name, true, true))).await.id;
    said(subject, id, "complete").await;
    assert!(hands(subject).has_volume(&name).await);
    removed(subject, id).await;
    assert!(!hands(subject).has_volume(&name).await, "it is left");
}

pub(super) async fn a_volume_outlives_its_box_and_is_shared(subject: &Subject) {
    let name = format!("contract-{}", SandboxId::random());
    let first =
        started_as(subject, &with(subject, "echo kept > /data/file", named(&name, true, false))).await.id;
    said(subject, first, "complete").await;
    removed(subject, first).await;
    assert!(hands(subject).has_volume(&name).await, "it went with a box that did not ask for that");
    // It was there before this one, so it is not its to take away.
    let second = started_as(subject, &with(subject, "cat /data/file", named(&name, true, true))).await.id;
    assert_eq!(said(subject, second, "complete").await, ["kept", "complete"]);
    removed(subject, second).await;
    assert!(hands(subject).has_volume(&name).await, "it went with a box that did not make it");
    hands(subject).remove_volume(&name).await;
}

pub(super) async fn named_volumes_are_refused(subject: &Subject) {
    let plan = with(subject, "true", named("some", true, false));
    let refused = subject.runtime.admit(&plan.spec).await.expect_err("admit");
    assert_eq!(refused.kind, RuntimeErrorKind::Invalid, "{refused}");
}
