//! The files of a ring: append-only segments in one directory.
//!
//! Written without syncing: what was written survives the death of the process, and a death of the machine is a new boot anyway.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::wire::{BootId, Class};

use super::record::{self, Header, Record};

/// A segment takes no more records when it is this long.
const SEGMENT_BYTES: u64 = 1024 * 1024;

/// Where an event's JSON stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub segment: u64,
    at: u64,
    pub length: u32,
}

/// An event that was found in the files.
pub(super) struct Found {
    pub seq: u64,
    pub class: Class,
    pub key: Option<String>,
    pub place: Place,
}

/// What the files of a boot hold.
#[derive(Default)]
pub(super) struct Contents {
    pub events: Vec<Found>,
    pub acked: u64,
    /// At least this; events may be newer.
    pub next: u64,
    /// Bytes that were cut off because they were no whole record.
    pub cut: u64,
}

struct Segment {
    path: PathBuf,
    file: File,
    length: u64,
    live: usize,
}

pub(super) struct Segments {
    /// `None`: every write fails.
    dir: Option<PathBuf>,
    boot: BootId,
    all: BTreeMap<u64, Segment>,
}

impl Segments {
    /// No files at all.
    pub(super) fn nowhere(boot: &BootId) -> Self {
        Self { dir: None, boot: boot.clone(), all: BTreeMap::new() }
    }

    /// Opens what `dir` holds of `boot`. Segments of another boot are removed; a damaged one is cut where the damage begins.
    pub(super) fn open(dir: &Path, boot: &BootId) -> io::Result<(Self, Contents)> {
        fs::create_dir_all(dir)?;
        let mut segments = Self { dir: Some(dir.to_owned()), boot: boot.clone(), all: BTreeMap::new() };
        let mut contents = Contents { next: 1, ..Contents::default() };
        for (number, path) in numbered(dir)? {
            segments.load(number, path, &mut contents)?;
        }
        Ok((segments, contents))
    }

    fn load(&mut self, number: u64, path: PathBuf, contents: &mut Contents) -> io::Result<()> {
        let bytes = fs::read(&path)?;
        let Some((Record::Header(header), mut at)) = record::first(&bytes).filter(|_| number > 0) else {
            contents.cut += bytes.len() as u64;
            return fs::remove_file(&path);
        };
        if header.boot != self.boot {
            return fs::remove_file(&path);
        }
        if header.alone {
            self.remove_before(number);
            *contents = Contents { cut: contents.cut, ..Contents::default() };
        }
        contents.acked = contents.acked.max(header.acked);
        contents.next = contents.next.max(header.next);
        let mut live = 0;
        while let Some((Record::Event { seq, class, key, json }, length)) = record::first(&bytes[at..]) {
            let place = Place {
                segment: number,
                at: (at + length - json.len()) as u64,
                length: u32::try_from(json.len()).unwrap_or(u32::MAX),
            };
            contents.events.push(Found { seq, class, key: key.map(str::to_owned), place });
            contents.next = contents.next.max(seq + 1);
            live += 1;
            at += length;
        }
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        if at < bytes.len() {
            contents.cut += (bytes.len() - at) as u64;
            file.set_len(at as u64)?;
        }
        self.all.insert(number, Segment { path, file, length: at as u64, live });
        Ok(())
    }

    /// Writes one event; a new segment begins when the last one is full.
    pub(super) fn append(
        &mut self,
        seq: u64,
        class: Class,
        key: Option<&str>,
        json: &[u8],
        acked: u64,
    ) -> io::Result<Place> {
        if self.all.last_key_value().is_none_or(|(_, last)| last.length >= SEGMENT_BYTES) {
            self.begin(acked, seq)?;
        }
        let (number, last) = self.all.iter_mut().next_back().ok_or(io::ErrorKind::NotFound)?;
        let (record, at) = record::event(seq, class, key, json);
        // At a position, not at the end: what a failed write left behind is written over by the next.
        last.file.write_all_at(&record, last.length)?;
        let place = Place { segment: *number, at: last.length + at as u64, length: json.len() as u32 };
        last.length += record.len() as u64;
        last.live += 1;
        Ok(place)
    }

