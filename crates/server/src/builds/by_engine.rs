//! Dockerfiles that the runtime's own engine builds, where it has a builder and the Dockerfile asks for nothing that the builder lacks.
//!
//! The engine keeps what every instruction made, so that a build repeats only what changed. What it leaves is opened as a sandbox like any
//! base image, and goes the rest of the way as every other build.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::dockerfile::{
    Dockerfile, DockerfileError as ReadError, Feature, Instruction, Variables,
};
use sandglass_sandbox::{
    ports::{
        Dockerfiles,
        dockerfiles::{DockerfileBuild, DockerfileError},
    },
    spec::{Entrypoint, Secrets, Spec},
};
use tempfile::NamedTempFile;

use super::{
    archive::{Archive, Dress},
    attempt::{Attempt, Workshop, of_disk, of_runtime, user_failure},
    dockerfile::{Plan, platform, stage_image},
    engine::{MADE_BY_BUILD, SandboxEngine},
    layers::chained,
    told,
};

const IGNORE_FILE: &str = ".dockerignore";
/// The Dockerfile of a tenant, which no repository has.
const MARKED: &str = ".sandglass.dockerfile";
/// Whose an image of the engine's builder is.
const OWNER: &str = "io.sandglass.image-build.owner";
/// No image: `FROM` of it starts with nothing.
const SCRATCH: &str = "scratch";

/// What the builders of engines do beyond the plain instructions. Not what they download themselves: that would come out of the engine's
/// network instead of a sandbox's.
pub(super) const SUPPORTED: &[Feature] = &[
    Feature::Scratch,
    Feature::AddUnpack,
    Feature::CopyFromImage,
    Feature::Healthcheck,
    Feature::Onbuild,
    Feature::StopSignal,
    Feature::Volume,
];

/// Whether an engine's builder understands all of it, and cannot understand it otherwise than it is understood here. `text` is what the file
/// was read from.
pub(super) fn is_for_engine(file: &Dockerfile, text: &str) -> bool {
    let mut instructions = file.stages.iter().flat_map(|stage| &stage.instructions);
    file.unsupported(SUPPORTED).is_empty()
        && !instructions.any(|located| changes_modes(&located.instruction))
        && file.is_certain(text)
}

fn changes_modes(instruction: &Instruction) -> bool {
    match instruction {
        Instruction::Copy(copy) | Instruction::Add(copy, _) => copy.chmod.is_some(),
        Instruction::Onbuild { instruction, .. } => changes_modes(instruction),
        _ => false,
    }
}

/// The images that stages start from, by the numbers of the stages.
///
/// # Errors
/// A variable cannot be expanded.
pub(super) fn starts(file: &Dockerfile, globals: &Variables) -> Result<Vec<(usize, String)>, ReadError> {
    let mut starts = Vec::new();
    for (index, stage) in file.stages.iter().enumerate() {
        let (image, _) = globals.from(stage)?;
        if image != SCRATCH && file.earlier_stage_named(&image, index).is_none() {
            starts.push((index, image));
        }
    }
    Ok(starts)
}

/// What keeps the engine's builder from a Dockerfile: what the image that a stage starts from has done first, which no text of the Dockerfile
/// shows.
pub(super) fn refused_trigger<'t>(
    file: &Dockerfile,
    stage: usize,
    triggers: &'t [String],
) -> Option<&'t str> {
    let is_fine = |trigger: &String| {
        let text = format!("FROM {SCRATCH}\nONBUILD {trigger}\n");
        let Ok(read) = Dockerfile::parse(&text) else { return false };
        // Whose an image is that it copies from, nobody has asked.
        let foreign = |image: &String| file.earlier_stage(image, stage).is_none();
        !trigger.contains(['\n', '\r']) && is_for_engine(&read, &text) && !copied(&read).iter().any(foreign)
    };
    triggers.iter().find(|trigger| !is_fine(trigger)).map(String::as_str)
}

/// The images that files are copied from, each once, also by what is done later.
pub(super) fn copied(file: &Dockerfile) -> BTreeSet<String> {
    let mut images = BTreeSet::new();
    for (index, stage) in file.stages.iter().enumerate() {
        let from = stage.instructions.iter().filter_map(|located| copied_from(&located.instruction));
        images.extend(from.filter(|from| file.earlier_stage(from, index).is_none()).cloned());
    }
    images
}

fn copied_from(instruction: &Instruction) -> Option<&String> {
    match instruction {
        Instruction::Copy(copy) | Instruction::Add(copy, _) => copy.from.as_ref(),
        Instruction::Onbuild { instruction, .. } => copied_from(instruction),
        _ => None,
    }
}

