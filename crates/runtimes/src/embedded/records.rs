//! Reading and writing the files of a sandbox directory.

use std::{
    fs, io,
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use sandglass_shim::EVENT_FILES;
use sandglass_shim::spec::{BoxEvent, BoxSpec, BoxState, MutableFacts};
use serde::{Serialize, de::DeserializeOwned};

/// Replaces the file in one step, so that a reader sees the old or the new content, never half of it.
fn replace<T: Serialize>(dir: &Path, name: &str, value: &T) -> io::Result<()> {
    let partial = dir.join(format!(".{name}.new"));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    file.write_all(&serde_json::to_vec(value).map_err(io::Error::other)?)?;
    drop(file);
    fs::rename(&partial, dir.join(name))
}

/// Writes a file that was not there. A crash leaves half of it, which a later look takes for what it is: a box that never began.
fn write_first<T: Serialize>(dir: &Path, name: &str, value: &T) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(dir.join(name))?;
    file.write_all(&serde_json::to_vec(value).map_err(io::Error::other)?)
}

fn read<T: DeserializeOwned>(dir: &Path, name: &str) -> io::Result<T> {
    serde_json::from_slice(&fs::read(dir.join(name))?).map_err(io::Error::other)
}

/// Facts before specification: who finds a readable specification finds the facts too.
pub(super) fn write_first_files(dir: &Path, spec: &BoxSpec, facts: &MutableFacts) -> io::Result<()> {
    write_first(dir, "facts.json", facts)?;
    write_first(dir, "spec.json", spec)
}

pub(super) fn read_spec(dir: &Path) -> io::Result<BoxSpec> {
    read(dir, "spec.json")
}

/// Replaces the specification of a box that waited in a pool.
pub(super) fn write_spec(dir: &Path, spec: &BoxSpec) -> io::Result<()> {
    replace(dir, "spec.json", spec)
}

pub(super) fn write_facts(dir: &Path, facts: &MutableFacts) -> io::Result<()> {
    replace(dir, "facts.json", facts)
}

pub(super) fn read_facts(dir: &Path) -> io::Result<MutableFacts> {
    read(dir, "facts.json")
}

pub(super) fn read_state(dir: &Path) -> io::Result<BoxState> {
    read(dir, "state.json")
}

/// The box's history by time; lines that a crash cut short are skipped.
pub(super) fn read_events(dir: &Path) -> io::Result<Vec<BoxEvent>> {
    let mut events: Vec<BoxEvent> = Vec::new();
    for name in EVENT_FILES {
        match fs::read_to_string(dir.join(name)) {
            Ok(text) => events.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    // Stable, so that what happened within a millisecond keeps its order.
    events.sort_by_key(|event: &BoxEvent| event.at_ms);
    Ok(events)
}

/// The newest `lines` lines of the console log, oldest first, across its rotation.
pub(super) fn tail_console(dir: &Path, lines: usize) -> io::Result<Vec<String>> {
    let mut found = tail_file(&dir.join("console.log"), lines)?;
    if found.len() < lines {
        let mut older = tail_file(&dir.join("console.log.1"), lines - found.len())?;
        older.append(&mut found);
        found = older;
    }
    Ok(found)
}

fn tail_file(path: &Path, lines: usize) -> io::Result<Vec<String>> {
    const BLOCK: u64 = 64 * 1024;
    let mut file = match fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut start = file.metadata()?.len();
    let mut tail: Vec<u8> = Vec::new();
    while start > 0 && tail.iter().filter(|b| **b == b'\n').count() <= lines {
        let from = start.saturating_sub(BLOCK);
        let mut block = vec![0; usize::try_from(start - from).unwrap_or(0)];
        file.seek(SeekFrom::Start(from))?;
        file.read_exact(&mut block)?;
        block.append(&mut tail);
        tail = block;
        start = from;
    }
    let text = String::from_utf8_lossy(&tail);
    let all: Vec<&str> = text.lines().collect();
    Ok(all[all.len().saturating_sub(lines)..].iter().map(|l| (*l).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_crosses_blocks_and_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let old: String = (0..10).map(|n| format!("old {n}\n")).collect();
        let new: String = (0..20_000).map(|n| format!("line {n}\n")).collect();
        fs::write(dir.path().join("console.log.1"), old).unwrap();
        fs::write(dir.path().join("console.log"), new).unwrap();
        assert_eq!(tail_console(dir.path(), 2).unwrap(), ["line 19998", "line 19999"]);
        let all = tail_console(dir.path(), 20_003).unwrap();
        assert_eq!((all.len(), all[0].as_str(), all[3].as_str()), (20_003, "old 7", "line 0"));
        assert!(tail_console(&dir.path().join("none"), 5).unwrap().is_empty());
    }
}
