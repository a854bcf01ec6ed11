//! Images: looked at first, pulled only when absent or made for another platform, never refreshed.
//!
//! What was learnt is kept for the create that follows, so that it need not ask again. Invariant: credentials go into the one pull they
//! were given for, and into no message.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use bollard::{
    auth::DockerCredentials,
    models::{CreateImageInfo, ImageInspect},
    query_parameters::CreateImageOptions,
};
use futures_util::StreamExt;
use sandglass_images::Reference;
use sandglass_sandbox::{
    ports::{
        RuntimeErrorKind,
        runtime::{PrepareProgress, RuntimeError},
    },
    spec::{Credentials, Platform, Secrets, Spec},
};

use super::{
    Shared, agent,
    enforcer::Enforcer,
    errors::{Failure, invalid},
    snapshot, windows,
};

/// More references than this are not remembered; forgetting costs one question.
const REMEMBERED: usize = 512;

/// What a create needs to know about its image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ImageFacts {
    /// `sha256:` and 64 digits.
    pub id: String,
    pub tags: Vec<String>,
    /// Names with digests of manifests.
    pub digests: Vec<String>,
    pub os: String,
    pub arch: String,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub labels: HashMap<String, String>,
    /// In Docker's syntax; empty for root.
    pub user: String,
}

impl From<ImageInspect> for ImageFacts {
    fn from(image: ImageInspect) -> Self {
        let config = image.config.unwrap_or_default();
        Self {
            id: image.id.unwrap_or_default(),
            tags: image.repo_tags.unwrap_or_default(),
            digests: image.repo_digests.unwrap_or_default(),
            os: image.os.unwrap_or_default().to_ascii_lowercase(),
            arch: normal_arch(&image.architecture.unwrap_or_default()),
            entrypoint: config.entrypoint.unwrap_or_default(),
            cmd: config.cmd.unwrap_or_default(),
            labels: config.labels.unwrap_or_default(),
            user: config.user.unwrap_or_default(),
        }
    }
}

/// The images that were just looked at, by reference.
#[derive(Default)]
pub(super) struct Prepared(Mutex<HashMap<String, Arc<ImageFacts>>>);

impl Prepared {
    fn remember(&self, reference: &str, facts: ImageFacts) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(reference.to_owned(), Arc::new(facts));
    }

    fn get(&self, reference: &str) -> Option<Arc<ImageFacts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(reference).cloned()
    }

    /// After the engine said that the image is gone.
    pub(super) fn forget(&self, reference: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(reference);
    }
}

type Progress<'a> = &'a (dyn Fn(PrepareProgress) + Send + Sync);

