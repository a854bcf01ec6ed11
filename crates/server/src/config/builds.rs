//! `[builds]`: images from repositories.

use std::{path::PathBuf, time::Duration};

use sandglass_repository::HostPattern;

use super::choice::choice;
use super::kinds::{FilePath, Flag, Int, ListOf, Maybe, Size, Span, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::{ByteSize, Quantity};

choice! {
    /// When Dockerfiles go to the Docker engine's own builder.
    EngineBuilder {
        /// While sandboxes are confined no further than by default.
        Auto = "auto",
        Always = "always",
        Never = "never",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct BuildsConfig {
    pub base_image: String,
    /// A lone `*` allows every host.
    pub allowed_hosts: Vec<String>,
    pub file_urls: bool,
    pub http_urls: bool,
    pub git_authorities: Option<PathBuf>,
    pub concurrency: usize,
    pub tenant_concurrency: usize,
    pub queue: usize,
    pub timeout: Duration,
    pub max_timeout: Duration,
    pub resolve_timeout: Duration,
    pub keep: u32,
    /// Zero is unbounded.
    pub images_budget: ByteSize,
    /// Zero keeps none.
    pub layers_budget: ByteSize,
    pub layer_after: Duration,
    pub engine_builder: EngineBuilder,
    pub repository_limit: ByteSize,
    /// Zero is unbounded.
    pub mirrors_budget: ByteSize,
    pub cpu: Quantity,
    pub memory: Quantity,
}

const GIB: u64 = 1 << 30;

impl Default for BuildsConfig {
    fn default() -> Self {
        let quantity = |text| Quantity::parse(text).expect("a literal that the tests parse");
        Self {
            base_image: "buildpack-deps:bookworm-scm".to_owned(),
            allowed_hosts: ["github.com", "gitlab.com", "bitbucket.org", "codeberg.org"]
                .map(str::to_owned)
                .into(),
            file_urls: false,
            http_urls: false,
            git_authorities: None,
            concurrency: 2,
            tenant_concurrency: 2,
            queue: 256,
            timeout: Duration::from_secs(1800),
            max_timeout: Duration::from_secs(4 * 3600),
            resolve_timeout: Duration::from_secs(60),
            keep: 2,
            images_budget: ByteSize::from_bytes(0),
            layers_budget: ByteSize::from_bytes(10 * GIB),
            layer_after: Duration::from_secs(1),
            engine_builder: EngineBuilder::Auto,
            repository_limit: ByteSize::from_bytes(10 * GIB),
            mirrors_budget: ByteSize::from_bytes(20 * GIB),
            cpu: quantity("2"),
            memory: quantity("4Gi"),
        }
    }
}

fn is_host_pattern(text: &str) -> bool {
    text == "*" || HostPattern::parse(text).is_ok()
}

impl BuildsConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "base_image",
            Text::non_empty(),
            &mut self.base_image,
            "Image that a repository without one of its own is built on. It needs a shell, `tar` and `git`.",
        );
        section.key(
            "allowed_hosts",
            ListOf(Text::that("a host, `*.` before one, or `*` for every host", is_host_pattern)),
            &mut self.allowed_hosts,
            "Hosts that repositories may come from. `*` also allows this machine and its private networks.",
        );
        section.key(
            "file_urls",
            Flag,
            &mut self.file_urls,
            "Whether `file:///…` names repositories on this machine's disk.",
        );
        section.key(
            "http_urls",
            Flag,
            &mut self.http_urls,
            "Whether repositories may be fetched without TLS. A token would travel readable.",
        );
        section.key(
            "git_authorities",
            Maybe(FilePath::absolute()),
            &mut self.git_authorities,
            "PEM file with the certificate authorities that git believes instead of the system's, on the server and in sandboxes from \
             repositories.",
        );
        section.key("concurrency", Int::at_least(1), &mut self.concurrency, "Builds at a time.");
        section.key(
            "tenant_concurrency",
            Int::at_least(1),
            &mut self.tenant_concurrency,
            "Builds at a time for one tenant.",
        );
        section.key(
            "queue",
            Int::at_least(1),
            &mut self.queue,
            "Builds that may wait for their turn; more are refused.",
        );
        section.key(
            "timeout_seconds",
            Span::seconds(1),
            &mut self.timeout,
            "How long a build may take when its request does not say, all attempts together.",
        );
        section.key(
            "max_timeout_seconds",
            Span::seconds(1),
            &mut self.max_timeout,
            "The longest time that a request may ask for.",
        );
        section.key(
            "resolve_timeout_seconds",
            Span::seconds(1),
            &mut self.resolve_timeout,
            "How long the commits, the recipe and the base image of a repository may take to be found.",
        );
        section.key(
            "keep",
            Int::at_least(0),
            &mut self.keep,
            "Images of a repository and recipe that stay besides the newest, those that are tagged and those in use.",
        );
        section.key(
            "images_budget",
            Size { min: 0 },
            &mut self.images_budget,
            "What all built images together may take; those unused for longest go first. Zero is unbounded.",
        );
        section.key(
            "layers_budget",
            Size { min: 0 },
            &mut self.layers_budget,
            "What kept instructions of Dockerfiles may take beside the images; those unused for longest go first. Zero keeps none. Embedded runtime.",
        );
        section.key(
            "layer_after_seconds",
            Span::seconds(0),
            &mut self.layer_after,
            "What an instruction has to take for what it made to be kept for later builds.",
        );
        section.key(
            "engine_builder",
            Words::new(),
            &mut self.engine_builder,
            "When Dockerfiles go to the Docker engine's own builder, whose `RUN` has Docker's confinement instead of that of `[docker]`: while \
             `[docker]` asks for no more than by default, always, or never. With a `secure_runtime` never.",
        );
        section.key(
            "repository_limit",
            Size { min: 1 },
            &mut self.repository_limit,
            "What one repository may take at most: what is downloaded, and a checkout with its submodules and large \
             files, in which every file and folder counts as 4 KiB or more.",
        );
        section.key(
            "mirrors_budget",
            Size { min: 0 },
            &mut self.mirrors_budget,
            "What the local copies of all repositories may take; those unused for longest go first. Zero is unbounded.",
        );
        section.key("cpu", rules::quantity(), &mut self.cpu, "Processors of a build.");
        section.key("memory", rules::quantity(), &mut self.memory, "Memory of a build.");
    }
}
