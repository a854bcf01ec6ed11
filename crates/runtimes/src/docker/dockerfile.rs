//! Dockerfiles built by the engine's own builder, which keeps what each instruction made for the builds that follow.
//!
//! The builder is the classic one: it is there on every engine, and ends with the connection that asked for it. It knows no secrets and no
//! mounts. Invariant: nothing goes in but the context, the arguments and the labels.

use std::{collections::HashMap, io, path::PathBuf};

use async_trait::async_trait;
use bollard::{BollardRequest, body_try_stream, models::BuildInfo, query_parameters::BuildImageOptions};
use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use sandglass_sandbox::{
    ports::{
        Dockerfiles,
        dockerfiles::{BuildOutput, DockerfileBuild, DockerfileError},
        runtime::RuntimeError,
    },
    spec::Limits,
};
use tokio::{fs::File, io::AsyncReadExt};

use super::{DockerRuntime, client::url_safe_credentials, errors::Failure, network::Mode};

const PHASE: &str = "dockerfile";
/// Of the context at a time.
const PIECE: usize = 256 << 10;
/// Microseconds; what processors are counted by.
const PERIOD: i32 = 100_000;

#[async_trait]
impl Dockerfiles for DockerRuntime {
    async fn build(&self, wanted: &DockerfileBuild, output: &BuildOutput<'_>) -> Result<(), DockerfileError> {
        let options = options(wanted, Mode::of(&self.shared.config).name());
        let (memory, context) = (wanted.limits.memory_bytes, wanted.context.clone());
        let built = self.shared.client.call_patiently(|docker| async move {
            let docker = docker
                .with_request_modifier(move |request| with_memory(url_safe_credentials(request), memory));
            let context = body_try_stream(pieces(context));
            let mut said = docker.build_image(options, None, Some(context));
            let mut lines = Lines::default();
            while let Some(step) = said.next().await {
                lines.take(&step?, output);
            }
            lines.end(output);
            Ok(())
        });
        let built = built.await;
        self.shared.images.forget(&wanted.name);
        built.map_err(|failure| of_build(&failure))
    }

    async fn triggers(&self, image: &str) -> Result<Vec<String>, RuntimeError> {
        let client = &self.shared.client;
        let found = client.call(|docker| async move { docker.inspect_image(image).await }).await;
        let found = found.map_err(|failure| failure.during(PHASE))?;
        Ok(found.config.and_then(|config| config.on_build).unwrap_or_default())
    }
}

fn options(wanted: &DockerfileBuild, network: &str) -> BuildImageOptions {
    let map = |from: &std::collections::BTreeMap<String, String>| -> HashMap<String, String> {
        from.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let Limits { cpu_millis, .. } = wanted.limits;
    let quota = cpu_millis.and_then(|millis| i32::try_from(millis.saturating_mul(100)).ok());
    BuildImageOptions {
        dockerfile: wanted.dockerfile.clone(),
        t: Some(wanted.name.clone()),
        target: wanted.target.clone().unwrap_or_default(),
        buildargs: Some(map(&wanted.args)),
        labels: Some(map(&wanted.labels)),
        platform: wanted.platform.clone().unwrap_or_default(),
        networkmode: Some(network.to_owned()),
        cpuperiod: quota.map(|_| PERIOD),
        cpuquota: quota,
        nocache: wanted.fresh,
        rm: true,
        // Also after an instruction that failed, and after a build that was broken off.
        forcerm: true,
        ..BuildImageOptions::default()
    }
}

/// The library spells memory in too few bits for what builds need.
fn with_memory(mut request: BollardRequest, bytes: Option<u64>) -> BollardRequest {
    let Some(bytes) = bytes else { return request };
    let uri = request.uri();
    if !uri.path().ends_with("/build") {
        return request;
    }
    let more =
        format!("{uri}{}memory={bytes}&memswap={bytes}", if uri.query().is_some() { '&' } else { '?' });
    if let Ok(uri) = more.parse() {
        *request.uri_mut() = uri;
    }
    request
}

/// The context, read as it is sent.
fn pieces(path: PathBuf) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::try_unfold((path, None), |(path, open): (PathBuf, Option<File>)| async move {
        let mut file = match open {
            Some(file) => file,
            None => File::open(&path).await?,
        };
        let mut piece = Vec::with_capacity(PIECE);
        let read = (&mut file).take(PIECE as u64).read_to_end(&mut piece).await?;
        Ok((read > 0).then(|| (Bytes::from(piece), (path, Some(file)))))
    })
}

/// A longer line is told in pieces.
const LONGEST_LINE: usize = 64 << 10;

