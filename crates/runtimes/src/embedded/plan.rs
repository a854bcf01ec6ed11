//! From what is asked for and what the image says to the shim's `spec.json`, and back.

use std::time::Duration;

use sandglass_images::{Image, ImageConfig};
use sandglass_sandbox::{
    SandboxId, Timestamp,
    policy::Action,
    ports::{
        RuntimeErrorKind,
        runtime::{Delivery, RuntimeError, StartPlan},
    },
    spec::{Entrypoint, MutableFacts, Spec, Volume, VolumeSource},
};
use sandglass_shim::spec::{self as shim, BoxSpec, ProcessSpec, RootSpec};
use serde::{Deserialize, Serialize};

use super::{Shared, network::Network};

/// The shim keeps this for us unread, so that a server with an empty database knows what every box was meant to be.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct About {
    pub spec: Spec,
    pub entrypoint: Vec<String>,
    pub image_id: String,
    /// When a box that waited in a pool became this sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned_at_ms: Option<i64>,
}

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where the agent listens in every box.
pub(super) const AGENT_PORT: u16 = 44772;

impl Shared {
    pub(super) fn box_spec(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        image: &Image,
        slot: u32,
    ) -> Result<BoxSpec, RuntimeError> {
        let entrypoint = entrypoint(&plan.spec.entrypoint, &image.config)?;
        let hostname: String = id.to_string().chars().take(12).filter(|c| *c != '-').collect();
        let about = About {
            spec: plan.spec.clone(),
            entrypoint: entrypoint.clone(),
            image_id: image.id.as_str().to_owned(),
            assigned_at_ms: None,
        };
        let limits = plan.spec.limits;
        let network = self.network.of_box(id, slot);
        let asked = plan.spec.egress.as_ref();
        let egress = asked.map(|asked| self.egress_spec(id, asked, &network, slot)).transpose()?;
        Ok(BoxSpec {
            version: shim::SPEC_VERSION,
            id: id.to_string(),
            generation: 1,
            created_at_ms: plan.created_at.as_millis(),
            root: RootSpec {
                lowers: image.layers.clone(),
                grafts: image
                    .grafts
                    .iter()
                    .map(|(lower, target)| shim::Graft { lower: lower.clone(), target: target.clone() })
                    .collect(),
                read_only: false,
                volumes: plan
                    .spec
                    .volumes
                    .iter()
                    .filter_map(bind)
                    .chain(plan.delivery.iter().map(delivered))
                    .collect(),
            },
            network: Some(network),
            egress,
            ids: Network::ids(slot),
            limits: shim::Limits {
                cpu_millis: limits.cpu_millis,
                memory_bytes: limits.memory_bytes,
                swap_bytes: limits.memory_bytes.map(|_| 0),
                pids: limits.pids.unwrap_or(self.config.pids_limit),
                ..shim::Limits::default()
            },
            process: ProcessSpec {
                agent: self.binaries.agent.clone(),
                entrypoint,
                env: environment(id, &hostname, &image.config, &plan.spec),
                cwd: non_empty(&image.config.working_dir, "/"),
                user: image.config.user.clone(),
                agent_port: AGENT_PORT,
                isolation: asks_for_sessions(&plan.spec),
                lifecycle: hooks(&plan.spec)?,
                standby: plan.spec.standby.is_some(),
            },
            hostname,
            access_token: plan.agent_token.clone(),
            route_token: plan.route_token.clone(),
            expiry_grace_ms: backstop(&plan.spec, self.config.expiry_grace),
            about: serde_json::to_value(about)
                .map_err(|e| RuntimeError::new(RuntimeErrorKind::Failed, "spec", e.to_string()))?,
        })
    }
}

/// How long after its expiry a box goes by itself, in milliseconds. One that is frozen then, or copied first, must not.
fn backstop(spec: &Spec, grace: Duration) -> u64 {
    let beyond = match spec.policies.as_ref().map(|policies| policies.on_expire) {
        None | Some(Action::Terminate) => Duration::ZERO,
        Some(Action::Snapshot) => COPIED_FIRST,
        Some(Action::Pause) => FROZEN,
    };
    u64::try_from(grace.saturating_add(beyond).as_millis()).unwrap_or(u64::MAX)
}

/// The longest that the snapshot of a box may take whose time is over.
const COPIED_FIRST: Duration = Duration::from_secs(3600);
/// What is frozen stays until somebody wants it or removes it.
const FROZEN: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Whether the box is to have isolated sessions: the extension that asks for them on every runtime.
fn asks_for_sessions(spec: &Spec) -> bool {
    spec.extensions.get("bootstrap.execd.isolation").is_some_and(|value| value == "enable")
}

/// As the agent reads them.
pub(super) fn hooks(spec: &Spec) -> Result<serde_json::Value, RuntimeError> {
    if spec.hooks.is_empty() {
        return Ok(serde_json::Value::Null);
    }
    serde_json::to_value(&spec.hooks)
        .map_err(|e| RuntimeError::new(RuntimeErrorKind::Failed, "spec", e.to_string()))
}

/// Other kinds of volumes are not admitted on this runtime.
fn bind(volume: &Volume) -> Option<shim::Bind> {
    let VolumeSource::Host { path } = &volume.source else { return None };
    Some(shim::Bind { source: path.clone(), target: volume.target.clone(), read_only: volume.read_only })
}

