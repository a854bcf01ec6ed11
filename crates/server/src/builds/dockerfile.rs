//! Dockerfiles, one instruction after the other, each stage in a sandbox of its base.
//!
//! What an instruction asks for and cannot have was refused before anything ran. Where it pays, what costly instructions made is kept, and
//! the next build begins after the last of them whose chain is the same.

use std::collections::BTreeMap;

use sandglass_builds::{
    build::{RecipeKind, StepName},
    ports::{EngineError, Job},
};
use sandglass_repository::{
    dockerfile::{CommandLine, Copy, Dockerfile, DockerfileError, IgnoreFile, Instruction, Variables},
    recipe::Base,
};
use sandglass_sandbox::{ImageBuildId, ports::captures::RunConfig};

use super::{
    archive::bounded,
    attempt::{Attempt, OWN, Workshop, of_disk, of_runtime, user_failure},
    copy::{CopyError, Ground, fixed_part},
    engine::SandboxEngine,
    inside::FILE_MOST,
};

/// Stages of one Dockerfile; more are refused.
pub(super) const STAGES: usize = 32;

/// A stage while it is built, and afterwards.
pub(super) struct StageState {
    pub(super) workshop: Workshop,
    pub(super) variables: Variables,
    pub(super) shell: Vec<String>,
    /// Whether a `CMD` of this stage would survive an `ENTRYPOINT`.
    own_cmd: bool,
    /// Keys of the chains up to the base and after each instruction; shorter where they are not known.
    pub(super) chain: Vec<String>,
    /// Instructions whose outcome was there already.
    done: usize,
}

impl StageState {
    /// The key of everything that the stage consists of.
    pub(super) fn end(&self, instructions: usize) -> Option<&str> {
        self.chain.get(instructions).map(String::as_str)
    }
}

/// Everything that stays the same over the stages.
pub(super) struct Plan {
    pub(super) file: Dockerfile,
    pub(super) context: Ground,
    /// As the recipe names it.
    pub(super) path: String,
    /// What it was read from.
    pub(super) text: String,
    /// On this machine.
    pub(super) place: std::path::PathBuf,
}

pub(super) fn failed(error: impl std::fmt::Display) -> EngineError {
    user_failure(StepName::Build, None, error.to_string())
}

/// The image that a stage is kept as while another one starts from it.
pub(super) fn stage_image(build: ImageBuildId, attempt: u32, stage: usize) -> String {
    format!("osb-stage-{build}-{attempt}-{stage}")
}

impl SandboxEngine {
    /// Builds the recipe's Dockerfile, if it has one.
    pub(super) async fn build(&self, job: &Job, attempt: &mut Attempt) -> Result<(), EngineError> {
        let Base::Dockerfile { path, context, target, args } = attempt.recipe.base.clone() else {
            return Ok(());
        };
        let folder = attempt.folders[0].clone();
        let plan = read(&folder, path, &context).map_err(failed)?;
        let workshop = match self.builder_for(&plan) {
            Some(builder) => {
                self.build_by_engine(job, attempt, (builder, &plan), (target, args)).await.map(Some)
            }
            None => self.build_stages(job, attempt, &plan, (target, args)).await,
        }?;
        let Some(workshop) = workshop else { return Ok(()) };
        attempt.workshop = Some(workshop.clone());
        self.put_sources(job, attempt, &workshop).await?;
        // Other recipes have a step of their own for it.
        if job.plan.recipe.kind == RecipeKind::Dockerfile && !attempt.recipe.setup.is_empty() {
            self.set_up(job, attempt).await?;
        }
        Ok(())
    }