/// The arguments with those that newer builders know by themselves, where the Dockerfile declares them.
pub(super) fn arguments(
    file: &Dockerfile,
    mut args: BTreeMap<String, String>,
    mut known: BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    for name in Variables::undeclared(file, &known) {
        known.remove(&name);
    }
    known.append(&mut args);
    known
}

/// The image that the builder makes; a stage that no Dockerfile has.
const BUILT: usize = super::dockerfile::STAGES;

impl SandboxEngine {
    /// The builder, where it can do what the plan asks for.
    pub(super) fn builder_for(&self, plan: &Plan) -> Option<&dyn Dockerfiles> {
        let builder = self.dockerfiles.as_deref()?;
        (is_for_engine(&plan.file, &plan.text) && in_context(plan).is_some()).then_some(builder)
    }

    pub(super) async fn build_by_engine(
        &self,
        job: &Job,
        attempt: &Attempt,
        (builder, plan): (&dyn Dockerfiles, &Plan),
        (target, args): (Option<String>, BTreeMap<String, String>),
    ) -> Result<Workshop, EngineError> {
        let dockerfile = in_context(plan).ok_or_else(|| {
            user_failure(StepName::Build, None, "the Dockerfile is not in its context".to_owned())
        })?;
        let args = arguments(&plan.file, args, platform(&job.plan.platform));
        let named = |error: ReadError| user_failure(StepName::Build, None, format!("{}: {error}", plan.path));
        let globals = Variables::global(&plan.file, &args, &BTreeMap::new()).map_err(named)?;
        let triggered =
            self.check_triggers(job, builder, plan, &starts(&plan.file, &globals).map_err(named)?).await?;
        let owner = job.namespace.as_deref().map(|tenant| chained(OWNER, &[&self.settings.builder, tenant]));
        let images = images(&plan.file, &globals).map_err(named)?;
        let written = written_out(&plan.file, &plan.text, &images, owner.as_deref());
        let (root, ignore) = (plan.context.root.clone(), plan.context.ignore.clone());
        let scratch = attempt.scratch.path().to_owned();
        // What base images have done first comes before any mark.
        let fresh = triggered && owner.is_some();
        let named = if written.is_some() { PathBuf::from(MARKED) } else { dockerfile };
        let at = named.clone();
        let packed = tokio::task::spawn_blocking(move || {
            let ground = super::copy::Ground { root, ignore };
            match written {
                Some(text) => pack_marked(&ground, &text, &scratch),
                None => pack(&ground, &at, &scratch),
            }
        });
        let packed = packed.await.map_err(|error| EngineError::transient(error.to_string()))?;
        let context = packed.map_err(of_disk("pack the build context"))?;
        let wanted = DockerfileBuild {
            name: stage_image(job.build, job.attempt, BUILT),
            context: context.path().to_owned(),
            dockerfile: named.to_string_lossy().into_owned(),
            target,
            args,
            labels: BTreeMap::from([(MADE_BY_BUILD.to_owned(), job.build.to_string())]),
            platform: None,
            limits: self.settings.limits,
            fresh,
        };
        let (told, writing) = told::into_log(&job.log, StepName::Build);
        let building = async {
            let output = move |line: &str| told.line(line);
            // The writer ends with the sender.
            builder.build(&wanted, &output).await
        };
        let (built, ()) = self.uncancelled(job, async { Ok(tokio::join!(building, writing)) }).await?;
        match built {
            Ok(()) => self.open(job, 0, &wanted.name).await,
            Err(DockerfileError::Instruction { exit_code, message }) => {
                let message = format!("{}: {message}", plan.path);
                Err(user_failure(StepName::Build, exit_code, message))
            }
            Err(DockerfileError::Engine(error)) => Err(of_runtime(error)),
        }
    }

    /// Looks at what base images have done first, as they are now: their names may mean other images than when the build was asked for.
    /// Whether there is anything.
    async fn check_triggers(
        &self,
        job: &Job,
        builder: &dyn Dockerfiles,
        plan: &Plan,
        starts: &[(usize, String)],
    ) -> Result<bool, EngineError> {
        let mut any = false;
        for (stage, image) in starts {
            let spec = Spec::new(image, Entrypoint::AgentOnly);
            let triggers = self.uncancelled(job, async {
                // The builder would fetch it by itself, and nobody would have looked.
                self.runtime.prepare(&spec, &Secrets::default(), &|_| {}).await.map_err(of_runtime)?;
                builder.triggers(image).await.map_err(of_runtime)
            });
            let triggers = triggers.await?;
            any |= !triggers.is_empty();
            if let Some(trigger) = refused_trigger(&plan.file, *stage, &triggers) {
                return Err(user_failure(StepName::Build, None, trigger_refusal(image, trigger)));
            }
        }
        Ok(any)
    }
}

