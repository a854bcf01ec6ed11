//! The checks of a create from a repository that need neither network nor disk.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_api::lifecycle::{
    AgentRequest, BootRequest, CreateSandboxRequest, ImageBuildRequest, RepositoryRequest, ServiceRequest,
};
use sandglass_builds::key::TagName;
use sandglass_repository::{Code as RepositoryCode, Credential, Source, SpecError, recipe::RecipeRequest};
use sandglass_sandbox::{
    source::{BootOptions, BuildMatch, BuildPolicy, Declared, ImageBuild, Lease, RepositorySource},
    workspace::{CodeServer, Command, Forwarding, Kind, OnFailure, Probe, RestartPolicy, Service, Ssh},
};
use serde_json::Value;

use crate::{
    builds::check_platform,
    http::error::{ApiError, ApiResult, Code},
    ingress::AGENT_PORT,
    workspace::{Confidential, Images, SecretFiles, secrets},
};

/// Where the editor and the SSH server listen when the request does not say.
const CODE_SERVER_PORT: u16 = 8443;
const SSH_PORT: u16 = 2222;
/// Names and values together.
const MOST_SECRET_BYTES: usize = 256 << 10;
const MOST_RECIPE_BYTES: usize = 64 << 10;
/// Bytes of all services as they are kept.
const MOST_SERVICE_BYTES: usize = 128 << 10;
/// What only the server and the agent set.
const RESERVED: [&str; 3] = ["SANDGLASS_", "OPENSANDBOX_", "EXECD_"];
/// A setting of the egress enforcer, which has rules of its own.
const EGRESS: &str = "OPENSANDBOX_EGRESS_";

/// What of a request is about its repository.
#[derive(Debug, Clone)]
pub struct Asked {
    repository: RepositoryRequest,
    image_build: ImageBuildRequest,
    boot: BootRequest,
    services: Vec<ServiceRequest>,
    agent: AgentRequest,
    ttl_seconds: Option<u64>,
    env: Vec<String>,
    platform: Option<String>,
}

impl Asked {
    /// `None` for a request without a repository.
    pub fn of(request: &CreateSandboxRequest) -> Option<Self> {
        Some(Self {
            repository: request.repository.clone()?,
            image_build: request.image_build.clone().unwrap_or_default(),
            boot: request.boot.clone().unwrap_or_default(),
            services: request.services.clone().unwrap_or_default(),
            agent: request.agent.clone().unwrap_or_default(),
            ttl_seconds: request.timeout.and_then(|seconds| u64::try_from(seconds).ok()),
            env: request.env.iter().flatten().map(|(name, _)| name.clone()).collect(),
            platform: request.platform.as_ref().map(|p| format!("{}/{}", p.os.trim(), p.arch.trim())),
        })
    }

    /// With the secrets that it names instead of their names. Blocking.
    ///
    /// # Errors
    /// 400 that names the field, when there is no such secret.
    pub(crate) fn with_secrets(mut self, files: SecretFiles<'_>, tenant: Option<&str>) -> ApiResult<Self> {
        let named = serde_json::to_value(&self.repository).map_err(|_| ApiError::internal())?;
        let known = secrets::resolved(named, files, tenant)
            .map_err(|error| ApiError::invalid_parameter(error.to_string()))?;
        self.repository = serde_json::from_value(known).map_err(|_| ApiError::internal())?;
        Ok(self)
    }