    /// Builds with a sandbox for each stage. The last one's.
    async fn build_stages(
        &self,
        job: &Job,
        attempt: &Attempt,
        plan: &Plan,
        (target, args): (Option<String>, BTreeMap<String, String>),
    ) -> Result<Option<Workshop>, EngineError> {
        let named = |error: DockerfileError| failed(format!("{}: {error}", plan.path));
        let globals = Variables::global(&plan.file, &args, &platform(&job.plan.platform)).map_err(named)?;
        let last = match &target {
            None => plan.file.stages.len() - 1,
            Some(name) => plan.file.stage_index(name).ok_or_else(|| failed("there is no such stage"))?,
        };
        if plan.file.stages.len() > STAGES {
            return Err(failed(format!("{}: more than {STAGES} stages", plan.path)));
        }
        let bases: Vec<String> = plan
            .file
            .stages
            .iter()
            .map(|stage| globals.from(stage).map(|(image, _)| image))
            .collect::<Result<_, _>>()
            .map_err(named)?;
        let mut stages: BTreeMap<usize, StageState> = BTreeMap::new();
        for index in needed(&plan.file, &bases, last) {
            let state =
                self.begin_stage(job, attempt, plan, (index, &bases[index]), (&globals, &stages)).await?;
            let done = state.done;
            stages.insert(index, state);
            for (number, located) in plan.file.stages[index].instructions.iter().enumerate().skip(done) {
                let began = self.clock.now();
                self.instruction(job, attempt, plan, (index, &mut stages), located).await?;
                if matches!(located.instruction, Instruction::Run(_))
                    && began.until(self.clock.now()) >= self.settings.layer_after
                    && let Some(state) = stages.get_mut(&index)
                {
                    self.keep_layer(job, attempt, state, number).await?;
                }
            }
        }
        let workshop = stages.remove(&last).map(|state| state.workshop);
        for (_, other) in stages {
            // Nothing is copied from it any more, and it takes memory.
            let grace = std::time::Duration::ZERO;
            self.runtime.remove(other.workshop.id, grace).await.map_err(of_runtime)?;
        }
        Ok(workshop)
    }

    async fn begin_stage(
        &self,
        job: &Job,
        attempt: &Attempt,
        plan: &Plan,
        (index, base): (usize, &str),
        (globals, stages): (&Variables, &BTreeMap<usize, StageState>),
    ) -> Result<StageState, EngineError> {
        let stage = &plan.file.stages[index];
        let line = format!("--- line {}: FROM {base} ---\n", stage.line);
        job.log.write(StepName::Build, line.as_bytes()).await;
        let chain = self.chain(job, attempt, plan, (index, base), (globals, stages)).await;
        let (done, kept) = self.longest_kept(&chain).await;
        let earlier = plan.file.earlier_stage_named(base, index);
        let image = match (kept, earlier.and_then(|earlier| Some((earlier, stages.get(&earlier)?)))) {
            (Some(kept), _) => kept,
            (None, None) => base.to_owned(),
            (None, Some((earlier, state))) => {
                let name = stage_image(job.build, job.attempt, earlier);
                let kept = self.captures.capture(state.workshop.id, &name, &state.workshop.config).await;
                kept.map_err(of_runtime)?;
                // Others may copy from it still.
                self.runtime.resume(state.workshop.id).await.map_err(of_runtime)?;
                name
            }
        };
        let mut workshop = self.open(job, index, &image).await?;
        if done == 0
            && let Some(state) = earlier.and_then(|earlier| stages.get(&earlier))
        {
            // What the earlier stage wrote was looked at by nobody yet.
            workshop.began = workshop.began.min(state.workshop.began);
        }
        let env = match (done, earlier.and_then(|earlier| stages.get(&earlier))) {
            (0, _) => workshop.config.env.clone(),
            (_, Some(state)) => state.workshop.config.env.clone(),
            (_, None) => self.base_environment(base).await?,
        };
        let shell = vec!["/bin/sh".to_owned(), "-c".to_owned()];
        let variables = globals.enter(&env.into_iter().collect());
        let mut state = StageState { variables, workshop, shell, own_cmd: false, chain, done };
        for located in &stage.instructions[..done] {
            let line =
                format!("--- line {}: {}, as before ---\n", located.line, located.instruction.keyword());
            job.log.write(StepName::Build, line.as_bytes()).await;
            let instruction = state.variables.apply(located);
            match instruction.map_err(|error| failed(format!("{}: {error}", plan.path)))? {
                Instruction::Shell(shell) => state.shell = shell,
                Instruction::Cmd(_) => state.own_cmd = true,
                // Everything else is in the image and its configuration.
                _ => {}
            }
        }
        Ok(state)
    }