/// In words for whoever wrote the Dockerfile.
pub(super) fn trigger_refusal(image: &str, trigger: &str) -> String {
    let shown: String = trigger.chars().take(80).collect();
    format!(
        "the base image {image} has `ONBUILD {shown}` done first, which is not supported: it may not download, nor copy from images"
    )
}

/// The Dockerfile's path in the context; `None` when it lies elsewhere, where the builder does not see it.
fn in_context(plan: &Plan) -> Option<PathBuf> {
    below(&plan.place, &plan.context.root)
}

/// A path below a folder, links followed.
pub(super) fn below(file: &Path, folder: &Path) -> Option<PathBuf> {
    let (file, folder) = (file.canonicalize().ok()?, folder.canonicalize().ok()?);
    file.strip_prefix(folder).ok().map(Path::to_owned)
}

/// The context as the ignore file leaves it. The Dockerfile and the ignore file always go along: the builder reads them.
fn pack(ground: &super::copy::Ground, dockerfile: &Path, scratch: &Path) -> std::io::Result<NamedTempFile> {
    let mut archive = Archive::begin(scratch)?;
    let keep = |below: &Path| {
        dockerfile.starts_with(below) || below == Path::new(IGNORE_FILE) || ground.keeps(below)
    };
    archive.add(&ground.root, Path::new("/"), Dress { ids: Some((0, 0)), mode: None }, &keep)?;
    archive.finish()
}

/// What every stage starts from, variables put in.
fn images(file: &Dockerfile, globals: &Variables) -> Result<Vec<String>, ReadError> {
    file.stages.iter().map(|stage| Ok(globals.from(stage)?.0)).collect()
}

/// The Dockerfile in which every `FROM` names just the image that was looked at, however a builder puts variables in, and every stage of an
/// owner's begins with a label of its own: the engine takes what an instruction made from any earlier build in which everything before it was
/// the same; between tenants, nothing is. `None` when it is as it was.
fn written_out(file: &Dockerfile, text: &str, images: &[String], owner: Option<&str>) -> Option<String> {
    if owner.is_none() && !file.stages.iter().any(|stage| stage.image.contains('$')) {
        return None;
    }
    let mut lines: Vec<String> = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        // A `FROM` that went on in the next line would not be for the engine.
        match file.stages.iter().zip(images).find(|(stage, _)| stage.line == index + 1) {
            Some((_, image)) => {
                let mut words: Vec<&str> = line.split_whitespace().collect();
                if let Some(named) = words.iter_mut().skip(1).find(|word| !word.starts_with("--")) {
                    *named = image;
                }
                lines.push(words.join(" "));
                lines.extend(owner.map(|owner| format!("LABEL {OWNER}={owner}")));
            }
            None => lines.push(line.to_owned()),
        }
    }
    Some(lines.join("\n"))
}

/// The context as the ignore file leaves it, and beside it the Dockerfile that the builder reads instead of the repository's own. The engine
/// takes out what the ignore file names before it copies anything: the file goes that way, and an ignore file that is there for it alone.
fn pack_marked(ground: &super::copy::Ground, text: &str, scratch: &Path) -> std::io::Result<NamedTempFile> {
    let mut archive = Archive::begin(scratch)?;
    let dress = Dress { ids: Some((0, 0)), mode: None };
    let ours = |below: &Path| below == Path::new(IGNORE_FILE) || below == Path::new(MARKED);
    archive.add(&ground.root, Path::new("/"), dress, &|below| !ours(below) && ground.keeps(below))?;
    let own = ground.root.join(IGNORE_FILE);
    // A link could lead anywhere.
    let is_own = std::fs::symlink_metadata(&own).is_ok_and(|meta| meta.is_file());
    let ignore = match is_own && ground.keeps(Path::new(IGNORE_FILE)) {
        true => format!("{}\n{MARKED}\n", std::fs::read_to_string(&own)?),
        false => format!("{IGNORE_FILE}\n{MARKED}\n"),
    };
    archive.text(Path::new(IGNORE_FILE), &ignore, dress)?;
    archive.text(Path::new(MARKED), text, dress)?;
    archive.finish()
}