    pub(super) fn read(&self, place: Place) -> io::Result<Vec<u8>> {
        let segment = self.all.get(&place.segment).ok_or(io::ErrorKind::NotFound)?;
        let mut json = vec![0; place.length as usize];
        segment.file.read_exact_at(&mut json, place.at)?;
        Ok(json)
    }

    /// One event of a segment is no longer needed. A segment without any goes, unless it is the one that is written to.
    pub(super) fn release(&mut self, number: u64) {
        let Some(segment) = self.all.get_mut(&number) else { return };
        segment.live = segment.live.saturating_sub(1);
        let last = self.all.last_key_value().map(|(number, _)| *number);
        if last != Some(number) {
            self.remove_if_dead(number);
        }
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.all.values().map(|segment| segment.length).sum()
    }

    /// Replaces everything by one segment with the given events. Either all of it happens or nothing.
    pub(super) fn rewrite<'a>(
        &mut self,
        header: &Header,
        events: impl Iterator<Item = (u64, Class, Option<&'a str>, Vec<u8>)>,
    ) -> io::Result<Vec<(u64, Place)>> {
        let number = self.next_number();
        let mut bytes = record::header(header).map_err(io::Error::from)?;
        let mut places = Vec::new();
        for (seq, class, key, json) in events {
            let (record, at) = record::event(seq, class, key, &json);
            let place = Place { segment: number, at: (bytes.len() + at) as u64, length: json.len() as u32 };
            places.push((seq, place));
            bytes.extend_from_slice(&record);
        }
        let segment = self.create(number, &bytes, places.len())?;
        self.all.insert(number, segment);
        self.remove_before(number);
        Ok(places)
    }

    fn begin(&mut self, acked: u64, next: u64) -> io::Result<()> {
        let header = Header { boot: self.boot.clone(), acked, next, alone: false };
        let number = self.next_number();
        let segment = self.create(number, &record::header(&header).map_err(io::Error::from)?, 0)?;
        let before = self.all.last_key_value().map(|(number, _)| *number);
        self.all.insert(number, segment);
        if let Some(before) = before {
            self.remove_if_dead(before);
        }
        Ok(())
    }

    fn create(&self, number: u64, bytes: &[u8], live: usize) -> io::Result<Segment> {
        let dir = self.dir.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let path = dir.join(format!("{number:010}.seg"));
        let draft = path.with_extension("new");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&draft)?;
        file.write_all_at(bytes, 0)?;
        fs::rename(&draft, &path)?;
        Ok(Segment { path, file, length: bytes.len() as u64, live })
    }

    fn next_number(&self) -> u64 {
        self.all.last_key_value().map_or(1, |(number, _)| number + 1)
    }

    fn remove_if_dead(&mut self, number: u64) {
        if self.all.get(&number).is_some_and(|segment| segment.live == 0)
            && let Some(segment) = self.all.remove(&number)
        {
            // A file that stays is found dead, or acknowledged, at the next start.
            let _ = fs::remove_file(segment.path);
        }
    }

    fn remove_before(&mut self, number: u64) {
        let kept = self.all.split_off(&number);
        for segment in std::mem::replace(&mut self.all, kept).into_values() {
            let _ = fs::remove_file(segment.path);
        }
    }
}

/// The boot whose ring a directory holds, if it holds one that can be read.
pub(super) fn boot_of(dir: &Path) -> io::Result<Option<BootId>> {
    for (_, path) in numbered(dir)?.into_iter().rev() {
        if let Some((Record::Header(header), _)) = record::first(&fs::read(path)?) {
            return Ok(Some(header.boot));
        }
    }
    Ok(None)
}

/// Segments by number. Drafts that were never finished are removed.
fn numbered(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let number = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse().ok());
        match (path.extension().and_then(|e| e.to_str()), number) {
            (Some("seg"), Some(number)) => found.push((number, path)),
            (Some("new"), Some(_)) => fs::remove_file(&path)?,
            _ => {}
        }
    }
    found.sort_unstable();
    Ok(found)
}