    /// Checks everything, and divides what may be stored from what may not.
    ///
    /// # Errors
    /// The first rule that is broken, with its code.
    pub fn check(&self, images: &dyn Images) -> ApiResult<(RepositorySource, Confidential)> {
        // Also where the runtime runs others: what a build runs, runs here.
        check_platform(self.platform.as_deref()).map_err(ApiError::invalid_parameter)?;
        let confidential = Confidential {
            repository: serde_json::to_value(&self.repository).map_err(|_| ApiError::internal())?,
            build_secrets: self.image_build.secrets.clone(),
        };
        let spec = confidential
            .repository()
            .map_err(|_| ApiError::invalid_parameter("repository: it is not understood"))?;
        let source = images.check(&spec).map_err(|e| refused(&e))?;
        check_credentials(&source)?;
        check_environment(&self.env)?;
        let image_build = self.image_build()?;
        if let (Some(asked), Some(most)) = (image_build.timeout_seconds, images.longest_build())
            && asked > most.as_secs()
        {
            let message =
                format!("imageBuild.timeoutSeconds must be at most {} on this server", most.as_secs());
            return Err(ApiError::invalid_parameter(message));
        }
        let services = services(&self.services)?;
        Ok((
            RepositorySource {
                namespace: None,
                repositories: source.members.iter().map(declared).collect(),
                depth: source.depth,
                submodules: source.submodules,
                lfs: source.lfs,
                image_build,
                boot: boot(&self.boot),
                services,
                lease: lease(&self.agent)?,
                ttl_seconds: self.ttl_seconds,
                found: None,
                rejected: Vec::new(),
            },
            confidential,
        ))
    }

    fn image_build(&self) -> ApiResult<ImageBuild> {
        let asked = &self.image_build;
        let secrets: usize = asked.secrets.iter().map(|(name, value)| name.len() + value.len()).sum();
        if secrets > MOST_SECRET_BYTES {
            return Err(ApiError::invalid_parameter("imageBuild.secrets: they are larger than 256 KiB"));
        }
        if let Some(name) = asked.secrets.keys().find(|name| !is_variable(name)) {
            let cut: String = name.chars().filter(|c| c.is_ascii_graphic()).take(32).collect();
            return Err(ApiError::invalid_parameter(format!(
                "imageBuild.secrets: {cut} cannot be a variable"
            )));
        }
        if asked.tag.as_deref().is_some_and(|tag| tag.parse::<TagName>().is_err()) {
            return Err(ApiError::invalid_parameter(
                "imageBuild.tag must be up to 128 letters, digits, `_`, `.` and `-`",
            ));
        }
        let recipe = asked.recipe.clone().unwrap_or(Value::Null);
        if !recipe.is_null() {
            let small = recipe.to_string().len() <= MOST_RECIPE_BYTES;
            let parsed = serde_json::from_value::<RecipeRequest>(recipe.clone());
            if !small || parsed.is_err() {
                return Err(ApiError::invalid_parameter(
                    "imageBuild.recipe must be {\"type\": …} of auto, dockerfile, devcontainer, hooks or none, with its fields",
                ));
            }
        }
        let auto = recipe.get("type").is_some_and(|kind| kind == "auto");
        Ok(ImageBuild {
            policy: asked.policy.as_deref().map(word).transpose()?.unwrap_or(BuildPolicy::IfMissing),
            fit: asked.fit.as_deref().map(word).transpose()?.unwrap_or(BuildMatch::Compatible),
            tag: asked.tag.clone(),
            recipe: if auto { Value::Null } else { recipe },
            timeout_seconds: asked.timeout_seconds.and_then(|seconds| u64::try_from(seconds).ok()),
        })
    }
}

/// A word that was checked when the body was read.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> ApiResult<T> {
    serde_json::from_value(text.into()).map_err(|_| ApiError::internal())
}

fn refused(error: &SpecError) -> ApiError {
    let code = match error.code {
        RepositoryCode::InvalidUrl => Code::RepositoryInvalidUrl,
        RepositoryCode::InvalidRef => Code::RepositoryInvalidRef,
        RepositoryCode::InvalidPath => Code::RepositoryInvalidPath,
        RepositoryCode::HostNotAllowed => Code::RepositoryHostNotAllowed,
        RepositoryCode::InvalidParameter => Code::InvalidParameter,
    };
    ApiError::new(code, error.to_string())
}

fn check_credentials(source: &Source) -> ApiResult<()> {
    if source.members.iter().any(|m| matches!(m.credential, Some(Credential::SecretRef { .. }))) {
        return Err(ApiError::invalid_parameter(
            "repository.credential.secretRef: this server keeps no secrets by name; send the token",
        ));
    }
    Ok(())
}