/// What the engine says, put together to lines: it comes in any pieces.
#[derive(Default)]
struct Lines {
    /// The beginning of a line.
    begun: String,
}

impl Lines {
    fn take(&mut self, step: &BuildInfo, output: &BuildOutput<'_>) {
        // Pulls tell their progress many times a second; that is nothing for a log.
        let progresses = step.progress_detail.as_ref().is_some_and(|detail| detail.total.is_some());
        match (&step.stream, &step.status) {
            (Some(text), _) => self.add(text, output),
            (None, Some(status)) if !progresses => {
                let of = step.id.as_ref().map(|id| format!("{id}: ")).unwrap_or_default();
                self.add(&format!("{of}{status}\n"), output);
            }
            (None, _) => {}
        }
    }

    fn add(&mut self, text: &str, output: &BuildOutput<'_>) {
        for part in text.split_inclusive('\n') {
            self.begun.push_str(part);
            if part.ends_with('\n') || self.begun.len() >= LONGEST_LINE {
                output(self.begun.trim_end());
                self.begun.clear();
            }
        }
    }

    fn end(self, output: &BuildOutput<'_>) {
        if !self.begun.trim().is_empty() {
            output(self.begun.trim_end());
        }
    }
}

fn of_build(failure: &Failure) -> DockerfileError {
    match failure {
        // The engine is at work by then: what it tells is about an instruction, unless it ran out of something of its own.
        Failure::Midway(message) if !is_of_engine(message) => {
            DockerfileError::Instruction { exit_code: exit_code(message), message: message.clone() }
        }
        Failure::Refused { status: 400, message } => {
            DockerfileError::Instruction { exit_code: None, message: message.clone() }
        }
        // It reports a Dockerfile that it does not understand as its own failure.
        Failure::Refused { status: 500, message } if message.to_ascii_lowercase().contains("dockerfile") => {
            DockerfileError::Instruction { exit_code: None, message: message.clone() }
        }
        other => DockerfileError::Engine(other.during(PHASE)),
    }
}

/// What the engine or a registry says when it is short of something for a while.
const PASSING: &[&str] = &[
    "no space left on device",
    "timeout",
    "timed out",
    "connection refused",
    "connection reset",
    "temporary failure",
    "no such host",
    "service unavailable",
    "internal server error",
    "toomanyrequests",
    "too many requests",
    "context canceled",
    "unexpected eof",
];

/// What the engine says when somebody removed an image, a layer or a container that the builder was at work on. An image that never was is
/// asked of its registry first, which says something else.
const VANISHED: &[&str] = &[
    "no such image",
    "unable to find image",
    "unknown parent image id",
    "unrecognized image id",
    // The image's description.
    "failed to get digest sha256:",
    "failed to get layer",
    "layer does not exist",
    "parent snapshot",
    "no such container",
    "container not found",
];

/// Failures that another attempt may not have.
fn is_of_engine(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    exit_code(&message).is_none() && PASSING.iter().chain(VANISHED).any(|text| message.contains(text))
}

