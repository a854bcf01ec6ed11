//! `[server]`: where the API listens and what protects it.

use std::net::IpAddr;
use std::time::Duration;

use super::choice::choice;
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
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "0.0.0.0".to_owned(),
            port: 8080,
            api_key: None,
            eip: None,
            max_sandbox_timeout: None,
            keep_alive: Duration::from_secs(30),
            limit_concurrency: Some(1024),
            graceful_shutdown: Duration::from_secs(5),
            backlog: 2048,
            thread_pool_size: 200,
            event_loop: EventLoop::Auto,
            http_parser: HttpParser::Auto,
            open_proxy: false,
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
