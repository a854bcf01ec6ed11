//! The files of one log: each begins at the offset that its name says.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::segment::{HEADER, Record};

/// Read at a time. What a batch reads beyond its end is read again by the next one, and should be little beside a batch.
const BUFFER: usize = 8 * 1024;

/// What readers took from the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of files.
    pub bytes: u64,
    /// Listings of folders.
    pub listings: u64,
}

#[derive(Debug, Default)]
pub(super) struct Meter {
    bytes: AtomicU64,
    listings: AtomicU64,
}

impl Meter {
    pub(super) fn cost(&self) -> Cost {
        Cost { bytes: self.bytes.load(Ordering::Relaxed), listings: self.listings.load(Ordering::Relaxed) }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Files {
    folder: PathBuf,
    meter: Arc<Meter>,
}

/// A file whose bytes are counted as they are read.
pub(super) struct Metered {
    file: File,
    meter: Arc<Meter>,
}

impl Read for Metered {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.meter.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Seek for Metered {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Files {
    pub(super) fn new(folder: PathBuf, meter: Arc<Meter>) -> Self {
        Self { folder, meter }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, start: u64) -> PathBuf {
        self.folder.join(format!("{start:020}.log"))
    }

    /// Where the files of the log begin, in order; none when there is no folder.
    pub(super) fn starts(&self) -> io::Result<Vec<u64>> {
        self.meter.listings.fetch_add(1, Ordering::Relaxed);
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut starts = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let start: Option<u64> =
                name.to_str().and_then(|name| name.strip_suffix(".log")).and_then(|n| n.parse().ok());
            starts.extend(start);
        }
        starts.sort_unstable();
        Ok(starts)
    }

    /// The file, from a position in it; `None` when it was left out.
    pub(super) fn open(&self, start: u64, position: u64) -> io::Result<Option<BufReader<Metered>>> {
        let mut file = match File::open(self.path(start)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        file.seek(SeekFrom::Start(position))?;
        Ok(Some(BufReader::with_capacity(BUFFER, Metered { file, meter: self.meter.clone() })))
    }

    /// Bytes of output and of file up to the last whole record.
    pub(super) fn measure(&self, start: u64) -> io::Result<(u64, u64)> {
        let mut file = self.open(start, 0)?.ok_or(io::ErrorKind::NotFound)?;
        let (mut output, mut length) = (0, 0);
        while let Some(record) = Record::read(&mut file)? {
            output += record.output.len() as u64;
            length += (HEADER + record.output.len()) as u64;
        }
        Ok((output, length))
    }

    /// Where the log ends.
    pub(super) fn end(&self) -> io::Result<u64> {
        match self.starts()?.last() {
            Some(start) => Ok(start + self.measure(*start)?.0),
            None => Ok(0),
        }
    }
}
