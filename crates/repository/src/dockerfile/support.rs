//! What a Dockerfile asks of an engine beyond the plain instructions, so that an engine can refuse by name.

use super::instruction::{CommandLine, Copy, CopySource, Healthcheck, Instruction, NetworkMode, Run};
use super::mount::Mount;
use super::{Dockerfile, Stage};

/// Something that an engine may or may not be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// `# syntax=` of another front end than `docker/dockerfile:1`.
    ForeignSyntax,
    /// `FROM --platform`.
    Platform,
    /// `FROM scratch`: there is nothing in which a `RUN` could run.
    Scratch,
    MountBind,
    MountCache,
    MountTmpfs,
    MountSecret,
    MountSsh,
    NetworkNone,
    NetworkHost,
    SecurityInsecure,
    Device,
    /// `ADD https://…`.
    AddDownload,
    /// `ADD https://….git` or `git@…`.
    AddGit,
    /// `ADD` of what may turn out to be an address when its variables are filled in and its quotes are gone.
    AddUncertain,
    AddChecksum,
    /// `ADD` of an archive, or with `--unpack`.
    AddUnpack,
    /// `COPY --from` of an image that is not a stage.
    CopyFromImage,
    CopyLink,
    CopyParents,
    CopyExclude,
    /// `--chmod` in symbols: `u=rwX`.
    ChmodSymbolic,
    InlineFile,
    RunHeredoc,
    Healthcheck,
    Onbuild,
    StopSignal,
    Volume,
}

/// What can be done by an engine that runs each `RUN` in a sandbox of the base image and copies files itself.
///
/// What it cannot: other front ends and platforms, the caller's ssh agent, more rights or network than a sandbox has, devices. `COPY --link`
/// is a hint for caches, and volumes, signals and health checks are written down in the image.
pub const SANDBOX_ENGINE: &[Feature] = &[
    Feature::Scratch,
    Feature::MountBind,
    Feature::MountCache,
    Feature::MountTmpfs,
    Feature::MountSecret,
    Feature::AddUncertain,
    Feature::AddUnpack,
    Feature::CopyFromImage,
    Feature::CopyLink,
    Feature::InlineFile,
    Feature::RunHeredoc,
    Feature::Healthcheck,
    Feature::StopSignal,
    Feature::Volume,
];

/// One place where a feature is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    pub feature: Feature,
    pub line: usize,
    /// The instruction with the flag or word that matters: `RUN --mount=type=ssh`.
    pub what: String,
}

impl Dockerfile {
    /// Everything used, in the order of lines.
    pub fn features(&self) -> Vec<Use> {
        let mut uses = Uses { line: 1, stage: 0, uses: Vec::new() };
        if let Some(syntax) = self.syntax.as_deref().filter(|syntax| !is_known_front_end(syntax)) {
            uses.add(Feature::ForeignSyntax, format!("# syntax={syntax}"));
        }
        for (index, stage) in self.stages.iter().enumerate() {
            uses.stage = index;
            self.features_of_stage(stage, &mut uses);
        }
        uses.uses
    }

    /// What is used and not among `supported`.
    pub fn unsupported(&self, supported: &[Feature]) -> Vec<Use> {
        self.features().into_iter().filter(|used| !supported.contains(&used.feature)).collect()
    }

    fn features_of_stage(&self, stage: &Stage, uses: &mut Uses) {
        uses.line = stage.line;
        if let Some(platform) = &stage.platform {
            uses.add(Feature::Platform, format!("FROM --platform={platform}"));
        }
        if stage.image == "scratch" {
            uses.add(Feature::Scratch, "FROM scratch".into());
        }
        for located in &stage.instructions {
            uses.line = located.line;
            self.features_of(&located.instruction, uses);
        }
    }

    fn features_of(&self, instruction: &Instruction, uses: &mut Uses) {
        match instruction {
            Instruction::Run(run) => features_of_run(run, uses),
            Instruction::Copy(copy) => self.features_of_copy("COPY", copy, uses),
            Instruction::Add(copy, options) => {
                self.features_of_copy("ADD", copy, uses);
                for source in &copy.sources {
                    features_of_added(source, options.unpack, uses);
                }
                if options.checksum.is_some() {
                    uses.add(Feature::AddChecksum, "ADD --checksum".into());
                }
                if options.keep_git_dir {
                    uses.add(Feature::AddGit, "ADD --keep-git-dir".into());
                }
                if options.unpack == Some(true) {
                    uses.add(Feature::AddUnpack, "ADD --unpack".into());
                }
            }
            Instruction::Healthcheck(check) if *check != Healthcheck::None => {
                uses.add(Feature::Healthcheck, "HEALTHCHECK".into())
            }
            Instruction::Onbuild { instruction, .. } => {
                uses.add(Feature::Onbuild, format!("ONBUILD {}", instruction.keyword()));
                // Later builds do it, and later stages of this one.
                self.features_of(instruction, uses);
            }
            Instruction::StopSignal(_) => uses.add(Feature::StopSignal, "STOPSIGNAL".into()),
            Instruction::Volume(_) => uses.add(Feature::Volume, "VOLUME".into()),
            _ => {}
        }
    }

