//! What is read about a box on demand: its output, its history, its use of resources, the engine's description. Changes nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};

use bollard::{
    container::LogOutput,
    models::{ContainerStatsResponse, EventMessage},
    query_parameters::{EventsOptions, LogsOptions, StatsOptions},
};
use futures_util::StreamExt;
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock, Timestamp,
    ports::runtime::{BoxEvent, RuntimeError, Usage},
};

use super::{
    Shared,
    container::{Container, Status},
    freeze::no_such_box,
};

/// More output than this is never held; the oldest lines go first.
const MOST_BYTES: usize = 16 << 20;
/// The engine cuts a line that is longer than this into pieces.
const PIECE: usize = 16 * 1024;

impl Shared {
    async fn existing(&self, id: SandboxId, phase: &str) -> Result<Container, RuntimeError> {
        self.find(id).await.map_err(|e| e.during(phase))?.ok_or_else(|| no_such_box(id))
    }

    pub(super) async fn logs(&self, id: SandboxId, lines: usize) -> Result<Vec<String>, RuntimeError> {
        let container = self.existing(id, "logs").await?;
        let options = LogsOptions {
            stdout: true,
            stderr: true,
            timestamps: true,
            tail: lines.to_string(),
            ..LogsOptions::default()
        };
        let key = container.key.as_str();
        let read = self.client.call(|docker| async move {
            let mut output = Lines::default();
            let mut pieces = std::pin::pin!(docker.logs(key, Some(options)));
            while let Some(piece) = pieces.next().await {
                output.take(&piece?);
            }
            Ok(output)
        });
        Ok(read.await.map_err(|e| e.during("logs"))?.last(lines))
    }

    pub(super) async fn events(&self, id: SandboxId) -> Result<Vec<BoxEvent>, RuntimeError> {
        let container = self.existing(id, "events").await?;
        let filters = HashMap::from([
            ("type".to_owned(), vec!["container".to_owned()]),
            ("container".to_owned(), vec![container.key.clone()]),
        ]);
        let seconds = |at: Timestamp| format!("{}.{:03}000000", at.as_millis() / 1000, at.as_millis() % 1000);
        let options = EventsOptions {
            since: container.created_at.map(seconds),
            // Until now, so that the engine ends the stream; by its own clock, in case ours is behind.
            until: Some(seconds(SystemClock.now())),
            filters: Some(filters),
        };
        let read = self.client.call(|docker| async move {
            let mut told = Vec::new();
            let mut events = std::pin::pin!(docker.events(Some(options)));
            while let Some(event) = events.next().await {
                told.extend(history(&event?));
            }
            Ok(told)
        });
        let mut told = complete(read.await.map_err(|e| e.during("events"))?, &container);
        if let Some(key) = container.joined() {
            told.extend(self.told_by_sidecar(key).await);
            told.sort_by_key(|event| event.at);
        }
        Ok(told)
    }

    pub(super) async fn usage(&self, id: SandboxId) -> Result<Usage, RuntimeError> {
        let container = self.existing(id, "usage").await?;
        if !matches!(container.status, Status::Running | Status::Paused) {
            return Ok(Usage::default());
        }
        let key = container.key.as_str();
        let read = self.client.call(|docker| async move {
            let options = StatsOptions { stream: false, one_shot: true };
            std::pin::pin!(docker.stats(key, Some(options))).next().await.transpose()
        });
        Ok(read.await.map_err(|e| e.during("usage"))?.map(|stats| used(&stats)).unwrap_or_default())
    }

    pub(super) async fn describe(&self, id: SandboxId) -> Result<BTreeMap<String, String>, RuntimeError> {
        let container = self.existing(id, "describe").await?;
        let mut facts = description(&container);
        if let Some(key) = container.joined() {
            let sidecar = self.inspect_container(key).await.map_err(|e| e.during("describe"))?;
            let told = sidecar.map_or_else(
                || "gone".to_owned(),
                |s| format!("{} {} ({})", short(&s.key), s.name, word(s.status)),
            );
            facts.insert("Sidecar".to_owned(), told);
        }
        Ok(facts)
    }
}

/// Output as it comes from the engine: pieces, each with the time of its line in front.
#[derive(Default)]
struct Lines {
    done: VecDeque<String>,
    bytes: usize,
    /// Lines that go on in the next piece of their stream.
    open: BTreeMap<&'static str, String>,
}