    async fn instruction(
        &self,
        job: &Job,
        attempt: &Attempt,
        plan: &Plan,
        (index, stages): (usize, &mut BTreeMap<usize, StageState>),
        located: &sandglass_repository::dockerfile::Located,
    ) -> Result<(), EngineError> {
        let Some(state) = stages.get_mut(&index) else { return Ok(()) };
        let named =
            |error: DockerfileError| user_failure(StepName::Build, None, format!("{}: {error}", plan.path));
        let instruction = state.variables.apply(located).map_err(named)?;
        let line = format!("--- line {}: {} ---\n", located.line, instruction.keyword());
        job.log.write(StepName::Build, line.as_bytes()).await;
        match &instruction {
            Instruction::Run(run) => self.run_instruction(job, attempt, state, run, located.line).await?,
            Instruction::Copy(copy) | Instruction::Add(copy, _) => {
                let ground = match &copy.from {
                    None => None,
                    Some(name) => {
                        let from = plan.file.earlier_stage(name, index);
                        let from = from.and_then(|from| Some(stages.get(&from)?.workshop.clone()));
                        let from = from.ok_or_else(|| failed(format!("there is no stage {name:?}")))?;
                        Some(self.fetch(job, attempt, &from, copy).await?)
                    }
                };
                let Some(state) = stages.get(&index) else { return Ok(()) };
                let ground = ground.as_ref().map_or(&plan.context, |(ground, _)| ground);
                self.copy(job, attempt, (state, located.line), ground, copy).await?;
            }
            Instruction::Workdir(path) => {
                let place = below(&state.workshop.config.working_dir, path);
                let workshop = state.workshop.clone();
                self.quietly(job, &workshop, &["mkdir", "-p", &place]).await?;
                state.workshop.config.working_dir = place;
            }
            Instruction::Healthcheck(_) => {
                let note = "health checks are not kept: sandboxes have their own\n";
                job.log.write(StepName::Build, note.as_bytes()).await;
            }
            other => configure(state, other),
        }
        Ok(())
    }

    /// Gets what a copy means from another stage's sandbox; the folder is gone when dropped.
    async fn fetch(
        &self,
        job: &Job,
        attempt: &Attempt,
        from: &Workshop,
        copy: &Copy,
    ) -> Result<(Ground, tempfile::TempDir), EngineError> {
        let mut wanted = Vec::new();
        for source in &copy.sources {
            let sandglass_repository::dockerfile::CopySource::Path(pattern) = source else { continue };
            wanted.push(format!("./{}", fixed_part(pattern).map_err(failed)?));
        }
        let there = format!("{OWN}/copied.tar");
        let mut command = vec!["tar", "-cf", &there, "-C", "/"];
        command.extend(wanted.iter().map(String::as_str));
        self.quietly(job, from, &command).await.map_err(|error| match error {
            EngineError::Rejected(message) => failed(message),
            other => other,
        })?;
        let folder = tempfile::Builder::new().prefix("copied-").tempdir_in(attempt.scratch.path());
        let folder = folder.map_err(of_disk("make a folder"))?;
        let archive = folder.path().join("archive.tar");
        let got = self.inside.get(&from.door, &there, &archive).await;
        got.map_err(|error| EngineError::transient(error.to_string()))?;
        self.quietly(job, from, &["rm", "-f", &there]).await?;
        let root = folder.path().join("root");
        let place = root.clone();
        let unpacked = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
            std::fs::create_dir(&place)?;
            bounded(std::fs::File::open(&archive)?, FILE_MOST)?;
            let mut archive = tar::Archive::new(std::fs::File::open(archive)?);
            archive.set_preserve_permissions(true);
            archive.set_preserve_ownerships(rustix::process::geteuid().is_root());
            archive.unpack(&place)
        });
        let unpacked = unpacked.await.map_err(|error| EngineError::transient(error.to_string()))?;
        unpacked.map_err(|error| match error.kind() {
            // What the archive itself says, which the image's own `tar` wrote.
            std::io::ErrorKind::Other => failed(format!("what is copied cannot be used: {error}")),
            _ => of_disk("unpack what is copied")(error),
        })?;
        Ok((Ground { root, ignore: None }, folder))
    }

    /// Removes the images that stages were kept as.
    pub(super) async fn remove_stages(&self, build: ImageBuildId, attempt: u32) -> Result<(), EngineError> {
        for stage in 0..=STAGES {
            let name = stage_image(build, attempt, stage);
            if self.captures.find(&name).await.map_err(of_runtime)?.is_some() {
                self.captures.remove(&name).await.map_err(of_runtime)?;
            }
        }
        Ok(())
    }
}

