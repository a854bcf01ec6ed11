//! From the document to the plan of the boot.

use sandglass_sandbox::hooks::Hooks;
use sandglass_sandbox::workspace::{
    self as told, Check, Command, Forwarding, Hook, Kind, Service, Workspace,
};
use sandglass_supervise::plan::{
    BootLimits, BootPlan, CommandSpec, HookStep, OnFailure, RestartNumbers, Source, StepLimits, SyncStep,
};
use sandglass_supervise::service::definition::{self as kept, Probe, RestartPolicy, Run, ServiceDefinition};

/// Services that the agent is itself, by their names in a plan.
pub(super) const SSH: &str = "ssh";
pub(super) const TERMINAL: &str = "terminal";
/// The hook of the sandbox itself, among those of repositories.
const PRE_START: &str = "preStart";

/// The plan of a document, with what the boot configuration adds: the entrypoint and the hook before it.
pub(super) fn of(workspace: &Workspace, entrypoint: &[String], hooks: Option<&Hooks>) -> BootPlan {
    let boot = &workspace.boot;
    let sync = (!workspace.repositories.is_empty()).then(|| SyncStep {
        // The sync reads the document itself.
        request: serde_json::Value::Null,
        limits: StepLimits { timeout_seconds: boot.sync_seconds, cap_seconds: None },
        on_failure: boot.on_sync_failure.map(policy),
    });
    let pre_start = hooks.and_then(|hooks| hooks.pre_start.as_ref()).map(|hook| {
        let seconds = hook.timeout().as_secs();
        HookStep {
            label: PRE_START.into(),
            command: CommandSpec { command: hook.command.clone(), ..CommandSpec::default() },
            limits: Some(StepLimits { timeout_seconds: seconds, cap_seconds: Some(seconds) }),
            on_failure: OnFailure::Fail,
        }
    });
    BootPlan {
        source: match workspace.source {
            told::Source::Fresh => Source::Fresh,
            told::Source::Image => Source::Image,
            told::Source::Snapshot => Source::Snapshot,
        },
        sync,
        setup: boot.setup.iter().map(|hook| step(hook, 300)).collect(),
        services: workspace.services.iter().map(|one| service(one, workspace)).collect(),
        start: pre_start.into_iter().chain(boot.start.iter().map(|hook| step(hook, 120))).collect(),
        entrypoint: (!entrypoint.is_empty())
            .then(|| CommandSpec { command: entrypoint.to_vec(), ..CommandSpec::default() }),
        limits: BootLimits {
            deadline_seconds: boot.deadline_seconds,
            services_seconds: boot.services_seconds,
            grace_seconds: boot.grace_seconds,
            ..BootLimits::default()
        },
        restarts: restarts(workspace),
    }
}

pub(super) fn restarts(workspace: &Workspace) -> RestartNumbers {
    let told::Restarts { budget, base_millis, cap_seconds, healthy_seconds } = workspace.boot.restarts;
    RestartNumbers { budget, base_millis, cap_seconds, healthy_seconds }
}

fn policy(told: told::OnFailure) -> OnFailure {
    match told {
        told::OnFailure::Fail => OnFailure::Fail,
        told::OnFailure::Warn => OnFailure::Warn,
    }
}

fn command(told: &Command) -> CommandSpec {
    let Command { command, env, cwd, user } = told.clone();
    CommandSpec { command, env, cwd, user }
}

fn step(hook: &Hook, usual_seconds: u64) -> HookStep {
    HookStep {
        label: hook.label.clone(),
        command: command(&hook.command),
        limits: Some(StepLimits {
            timeout_seconds: hook.timeout_seconds.unwrap_or(usual_seconds),
            cap_seconds: hook.cap_seconds,
        }),
        on_failure: policy(hook.on_failure),
    }
}