fn is_variable(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn check_environment(names: &[String]) -> ApiResult<()> {
    if names.iter().any(|name| !is_variable(name)) {
        return Err(ApiError::invalid_parameter(
            "env: names are letters, digits and `_`, and begin with no digit",
        ));
    }
    let reserved =
        |name: &String| RESERVED.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with(EGRESS);
    if let Some(name) = names.iter().find(|name| reserved(name)) {
        let cut: String = name.chars().take(64).collect();
        return Err(ApiError::invalid_parameter(format!("env: {cut} is reserved")));
    }
    Ok(())
}

fn declared(member: &sandglass_repository::Member) -> Declared {
    let reference = Some(member.reference.to_string());
    Declared {
        url: member.url.to_string(),
        reference: reference.filter(|_| member.reference != sandglass_repository::Reference::Head),
        path: member.path.to_string(),
        credential: matches!(member.credential, Some(Credential::Token { .. } | Credential::SshKey { .. })),
    }
}

fn boot(asked: &BootRequest) -> BootOptions {
    let outcome = |word: &Option<String>| {
        word.as_deref().map(|word| if word == "warn" { OnFailure::Warn } else { OnFailure::Fail })
    };
    let seconds = |asked: Option<i64>| asked.and_then(|seconds| u64::try_from(seconds).ok());
    BootOptions {
        on_sync_failure: outcome(&asked.on_sync_failure),
        on_setup_failure: outcome(&asked.on_setup_failure),
        on_start_failure: outcome(&asked.on_start_failure),
        setup_timeout_seconds: seconds(asked.setup_timeout_seconds),
        start_timeout_seconds: seconds(asked.start_timeout_seconds),
    }
}

fn lease(asked: &AgentRequest) -> ApiResult<Lease> {
    let seconds = |asked: Option<i64>| asked.and_then(|seconds| u64::try_from(seconds).ok());
    let usual = Lease::default();
    let interval = seconds(asked.heartbeat_interval_seconds).unwrap_or(usual.heartbeat_interval_seconds);
    let timeout = seconds(asked.heartbeat_timeout_seconds)
        .unwrap_or_else(|| usual.heartbeat_timeout_seconds.max(interval * 3));
    if timeout <= interval {
        return Err(ApiError::invalid_parameter(
            "agent.heartbeatTimeoutSeconds must be more than agent.heartbeatIntervalSeconds",
        ));
    }
    Ok(Lease { heartbeat_interval_seconds: interval, heartbeat_timeout_seconds: timeout })
}

fn services(asked: &[ServiceRequest]) -> ApiResult<Vec<Service>> {
    let mut names = BTreeSet::new();
    let mut ports = BTreeMap::from([(AGENT_PORT, "the agent's API".to_owned())]);
    let mut all = Vec::new();
    for (index, asked) in asked.iter().enumerate() {
        let at = format!("services[{index}]");
        let service = service(&at, asked)?;
        if service.name == crate::workspace::BRIDGE || !names.insert(service.name.clone()) {
            return Err(ApiError::invalid_parameter(format!("{at}.name is taken")));
        }
        if let Some(port) = service.port
            && let Some(taken) = ports.insert(port, format!("service {}", service.name))
        {
            let message = format!("{at}.port {port} is that of {taken} already");
            return Err(ApiError::new(Code::ServicePortConflict, message));
        }
        all.push(service);
    }
    if serde_json::to_vec(&all).map_or(0, |bytes| bytes.len()) > MOST_SERVICE_BYTES {
        return Err(ApiError::invalid_parameter("services: they are larger than 128 KiB"));
    }
    Ok(all)
}

/// The types of keys that the SSH server of a sandbox takes.
const KEY_TYPES: [&str; 6] = [
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
];

/// A line as in `authorized_keys`, options before the type allowed. What the key itself is, the server in the sandbox finds out.
fn is_key(line: &str) -> bool {
    let mut words = line.split_whitespace().skip_while(|word| !KEY_TYPES.contains(word));
    !line.contains(['\n', '\r'])
        && words.next().is_some()
        && words.next().is_some_and(|key| key.starts_with("AAAA"))
}

fn service(at: &str, asked: &ServiceRequest) -> ApiResult<Service> {
    let wrong = |what: &str| Err(ApiError::invalid_parameter(format!("{at}.{what}")));
    if !is_service_name(&asked.name) {
        return wrong("name must be of 1 to 63 lower-case letters, digits and inner hyphens");
    }
    let foreign = |given: bool, field: &str| if given { wrong(field).map(drop) } else { Ok(()) };
    let custom = !matches!(asked.name.as_str(), "code-server" | "ssh" | "terminal");
    foreign(!custom && asked.command.is_some(), "command is for services with a name of your own")?;
    foreign(asked.name != "ssh" && !asked.authorized_keys.is_empty(), "authorizedKeys is for ssh")?;
    if !asked.authorized_keys.iter().all(|line| is_key(line)) {
        return wrong(
            "authorizedKeys must be lines with an ed25519 or ecdsa public key; RSA is not accepted",
        );
    }
    foreign(asked.name != "ssh" && asked.forwarding.is_some(), "forwarding is for ssh")?;
    foreign(asked.name != "code-server" && asked.folder.is_some(), "folder is for code-server")?;
    let port = asked.port.and_then(|port| u16::try_from(port).ok());
    let (kind, port) = match asked.name.as_str() {
        "code-server" => {
            let folder = asked.folder.clone().map(Into::into);
            (Kind::CodeServer(CodeServer { folder, program: None }), Some(port.unwrap_or(CODE_SERVER_PORT)))
        }
        "ssh" => {
            let forwarding = asked.forwarding.as_deref().map(word::<Forwarding>).transpose()?;
            let ssh = Ssh {
                authorized_keys: asked.authorized_keys.clone(),
                certificate_authorities: Vec::new(),
                forwarding: forwarding.unwrap_or_default(),
            };
            (Kind::Ssh(ssh), Some(port.unwrap_or(SSH_PORT)))
        }
        "terminal" => (Kind::Terminal, None),
        _ => {
            let Some(command) =
                asked.command.clone().filter(|argv| argv.first().is_some_and(|p| !p.is_empty()))
            else {
                return wrong("command must name a program");
            };
            if asked.env.keys().any(|name| !is_variable(name)) {
                return wrong("env has a name that cannot be a variable");
            }
            let nul = |text: &String| text.contains('\0');
            if command.iter().any(nul) || asked.env.values().any(nul) {
                return wrong("command and env must not contain NUL");
            }
            let is_clean = |path: &String| {
                path.starts_with('/')
                    && !path.contains(char::is_control)
                    && !path.split('/').any(|part| part == "..")
            };
            if !asked.cwd.as_ref().is_none_or(is_clean) {
                return wrong("cwd must be an absolute path without `..` and control characters");
            }
            let run = Command {
                command,
                env: asked.env.clone(),
                cwd: asked.cwd.clone().map(Into::into),
                user: asked.user.clone(),
            };
            (Kind::Custom(run), port)
        }
    };
    let probe: Option<Probe> = match &asked.probe {
        None => None,
        Some(probe) => match serde_json::from_value::<Probe>(probe.clone()) {
            Ok(probe) if !(1..=3600).contains(&probe.interval_seconds) => {
                return wrong("probe.intervalSeconds must be between 1 and 3600");
            }
            Ok(probe) if !(1..=300).contains(&probe.timeout_seconds) => {
                return wrong("probe.timeoutSeconds must be between 1 and 300");
            }
            Ok(probe) if !(1..=100).contains(&probe.threshold) => {
                return wrong("probe.threshold must be between 1 and 100");
            }
            Ok(probe) => Some(probe),
            Err(_) => return wrong("probe must be {\"type\": \"tcp\" | \"http\" | \"exec\", …}"),
        },
    };
    let restart = asked.restart.as_deref().map(word::<RestartPolicy>).transpose()?;
    Ok(Service {
        name: asked.name.clone(),
        kind,
        port,
        probe,
        restart: restart.unwrap_or_default(),
        required: asked.required,
        enabled: asked.enabled.unwrap_or(true),
        ready_seconds: 60,
        grace_seconds: 10,
    })
}

fn is_service_name(name: &str) -> bool {
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = name.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(|b| edge(b) || *b == b'-')
        && bytes.first().is_some_and(edge)
        && bytes.last().is_some_and(edge)
}

#[cfg(test)]
#[path = "repository_tests.rs"]
mod tests;
