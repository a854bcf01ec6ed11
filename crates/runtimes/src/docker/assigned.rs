//! Boxes that waited in a pool and are sandboxes now: their labels cannot change, so a file says what they are.
//!
//! `<state_dir>/assigned/<id>.json` is the record that the labels would hold. Written after the agent was told, so that as long as there is
//! no file everything is done again, and the agent answers the same assignment like the first time.

use std::{
    collections::HashSet,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use sandglass_sandbox::{
    SandboxId,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Observation, RuntimeError, StartPlan},
    },
    spec::Entrypoint,
};
use tracing::warn;

use super::{
    Shared,
    errors::failed,
    image,
    labels::{self, Parsed, Record},
    side_facts::replace,
};
use crate::assignment::Assignment;

/// A list may have been taken just before a box was made.
const OLD: Duration = Duration::from_secs(3600);

/// The directory of the files.
#[derive(Debug, Clone)]
pub(super) struct Assigned {
    dir: PathBuf,
}

impl Assigned {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("assigned") }
    }

    fn file(&self, id: SandboxId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn read(&self, id: SandboxId) -> Option<Record> {
        let text = fs::read(self.file(id)).ok()?;
        let record = serde_json::from_slice::<Record>(&text);
        let record = record
            .inspect_err(|e| warn!(sandbox = %id, error = %e, "what it was assigned to cannot be read"));
        record.ok().filter(|record| record.id == id)
    }

    fn write(&self, record: &Record) -> io::Result<()> {
        replace(&self.file(record.id), &serde_json::to_value(record)?)
    }

    /// Forgets a box. None known is success.
    pub(super) fn remove(&self, id: SandboxId) -> io::Result<()> {
        match fs::remove_file(self.file(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// What the labels of a box say, or what it was assigned to since.
    pub(super) fn over(&self, mut parsed: Parsed) -> Parsed {
        let waits = parsed.record.as_ref().is_some_and(|record| record.spec.standby.is_some());
        if let Some(record) = waits.then(|| self.read(parsed.id)).flatten() {
            parsed.facts = record.facts.clone();
            parsed.tenant.clone_from(&record.spec.tenant);
            parsed.extensions.clone_from(&record.spec.extensions);
            parsed.record = Some(record);
        }
        parsed
    }

    /// Removes the files of boxes that are certainly gone.
    pub(super) fn sweep(&self, present: &HashSet<SandboxId>) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            let written = entry.metadata().and_then(|m| m.modified()).unwrap_or_else(|_| SystemTime::now());
            let old = written.elapsed().is_ok_and(|age| age >= OLD);
            if id.is_some_and(|id| !present.contains(&id)) && old {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

impl Shared {
    /// See `Runtime::assign`.
    pub(super) async fn assign(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError> {
        let absent = || RuntimeError::new(RuntimeErrorKind::NotFound, "assign", format!("no box {id}"));
        let observed = self.observe(id).await.map_err(|e| e.during("assign"))?;
        let observed = observed.filter(|o| o.condition != Condition::Starting).ok_or_else(absent)?;
        let Some(mark) = &observed.spec.standby else { return Ok(observed) };
        let argv = match &plan.spec.entrypoint {
            Entrypoint::Image => {
                let image = self.image_facts(&plan.spec.image).await?;
                if image.id != mark.image {
                    return Err(failed("assign", "the box is of an older image of that name"));
                }
                image::entrypoint(&plan.spec.entrypoint, &image)?
            }
            Entrypoint::Command(argv) => argv.clone(),
            Entrypoint::AgentOnly => Vec::new(),
        };
        let address: Option<SocketAddr> = self.agent_address(&observed).await?;
        let address = address.ok_or_else(|| failed("assign", "the box has no address"))?;
        let assignment = Assignment {
            sandbox_id: id,
            access_token: &plan.agent_token,
            entrypoint: &argv,
            env: &plan.spec.env,
            lifecycle: &plan.spec.hooks,
        };
        assignment.deliver(address, &observed.agent_token).await?;
        let (assigned, record) = (self.assigned.clone(), labels::record(id, plan, &argv));
        let written = tokio::task::spawn_blocking(move || assigned.write(&record)).await;
        written
            .map_err(io::Error::other)
            .flatten()
            .map_err(|e| failed("assign", format!("cannot write what the box was assigned to: {e}")))?;
        let now = self.observe(id).await.map_err(|e| e.during("assign"))?;
        now.ok_or_else(absent)
    }

    /// See `Runtime::image_identity`.
    pub(super) async fn image_identity(&self, image: &str) -> Result<String, RuntimeError> {
        Ok(self.look(image).await?.map(|facts| facts.id).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::{
        Timestamp,
        pool::Standby,
        spec::{MutableFacts, Spec},
    };

    use super::*;
    use crate::docker::Made;

    fn plan(spec: Spec, token: &str) -> StartPlan {
        StartPlan {
            spec,
            facts: MutableFacts::default(),
            created_at: Timestamp::clamped(1),
            agent_token: token.to_owned(),
            route_token: String::new(),
            delivery: Vec::new(),
            root_agent: false,
        }
    }

    #[test]
    fn an_assigned_box_is_what_the_file_says_and_no_other_is() {
        let dir = tempfile::tempdir().unwrap();
        let assigned = Assigned::new(dir.path());
        let standby = Standby { pool: "p".into(), revision: "r".into(), image: String::new() };
        let waiting = Spec { standby: Some(standby), ..Spec::new("img", Entrypoint::AgentOnly) };
        let asked = plan(Spec::new("img", Entrypoint::Command(vec!["a".into()])), "late");
        let look = |id: SandboxId, spec: &Spec| {
            let labels = labels::for_create(
                id,
                &plan(spec.clone(), "early"),
                &[],
                &Made::default(),
                &Default::default(),
            );
            assigned.over(labels::parse(&labels).unwrap()).record.unwrap()
        };
        let id = SandboxId::random();
        assert_eq!(look(id, &waiting).agent_token, "early");
        assigned.write(&labels::record(id, &asked, &["a".to_owned()])).unwrap();
        let record = look(id, &waiting);
        assert_eq!((record.agent_token.as_str(), record.argv.as_slice()), ("late", &["a".to_owned()][..]));
        assert!(record.spec.standby.is_none());
        assert_eq!(look(SandboxId::random(), &waiting).agent_token, "early");
        assert_eq!(look(id, &Spec::new("img", Entrypoint::AgentOnly)).agent_token, "early");
        assigned.sweep(&HashSet::new());
        assert_eq!(look(id, &waiting).agent_token, "late", "it is not old");
        assigned.remove(id).unwrap();
        assigned.remove(id).unwrap();
        assert_eq!(look(id, &waiting).agent_token, "early");
    }
}