#[cfg(test)]
mod tests {
    use sandglass_repository::dockerfile::IgnoreFile;

    use super::*;

    #[test]
    fn what_only_newer_builders_know_is_not_for_the_engine() {
        let for_engine = |text: &str| is_for_engine(&Dockerfile::parse(text).unwrap(), text);
        assert!(for_engine("FROM a\nRUN b\nCOPY c /c\nHEALTHCHECK CMD d\n"));
        assert!(for_engine("FROM a\nADD x.tar /x\nCOPY --from=b /y /y\n"));
        assert!(!for_engine("FROM a\nADD https://example.com/x.tar /x\n"));
        for newer in [
            "FROM a\nRUN --mount=type=secret,id=t b\n",
            "FROM a\nRUN --mount=type=cache,target=/c b\n",
            "FROM a\nRUN <<E\nb\nE\n",
            "FROM a\nCOPY --link b /b\n",
            "FROM a\nCOPY --chmod=755 b /b\n",
            "FROM a\nONBUILD COPY --chmod=755 b /b\n",
        ] {
            assert!(!for_engine(newer), "{newer}");
        }
    }

    #[test]
    fn the_engine_downloads_nothing() {
        let for_engine = |text: &str| is_for_engine(&Dockerfile::parse(text).unwrap(), text);
        assert!(for_engine("FROM a\nARG V=1\nADD x-$V.tar /x\nONBUILD ADD y.tar /y\n"));
        for downloads in [
            "FROM a\nADD https://example.com/x.tar /x\n",
            "FROM a\nARG U=http://h/x\nADD $U /x\n",
            "FROM a\nENV S=http\nADD ${S}://h/x /x\n",
            "FROM a\nADD \"http://h/x\" /x\n",
            "FROM a\nADD [\"$U\", \"/x\"]\n",
            "FROM a AS q\nONBUILD ADD http://h/x /x\nFROM q\nRUN true\n",
            "FROM a AS q\nONBUILD ADD $U /x\nFROM q\nRUN true\n",
        ] {
            assert!(!for_engine(downloads), "{downloads}");
        }
    }

    #[test]
    fn what_base_images_have_done_first_is_looked_at() {
        let file = Dockerfile::parse("FROM a AS tools\nFROM b\nFROM c AS later\n").unwrap();
        let refused = |trigger: &str| refused_trigger(&file, 1, &[trigger.to_owned()]).is_some();
        for fine in ["RUN npm ci", "COPY . /app", "ADD x.tar /x", "ENV A=b", "COPY --from=tools /a /a"] {
            assert!(!refused(fine), "{fine}");
        }
        for other in [
            "ADD http://h/x /x",
            "ADD $U /x",
            "COPY --from=osb-img-0-1 /a /a",
            "COPY --from=later /a /a",
            "COPY --from=1 /a /a",
            "RUN a\nADD http://h/x /x",
            "RUN --mount=type=bind,from=x a",
            "NOTHING",
        ] {
            assert!(refused(other), "{other}");
        }
    }

    #[test]
    fn images_are_seen_behind_triggers_and_numbers() {
        let text = "ARG B=x\nFROM a AS q\nONBUILD COPY --from=osb-img-0-1 /a /a\nFROM q\nCOPY --from=q /b /b\nFROM 0\nFROM $B\n";
        let file = Dockerfile::parse(text).unwrap();
        assert_eq!(copied(&file), BTreeSet::from(["osb-img-0-1".to_owned()]));
        let globals = Variables::global(&file, &BTreeMap::new(), &BTreeMap::new()).unwrap();
        let expected = [(0, "a".to_owned()), (2, "0".to_owned()), (3, "x".to_owned())];
        assert_eq!(starts(&file, &globals).unwrap(), expected);
    }

