//! `/metrics`: processor and memory of the box, by its cgroup limits where they are known.

use std::fs;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;

use crate::http::body::Body;
use crate::http::reply::{self, Reply};
use crate::settings::Limits;

/// Over which time processor use is measured.
const WINDOW: Duration = Duration::from_millis(50);
const WATCH_PERIOD: Duration = Duration::from_secs(2);
const MIB: f64 = 1024.0 * 1024.0;

#[derive(Debug, Clone, Copy, Serialize)]
struct Reading {
    cpu_count: f64,
    cpu_used_pct: f64,
    mem_total_mib: f64,
    mem_used_mib: f64,
    timestamp: i64,
}

/// Reads the box's use.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    limits: Limits,
}

impl Meter {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits }
    }

    /// One reading; takes as long as the window.
    pub async fn read(&self) -> Reply {
        reply::json(&self.measure().await)
    }

    /// A reading every two seconds until the client leaves.
    pub fn watch(&self) -> Reply {
        let (tx, body) = Body::channel(1, None);
        let meter = *self;
        tokio::spawn(async move {
            loop {
                let mut line = serde_json::to_vec(&meter.measure().await).map_err(io::Error::other);
                if let Ok(line) = &mut line {
                    line.push(b'\n');
                }
                if tx.send(line.map(Bytes::from)).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(WATCH_PERIOD) => {}
                    () = tx.closed() => return,
                }
            }
        });
        reply::event_stream(body)
    }

    async fn measure(&self) -> Reading {
        let cpus = self.cpu_count();
        let (before, started) = (cpu_seconds(), tokio::time::Instant::now());
        tokio::time::sleep(WINDOW).await;
        let elapsed = started.elapsed().as_secs_f64();
        let used = (cpu_seconds() - before).max(0.0) / elapsed / cpus * 100.0;
        let (total, used_bytes) = self.memory();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Reading {
            cpu_count: cpus,
            cpu_used_pct: used.clamp(0.0, 100.0),
            mem_total_mib: total / MIB,
            mem_used_mib: used_bytes.clamp(0.0, total) / MIB,
            timestamp: i64::try_from(now.as_millis()).unwrap_or(i64::MAX),
        }
    }

    fn cpu_count(&self) -> f64 {
        let online = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        match self.limits.cpu_millis {
            Some(millis) if millis > 0 => (millis as f64 / 1000.0).min(online),
            _ => online,
        }
    }

    /// Total and used bytes: of the cgroup where it is visible, of the limit and our processes where only that is known, of the machine otherwise.
    fn memory(&self) -> (f64, f64) {
        let machine = meminfo();
        let seen = cgroup_memory();
        let limit = self.limits.memory_bytes.or(seen.and_then(|(limit, _)| limit)).map(|n| n as f64);
        match (limit, seen) {
            (Some(limit), Some((_, used))) => (limit.min(machine.0), used as f64),
            (Some(limit), None) => (limit.min(machine.0), resident_bytes()),
            (None, _) => machine,
        }
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Limit and use of the cgroup that is mounted inside the box, if any.
fn cgroup_memory() -> Option<(Option<u64>, u64)> {
    if let Some(used) = number("/sys/fs/cgroup/memory.current") {
        return Some((number("/sys/fs/cgroup/memory.max"), used));
    }
    let used = number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?;
    // An absurdly large number is v1's way of saying that there is no limit.
    let limit = number("/sys/fs/cgroup/memory/memory.limit_in_bytes").filter(|n| *n < 1 << 60);
    Some((limit, used))
}

/// Total and used bytes of the machine.
fn meminfo() -> (f64, f64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> f64 {
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0)
            * 1024.0
    };
    let total = field("MemTotal");
    (total, total - field("MemFree") - field("Buffers") - field("Cached"))
}

fn processes() -> impl Iterator<Item = String> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
}

/// Memory of every process that the box's `/proc` shows.
fn resident_bytes() -> f64 {
    processes()
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/statm")).ok())
        .filter_map(|statm| statm.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok()))
        .sum::<f64>()
        * rustix::param::page_size() as f64
}

/// Processor time of every process that the box's `/proc` shows, in seconds.
fn cpu_seconds() -> f64 {
    let ticks: f64 = processes()
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/stat")).ok())
        .filter_map(|stat| {
            let after_name = stat.rsplit_once(')')?.1;
            let mut words = after_name.split_whitespace().skip(11);
            let user: f64 = words.next()?.parse().ok()?;
            let system: f64 = words.next()?.parse().ok()?;
            Some(user + system)
        })
        .sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}