impl Shared {
    /// Makes the image of a spec present, and that of its sidecar.
    pub(super) async fn prepare(
        &self,
        spec: &Spec,
        secrets: &Secrets,
        progress: Progress<'_>,
    ) -> Result<(), RuntimeError> {
        let platform = spec.platform.as_ref().filter(|p| !windows::is_windows(p));
        let any_platform = spec.platform.is_some() && platform.is_none();
        let found = self.look(&spec.image).await?;
        if let Some(facts) = &found {
            refuse_snapshots(spec, facts)?;
        }
        let fits = match &found {
            None => false,
            Some(_) if any_platform || spec.snapshot.is_some() => true,
            Some(facts) => *facts == self.expected(platform).await?.filling(facts),
        };
        if let (Some(facts), true) = (found.clone(), fits) {
            self.images.remember(&spec.image, facts);
        } else {
            if spec.snapshot.is_some() {
                let message = "the image of the snapshot is gone";
                return Err(RuntimeError::new(RuntimeErrorKind::ImagePull, "image", message));
            }
            // An image for another platform must be replaced by name; an absent one is left to the engine's choice.
            let pin = match (platform, &found) {
                (Some(platform), _) => Some(platform.clone()),
                (None, Some(_)) => Some(self.expected(None).await?.platform()),
                (None, None) => None,
            };
            self.pull(&spec.image, secrets.registry.as_ref(), pin.as_ref(), progress).await?;
            let facts = self.look(&spec.image).await?;
            let facts =
                facts.ok_or_else(|| pull_error("the engine pulled the image and does not have it"))?;
            self.images.remember(&spec.image, facts);
        }
        if spec.egress.is_some() {
            match self.enforcer() {
                Enforcer::Own => drop(self.make_own_image().await?),
                Enforcer::Configured(image) => {
                    if self.look(image).await?.is_none() {
                        self.pull(image, None, None, progress).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The image of a create: as it was just prepared, or looked at again.
    pub(super) async fn image_facts(&self, reference: &str) -> Result<Arc<ImageFacts>, RuntimeError> {
        if let Some(facts) = self.images.get(reference) {
            return Ok(facts);
        }
        match self.look(reference).await? {
            Some(facts) => Ok(Arc::new(facts)),
            None => Err(pull_error(&format!("image {reference} was removed meanwhile"))),
        }
    }

    /// The image of that name, or of that whole id.
    pub(super) async fn look(&self, reference: &str) -> Result<Option<ImageFacts>, RuntimeError> {
        check_reference(reference)?;
        let looked = self.client.call(|docker| async move { docker.inspect_image(reference).await }).await;
        match looked {
            Ok(image) => Ok(Some(ImageFacts::from(image)).filter(|facts| is_named(reference, facts))),
            Err(e) if e.is_absent() => Ok(None),
            Err(e) => Err(of_image(&e)),
        }
    }

    pub(super) async fn expected(&self, platform: Option<&Platform>) -> Result<Expected, RuntimeError> {
        if let Some(platform) = platform {
            return Ok(Expected { os: platform.os.clone(), arch: normal_arch(&platform.arch) });
        }
        let known = self.engine_platform.get_or_try_init(|| async {
            let info = self.client.call(|docker| async move { docker.info().await }).await;
            let info = info.map_err(|e| e.during("engine"))?;
            Ok::<_, RuntimeError>(Expected {
                os: info.os_type.unwrap_or_default().to_ascii_lowercase(),
                arch: normal_arch(&info.architecture.unwrap_or_default()),
            })
        });
        known.await.cloned()
    }

    async fn pull(
        &self,
        reference: &str,
        credentials: Option<&Credentials>,
        platform: Option<&Platform>,
        progress: Progress<'_>,
    ) -> Result<(), RuntimeError> {
        let parsed: Option<Reference> = reference.parse().ok();
        let tell = |message: String| progress(PrepareProgress { phase: "pull", message });
        tell(format!("pulling {reference}"));
        let options = CreateImageOptions {
            from_image: Some(reference.to_owned()),
            tag: (!names_version(reference)).then(|| "latest".to_owned()),
            platform: platform.map_or_else(String::new, |p| format!("{}/{}", p.os, p.arch)),
            ..CreateImageOptions::default()
        };
        let login = credentials.map(|c| DockerCredentials {
            username: Some(c.username.clone()),
            password: Some(c.password.clone()),
            serveraddress: parsed.map(|r| r.registry().to_owned()),
            ..DockerCredentials::default()
        });
        let pulled = self.client.call_patiently(|docker| async move {
            let mut steps = docker.create_image(Some(options), None, login);
            while let Some(step) = steps.next().await {
                if let Some(line) = worth_telling(&step?) {
                    tell(line);
                }
            }
            Ok(())
        });
        let pulled = pulled.await.map_err(|e| of_image(&e));
        pulled.map_err(|mut e| {
            for secret in credentials.iter().flat_map(|c| [&c.password, &c.username]) {
                if secret.len() > 3 {
                    e.message = e.message.replace(secret.as_str(), "***");
                }
            }
            e.message = format!("cannot pull {reference}: {}", e.message);
            e
        })
    }
}

/// The platform an image must be made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Expected {
    os: String,
    arch: String,
}

impl Expected {
    /// The given facts on this platform; equal to them when they fit. What the image does not say fits.
    fn filling(self, facts: &ImageFacts) -> ImageFacts {
        let or = |said: &String, wanted: String| if said.is_empty() { said.clone() } else { wanted };
        ImageFacts { os: or(&facts.os, self.os), arch: or(&facts.arch, self.arch), ..facts.clone() }
    }

    pub(super) fn platform(self) -> Platform {
        Platform { os: self.os, arch: self.arch }
    }
}

fn normal_arch(arch: &str) -> String {
    match arch.to_ascii_lowercase().as_str() {
        "x86_64" | "x86-64" => "amd64".to_owned(),
        "aarch64" | "arm64/v8" => "arm64".to_owned(),
        other => other.to_owned(),
    }
}

/// References become parts of request paths, so nothing else may get there.
fn check_reference(reference: &str) -> Result<(), RuntimeError> {
    let is_id = reference
        .strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    if is_id || reference.parse::<Reference>().is_ok() {
        return Ok(());
    }
    Err(invalid("image", format!("{reference:?} is not an image reference")))
}

/// Whether the engine found the image by its name or its whole id. It also finds images by the first digits of their ids, which nobody may
/// try out.
pub(super) fn is_named(reference: &str, facts: &ImageFacts) -> bool {
    if reference == facts.id {
        return true;
    }
    let Ok(asked) = reference.parse::<Reference>() else { return false };
    facts
        .tags
        .iter()
        .chain(&facts.digests)
        .any(|name| name.parse::<Reference>().is_ok_and(|name| name == asked))
}

/// Whose snapshot it is, only the server knows, so a snapshot is started by its id.
fn refuse_snapshots(spec: &Spec, facts: &ImageFacts) -> Result<(), RuntimeError> {
    if spec.snapshot.is_none() && facts.tags.iter().any(|tag| snapshot::is_artifact(tag)) {
        return Err(invalid("image", "the image is a snapshot; start it with snapshotId"));
    }
    Ok(())
}

/// Whether a reference says which of the repository's images it means.
fn names_version(reference: &str) -> bool {
    let last = reference.rsplit('/').next().unwrap_or(reference);
    last.contains(':') || last.contains('@')
}

fn pull_error(message: &str) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::ImagePull, "image", message)
}

fn of_image(failure: &Failure) -> RuntimeError {
    let error = failure.during("image");
    let kind = match error.kind {
        kind @ (RuntimeErrorKind::Unavailable | RuntimeErrorKind::Exhausted) => kind,
        RuntimeErrorKind::Invalid if error.message.contains("invalid reference format") => {
            RuntimeErrorKind::Invalid
        }
        _ => RuntimeErrorKind::ImagePull,
    };
    RuntimeError { kind, ..error }
}

/// The milestones of a pull, without the many lines that only move a bar.
fn worth_telling(step: &CreateImageInfo) -> Option<String> {
    let status = step.status.as_deref()?;
    let milestones =
        ["Pulling from", "Pulling fs layer", "Pull complete", "Already exists", "Digest:", "Status:"];
    if !milestones.iter().any(|m| status.starts_with(m)) {
        return None;
    }
    Some(match step.id.as_deref().filter(|id| !id.is_empty()) {
        Some(id) => format!("{id}: {status}"),
        None => status.to_owned(),
    })
}

/// What runs beside the agent: the request's argument vector replaces both of the image's.
pub(super) fn entrypoint(
    wanted: &sandglass_sandbox::spec::Entrypoint,
    image: &ImageFacts,
) -> Result<Vec<String>, RuntimeError> {
    use sandglass_sandbox::spec::Entrypoint;
    match wanted {
        Entrypoint::Command(argv) => Ok(argv.clone()),
        Entrypoint::AgentOnly => Ok(Vec::new()),
        Entrypoint::Image => {
            // An image that was committed from a box has the agent, ours or another server's, as its entrypoint.
            let is_agent = image.entrypoint.first().is_some_and(|program| program.starts_with(agent::HOME));
            let entrypoint = image.entrypoint.iter().filter(|_| !is_agent);
            let argv: Vec<String> = entrypoint.chain(&image.cmd).cloned().collect();
            if argv.is_empty() {
                let message = "the image has neither entrypoint nor command; give one";
                return Err(invalid("entrypoint", message));
            }
            Ok(argv)
        }
    }
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::spec::Entrypoint;

    use super::*;

    #[test]
    fn references_that_name_no_version_mean_the_latest() {
        for (reference, named) in [
            ("busybox", false),
            ("localhost:5000/busybox", false),
            ("busybox:1", true),
            ("localhost:5000/a/b:1", true),
            ("busybox@sha256:00", true),
        ] {
            assert_eq!(names_version(reference), named, "{reference}");
        }
    }

    #[test]
    fn images_are_found_by_name_and_snapshots_by_their_id_only() {
        let facts = |tags: &[&str]| ImageFacts {
            id: format!("sha256:{}", "ab12".repeat(16)),
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            ..ImageFacts::default()
        };
        let plain = facts(&["busybox:1"]);
        assert!(is_named("busybox:1", &plain) && is_named(&plain.id, &plain));
        let digits = ["a", "ab12ab12", "sha256:a", "sha256:ab12", "ab12:latest", "library/ab12"];
        assert!(digits.iter().all(|digits| !is_named(digits, &plain)));
        assert!(!is_named("busybox", &plain) && !is_named("h:5000/busybox:1", &plain));
        assert!(is_named("docker.io/library/busybox:1", &plain), "another form of the same name");
        let by_digest = format!("h:5000/a@sha256:{}", "cd".repeat(32));
        let pulled = ImageFacts { digests: vec![by_digest.clone()], ..plain.clone() };
        assert!(is_named(&by_digest, &pulled) && !is_named(&by_digest, &plain));
        assert!(is_named("ab12", &facts(&["ab12:latest"])), "a name that looks like an id");
        let saved = facts(&["opensandbox-snapshots:7f3c3cf0-58a7-4f26-9d0a-7f7c2f5b3c11"]);
        let by_image = Spec::new("x", Entrypoint::AgentOnly);
        assert_eq!(refuse_snapshots(&by_image, &saved).unwrap_err().kind, RuntimeErrorKind::Invalid);
        assert!(refuse_snapshots(&by_image, &plain).is_ok());
        let restored = Spec { snapshot: Some(sandglass_sandbox::SnapshotId::random()), ..by_image };
        assert!(refuse_snapshots(&restored, &saved).is_ok());
    }

    #[test]
    fn only_references_reach_the_engine() {
        for good in ["busybox", "localhost:5000/a/b:1", &format!("sha256:{}", "a".repeat(64))] {
            assert!(check_reference(good).is_ok(), "{good}");
        }
        for bad in ["", "Not A Reference", "../containers", "a/../../b", "busybox?x=1"] {
            let refused = check_reference(bad).unwrap_err();
            assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Invalid, "image"), "{bad}");
        }
    }