    #[test]
    fn what_newer_builders_know_by_themselves_is_told_where_it_is_declared() {
        let file = Dockerfile::parse("FROM a\nARG TARGETARCH\nARG V=1\nRUN b\n").unwrap();
        let given = BTreeMap::from([("V".to_owned(), "2".to_owned())]);
        let told = arguments(&file, given, platform("linux/arm64"));
        let expected = [("TARGETARCH", "arm64"), ("V", "2")];
        assert_eq!(told, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn the_context_is_what_the_ignore_file_leaves_and_what_the_builder_reads() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("context");
        std::fs::create_dir_all(root.join("docker")).unwrap();
        std::fs::create_dir_all(root.join("node_modules/x")).unwrap();
        for file in ["docker/Dockerfile", "docker/other", "node_modules/x/y", "main.js", ".dockerignore"] {
            std::fs::write(root.join(file), file).unwrap();
        }
        let ignore = Some(IgnoreFile::parse("docker\nnode_modules\n.dockerignore\n"));
        let ground = super::super::copy::Ground { root, ignore };
        let packed = pack(&ground, Path::new("docker/Dockerfile"), dir.path()).unwrap();
        let mut seen: Vec<String> = tar::Archive::new(std::fs::File::open(packed.path()).unwrap())
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        seen.sort();
        assert_eq!(seen, [".dockerignore", "docker", "docker/Dockerfile", "main.js"]);
    }

    #[test]
    fn what_a_tenants_stages_begin_with_is_theirs_alone() {
        let text = "ARG V=1\r\nFROM a:$V AS x\r\nRUN b\r\nfrom x";
        let file = Dockerfile::parse(text).unwrap();
        let globals = Variables::global(&file, &BTreeMap::new(), &BTreeMap::new()).unwrap();
        let images = images(&file, &globals).unwrap();
        let written = written_out(&file, text, &images, Some("0f")).unwrap();
        let expected = [
            "ARG V=1\r",
            "FROM a:1 AS x",
            "LABEL io.sandglass.image-build.owner=0f",
            "RUN b\r",
            "from x",
            "LABEL io.sandglass.image-build.owner=0f",
        ];
        assert_eq!(written.split('\n').collect::<Vec<_>>(), expected);
        assert!(is_for_engine(&Dockerfile::parse(&written).unwrap(), &written));
        assert_eq!(written_out(&file, text, &images, None).unwrap().lines().nth(1), Some(expected[1]));
        let plain = "FROM a\nRUN b\n";
        let file = Dockerfile::parse(plain).unwrap();
        assert_eq!(written_out(&file, plain, &["a".into()], None), None);
    }

    #[test]
    fn an_image_that_builders_would_read_differently_is_the_one_that_was_looked_at() {
        let given = BTreeMap::from([("HTTP_PROXY".to_owned(), "other".to_owned())]);
        for text in [
            "FROM ${HTTP_PROXY:-base}\n",
            "ARG A=$1\nARG B=${A:+base}\nFROM ${B:-other}\n",
            "ARG A=base\nARG A\nFROM ${A:-other}\n",
        ] {
            let file = Dockerfile::parse(text).unwrap();
            let globals = Variables::global(&file, &given, &BTreeMap::new()).unwrap();
            let images = images(&file, &globals).unwrap();
            let written = written_out(&file, text, &images, None).unwrap();
            let named = Dockerfile::parse(&written).unwrap().stages[0].image.clone();
            assert!(!named.contains('$') && named == images[0], "{text}: {named}");
        }
    }

    #[test]
    fn what_a_tenants_dockerfile_is_called_stays_out_of_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("context");
        std::fs::create_dir_all(&root).unwrap();
        for file in ["Dockerfile", "main.js", MARKED] {
            std::fs::write(root.join(file), file).unwrap();
        }
        let told = |ignore: Option<&str>| {
            let ignore = ignore.map(|text| {
                std::fs::write(root.join(IGNORE_FILE), text).unwrap();
                IgnoreFile::parse(text)
            });
            let ground = super::super::copy::Ground { root: root.clone(), ignore };
            let packed = pack_marked(&ground, "FROM a", dir.path()).unwrap();
            let mut archive = tar::Archive::new(std::fs::File::open(packed.path()).unwrap());
            let text = |entry: std::io::Result<tar::Entry<'_, std::fs::File>>| {
                let mut entry = entry.unwrap();
                let name = entry.path().unwrap().display().to_string();
                (name, std::io::read_to_string(&mut entry).unwrap())
            };
            archive.entries().unwrap().map(text).collect::<BTreeMap<String, String>>()
        };
        let ours = format!("{IGNORE_FILE}\n{MARKED}\n");
        let seen = told(None);
        assert_eq!((seen[MARKED].as_str(), &seen[IGNORE_FILE], seen.len()), ("FROM a", &ours, 4));
        let seen = told(Some("Dockerfile\n"));
        assert_eq!(seen[IGNORE_FILE], format!("Dockerfile\n\n{MARKED}\n"));
        assert!(!seen.contains_key("Dockerfile"));
        assert_eq!(told(Some(".*\n"))[IGNORE_FILE], ours);
    }
}