fn delivered(delivery: &Delivery) -> shim::Bind {
    shim::Bind {
        source: delivery.source.clone(),
        target: delivery.target.clone(),
        read_only: delivery.read_only,
    }
}

fn non_empty(text: &str, default: &str) -> String {
    if text.is_empty() { default.to_owned() } else { text.to_owned() }
}

/// What runs beside the agent: the request's argument vector replaces both of the image's.
pub(super) fn entrypoint(wanted: &Entrypoint, image: &ImageConfig) -> Result<Vec<String>, RuntimeError> {
    match wanted {
        Entrypoint::Command(argv) => Ok(argv.clone()),
        Entrypoint::AgentOnly => Ok(Vec::new()),
        Entrypoint::Image => {
            let argv: Vec<String> = image.entrypoint.iter().chain(&image.cmd).cloned().collect();
            if argv.is_empty() {
                let message = "the image has neither entrypoint nor command; give one";
                return Err(RuntimeError::new(RuntimeErrorKind::Invalid, "entrypoint", message));
            }
            Ok(argv)
        }
    }
}

/// The image's environment, overlaid by the request's, overlaid by what the sandbox is. Later wins; each name once.
fn environment(id: SandboxId, hostname: &str, image: &ImageConfig, spec: &Spec) -> Vec<(String, String)> {
    let defaults =
        [("PATH".to_owned(), DEFAULT_PATH.to_owned()), ("HOSTNAME".to_owned(), hostname.to_owned())];
    let ours = [("OPENSANDBOX_ID".to_owned(), id.to_string())];
    let mut merged: Vec<(String, String)> = Vec::new();
    for (name, value) in defaults.iter().chain(&image.env).chain(&spec.env).chain(&ours) {
        match merged.iter_mut().find(|(known, _)| known == name) {
            Some(slot) => slot.1.clone_from(value),
            None => merged.push((name.clone(), value.clone())),
        }
    }
    merged
}

/// The environment of a box that waited, overlaid by that of the request.
pub(super) fn overlaid(
    waited: &[(String, String)],
    asked: &[(String, String)],
    id: &str,
) -> Vec<(String, String)> {
    let ours = [("OPENSANDBOX_ID".to_owned(), id.to_owned())];
    let mut merged = waited.to_vec();
    for (name, value) in asked.iter().chain(&ours) {
        match merged.iter_mut().find(|(known, _)| known == name) {
            Some(slot) => slot.1.clone_from(value),
            None => merged.push((name.clone(), value.clone())),
        }
    }
    merged
}

pub(super) fn facts_for_shim(facts: &MutableFacts) -> shim::MutableFacts {
    shim::MutableFacts {
        expires_at_ms: facts.expires_at.map(Timestamp::as_millis),
        metadata: facts.metadata.clone(),
        revision: 0,
    }
}

pub(super) fn facts_of_shim(facts: &shim::MutableFacts) -> MutableFacts {
    MutableFacts { expires_at: facts.expires_at_ms.map(Timestamp::clamped), metadata: facts.metadata.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(env: &[(&str, &str)]) -> ImageConfig {
        ImageConfig {
            env: env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            entrypoint: vec!["/entry".into()],
            cmd: vec!["arg".into()],
            ..ImageConfig::default()
        }
    }

    fn spec(entrypoint: Entrypoint, env: &[(&str, &str)]) -> Spec {
        let env = env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Spec { env, ..Spec::new("x", entrypoint) }
    }

    #[test]
    fn the_request_replaces_the_images_entrypoint_and_command() {
        let config = image(&[]);
        assert_eq!(entrypoint(&Entrypoint::Command(vec!["a".into()]), &config).unwrap(), ["a"]);
        assert_eq!(entrypoint(&Entrypoint::Image, &config).unwrap(), ["/entry", "arg"]);
        assert!(entrypoint(&Entrypoint::AgentOnly, &config).unwrap().is_empty());
        let empty = entrypoint(&Entrypoint::Image, &ImageConfig::default()).unwrap_err();
        assert_eq!(empty.kind, RuntimeErrorKind::Invalid);
    }

    #[test]
    fn a_box_that_waited_gets_the_environment_of_one_that_did_not() {
        let id = SandboxId::random();
        let config = image(&[("PATH", "/image"), ("A", "image")]);
        let asked = spec(Entrypoint::AgentOnly, &[("A", "asked"), ("B", "b"), ("OPENSANDBOX_ID", "x")]);
        let waited = environment(id, "h", &config, &spec(Entrypoint::AgentOnly, &[]));
        let mut late = overlaid(&waited, &asked.env, &id.to_string());
        let mut early = environment(id, "h", &config, &asked);
        late.sort();
        early.sort();
        assert_eq!(late, early);
    }

    #[test]
    fn later_environment_wins_and_the_id_cannot_be_faked() {
        let id = SandboxId::random();
        let config = image(&[("PATH", "/image"), ("A", "image")]);
        let env = environment(
            id,
            "h",
            &config,
            &spec(Entrypoint::AgentOnly, &[("A", "asked"), ("OPENSANDBOX_ID", "x")]),
        );
        let get =
            |name: &str| env.iter().filter(|(k, _)| k == name).map(|(_, v)| v.as_str()).collect::<Vec<_>>();
        assert_eq!(get("PATH"), ["/image"]);
        assert_eq!(get("A"), ["asked"]);
        assert_eq!(get("OPENSANDBOX_ID"), [id.to_string()]);
    }
}