fn service(told: &Service, workspace: &Workspace) -> ServiceDefinition {
    let (kind, run, around) = match &told.kind {
        Kind::Custom(program) => {
            // Where its repository is, unless it says otherwise.
            let primary = || workspace.repositories.first().map(|repository| repository.path.clone());
            let around = Command { cwd: program.cwd.clone().or_else(primary), ..program.clone() };
            (kept::Kind::Custom, Run::Command(program.command.clone()), Some(around))
        }
        Kind::CodeServer(editor) => {
            let primary = workspace.repositories.first().map(|repository| &repository.path);
            let folder = editor.folder.as_ref().or(primary).unwrap_or(&workspace.git.root);
            let mut run = sandglass_supervise::code_server::CodeServer::of(folder.clone());
            run.program.clone_from(&editor.program);
            (kept::Kind::CodeServer, Run::CodeServer(run), None)
        }
        Kind::Ssh(_) => (kept::Kind::Ssh, Run::Builtin(SSH.into()), None),
        Kind::Terminal => (kept::Kind::Terminal, Run::Builtin(TERMINAL.into()), None),
    };
    let around = around.unwrap_or_default();
    ServiceDefinition {
        kind,
        port: told.port,
        probe: told.probe.as_ref().map(probe),
        restart: match told.restart {
            told::RestartPolicy::Always => RestartPolicy::Always,
            told::RestartPolicy::OnFailure => RestartPolicy::OnFailure,
            told::RestartPolicy::Never => RestartPolicy::Never,
        },
        required: told.required,
        enabled: told.enabled,
        env: around.env,
        cwd: around.cwd,
        user: around.user,
        ready_seconds: told.ready_seconds,
        grace_seconds: told.grace_seconds,
        ..ServiceDefinition::new(told.name.clone(), run)
    }
}

fn probe(told: &told::Probe) -> Probe {
    Probe {
        check: match told.check.clone() {
            Check::Tcp { port } => kept::Check::Tcp { port },
            Check::Http { port, path } => kept::Check::Http { port, path },
            Check::Exec { command } => kept::Check::Exec { command },
        },
        interval_seconds: told.interval_seconds,
        timeout_seconds: told.timeout_seconds,
        threshold: told.threshold,
    }
}

/// What the SSH server calls it.
pub(super) fn forwarding(told: Forwarding) -> sandglass_sshd::Forwarding {
    match told {
        Forwarding::Off => sandglass_sshd::Forwarding::Off,
        Forwarding::Loopback => sandglass_sshd::Forwarding::LoopbackOnly,
        Forwarding::Any => sandglass_sshd::Forwarding::Any,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document(more: serde_json::Value) -> Workspace {
        let mut value = json!({
            "sandboxId": "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10", "generation": 1,
            "bridge": { "way": { "socket": "/run/x" } },
        });
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_defaults_of_document_and_plan_are_the_same() {
        assert_eq!(of(&document(json!({})), &[], None), BootPlan::default());
        let bare = of(
            &document(json!({ "services": [{ "name": "a", "kind": "custom", "command": ["x"] }] })),
            &[],
            None,
        );
        assert_eq!(bare.services, [ServiceDefinition::new("a", Run::Command(vec!["x".into()]))]);
    }

    #[test]
    fn everything_finds_its_place() {
        let hooks = Hooks::parse(r#"{"preStart":{"command":["a"],"timeoutSeconds":7}}"#).unwrap();
        let workspace = document(json!({
            "source": "image",
            "repositories": [{ "url": "https://x/y", "commit": "0".repeat(40), "path": "/workspace/y" }],
            "boot": { "setup": [{ "label": "y", "command": ["s"] }], "start": [{ "label": "y", "command": ["t"] }] },
            "services": [
                { "name": "app", "kind": "custom", "command": ["x"], "user": "u", "port": 1 },
                { "name": "code-server", "kind": "code-server", "port": 2 },
                { "name": "ssh", "kind": "ssh", "port": 22 },
                { "name": "terminal", "kind": "terminal" },
                { "name": "other", "kind": "custom", "command": ["x"], "cwd": "/srv" },
            ],
        }));
        let plan = of(&workspace, &["sleep".into()], Some(&hooks));
        plan.check().unwrap();
        assert_eq!(plan.source, Source::Image);
        assert!(plan.sync.is_some());
        let labels: Vec<_> = plan.start.iter().map(|hook| hook.label.as_str()).collect();
        assert_eq!(labels, [PRE_START, "y"]);
        assert_eq!(plan.start[0].limits.unwrap().cap_seconds, Some(7));
        let app = &plan.services[0];
        assert_eq!((app.user.as_deref(), app.cwd.as_deref()), (Some("u"), Some("/workspace/y".as_ref())));
        assert!(
            matches!(&plan.services[1].run, Run::CodeServer(editor) if editor.folder.ends_with("workspace/y"))
        );
        assert_eq!(plan.services[4].cwd.as_deref(), Some("/srv".as_ref()));
        assert_eq!(plan.entrypoint.unwrap().command, ["sleep"]);
    }
}