impl Lines {
    fn take(&mut self, piece: &LogOutput) {
        let stream = match piece {
            LogOutput::StdErr { .. } => "stderr",
            LogOutput::StdOut { .. } | LogOutput::StdIn { .. } | LogOutput::Console { .. } => "stdout",
        };
        let text = String::from_utf8_lossy(piece.as_ref());
        for part in text.split_inclusive('\n') {
            let (time, rest) = part.split_once(' ').unwrap_or((part.trim_end(), ""));
            let ends = part.ends_with('\n');
            let rest = rest.strip_suffix('\n').unwrap_or(rest);
            let rest = rest.strip_suffix('\r').unwrap_or(rest);
            let line = match self.open.remove(stream) {
                Some(begun) => begun + rest,
                None => format!("{time} {stream} {rest}"),
            };
            if ends || rest.len() < PIECE {
                self.bytes += line.len();
                self.done.push_back(line);
            } else {
                self.open.insert(stream, line);
            }
        }
        while self.bytes > MOST_BYTES {
            let Some(oldest) = self.done.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }

    fn last(mut self, lines: usize) -> Vec<String> {
        self.done.extend(std::mem::take(&mut self.open).into_values());
        let surplus = self.done.len().saturating_sub(lines);
        self.done.into_iter().skip(surplus).collect()
    }
}

/// The kinds under which every runtime tells its history, for what the engine calls otherwise.
fn history(event: &EventMessage) -> Option<BoxEvent> {
    let attribute = |name: &str| event.actor.as_ref()?.attributes.as_ref()?.get(name).map(String::as_str);
    let (kind, message) = match event.action.as_deref()? {
        "create" => ("created", "the container was made".to_owned()),
        "start" => ("started", "the container was started".to_owned()),
        "pause" => ("paused", "every process is frozen".to_owned()),
        "unpause" => ("resumed", "every process goes on".to_owned()),
        "oom" => ("out_of_memory", "a process used more memory than the limit".to_owned()),
        "kill" => ("signalled", format!("signal {} was sent", attribute("signal").unwrap_or("?"))),
        "restart" => ("restarted", "the container was restarted".to_owned()),
        "die" => ("exited", format!("exited with code {}", attribute("exitCode").unwrap_or("?"))),
        _ => return None,
    };
    Some(BoxEvent { at: at(event)?, kind: kind.to_owned(), message })
}

/// When an event happened.
pub(super) fn at(event: &EventMessage) -> Option<Timestamp> {
    let millis = event.time_nano.map(|nanos| nanos / 1_000_000);
    millis.or(event.time.map(|seconds| seconds.saturating_mul(1000))).and_then(Timestamp::from_millis)
}

/// The engine forgets events; what the container itself still says is added.
fn complete(mut told: Vec<BoxEvent>, container: &Container) -> Vec<BoxEvent> {
    let mut add = |kind: &str, at: Option<Timestamp>, message: String| {
        if let Some(at) = at
            && !told.iter().any(|event| event.kind == kind)
        {
            told.push(BoxEvent { at, kind: kind.to_owned(), message });
        }
    };
    add("started", container.started_at, "the container was started".to_owned());
    if container.status == Status::Ended {
        let code = container.exit_code.map_or_else(|| "?".to_owned(), |code| code.to_string());
        add("exited", container.finished_at, format!("exited with code {code}"));
        if container.out_of_memory {
            add(
                "out_of_memory",
                container.finished_at,
                "a process used more memory than the limit".to_owned(),
            );
        }
        if !container.error.is_empty() {
            add("error", container.finished_at, container.error.clone());
        }
    }
    for (time, code, output) in &container.health {
        let at = super::labels::instant(time).or(container.started_at);
        let output: String = output.chars().take(200).collect();
        told.extend(at.map(|at| BoxEvent {
            at,
            kind: "health".to_owned(),
            message: format!("exit={code} {}", output.trim()),
        }));
    }
    told.sort_by_key(|event| event.at);
    told
}

fn used(stats: &ContainerStatsResponse) -> Usage {
    let memory = stats.memory_stats.as_ref();
    let detail = |name: &str| memory.and_then(|m| m.stats.as_ref()).and_then(|s| s.get(name)).copied();
    // Pages that can be dropped at any time are no use of memory; the two versions of cgroups name them differently.
    let cache = detail("total_inactive_file").or_else(|| detail("inactive_file")).unwrap_or(0);
    Usage {
        memory_bytes: memory.and_then(|m| m.usage).map(|bytes| bytes.saturating_sub(cache)),
        cpu_usec: stats
            .cpu_stats
            .as_ref()
            .and_then(|cpu| cpu.cpu_usage.as_ref()?.total_usage)
            .map(|nanos| nanos / 1000),
        pids: stats.pids_stats.as_ref().and_then(|pids| pids.current),
    }
}

fn short(key: &str) -> String {
    key.chars().take(12).collect()
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Created => "created",
        Status::Running => "running",
        Status::Paused => "paused",
        Status::Ended => "exited",
    }
}

