//! `[server]`: where the API listens and what protects it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{Cap, FilePath, Flag, Int, Maybe, SecretText, Span, Text, Words};
use super::reader::Section;
use super::values::Secret;

choice! {
    /// The reference's Python event loop: accepted, without effect here.
    EventLoop { Auto = "auto", Uvloop = "uvloop", Asyncio = "asyncio" }
}

choice! {
    /// The reference's Python HTTP parser: accepted, without effect here.
    HttpParser { Auto = "auto", Httptools = "httptools", H11 = "h11" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    pub port: u16,
    /// `None` (unset or blank) means authentication is off, which the startup guard asks about.
    pub api_key: Option<Secret>,
    pub eip: Option<String>,
    pub max_sandbox_timeout: Option<Duration>,
    pub keep_alive: Duration,
    /// `None` means no cap.
    pub limit_concurrency: Option<usize>,
    pub graceful_shutdown: Duration,
    pub backlog: u32,
    pub thread_pool_size: usize,
    pub event_loop: EventLoop,
    pub http_parser: HttpParser,
    /// Restores the reference's unauthenticated proxy routes.
    pub open_proxy: bool,
    /// Ours: `/metrics` without a key, for scrapers that cannot send one.
    pub open_metrics: bool,
    /// Ours: TLS, when both are set.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    pub tls_redirect_port: Option<u16>,
    pub hsts_max_age: Option<Duration>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "0.0.0.0".to_owned(),
            port: 8080,
            api_key: None,
            eip: None,
            max_sandbox_timeout: None,
            // Longer than clients keep unused connections: the published pools do so for 300 seconds.
            keep_alive: Duration::from_secs(305),
            limit_concurrency: Some(1024),
            graceful_shutdown: Duration::from_secs(5),
            backlog: 2048,
            thread_pool_size: 200,
            event_loop: EventLoop::Auto,
            http_parser: HttpParser::Auto,
            open_proxy: false,
            open_metrics: false,
            tls_cert: None,
            tls_key: None,
            tls_redirect_port: None,
            hsts_max_age: None,
        }
    }
}

impl ServerConfig {
    /// Whether only this machine can reach the API. A name other than `localhost` counts as reachable from elsewhere,
    /// because what it resolves to can change after this was asked.
    #[must_use]
    pub fn listens_on_loopback(&self) -> bool {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

impl ServerConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "host",
            Text::non_empty(),
            &mut self.host,
            "Address to listen on. Anything but a loopback address hides the image `host` (see `embedded.host_image`).",
        );
        section.key("port", Int::within(1..=65_535), &mut self.port, "Port to listen on.");
        section.key(
            "api_key",
            Maybe(SecretText::any()),
            &mut self.api_key,
            "The API key. Unset or blank switches authentication off, which the server only does after being told twice.",
        );
        section.key(
            "eip",
            Maybe(Text::any()),
            &mut self.eip,
            "Public host for endpoint answers; for proxy addresses the whole base, with scheme and path if need be.",
        );
        section.key(
            "max_sandbox_timeout_seconds",
            Maybe(Span::seconds(60)),
            &mut self.max_sandbox_timeout,
            "Longest `timeout` a create request may ask for. Renewals are not bound by it.",
        );
        section.key(
            "timeout_keep_alive",
            Span::seconds(1),
            &mut self.keep_alive,
            "Seconds an idle connection is kept open.",
        );
        section.key(
            "limit_concurrency",
            Cap,
            &mut self.limit_concurrency,
            "Most requests at once; above it the answer is 503.",
        );
        section.key(
            "timeout_graceful_shutdown",
            Span::seconds(1),
            &mut self.graceful_shutdown,
            "Seconds that running requests get to finish when the server stops.",
        );
        section.key(
            "backlog",
            Int::at_least(1),
            &mut self.backlog,
            "Length of the queue of connections not yet accepted.",
        );
        section.key(
            "thread_pool_size",
            Int::at_least(1),
            &mut self.thread_pool_size,
            "Most threads for blocking work.",
        );
        section.key("loop", Words::new(), &mut self.event_loop, "Accepted for compatibility; has no effect.");
        section.key(
            "http",
            Words::new(),
            &mut self.http_parser,
            "Accepted for compatibility; has no effect.",
        );
        section.key(
            "open_proxy",
            Flag,
            &mut self.open_proxy,
            "Whether proxy routes work without any key, as in the OpenSandbox server.",
        );
        section.key(
            "open_metrics",
            Flag,
            &mut self.open_metrics,
            "Whether `/metrics` works without the key. Names, counts and versions are on that page, but no ids and no secrets.",
        );
        self.tls_keys(section);
    }

    fn tls_keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "tls_cert",
            Maybe(FilePath::any()),
            &mut self.tls_cert,
            "Certificate chain in PEM form, own certificate first. With `tls_key` the API is served over TLS only. Both files are read again when they change.",
        );
        section.key(
            "tls_key",
            Maybe(FilePath::any()),
            &mut self.tls_key,
            "Private key in PEM form. Only the server's user should be able to read it.",
        );
        section.key(
            "tls_redirect_port",
            Maybe(Int::within(1..=65_535)),
            &mut self.tls_redirect_port,
            "A second port, for plain HTTP, on which every request is answered with its address under HTTPS.",
        );
        section.key(
            "hsts_max_age_seconds",
            Maybe(Span::seconds(1)),
            &mut self.hsts_max_age,
            "Sends `Strict-Transport-Security` with this age over TLS. Browsers then refuse plain HTTP to this host, on every port, for that long.",
        );
    }
}