/// From `The command '/bin/sh -c false' returned a non-zero code: 1`.
fn exit_code(message: &str) -> Option<i32> {
    message.rsplit_once("returned a non-zero code: ")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Mutex};

    use sandglass_sandbox::ports::RuntimeErrorKind;

    use super::*;

    fn wanted() -> DockerfileBuild {
        DockerfileBuild {
            name: "osb-stage-1".into(),
            context: "/none".into(),
            dockerfile: "docker/Dockerfile".into(),
            target: Some("web".into()),
            args: BTreeMap::from([("A".into(), "b".into())]),
            labels: BTreeMap::new(),
            platform: None,
            limits: Limits { cpu_millis: Some(1500), memory_bytes: Some(4 << 30), ..Limits::default() },
            fresh: false,
        }
    }

    #[test]
    fn what_is_asked_is_told_in_the_engines_words() {
        let told = options(&wanted(), "bridge");
        assert_eq!((told.dockerfile.as_str(), told.target.as_str()), ("docker/Dockerfile", "web"));
        assert_eq!(told.t.as_deref(), Some("osb-stage-1"));
        assert_eq!(told.buildargs.unwrap()["A"], "b");
        assert_eq!((told.cpuperiod, told.cpuquota), (Some(100_000), Some(150_000)));
        assert!(told.rm && told.forcerm && !told.nocache);
        assert!(options(&DockerfileBuild { fresh: true, ..wanted() }, "bridge").nocache);
        assert_eq!(told.networkmode.as_deref(), Some("bridge"));
    }

    #[test]
    fn only_a_build_gets_memory() {
        let request = |uri: &str| {
            let mut request = BollardRequest::new(bollard::body_full(Bytes::new()));
            *request.uri_mut() = uri.parse().unwrap();
            with_memory(request, Some(4 << 30)).uri().to_string()
        };
        let built = request("http://localhost/v1.41/build?t=x");
        assert!(built.ends_with("/v1.41/build?t=x&memory=4294967296&memswap=4294967296"), "{built}");
        assert_eq!(request("http://localhost/v1.41/commit?t=x"), "http://localhost/v1.41/commit?t=x");
    }

    #[test]
    fn output_comes_in_lines_and_progress_not_at_all() {
        let seen = Mutex::new(Vec::new());
        let output = |line: &str| seen.lock().unwrap().push(line.to_owned());
        let said = |text: &str| BuildInfo { stream: Some(text.to_owned()), ..BuildInfo::default() };
        let mut lines = Lines::default();
        lines.take(&said("Step 1/2 : FR"), &output);
        lines.take(&said("OM a\nx\n"), &output);
        let status = |total| BuildInfo {
            id: Some("abc".into()),
            status: Some("Downloading".into()),
            progress_detail: Some(bollard::models::ProgressDetail { current: Some(1), total }),
            ..BuildInfo::default()
        };
        lines.take(&status(Some(2)), &output);
        lines.take(&status(None), &output);
        lines.take(&said("the end"), &output);
        lines.end(&output);
        assert_eq!(*seen.lock().unwrap(), ["Step 1/2 : FROM a", "x", "abc: Downloading", "the end"]);
        seen.lock().unwrap().clear();
        let mut lines = Lines::default();
        (0..20).for_each(|_| lines.take(&said(&"a".repeat(10_000)), &output));
        assert!(lines.begun.len() < LONGEST_LINE, "what has no end is not collected");
        lines.end(&output);
        assert_eq!(seen.lock().unwrap().concat().len(), 200_000);
    }

    #[test]
    fn the_dockerfiles_faults_are_told_from_the_engines() {
        let code = |message: &str| match of_build(&Failure::Midway(message.into())) {
            DockerfileError::Instruction { exit_code, .. } => Ok(exit_code),
            DockerfileError::Engine(error) => Err(error.kind),
        };
        assert_eq!(code("The command '/bin/sh -c exit 7' returned a non-zero code: 7"), Ok(Some(7)));
        assert_eq!(code("COPY failed: file not found in build context"), Ok(None));
        // What a command says of timeouts is its own matter.
        assert_eq!(code("The command 'curl timeout' returned a non-zero code: 28"), Ok(Some(28)));
        assert_eq!(code("Get \"https://registry\": net/http: timeout"), Err(RuntimeErrorKind::Failed));
        let refused = |status, message: &str| of_build(&Failure::Refused { status, message: message.into() });
        assert!(matches!(refused(400, "dockerfile parse error"), DockerfileError::Instruction { .. }));
        assert!(matches!(refused(503, "away"), DockerfileError::Engine(_)));
    }
    #[test]
    fn what_somebody_removed_under_the_builder_is_no_fault_of_the_dockerfile() {
        let id = "sha256:24b9ba7e5e60d53deae385425d7658e4eb1d3a6a0977bff0345310c4974a6f60";
        let is_engines =
            |message: &str| matches!(of_build(&Failure::Midway(message.into())), DockerfileError::Engine(_));
        for gone in [
            "No such image: {}",
            "No such image: base:latest",
            "failed to get destination image \"{}\": No such image: {}",
            "invalid from flag value tools: No such image: {}",
            "unable to find image \"{}\"",
            "unknown parent image ID {}",
            "failed to export image: failed to set parent {}: unknown parent image ID {}",
            "failed to export image: failed to create image: failed to get layer {}: layer does not exist",
            "failed to get layer for image {}: layer does not exist",
            "layer does not exist",
            "failed to get digest {}: open /var/lib/docker/image/overlay2/imagedb/content/sha256/24b9: no such file or directory",
            "No such container: 996e253cd45a",
            "container not found: 996e253cd45a",
        ] {
            assert!(is_engines(&gone.replace("{}", id)), "{gone}");
        }
        for own in [
            "manifest for base:nope not found: manifest unknown: manifest unknown",
            "pull access denied for nope, repository does not exist or may require 'docker login': denied: requested access to the resource is denied",
            "COPY failed: file not found in build context or excluded by .dockerignore: stat x: file does not exist",
            "invalid from flag value nope: pull access denied for nope, repository does not exist or may require 'docker login'",
            // What a command says is its own matter.
            "The command '/bin/sh -c docker run x # No such image: x' returned a non-zero code: 125",
        ] {
            assert!(!is_engines(own), "{own}");
        }
    }
}