    fn features_of_copy(&self, keyword: &str, copy: &Copy, uses: &mut Uses) {
        if let Some(from) = &copy.from
            && self.earlier_stage(from, uses.stage).is_none()
        {
            uses.add(Feature::CopyFromImage, format!("{keyword} --from={from}"));
        }
        for (used, feature, flag) in [
            (copy.link, Feature::CopyLink, "--link"),
            (copy.parents, Feature::CopyParents, "--parents"),
            (!copy.exclude.is_empty(), Feature::CopyExclude, "--exclude"),
        ] {
            if used {
                uses.add(feature, format!("{keyword} {flag}"));
            }
        }
        if let Some(mode) =
            copy.chmod.as_ref().filter(|mode| mode.contains(|c: char| !c.is_digit(8)) && !mode.contains('$'))
        {
            uses.add(Feature::ChmodSymbolic, format!("{keyword} --chmod={mode}"));
        }
        if copy.sources.iter().any(|source| matches!(source, CopySource::Inline(_))) {
            uses.add(Feature::InlineFile, format!("{keyword} <<"));
        }
    }
}

struct Uses {
    line: usize,
    stage: usize,
    uses: Vec<Use>,
}

impl Uses {
    fn add(&mut self, feature: Feature, what: String) {
        self.uses.push(Use { feature, line: self.line, what });
    }
}

fn features_of_run(run: &Run, uses: &mut Uses) {
    for mount in &run.mounts {
        let feature = match mount {
            Mount::Bind { .. } => Feature::MountBind,
            Mount::Cache(_) => Feature::MountCache,
            Mount::Tmpfs { .. } => Feature::MountTmpfs,
            Mount::Secret(_) => Feature::MountSecret,
            Mount::Ssh { .. } => Feature::MountSsh,
        };
        uses.add(feature, format!("RUN --mount=type={}", mount.kind()));
    }
    match run.network {
        NetworkMode::Default => {}
        NetworkMode::None => uses.add(Feature::NetworkNone, "RUN --network=none".into()),
        NetworkMode::Host => uses.add(Feature::NetworkHost, "RUN --network=host".into()),
    }
    if let Some(security) = run.security.as_deref().filter(|security| *security != "sandbox") {
        uses.add(Feature::SecurityInsecure, format!("RUN --security={security}"));
    }
    for device in &run.devices {
        uses.add(Feature::Device, format!("RUN --device={device}"));
    }
    if !run.heredocs.is_empty() && matches!(run.command, CommandLine::Shell(_)) {
        uses.add(Feature::RunHeredoc, "RUN <<".into());
    }
}

fn features_of_added(source: &CopySource, unpack: Option<bool>, uses: &mut Uses) {
    const ARCHIVES: &[&str] =
        &[".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst"];
    let CopySource::Path(path) = source else { return };
    let remote = path.starts_with("http://") || path.starts_with("https://");
    let without_fragment = path.split('#').next().unwrap_or(path);
    let git = path.starts_with("git@")
        || path.starts_with("git://")
        || path.starts_with("ssh://")
        || without_fragment.ends_with(".git");
    if git && (remote || path.contains(':')) {
        uses.add(Feature::AddGit, format!("ADD {path}"));
    } else if remote {
        uses.add(Feature::AddDownload, format!("ADD {path}"));
    } else if may_be_address(path) {
        uses.add(Feature::AddUncertain, format!("ADD {path}"));
    }
    if !remote && !git && unpack != Some(false) && ARCHIVES.iter().any(|ending| path.ends_with(ending)) {
        uses.add(Feature::AddUnpack, format!("ADD {path}"));
    }
}

/// Whether a source can begin like an address once its variables are filled in and its quotes and escapes are gone. `app-$V.tar` cannot.
fn may_be_address(path: &str) -> bool {
    const BEGINNINGS: &[&str] = &["http://", "https://", "git://", "ssh://", "ftp://", "git@"];
    // An array that is not one to this reader may be one to another.
    if path.starts_with('[') {
        return true;
    }
    let end = path.find(['$', '"', '\'', '\\', '`']).unwrap_or(path.len());
    let (literal, is_whole) = (path[..end].to_ascii_lowercase(), end == path.len());
    BEGINNINGS.iter().any(|beginning| {
        literal.starts_with(beginning) || (!is_whole && beginning.starts_with(literal.as_str()))
    })
}

/// `docker/dockerfile:1`, `docker.io/docker/dockerfile:1.7`, with or without a digest. `-labs` variants know more than is read here.
fn is_known_front_end(syntax: &str) -> bool {
    let name = syntax.strip_prefix("docker.io/").unwrap_or(syntax);
    let name = name.split('@').next().unwrap_or(name);
    match name.strip_prefix("docker/dockerfile") {
        Some("" | ":latest") => true,
        Some(tag) => tag
            .strip_prefix(":1")
            .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_seen_through_variables_and_quotes() {
        for path in [
            "$U",
            "${S}://h/x",
            "h$X",
            "HTTP$X",
            "https://h/x",
            "HTTP://h/x",
            "'http://h/x'",
            "h\\ttp://h/x",
            "ht\"tp\"://h",
            "[\"http://h/x\",\"/y\"]",
            "git@$X",
            "`x",
        ] {
            assert!(may_be_address(path), "{path}");
        }
        for path in ["a", "app-$V.tar.gz", "./$X", "http", "src/http://x", "/$U", ".", "*.tar", "host/$X"] {
            assert!(!may_be_address(path), "{path}");
        }
    }

    #[test]
    fn what_triggers_ask_for_is_asked_for() {
        let file = Dockerfile::parse("FROM a AS q\nONBUILD ADD http://h/x /x\nONBUILD ADD $U /x\n").unwrap();
        let features: Vec<Feature> = file.features().into_iter().map(|used| used.feature).collect();
        let expected = [Feature::Onbuild, Feature::AddDownload, Feature::Onbuild, Feature::AddUncertain];
        assert_eq!(features, expected);
    }
}
