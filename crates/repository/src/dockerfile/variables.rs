//! The variables of a stage, and instructions with them filled in.

use std::collections::BTreeMap;

use super::instruction::{Copy, CopySource, Instruction, Located};
use super::mount::Mount;
use super::words::{expand, expand_text};
use super::{Dockerfile, DockerfileError, Stage};

/// Build arguments that may be given without being declared; they reach `RUN` and stay out of the image.
pub const PREDEFINED: &[&str] = &[
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// What `$name` means at one place of a Dockerfile. Goes through a stage with its instructions.
#[derive(Debug, Clone)]
pub struct Variables {
    escape: char,
    in_stage: bool,
    /// Given with the build.
    given: BTreeMap<String, String>,
    /// Before the first `FROM`, with those of the platform; a stage has to declare what it wants of them.
    global: BTreeMap<String, String>,
    /// Declared in this stage; `None` without a value.
    args: BTreeMap<String, Option<String>>,
    env: BTreeMap<String, String>,
}

impl Variables {
    /// The variables that `FROM` lines see.
    ///
    /// `platform` are those that the builder knows by itself (`TARGETARCH`, `BUILDPLATFORM`, …).
    ///
    /// # Errors
    /// A default cannot be expanded.
    pub fn global(
        file: &Dockerfile,
        given: &BTreeMap<String, String>,
        platform: &BTreeMap<String, String>,
    ) -> Result<Self, DockerfileError> {
        let mut variables = Self {
            escape: file.escape,
            in_stage: false,
            given: given.clone(),
            global: platform.clone(),
            args: BTreeMap::new(),
            env: BTreeMap::new(),
        };
        for arg in &file.global_args {
            let value = match (given.get(&arg.name), &arg.default) {
                (Some(value), _) => value.clone(),
                (None, Some(default)) => {
                    variables.word(default).map_err(|message| DockerfileError::new(0, message))?
                }
                (None, None) => continue,
            };
            variables.global.insert(arg.name.clone(), value);
        }
        Ok(variables)
    }

    /// Given arguments that the file does not declare: a mistyped name, which is never silently ignored.
    pub fn undeclared(file: &Dockerfile, given: &BTreeMap<String, String>) -> Vec<String> {
        let in_stages = file.stages.iter().flat_map(|stage| &stage.instructions).filter_map(|located| {
            match &located.instruction {
                Instruction::Arg(declarations) => Some(declarations.as_slice()),
                _ => None,
            }
        });
        let declared: Vec<&str> = std::iter::once(file.global_args.as_slice())
            .chain(in_stages)
            .flatten()
            .map(|arg| arg.name.as_str())
            .collect();
        given
            .keys()
            .filter(|name| !declared.contains(&name.as_str()) && !PREDEFINED.contains(&name.as_str()))
            .cloned()
            .collect()
    }

    /// The image and the platform of a stage, filled in. Only for [`Variables::global`].
    ///
    /// # Errors
    /// A variable cannot be expanded, or the image's name is empty then.
    pub fn from(&self, stage: &Stage) -> Result<(String, Option<String>), DockerfileError> {
        let fail = |message: String| DockerfileError::new(stage.line, format!("FROM: {message}"));
        let image = self.word(&stage.image).map_err(fail)?;
        if image.is_empty() {
            return Err(fail(format!("`{}` is empty when its variables are filled in", stage.image)));
        }
        let platform =
            stage.platform.as_ref().map(|platform| self.word(platform)).transpose().map_err(fail)?;
        Ok((image, platform.filter(|platform| !platform.is_empty())))
    }

    /// The variables at the beginning of a stage whose base image has this environment.
    #[must_use]
    pub fn enter(&self, base_env: &BTreeMap<String, String>) -> Self {
        Self { in_stage: true, args: BTreeMap::new(), env: base_env.clone(), ..self.clone() }
    }

    /// What a `RUN` at this place finds in its environment beside the builder's own.
    pub fn run_environment(&self) -> BTreeMap<String, String> {
        let predefined =
            PREDEFINED.iter().filter_map(|name| Some(((*name).to_owned(), self.given.get(*name)?.clone())));
        let args = self.args.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
        predefined.chain(args).chain(self.env.clone()).collect()
    }

    /// What the image's environment is at this place.
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    /// Fills an instruction in, and takes in what `ENV` and `ARG` say for those after it.
    ///
    /// # Errors
    /// A variable cannot be expanded; the line is the instruction's.
    pub fn apply(&mut self, located: &Located) -> Result<Instruction, DockerfileError> {
        let keyword = located.instruction.keyword();
        self.expanded(&located.instruction)
            .map_err(|message| DockerfileError::new(located.line, format!("{keyword}: {message}")))
    }

    fn expanded(&mut self, instruction: &Instruction) -> Result<Instruction, String> {
        Ok(match instruction {
            Instruction::Arg(declarations) => {
                let mut expanded = declarations.clone();
                for arg in &mut expanded {
                    arg.default = arg.default.as_ref().map(|default| self.word(default)).transpose()?;
                    let value = self
                        .given
                        .get(&arg.name)
                        .or(arg.default.as_ref())
                        .or(self.global.get(&arg.name))
                        .cloned();
                    self.args.insert(arg.name.clone(), value);
                }
                Instruction::Arg(expanded)
            }
            Instruction::Env(pairs) => {
                // All values of one line see the environment before it.
                let expanded = self.pairs(pairs)?;
                self.env.extend(expanded.iter().cloned());
                Instruction::Env(expanded)
            }
            Instruction::Label(pairs) => Instruction::Label(self.pairs(pairs)?),
            Instruction::Copy(copy) => Instruction::Copy(self.copy(copy)?),
            Instruction::Add(copy, options) => {
                let mut options = options.clone();
                options.checksum =
                    options.checksum.as_ref().map(|checksum| self.word(checksum)).transpose()?;
                Instruction::Add(self.copy(copy)?, options)
            }
            Instruction::Expose(ports) => {
                let ports = self.words(ports)?;
                Instruction::Expose(
                    ports.iter().flat_map(|port| port.split_whitespace()).map(str::to_owned).collect(),
                )
            }
            Instruction::StopSignal(signal) => Instruction::StopSignal(self.word(signal)?),
            Instruction::User(user) => Instruction::User(self.word(user)?),
            Instruction::Volume(paths) => Instruction::Volume(self.words(paths)?),
            Instruction::Workdir(path) => Instruction::Workdir(self.word(path)?),
            Instruction::Run(run) => {
                let mut run = run.clone();
                for mount in &mut run.mounts {
                    self.mount(mount)?;
                }
                Instruction::Run(run)
            }
            // Commands are the shell's to expand, triggers the later build's.
            Instruction::Cmd(_)
            | Instruction::Entrypoint(_)
            | Instruction::Healthcheck(_)
            | Instruction::Maintainer(_)
            | Instruction::Onbuild { .. }
            | Instruction::Shell(_) => instruction.clone(),
        })
    }

    fn copy(&self, copy: &Copy) -> Result<Copy, String> {
        let mut copy = copy.clone();
        for source in &mut copy.sources {
            match source {
                CopySource::Path(path) => *path = self.word(path)?,
                CopySource::Inline(heredoc) if heredoc.expand => {
                    heredoc.content = expand_text(&heredoc.content, self.escape, &|name| self.lookup(name))?;
                }
                CopySource::Inline(_) => {}
            }
        }
        copy.destination = self.word(&copy.destination)?;
        copy.exclude = self.words(&copy.exclude)?;
        for text in [&mut copy.from, &mut copy.chown, &mut copy.chmod].into_iter().flatten() {
            *text = self.word(text)?;
        }
        Ok(copy)
    }

    fn mount(&self, mount: &mut Mount) -> Result<(), String> {
        let texts: Vec<&mut String> = match mount {
            Mount::Bind { target, source, from, .. } => {
                [Some(target), source.as_mut(), from.as_mut()].into_iter().flatten().collect()
            }
            Mount::Cache(cache) => {
                [Some(&mut cache.target), cache.id.as_mut(), cache.source.as_mut(), cache.from.as_mut()]
                    .into_iter()
                    .flatten()
                    .collect()
            }
            Mount::Tmpfs { target, .. } => vec![target],
            Mount::Secret(secret) => [Some(&mut secret.id), secret.target.as_mut(), secret.env.as_mut()]
                .into_iter()
                .flatten()
                .collect(),
            Mount::Ssh { id, target, .. } => [id.as_mut(), target.as_mut()].into_iter().flatten().collect(),
        };
        for text in texts {
            *text = self.word(text)?;
        }
        Ok(())
    }

    fn pairs(&self, pairs: &[(String, String)]) -> Result<Vec<(String, String)>, String> {
        pairs.iter().map(|(name, value)| Ok((self.word(name)?, self.word(value)?))).collect()
    }

    fn words(&self, words: &[String]) -> Result<Vec<String>, String> {
        words.iter().map(|word| self.word(word)).collect()
    }

    fn word(&self, text: &str) -> Result<String, String> {
        expand(text, self.escape, &|name| self.lookup(name))
    }

    /// The environment goes before arguments of the same name. Where no stage has begun, the global ones are seen.
    fn lookup(&self, name: &str) -> Option<String> {
        if let Some(value) = self.env.get(name) {
            return Some(value.clone());
        }
        match self.args.get(name) {
            Some(value) => value.clone(),
            None if self.in_stage => None,
            None => self.global.get(name).cloned(),
        }
    }
}