/// Labels and environment are left out: the server prints what belongs to the user, and the rest holds tokens.
fn description(container: &Container) -> BTreeMap<String, String> {
    let boolean = |value: bool| if value { "True" } else { "False" }.to_owned();
    let mut facts = BTreeMap::new();
    let mut set = |key: &str, value: String| facts.insert(key.to_owned(), value);
    set("Container ID", short(&container.key));
    set("Name", container.name.clone());
    set("Image", container.image.clone());
    set("Image ID", container.image_id.clone());
    set("Status", word(container.status).to_owned());
    set("OOMKilled", boolean(container.out_of_memory));
    set("Network Mode", container.network_mode.clone());
    if container.status == Status::Ended
        && let Some(code) = container.exit_code
    {
        set("Exit Code", code.to_string());
    }
    for (key, at) in [("Started At", container.started_at), ("Finished At", container.finished_at)] {
        if let Some(at) = at {
            set(key, at.to_string());
        }
    }
    if !container.error.is_empty() {
        set("Error", container.error.clone());
    }
    if let Some(cpu) = container.limits.cpu_millis {
        set("CPU", format!("{}.{:02} cores", cpu / 1000, cpu % 1000 / 10));
    }
    if let Some(bytes) = container.limits.memory_bytes {
        set("Memory", format!("{} MiB", bytes >> 20));
    }
    if let Some(pids) = container.limits.pids {
        set("PIDs Limit", pids.to_string());
    }
    for (network, address) in &container.addresses {
        set(&format!("Network {network}"), address.to_string());
    }
    for (port, (address, outside)) in &container.published {
        set(&format!("Port {port}/tcp"), format!("{address}:{outside}"));
    }
    facts
}

#[cfg(test)]
mod tests {
    use bollard::models::{ContainerInspectResponse, EventActor};

    use super::*;

    fn out(text: &str) -> LogOutput {
        LogOutput::StdOut { message: text.to_owned().into() }
    }

    #[test]
    fn lines_have_their_time_and_stream_and_long_ones_are_whole() {
        let mut lines = Lines::default();
        lines.take(&out("2026-01-01T00:00:00.000000001Z one two\n"));
        let piece = "x".repeat(PIECE);
        lines.take(&out(&format!("2026-01-01T00:00:01Z {piece}")));
        lines.take(&LogOutput::StdErr { message: "2026-01-01T00:00:01Z between\r\n".into() });
        lines.take(&out("2026-01-01T00:00:02Z end\n"));
        lines.take(&out("2026-01-01T00:00:03Z \n"));
        lines.take(&out("2026-01-01T00:00:04Z no line feed"));
        let seen = lines.last(100);
        assert_eq!(seen[0], "2026-01-01T00:00:00.000000001Z stdout one two");
        assert_eq!(seen[1], "2026-01-01T00:00:01Z stderr between");
        assert_eq!(seen[2], format!("2026-01-01T00:00:01Z stdout {piece}end"));
        assert_eq!(seen[3], "2026-01-01T00:00:03Z stdout ");
        assert_eq!(seen[4], "2026-01-01T00:00:04Z stdout no line feed");
        assert_eq!(seen.len(), 5);
    }

    #[test]
    fn only_the_newest_lines_are_kept_and_never_too_many_bytes() {
        let mut lines = Lines::default();
        for n in 0..2000 {
            lines.take(&out(&format!("2026-01-01T00:00:00Z {n} {}\n", "y".repeat(12_000))));
        }
        assert!(lines.bytes <= MOST_BYTES);
        let last = lines.last(2);
        assert!(last[0].contains(" 1998 ") && last[1].contains(" 1999 "));
        let mut binary = Lines::default();
        binary.take(&LogOutput::StdOut { message: vec![0xff, b' ', 0xfe, b'\n'].into() });
        assert_eq!(binary.last(9).len(), 1);
    }

    #[test]
    fn history_is_what_the_engine_tells_and_what_the_container_shows() {
        let event = |action: &str, nanos: i64| EventMessage {
            action: Some(action.to_owned()),
            time_nano: Some(nanos),
            actor: Some(EventActor {
                attributes: Some(HashMap::from([("exitCode".to_owned(), "3".to_owned())])),
                ..EventActor::default()
            }),
            ..EventMessage::default()
        };
        let told: Vec<_> = [
            event("pause", 2_000_000_000),
            event("exec_create: sh", 2_500_000_000),
            event("die", 3_000_000_000),
        ]
        .iter()
        .filter_map(history)
        .collect();
        let mut container = Container::inspected(ContainerInspectResponse::default());
        container.status = Status::Ended;
        container.started_at = Timestamp::from_millis(1000);
        container.finished_at = Timestamp::from_millis(3000);
        let kinds: Vec<_> =
            complete(told, &container).into_iter().map(|e| (e.kind, e.message, e.at.as_millis())).collect();
        assert_eq!(kinds[0], ("started".into(), "the container was started".into(), 1000));
        assert_eq!(kinds[1], ("paused".into(), "every process is frozen".into(), 2000));
        assert_eq!(kinds[2], ("exited".into(), "exited with code 3".into(), 3000));
        assert_eq!(kinds.len(), 3);
    }

    #[test]
    fn a_description_never_shows_labels_or_environment() {
        let mut container = Container::inspected(ContainerInspectResponse::default());
        container.key = "0123456789abcdef".into();
        container.labels.insert("opensandbox.io/egress-auth-token".into(), "secret".into());
        container.env.push(("API_KEY".into(), "secret".into()));
        let facts = description(&container);
        assert_eq!(facts["Container ID"], "0123456789ab");
        assert!(facts.values().all(|value| !value.contains("secret")));
    }
}
