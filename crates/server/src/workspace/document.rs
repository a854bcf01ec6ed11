//! What the agent of a box is handed: from what was asked for and found to the document of `sandglass_sandbox::workspace`.

use std::path::PathBuf;

use sandglass_sandbox::{
    SandboxId,
    source::{FoundImage, RepositorySource},
    workspace::{
        BRIDGE_SOCKET, Boot, Bridge, Hook, Kind, OnFailure, Repository, STATE_DIR, Service, TOKEN_FILE, Way,
        Workspace,
    },
};

use super::Settings;

/// The document of a sandbox, in its generation. `socket`: the box is shown the folder with the server's socket. `authority`: the public
/// key of whoever signs keys for its SSH servers.
pub(super) fn document(
    id: SandboxId,
    generation: u64,
    source: &RepositorySource,
    found: &FoundImage,
    settings: &Settings,
    socket: bool,
    authority: Option<&str>,
) -> Workspace {
    let way = match (&settings.agent_url, socket) {
        (_, true) => Way::Socket(BRIDGE_SOCKET.into()),
        (Some(url), false) => Way::Url(url.clone()),
        (None, false) => Way::Pull,
    };
    let repositories = source.repositories.iter().map(|repository| Repository {
        url: repository.url.clone(),
        reference: found.refs.get(&repository.path).cloned(),
        commit: found.commits.get(&repository.path).cloned().unwrap_or_default(),
        path: PathBuf::from(&repository.path),
        depth: source.depth,
        submodules: source.submodules,
        lfs: source.lfs,
        credential: repository.credential,
    });
    let options = &source.boot;
    let hooks = |hooks: &[Hook], seconds: Option<u64>, on_failure: Option<OnFailure>| {
        let with = |hook: &Hook| Hook {
            timeout_seconds: seconds.or(hook.timeout_seconds),
            on_failure: on_failure.unwrap_or(hook.on_failure),
            ..hook.clone()
        };
        hooks.iter().map(with).collect()
    };
    Workspace {
        sandbox_id: id,
        generation,
        bridge: Bridge {
            way,
            token_file: TOKEN_FILE.into(),
            heartbeat_interval_seconds: source.lease.heartbeat_interval_seconds,
            lease_timeout_seconds: source.lease.heartbeat_timeout_seconds,
            attach_grace_seconds: settings.attach_within.as_secs(),
            exit_on_revoke: true,
        },
        source: found.source,
        repositories: repositories.collect(),
        git: settings.git.clone(),
        user: found.user.clone(),
        boot: Boot {
            on_sync_failure: options.on_sync_failure,
            setup: hooks(&found.setup, options.setup_timeout_seconds, options.on_setup_failure),
            start: hooks(&found.start, options.start_timeout_seconds, options.on_start_failure),
            ..Boot::default()
        },
        services: source.services.iter().map(|service| believing(service, authority)).collect(),
        state_dir: STATE_DIR.into(),
    }
}

/// An SSH server that believes the authority; other services as they are.
fn believing(service: &Service, authority: Option<&str>) -> Service {
    let mut service = service.clone();
    if let (Kind::Ssh(ssh), Some(authority)) = (&mut service.kind, authority) {
        ssh.certificate_authorities.push(authority.to_owned());
    }
    service
}
