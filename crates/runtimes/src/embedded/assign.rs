//! A box that waited in a pool becomes a sandbox.
//!
//! The agent is told first, then `spec.json` is replaced: as long as the file says that the box waits, everything is done again, and the
//! agent answers the same assignment like the first time.

use std::{net::SocketAddr, sync::Arc};

use sandglass_sandbox::{
    SandboxId,
    ports::{
        RuntimeErrorKind,
        runtime::{Observation, RuntimeError, StartPlan},
    },
    spec::Entrypoint,
};
use sandglass_shim::{protocol::Request, spec::BoxSpec};
use tracing::debug;

use super::{
    Shared,
    control::ask,
    plan::{About, entrypoint, facts_for_shim, hooks, overlaid},
    records,
};
use crate::assignment::Assignment;

fn failed(message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "assign", message)
}

impl Shared {
    pub(super) async fn assign(
        self: &Arc<Self>,
        id: SandboxId,
        plan: &StartPlan,
    ) -> Result<Observation, RuntimeError> {
        let absent = || RuntimeError::new(RuntimeErrorKind::NotFound, "assign", format!("no box {id}"));
        let (spec, about, mut facts) = {
            let boxes = self.boxes.lock();
            let known = boxes.get(&id).ok_or_else(absent)?;
            (known.spec.clone(), known.about.clone(), known.facts.clone())
        };
        if about.spec.standby.is_none() {
            return self.boxes.observe(id).ok_or_else(absent);
        }
        let next_about = About {
            entrypoint: self.entrypoint_of(plan, &about.image_id).await?,
            spec: plan.spec.clone(),
            image_id: about.image_id.clone(),
            assigned_at_ms: Some(plan.created_at.as_millis()),
        };
        let next = assigned(&spec, plan, &next_about)?;
        let network = spec.network.as_ref().ok_or_else(|| failed("the box has no network"))?;
        let address = SocketAddr::from((network.address, spec.process.agent_port));
        let dir = self.dir(id);
        let revision = facts.revision + 1;
        facts = facts_for_shim(&plan.facts);
        facts.revision = revision;
        let assignment = Assignment {
            sandbox_id: id,
            access_token: &plan.agent_token,
            entrypoint: &next.process.entrypoint,
            env: &plan.spec.env,
            lifecycle: &plan.spec.hooks,
        };
        assignment.deliver(address, &spec.access_token).await?;
        // Facts first: who finds the new specification finds its facts too.
        records::write_facts(&dir, &facts)
            .and_then(|()| records::write_spec(&dir, &next))
            .map_err(|e| failed(format!("cannot write the box's records: {e}")))?;
        let observed = {
            let mut boxes = self.boxes.lock();
            let known = boxes.get_mut(&id).ok_or_else(absent)?;
            known.spec = Arc::new(next);
            known.about = Arc::new(next_about);
            known.facts = facts;
            self.boxes.observation(id, known)
        };
        // Its timer; the file is what counts.
        tokio::spawn(async move {
            if let Err(e) = ask(&dir, &Request::FactsChanged).await {
                debug!(sandbox = %id, error = %e, "the shim was not told of new facts");
            }
        });
        Ok(observed)
    }

    async fn entrypoint_of(
        self: &Arc<Self>,
        plan: &StartPlan,
        image_id: &str,
    ) -> Result<Vec<String>, RuntimeError> {
        match &plan.spec.entrypoint {
            Entrypoint::Image => {
                let image = self.find_image(&plan.spec.image).await?;
                let image = image.filter(|image| image.id.as_str() == image_id);
                let image = image.ok_or_else(|| failed("the box is of an older image of that name"))?;
                entrypoint(&plan.spec.entrypoint, &image.config)
            }
            given => entrypoint(given, &Default::default()),
        }
    }
}

/// The specification of the box as that of the sandbox: what it was made of stays.
fn assigned(waited: &BoxSpec, plan: &StartPlan, about: &About) -> Result<BoxSpec, RuntimeError> {
    let mut next = waited.clone();
    next.created_at_ms = plan.created_at.as_millis();
    next.access_token.clone_from(&plan.agent_token);
    next.route_token.clone_from(&plan.route_token);
    next.process.standby = false;
    next.process.entrypoint.clone_from(&about.entrypoint);
    next.process.env = overlaid(&waited.process.env, &plan.spec.env, &waited.id);
    next.process.lifecycle = hooks(&plan.spec)?;
    next.about = serde_json::to_value(about).map_err(|e| failed(e.to_string()))?;
    Ok(next)
}
