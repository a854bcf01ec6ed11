//! Chains of instructions: what each stage of a Dockerfile consists of, so that what was made once is found again.

use std::{fs::File, io, path::Path};

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::dockerfile::{Copy, Instruction, Variables};
use sha2::{Digest, Sha256};

use super::{
    archive::Dress,
    attempt::{Attempt, Workshop, of_runtime},
    copy::{Ground, Wanted, pack},
    dockerfile::{Plan, StageState},
    engine::SandboxEngine,
    layers::chained,
};

/// Goes into every key; changed when what instructions make changes.
const FORMAT: &str = "1";

impl SandboxEngine {
    /// Keys of the stage's base and of the chain after each of its instructions; ends early where one is not known, and is empty where
    /// nothing is kept.
    pub(super) async fn chain(
        &self,
        job: &Job,
        attempt: &Attempt,
        plan: &Plan,
        (index, base): (usize, &str),
        (globals, stages): (&Variables, &std::collections::BTreeMap<usize, StageState>),
    ) -> Vec<String> {
        let mut chain = Vec::new();
        if self.layers.is_none() {
            return chain;
        }
        let ended = |stage: usize| stages.get(&stage)?.end(plan.file.stages[stage].instructions.len());
        let earlier = plan.file.earlier_stage_named(base, index);
        let (beginning, env) = match earlier {
            Some(earlier) => {
                let Some((end, state)) = ended(earlier).zip(stages.get(&earlier)) else { return chain };
                (end.to_owned(), state.workshop.config.env.clone())
            }
            None => {
                let Ok(Some(image)) = self.captures.find(base).await else { return chain };
                // Tenants do not share what they made.
                let tenant =
                    job.namespace.as_deref().map_or_else(String::new, |tenant| format!("of {tenant}"));
                let parts = [tenant.as_str(), &job.plan.platform, &image.digest];
                (chained(FORMAT, &parts), image.config.env)
            }
        };
        let mut variables = globals.enter(&env.into_iter().collect());
        chain.push(beginning);
        for located in &plan.file.stages[index].instructions {
            // What is wrong with it is said when its turn comes.
            let Ok(instruction) = variables.apply(located) else { break };
            let more = match &instruction {
                Instruction::Run(_) => Some(format!("{:?}", variables.run_environment())),
                Instruction::Copy(copy) | Instruction::Add(copy, _) => match &copy.from {
                    None => content(&plan.context, copy, attempt.scratch.path()).await,
                    Some(name) => plan.file.earlier_stage(name, index).and_then(ended).map(str::to_owned),
                },
                _ => Some(String::new()),
            };
            let (Some(more), Some(before)) = (more, chain.last()) else { break };
            let key = chained(before, &[&format!("{instruction:?}"), &more]);
            chain.push(key);
        }
        chain
    }

    /// The image of the longest chain that is kept, and of how many instructions it is.
    pub(super) async fn longest_kept(&self, chain: &[String]) -> (usize, Option<String>) {
        let Some(layers) = &self.layers else { return (0, None) };
        for (done, key) in chain.iter().enumerate().skip(1).rev() {
            if let Some(image) = layers.find(key).await {
                return (done, Some(image.reference));
            }
        }
        (0, None)
    }

    /// The environment of a stage's base.
    pub(super) async fn base_environment(&self, base: &str) -> Result<Vec<(String, String)>, EngineError> {
        let found = self.captures.find(base).await.map_err(of_runtime)?;
        let image = found.ok_or_else(|| EngineError::transient(format!("the image {base} is gone again")))?;
        Ok(image.config.env)
    }

    /// Keeps what the stage has come to with this instruction, and goes on in a sandbox of that, so that nothing is kept twice. Nothing is kept
    /// with something secret in it: later looks would take it for old.
    pub(super) async fn keep_layer(
        &self,
        job: &Job,
        attempt: &Attempt,
        state: &mut StageState,
        number: usize,
    ) -> Result<(), EngineError> {
        let (Some(layers), Some(key)) = (&self.layers, state.chain.get(number + 1)) else { return Ok(()) };
        let before = state.workshop.clone();
        self.purge(job, attempt, &before, StepName::Build).await?;
        let image = match layers.keep(key, before.id, &before.config, before.image_bytes).await {
            Ok(image) => image,
            Err(error) => {
                let note = format!("it is not kept for later builds: {error}\n");
                job.log.write(StepName::Build, note.as_bytes()).await;
                self.runtime.resume(before.id).await.map_err(of_runtime)?;
                return self.begin(job, &before).await;
            }
        };
        let more = attempt.more.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let opened = self.open(job, more, &image.reference).await?;
        self.runtime.remove(before.id, std::time::Duration::ZERO).await.map_err(of_runtime)?;
        state.workshop = Workshop { config: before.config, ..opened };
        Ok(())
    }
}

/// A digest of everything that a copy means, wherever it goes; `None` when that cannot be found out.
async fn content(context: &Ground, copy: &Copy, scratch: &Path) -> Option<String> {
    let (root, ignore) = (context.root.clone(), context.ignore.clone());
    let (copy, scratch) = (copy.clone(), scratch.to_owned());
    let digested = tokio::task::spawn_blocking(move || {
        let wanted =
            Wanted { copy: &copy, destination: "/".into(), is_folder: true, dress: Dress::default() };
        let packed = pack(&Ground { root, ignore }, &wanted, &scratch).ok()?;
        digest(File::open(packed.path()).ok()?).ok()
    });
    digested.await.ok()?
}

/// Of an archive without its times: a checkout has others each time.
fn digest(archive: impl io::Read) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut archive = tar::Archive::new(archive);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let header = entry.header();
        let mut about = vec![header.entry_type().as_byte()];
        about.extend(header.mode()?.to_be_bytes());
        about.extend(header.uid()?.to_be_bytes());
        about.extend(header.gid()?.to_be_bytes());
        about.extend(entry.size().to_be_bytes());
        digest.update(&about);
        for name in [Some(entry.path_bytes()), entry.link_name_bytes()].into_iter().flatten() {
            digest.update((name.len() as u64).to_be_bytes());
            digest.update(&name);
        }
        io::copy(&mut entry, &mut digest)?;
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandglass_repository::dockerfile::{CopySource, IgnoreFile};

    #[tokio::test]
    async fn a_copy_is_known_by_what_it_copies() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name);
        std::fs::create_dir(place("src")).unwrap();
        std::fs::write(place("src/a"), "1").unwrap();
        std::fs::write(place("left_out"), "1").unwrap();
        let copy =
            |source: &str| Copy { sources: vec![CopySource::Path(source.to_owned())], ..Copy::default() };
        let ground = Ground { root: dir.path().to_owned(), ignore: Some(IgnoreFile::parse("left_out\n")) };
        let first = content(&ground, &copy("."), scratch.path()).await.unwrap();
        let touched = File::options().write(true).open(place("src/a")).unwrap();
        touched.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        std::fs::write(place("left_out"), "2").unwrap();
        assert_eq!(content(&ground, &copy("."), scratch.path()).await, Some(first.clone()));
        std::fs::write(place("src/a"), "2").unwrap();
        assert_ne!(content(&ground, &copy("."), scratch.path()).await, Some(first.clone()));
        std::fs::write(place("src/a"), "1").unwrap();
        std::fs::rename(place("src/a"), place("src/b")).unwrap();
        assert_ne!(content(&ground, &copy("."), scratch.path()).await, Some(first));
        assert_eq!(content(&ground, &copy("none"), scratch.path()).await, None);
    }
}
