//! The embedded runtime on the real kernel: the contract of every runtime, and what only a restart shows. Needs root. The Docker runtime on a real
//! engine is in `docker/`.

mod docker;

use std::{path::Path, sync::Arc, time::Duration};

use sandglass_runtimes::embedded::{EgressConfig, EmbeddedConfig, EmbeddedRuntime};
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock,
    ports::{
        Runtime, RuntimeErrorKind,
        runtime::{Condition, ExitCause, StartPlan},
    },
    spec::{Egress, EgressRule, Entrypoint, MutableFacts, NetworkPolicy, Secrets, Spec},
};
use sandglass_testkit::runtime_contract::{self, Subject};

/// Against hanging; nothing is measured by it.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(dir: &Path) -> EmbeddedConfig {
    EmbeddedConfig {
        state_dir: dir.to_path_buf(),
        host_image: true,
        subnet: None,
        dns: vec![],
        pids_limit: 256,
        expiry_grace: Duration::from_secs(2),
        insecure_registries: vec![],
        egress: EgressConfig::default(),
    }
}

fn plan(ttl: Option<u64>) -> StartPlan {
    let now = SystemClock.now();
    StartPlan {
        spec: Spec::new("host", Entrypoint::Command(vec!["sleep".into(), "1000".into()])),
        facts: MutableFacts {
            expires_at: ttl.and_then(|s| now.checked_add(Duration::from_secs(s))),
            metadata: Default::default(),
        },
        created_at: now,
        agent_token: "t".into(),
        route_token: "r".into(),
        delivery: Vec::new(),
        root_agent: false,
    }
}

