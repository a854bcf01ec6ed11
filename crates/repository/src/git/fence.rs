//! What git may see and do: its environment and the configuration that it cannot be talked out of.

use std::path::Path;

use super::access::Access;
use super::{Remote, Settings};
use crate::host::HostAllowList;
use crate::url::Scheme;

/// Variables besides which git's environment is empty.
pub(super) fn environment(
    settings: &Settings,
    access: &Access,
    remote: Remote<'_>,
) -> Vec<(&'static str, String)> {
    let home = access.path().display().to_string();
    let mut environment = vec![
        ("PATH", std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".into())),
        ("HOME", home.clone()),
        ("XDG_CONFIG_HOME", home),
        ("LC_ALL", "C".into()),
        ("LANGUAGE", "C".into()),
        ("GIT_CONFIG_NOSYSTEM", "1".into()),
        ("GIT_CONFIG_SYSTEM", "/dev/null".into()),
        ("GIT_CONFIG_GLOBAL", "/dev/null".into()),
        ("GIT_ATTR_NOSYSTEM", "1".into()),
        ("GIT_TERMINAL_PROMPT", "0".into()),
        ("GIT_EDITOR", "false".into()),
        ("GIT_PAGER", "cat".into()),
        ("GIT_OPTIONAL_LOCKS", "0".into()),
        ("GIT_ALLOW_PROTOCOL", protocols(settings, remote)),
        ("GIT_PROTOCOL_FROM_USER", "0".into()),
        ("GIT_ADVICE", "0".into()),
        ("GIT_LFS_SKIP_SMUDGE", "1".into()),
    ];
    // Without a helper git asks nobody, for the prompt on the terminal is off.
    if let Some(askpass) = &access.askpass {
        environment.push(("GIT_ASKPASS", askpass.display().to_string()));
    }
    environment.push(("GIT_SSH_COMMAND", access.ssh_command.clone()));
    environment.push(("GIT_SSH_VARIANT", "ssh".into()));
    if let Some(authorities) = &settings.authorities {
        environment.push(("GIT_SSL_CAINFO", authorities.display().to_string()));
    }
    if let Some(proxy) = &settings.proxy {
        environment.push(("https_proxy", proxy.clone()));
    }
    environment
}

/// The protocols that this repository may use, its submodules included.
fn protocols(settings: &Settings, remote: Remote<'_>) -> String {
    let mut protocols = vec!["https", "ssh"];
    if settings.policy.allow_http || remote.url.scheme() == Scheme::Http {
        protocols.push("http");
    }
    // The mirror is read as files, but by a call of its own; here only what the policy opened.
    if settings.policy.allow_file {
        protocols.push("file");
    }
    protocols.join(":")
}

/// Configuration on the command line, where it wins over that of the repository.
pub(super) fn configuration(settings: &Settings) -> Vec<String> {
    // A redirect could lead to a host that is not on the list; where every host is allowed, repositories may move.
    let redirects = match settings.policy.hosts {
        HostAllowList::Any => "initial",
        HostAllowList::Only(_) => "false",
    };
    let mut arguments = Vec::new();
    for setting in [
        "core.hooksPath=/dev/null",
        "core.fsmonitor=false",
        "core.untrackedCache=false",
        "core.symlinks=true",
        "core.protectNTFS=true",
        "core.protectHFS=true",
        "core.pager=cat",
        "core.editor=false",
        // An empty helper forgets those of the repository's configuration.
        "credential.helper=",
        "credential.useHttpPath=true",
        "protocol.version=2",
        "safe.directory=*",
        "gc.auto=0",
        "maintenance.auto=false",
        "fetch.recurseSubmodules=false",
        "fetch.writeCommitGraph=false",
        "submodule.recurse=false",
        "fetch.fsckObjects=false",
        "advice.detachedHead=false",
        "init.defaultBranch=main",
        "commit.gpgSign=false",
        "log.showSignature=false",
        "http.sslVerify=true",
    ] {
        arguments.extend(["-c".to_owned(), setting.to_owned()]);
    }
    arguments.extend(["-c".to_owned(), format!("http.followRedirects={redirects}")]);
    arguments
}

/// The address of a folder on this machine, for reading a mirror.
pub(super) fn folder_url(folder: &Path) -> String {
    format!("file://{}", folder.display())
}