/// Instructions that only say how the image is run.
fn configure(state: &mut StageState, instruction: &Instruction) {
    let config: &mut RunConfig = &mut state.workshop.config;
    match instruction {
        Instruction::Env(pairs) => {
            super::engine::with_environment(config, &pairs.iter().cloned().collect());
        }
        Instruction::User(user) => config.user.clone_from(user),
        Instruction::Cmd(command) => {
            config.cmd = words(&state.shell, command);
            state.own_cmd = true;
        }
        Instruction::Entrypoint(command) => {
            config.entrypoint = words(&state.shell, command);
            if !state.own_cmd {
                config.cmd.clear();
            }
        }
        Instruction::Expose(ports) => {
            for port in ports {
                let port = if port.contains('/') { port.clone() } else { format!("{port}/tcp") };
                if !config.exposed_ports.contains(&port) {
                    config.exposed_ports.push(port);
                }
            }
        }
        Instruction::Label(pairs) => config.labels.extend(pairs.iter().cloned()),
        Instruction::Maintainer(name) => {
            config.labels.insert("maintainer".to_owned(), name.clone());
        }
        Instruction::StopSignal(signal) => config.stop_signal = Some(signal.clone()),
        Instruction::Shell(shell) => state.shell.clone_from(shell),
        // Declarations are the variables' own; volumes have no meaning where every sandbox has its own files.
        _ => {}
    }
}

fn words(shell: &[String], command: &CommandLine) -> Vec<String> {
    match command {
        CommandLine::Exec(words) => words.clone(),
        CommandLine::Shell(text) => shell.iter().cloned().chain([text.clone()]).collect(),
    }
}

/// A path as the working directory has it.
pub(super) fn below(working_dir: &str, path: &str) -> String {
    if path.starts_with('/') {
        return path.to_owned();
    }
    format!("{}/{}", working_dir.trim_end_matches('/'), path.trim_start_matches("./"))
}

fn read(folder: &std::path::Path, path: String, context: &str) -> Result<Plan, CopyError> {
    // Read by name when the recipe was, so it is no link and not too large.
    let place = folder.join(&path);
    let text = std::fs::read_to_string(&place)?;
    let file = Dockerfile::parse(&text).map_err(|error| CopyError::Asked(format!("{path}: {error}")))?;
    let root = folder.join(context).canonicalize()?;
    if !root.starts_with(folder.canonicalize()?) {
        return Err(CopyError::Asked("the context leads out of the repository".into()));
    }
    let own = folder.join(format!("{path}.dockerignore"));
    let ignored = [own, root.join(".dockerignore")].into_iter().find(|file| {
        // A link could lead anywhere.
        std::fs::symlink_metadata(file).is_ok_and(|meta| meta.is_file())
    });
    let ignore = ignored.map(std::fs::read_to_string).transpose()?.map(|text| IgnoreFile::parse(&text));
    Ok(Plan { file, context: Ground { root, ignore }, path, text, place })
}

/// The stages that the last one needs, in order, itself included.
fn needed(file: &Dockerfile, bases: &[String], last: usize) -> Vec<usize> {
    let mut all = std::collections::BTreeSet::new();
    let mut waiting = vec![last];
    while let Some(index) = waiting.pop() {
        if !all.insert(index) {
            continue;
        }
        waiting.extend(file.earlier_stage_named(&bases[index], index));
        for located in &file.stages[index].instructions {
            if let Instruction::Copy(copy) | Instruction::Add(copy, _) = &located.instruction
                && let Some(from) = &copy.from
            {
                waiting.extend(file.earlier_stage(from, index));
            }
        }
    }
    all.into_iter().collect()
}

/// What the builder knows by itself.
pub(super) fn platform(platform: &str) -> BTreeMap<String, String> {
    let (os, arch) = platform.split_once('/').unwrap_or(("linux", platform));
    let mut known = BTreeMap::new();
    for side in ["TARGET", "BUILD"] {
        known.insert(format!("{side}PLATFORM"), platform.to_owned());
        known.insert(format!("{side}OS"), os.to_owned());
        known.insert(format!("{side}ARCH"), arch.to_owned());
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_target_needs_is_built() {
        let text =
            "FROM a AS base\nFROM base AS unused\nFROM base AS tools\nFROM b\nCOPY --from=tools /x /x\n";
        let file = Dockerfile::parse(text).unwrap();
        let bases: Vec<String> = file.stages.iter().map(|stage| stage.image.clone()).collect();
        assert_eq!(needed(&file, &bases, 3), [0, 2, 3]);
        assert_eq!(needed(&file, &bases, 1), [0, 1]);
    }

    #[test]
    fn paths_are_below_the_working_directory() {
        assert_eq!(below("/app", "x"), "/app/x");
        assert_eq!(below("", "./x/"), "/x/");
        assert_eq!(below("/app", "/x"), "/x");
    }
}