/// Boxes, cgroups and interfaces that this state directory has left on the machine.
fn remains(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir.join("sandboxes")).into_iter().flatten().flatten() {
        found.push(format!("directory {}", entry.path().display()));
    }
    let network = std::fs::read_to_string(dir.join("network.json")).unwrap_or_default();
    let prefix =
        network.split("\"prefix\": \"").nth(1).and_then(|t| t.split('"').next()).unwrap_or("?").to_owned();
    for entry in std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&prefix) {
            found.push(format!("interface {name}"));
        }
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    found
        .extend(mounts.lines().filter(|l| l.contains(&*dir.to_string_lossy())).map(|l| format!("mount {l}")));
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_runtime_keeps_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Arc::new(EmbeddedRuntime::open(config(dir.path())).unwrap());
    let subject = Subject {
        runs_processes: true,
        host_dir: Some(dir.path().join("shared")),
        ..Subject::new(runtime.clone(), "host")
    };
    runtime_contract::run(&subject).await;
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    runtime.remove_network().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_server_on_the_same_state_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = EmbeddedRuntime::open(config(dir.path())).unwrap();
    let second = EmbeddedRuntime::open(config(dir.path())).unwrap_err();
    assert_eq!(second.kind, RuntimeErrorKind::Exists);
    assert!(second.message.contains("another server"), "{second}");
    first.remove_network().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_ends_at_once_is_an_exit_and_no_failed_start() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = EmbeddedRuntime::open(config(dir.path())).unwrap();
    for _ in 0..20 {
        let id = SandboxId::random();
        let mut plan = plan(None);
        plan.spec.entrypoint = Entrypoint::Command(vec!["sh".into(), "-c".into(), "exit 9".into()]);
        runtime.start(id, &plan, &Secrets::default()).await.unwrap();
        let exited = async {
            loop {
                if let Some(Condition::Exited(exit)) =
                    runtime.inspect(id).await.unwrap().map(|seen| seen.condition)
                {
                    return exit;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let exit = tokio::time::timeout(PATIENCE, exited).await.unwrap();
        assert_eq!(exit.code, Some(9));
        runtime.remove(id, Duration::ZERO).await.unwrap();
    }
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    runtime.remove_network().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxes_outlive_their_server_and_are_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let id = SandboxId::random();
    let before = {
        let first = EmbeddedRuntime::open(config(dir.path())).unwrap();
        let seen = first.start(id, &plan(Some(600)), &Secrets::default()).await.unwrap();
        first.pause(id).await.unwrap();
        seen
    };
    let second = reopened(dir.path()).await;
    let found = second.list().await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].condition, Condition::Paused);
    assert_eq!((found[0].facts.clone(), found[0].address), (before.facts, before.address));
    second.resume(id).await.unwrap();
    second.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    second.remove_network().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_has_an_enforcer_that_outlives_its_server_and_leaves_with_the_box() {
    let dir = tempfile::tempdir().unwrap();
    let id = SandboxId::random();
    let rule = EgressRule { action: "allow".into(), target: "example.com".into() };
    let policy = NetworkPolicy { default_action: Some("deny".into()), egress: vec![rule] };
    let mut plan = plan(Some(600));
    plan.spec.egress = Some(Egress { policy, credential_proxy: true, env: vec![] });
    let token = {
        let first = EmbeddedRuntime::open(config(dir.path())).unwrap();
        assert!(first.capabilities().network_policy);
        let seen = first.start(id, &plan, &Secrets::default()).await.unwrap();
        let pid = first.describe(id).await.unwrap()["Egress Enforcer PID"].clone();
        assert!(Path::new("/proc").join(&pid).exists(), "no process {pid}");
        seen.egress_token.unwrap()
    };
    let second = reopened(dir.path()).await;
    let found = second.list().await.unwrap();
    assert_eq!(found[0].egress_token.as_ref(), Some(&token));
    // The policy and the authority are files of the enforcer's, not of the box.
    let files = dir.path().join("sandboxes").join(id.to_string()).join("egress");
    assert!(files.join("authority/mitmproxy-ca-cert.pem").exists());
    second.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    second.remove_network().unwrap();
}

/// The listener tasks of the runtime that went away hold its lock until they notice.
async fn reopened(dir: &Path) -> EmbeddedRuntime {
    for _ in 0..PATIENCE.as_millis() / 10 {
        match EmbeddedRuntime::open(config(dir)) {
            Ok(runtime) => return runtime,
            Err(e) if e.kind == RuntimeErrorKind::Exists => {
                tokio::time::sleep(Duration::from_millis(10)).await
            }
            Err(e) => panic!("{e}"),
        }
    }
    panic!("the state directory stayed locked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_whose_shim_is_killed_is_failed_and_leaves_nothing_when_removed() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = EmbeddedRuntime::open(config(dir.path())).unwrap();
    let id = SandboxId::random();
    runtime.start(id, &plan(None), &Secrets::default()).await.unwrap();
    let shim: i32 = runtime.describe(id).await.unwrap()["Shim PID"].parse().unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(shim).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let mut cause = None;
    for _ in 0..PATIENCE.as_millis() / 10 {
        if let Some(Condition::Exited(exit)) = runtime.inspect(id).await.unwrap().map(|o| o.condition) {
            cause = Some(exit.cause);
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(cause, Some(ExitCause::SupervisorLost));
    runtime.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    runtime.remove_network().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_ends_by_itself_when_no_server_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    {
        let runtime = EmbeddedRuntime::open(config(dir.path())).unwrap();
        runtime.start(SandboxId::random(), &plan(Some(1)), &Secrets::default()).await.unwrap();
    }
    for _ in 0..PATIENCE.as_millis() / 10 {
        if remains(dir.path()).is_empty() {
            reopened(dir.path()).await.remove_network().unwrap();
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("left: {:?}", remains(dir.path()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_whose_files_were_removed_by_hand_is_ended_all_the_same() {
    for lost in ["shim.sock", "."] {
        let dir = tempfile::tempdir().unwrap();
        let runtime = EmbeddedRuntime::open(config(dir.path())).unwrap();
        let id = SandboxId::random();
        runtime.start(id, &plan(None), &Secrets::default()).await.unwrap();
        let facts = runtime.describe(id).await.unwrap();
        let folder = dir.path().join("sandboxes").join(id.to_string());
        if lost == "." {
            // The shim may be writing into it.
            while std::fs::remove_dir_all(&folder).is_err() && folder.exists() {}
        } else {
            std::fs::remove_file(folder.join(lost)).unwrap();
        }
        runtime.remove(id, Duration::ZERO).await.unwrap();
        assert_eq!(remains(dir.path()), Vec::<String>::new(), "after losing {lost}");
        for process in ["Shim PID", "Init PID"] {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", facts[process])).unwrap_or_default();
            assert!(stat.is_empty() || stat.contains(") Z "), "{process} lives after losing {lost}");
        }
        runtime.remove_network().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_whose_box_never_ran_is_removed_and_the_box_can_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let (ran, asked) = (SandboxId::random(), SandboxId::random());
    {
        let first = EmbeddedRuntime::open(config(dir.path())).unwrap();
        first.start(ran, &plan(None), &Secrets::default()).await.unwrap();
    }
    // What a server leaves that dies after it wrote the files and before a shim took them up.
    let sandboxes = dir.path().join("sandboxes");
    let spec = std::fs::read_to_string(sandboxes.join(ran.to_string()).join("spec.json")).unwrap();
    let folder = sandboxes.join(asked.to_string());
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("facts.json"), "{}").unwrap();
    std::fs::write(folder.join("spec.json"), spec.replace(&ran.to_string(), &asked.to_string())).unwrap();
    let second = reopened(dir.path()).await;
    let listed: Vec<_> = second.list().await.unwrap().into_iter().map(|o| o.id).collect();
    assert_eq!(listed, [ran]);
    assert!(!folder.exists());
    second.start(asked, &plan(None), &Secrets::default()).await.unwrap();
    for id in [ran, asked] {
        second.remove(id, Duration::ZERO).await.unwrap();
    }
    assert_eq!(remains(dir.path()), Vec::<String>::new());
    second.remove_network().unwrap();
}
