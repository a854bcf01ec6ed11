//! Appending: the beginning is kept, then a window that moves with the end.

use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions},
    io::{self, Write},
};

use sandglass_sandbox::Timestamp;

use super::{
    Limits,
    files::Files,
    segment::{self, RECORD},
};
use crate::build::StepName;

/// The window is this many files, of which the oldest goes when it is full.
const WINDOW_FILES: u64 = 8;

pub(super) struct Writer {
    files: Files,
    limits: Limits,
    /// The file that is appended to.
    file: File,
    start: u64,
    end: u64,
    /// Where the files of the window begin that are complete, and how much output is in each.
    window: VecDeque<(u64, u64)>,
}

impl Writer {
    /// Opens the log and cuts off what a crash left of a record.
    pub(super) fn open(files: Files, limits: Limits) -> io::Result<Self> {
        fs::create_dir_all(files.folder())?;
        let starts = files.starts()?;
        let start = starts.last().copied().unwrap_or(0);
        let file = OpenOptions::new().create(true).append(true).open(files.path(start))?;
        let (output, length) = files.measure(start)?;
        file.set_len(length)?;
        let mut window = VecDeque::new();
        for older in starts.iter().copied().filter(|s| *s >= limits.head && *s != start) {
            window.push_back((older, files.measure(older)?.0));
        }
        Ok(Self { files, limits, file, start, end: start + output, window })
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn append(&mut self, step: StepName, at: Timestamp, mut output: &[u8]) -> io::Result<()> {
        while !output.is_empty() {
            let room = self.room();
            if room == 0 {
                self.roll()?;
                continue;
            }
            let fits = usize::try_from(room).unwrap_or(RECORD).min(RECORD).min(output.len());
            let (now, rest) = output.split_at(fits);
            self.file.write_all(&segment::encode(step, at, now))?;
            self.end += now.len() as u64;
            output = rest;
        }
        Ok(())
    }

    pub(super) fn sync(self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn window_file(&self) -> u64 {
        (self.limits.tail / WINDOW_FILES).max(1)
    }

    /// Output that the current file still takes. The head's files end where the head does.
    fn room(&self) -> u64 {
        let ends = if self.start < self.limits.head {
            self.limits.head.min(self.start + (1 << 20))
        } else {
            self.start + self.window_file()
        };
        ends.saturating_sub(self.end)
    }

    fn roll(&mut self) -> io::Result<()> {
        if self.start >= self.limits.head {
            self.window.push_back((self.start, self.end - self.start));
        }
        let next = OpenOptions::new().create(true).append(true).open(self.files.path(self.end))?;
        self.file = next;
        self.start = self.end;
        // Room for the new file, before it is filled: all together never take more than the window.
        let most = self.limits.tail.saturating_sub(self.window_file());
        while self.window.iter().map(|(_, size)| size).sum::<u64>() > most {
            let Some((oldest, _)) = self.window.pop_front() else { break };
            match fs::remove_file(self.files.path(oldest)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}