    #[test]
    fn an_image_fits_when_what_it_says_is_what_is_expected() {
        let image =
            |os: &str, arch: &str| ImageFacts { os: os.into(), arch: arch.into(), ..ImageFacts::default() };
        let expected = Expected { os: "linux".into(), arch: "amd64".into() };
        for (facts, fits) in
            [(image("linux", "amd64"), true), (image("linux", "arm64"), false), (image("", ""), true)]
        {
            assert_eq!(expected.clone().filling(&facts) == facts, fits, "{facts:?}");
        }
        assert_eq!(
            ["x86_64", "aarch64", "arm64/v8", "riscv64"].map(normal_arch),
            ["amd64", "arm64", "arm64", "riscv64"]
        );
    }

    #[test]
    fn failures_of_a_pull_are_told_apart() {
        use RuntimeErrorKind as Kind;
        let table = [
            (
                Failure::Refused {
                    status: 404,
                    message:
                        "pull access denied for x, repository does not exist or may require 'docker login'"
                            .into(),
                },
                Kind::ImagePull,
            ),
            (
                Failure::Refused {
                    status: 500,
                    message: "Get \"https://127.0.0.1:9/v2/\": dial tcp: connection refused".into(),
                },
                Kind::ImagePull,
            ),
            (Failure::Refused { status: 400, message: "invalid reference format".into() }, Kind::Invalid),
            (Failure::Midway("write /x: no space left on device".into()), Kind::Exhausted),
            (Failure::Midway("unexpected EOF".into()), Kind::ImagePull),
            (Failure::TimedOut, Kind::Unavailable),
        ];
        for (failure, kind) in table {
            assert_eq!(of_image(&failure).kind, kind, "{failure}");
        }
    }

    #[test]
    fn the_request_replaces_the_images_entrypoint_and_command() {
        let image =
            ImageFacts { entrypoint: vec!["/e".into()], cmd: vec!["a".into()], ..ImageFacts::default() };
        assert_eq!(entrypoint(&Entrypoint::Command(vec!["x".into()]), &image).unwrap(), ["x"]);
        assert_eq!(entrypoint(&Entrypoint::Image, &image).unwrap(), ["/e", "a"]);
        assert!(entrypoint(&Entrypoint::AgentOnly, &image).unwrap().is_empty());
        for agent in ["/opt/opensandbox/bootstrap.sh", "/opt/opensandbox/execd"] {
            let committed = ImageFacts { entrypoint: vec![agent.into(), "--init".into()], ..image.clone() };
            assert_eq!(entrypoint(&Entrypoint::Image, &committed).unwrap(), ["a"]);
        }
        let none = entrypoint(&Entrypoint::Image, &ImageFacts::default()).unwrap_err();
        assert_eq!((none.kind, none.phase.as_str()), (RuntimeErrorKind::Invalid, "entrypoint"));
    }
}
