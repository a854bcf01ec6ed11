//! One sandbox as it is, in aligned lines.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::net::IpAddr;

use super::masking::mask;
use super::{one_line, time};

/// Everything that is printed. There is no field for a token on purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InspectFacts {
    pub id: String,
    pub name: String,
    pub image: String,
    pub status: String,
    pub running: bool,
    pub paused: bool,
    pub oom_killed: bool,
    pub exit_code: Option<i32>,
    pub started_at_ms: Option<i64>,
    pub finished_at_ms: Option<i64>,
    pub error: Option<String>,
    pub cpu_millis: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub pids_limit: Option<u64>,
    /// Name of a network and the address in it.
    pub networks: Vec<(String, IpAddr)>,
    pub ports: Vec<PortFacts>,
    pub labels: BTreeMap<String, String>,
    pub env: Vec<(String, String)>,
}

/// A port and where it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    pub port: u16,
    pub bound_to: Option<String>,
}

/// The text.
#[must_use]
pub fn render(facts: &InspectFacts) -> String {
    let mut page = Page::default();
    let id: String = facts.id.chars().take(12).collect();
    page.field("Container ID", &id);
    page.field("Name", &facts.name);
    page.field("Image", &facts.image);
    page.field("Status", &facts.status);
    page.field("Running", word(facts.running));
    page.field("Paused", word(facts.paused));
    page.field("OOMKilled", word(facts.oom_killed));
    page.optional("Exit Code", facts.exit_code);
    page.optional("Started At", facts.started_at_ms.map(time));
    page.optional("Finished At", facts.finished_at_ms.map(time));
    page.optional("Error", facts.error.as_deref().filter(|error| !error.is_empty()).map(one_line));
    page.text.push('\n');

    page.section("Resources");
    page.detail(facts.cpu_millis.map(|cpu| format!("CPU: {}.{:02} cores", cpu / 1000, cpu % 1000 / 10)));
    page.detail(facts.memory_bytes.map(|bytes| format!("Memory: {}", memory(bytes))));
    page.detail(facts.pids_limit.map(|pids| format!("PIDs Limit: {pids}")));
    page.section("Network");
    page.details(facts.networks.iter().map(|(name, address)| format!("{name}: {address}")));
    page.section("Ports");
    page.details(
        facts.ports.iter().map(|port| {
            format!("{}/tcp -> {}", port.port, port.bound_to.as_deref().unwrap_or("(not bound)"))
        }),
    );
    page.section("Labels");
    page.details(facts.labels.iter().map(|(name, value)| pair(name, value)));
    page.section("Environment");
    page.details(facts.env.iter().map(|(name, value)| pair(name, value)));
    page.text
}

/// What the runtime tells beyond that, under a heading of its own; nothing when there is nothing.
#[must_use]
pub fn render_runtime(facts: &BTreeMap<String, String>) -> String {
    let mut page = Page::default();
    if !facts.is_empty() {
        page.text.push('\n');
        page.section("Runtime");
        let line = |(name, value): (&String, &String)| one_line(&format!("{name}: {}", mask(name, value)));
        page.details(facts.iter().map(line));
    }
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    /// Values start at column 17.
    fn field(&mut self, key: &str, value: &str) {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(self.text, "{:<16}{value}", format!("{key}:"));
    }

    fn optional(&mut self, key: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.field(key, &value.to_string());
        }
    }

    fn section(&mut self, title: &str) {
        let _ = writeln!(self.text, "{title}:");
    }

    fn details(&mut self, lines: impl Iterator<Item = String>) {
        for line in lines {
            let _ = writeln!(self.text, "  {line}");
        }
    }

    fn detail(&mut self, line: Option<String>) {
        self.details(line.into_iter());
    }
}

fn pair(name: &str, value: &str) -> String {
    one_line(&format!("{name}={}", mask(name, value)))
}

fn word(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

fn memory(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    if bytes < MIB { format!("{bytes} B") } else { format!("{} MiB", bytes / MIB) }
}
