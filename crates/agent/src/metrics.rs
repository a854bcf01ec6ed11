//! `/metrics`: the box's processors and memory, by its cgroup where visible, else as told, else the machine's.
//!
//! Processor use is measured between calls, or over a short window when no recent sample exists.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;

use crate::cgroup::{Cgroup, keyed, text};
use crate::events::unix_millis;
use crate::http::body::Body;
use crate::http::reply::{self, Reply};
use crate::settings::Limits;

const WINDOW: Duration = Duration::from_millis(60);
const STALE: Duration = Duration::from_secs(10);
const WATCH_EVERY: Duration = Duration::from_secs(2);
const MIB: f64 = 1024.0 * 1024.0;

#[derive(Clone)]
pub struct Meter(Arc<Inner>);

struct Inner {
    limits: Limits,
    cgroup: Cgroup,
    last: Mutex<Option<Sample>>,
}

/// Processor time used up to an instant.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    micros: u64,
}

/// Limits and use of processors and memory; the percentage is of the limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) cpu_count: f64,
    pub(crate) cpu_used_pct: f64,
    pub(crate) memory_total: u64,
    pub(crate) memory_used: u64,
}

#[derive(Debug, Serialize)]
struct Metrics {
    cpu_count: f64,
    cpu_used_pct: f64,
    mem_total_mib: f64,
    mem_used_mib: f64,
    timestamp: u64,
}

impl Meter {
    pub fn new(limits: Limits) -> Self {
        Meter(Arc::new(Inner { limits, cgroup: Cgroup::of_agent(), last: Mutex::new(None) }))
    }

    pub async fn read(&self) -> Reply {
        reply::json(&self.measure().await)
    }

    /// One JSON object and one newline every two seconds, until the client goes away.
    pub fn watch(&self) -> Reply {
        let (tx, body) = Body::channel(1, None);
        let meter = self.clone();
        tokio::spawn(async move {
            loop {
                let mut line = match serde_json::to_vec(&meter.measure().await) {
                    Ok(line) => line,
                    Err(error) => serde_json::json!({ "error": error.to_string() }).to_string().into_bytes(),
                };
                line.push(b'\n');
                if tx.send(Ok(Bytes::from(line))).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(WATCH_EVERY) => {}
                    () = tx.closed() => return,
                }
            }
        });
        reply::event_stream(body)
    }

    async fn measure(&self) -> Metrics {
        let usage = self.usage().await;
        Metrics {
            cpu_count: usage.cpu_count,
            cpu_used_pct: usage.cpu_used_pct,
            mem_total_mib: usage.memory_total as f64 / MIB,
            mem_used_mib: usage.memory_used as f64 / MIB,
            timestamp: unix_millis(),
        }
    }

    /// What the box may use and uses now.
    pub(crate) async fn usage(&self) -> Usage {
        let Inner { limits, cgroup, .. } = &*self.0;
        let cpus = cpu_count(*limits, cgroup);
        let recent = self.last().filter(|s| (WINDOW..STALE).contains(&s.at.elapsed()));
        let before = match recent {
            Some(sample) => sample,
            None => {
                let sample = sample(cgroup);
                tokio::time::sleep(WINDOW).await;
                sample
            }
        };
        let now = sample(cgroup);
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        let wall = now.at.duration_since(before.at).as_secs_f64() * 1e6;
        let used = now.micros.saturating_sub(before.micros) as f64;
        let percent = if wall > 0.0 { (used / (wall * cpus) * 100.0).clamp(0.0, 100.0) } else { 0.0 };
        let (memory_total, memory_used) = memory(*limits, cgroup);
        Usage { cpu_count: cpus, cpu_used_pct: percent, memory_total, memory_used }
    }

    fn last(&self) -> Option<Sample> {
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cpu_count(limits: Limits, cgroup: &Cgroup) -> f64 {
    let online = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    let quota = limits.cpu_millis.map(|millis| millis as f64 / 1000.0).or_else(|| cgroup.cpu_limit());
    quota.filter(|q| *q > 0.0).map_or(online, |q| q.min(online))
}

fn sample(cgroup: &Cgroup) -> Sample {
    let micros = cgroup
        .cpu_micros()
        .or_else(|| crate::init::is_pid_one().then(box_cpu_micros))
        .or_else(machine_cpu_micros)
        .unwrap_or(0);
    Sample { at: Instant::now(), micros }
}

/// Without a visible cgroup, the processes of the pid namespace are the box; init has inherited the ended ones.
fn box_cpu_micros() -> u64 {
    processes(|pid| {
        let stat = text(format!("/proc/{pid}/stat").as_ref())?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
        // utime and stime, then those of waited-for children.
        Some((ticks(11) + ticks(12) + ticks(13) + ticks(14)) * 10_000)
    })
}

fn processes(value: impl Fn(&str) -> Option<u64>) -> u64 {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|pid| value(&pid))
        .sum()
}

fn machine_cpu_micros() -> Option<u64> {
    let stat = text(Path::new("/proc/stat"))?;
    let fields: Vec<u64> =
        stat.lines().next()?.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    let idle = fields.get(3)? + fields.get(4).unwrap_or(&0);
    let total: u64 = fields.iter().take(8).sum();
    Some(total.saturating_sub(idle) * 10_000)
}

/// Total and used bytes.
fn memory(limits: Limits, cgroup: &Cgroup) -> (u64, u64) {
    let info = |key: &str| keyed(Path::new("/proc/meminfo"), key).unwrap_or(0) * 1024;
    let machine = match info("MemTotal") {
        0 => return without_proc(limits),
        total => total,
    };
    let limit = limits.memory_bytes.filter(|limit| *limit > 0).or_else(|| cgroup.memory_limit());
    let used = cgroup.memory_used();
    match (limit, used) {
        (Some(limit), Some(used)) => (limit.min(machine.max(1)), used.min(limit)),
        (Some(limit), None) => (limit.min(machine.max(1)), box_memory().min(limit)),
        (None, _) => {
            let free = info("MemFree") + info("Buffers") + info("Cached");
            (machine, machine.saturating_sub(free))
        }
    }
}

/// The kernel's own summary, for a box without /proc.
fn without_proc(limits: Limits) -> (u64, u64) {
    let info = rustix::system::sysinfo();
    // The kernel's word size and this unit are both small; the product cannot overflow.
    let bytes = |units: u64| units * u64::from(info.mem_unit);
    let total = limits.memory_bytes.unwrap_or(u64::MAX).min(bytes(info.totalram));
    (total, bytes(info.totalram.saturating_sub(info.freeram + info.bufferram)).min(total))
}

fn box_memory() -> u64 {
    let page = rustix::param::page_size() as u64;
    processes(|pid| {
        let statm = text(format!("/proc/{pid}/statm").as_ref())?;
        Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * page)
    })
}
