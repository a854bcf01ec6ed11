//! The entrypoint's output: two pipes into `console.log`, a line at a time, with time and origin.
//!
//! Nothing is dropped: while the disk is full the pipes are not read, so that the writer in the box waits.
//! Invariant: a line in the file is whole, and the file stays below [`ROTATE_AT`] plus one read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::directory::BoxDir;

const ROTATE_AT: u64 = 8 << 20;

/// Longer lines are cut into several.
const LONGEST_LINE: usize = 16 << 10;

/// Read in one turn of the loop, so that a flood cannot keep clients waiting.
const READS_A_TURN: usize = 16;

const TAIL: usize = 400;

pub struct Console {
    pipes: Vec<Pipe>,
    path: PathBuf,
    file: Option<File>,
    size: u64,
    unwritten: Vec<u8>,
    blocked_until: Option<Instant>,
    tail: String,
}

struct Pipe {
    name: &'static str,
    fd: OwnedFd,
    partial: Vec<u8>,
}

impl Console {
    pub fn new(dir: &BoxDir, stdout: OwnedFd, stderr: OwnedFd) -> Self {
        let pipe = |name, fd: OwnedFd| {
            // Reading is always after poll, but draining reads until there is no more.
            let _ = rustix::io::ioctl_fionbio(&fd, true);
            Pipe { name, fd, partial: Vec::new() }
        };
        Self {
            pipes: vec![pipe("stdout", stdout), pipe("stderr", stderr)],
            path: dir.join("console.log"),
            file: None,
            size: 0,
            unwritten: Vec::new(),
            blocked_until: None,
            tail: String::new(),
        }
    }

    /// What to poll for input: nothing while the disk refuses.
    pub fn readable(&self) -> Vec<BorrowedFd<'_>> {
        if self.blocked_until.is_some() {
            return Vec::new();
        }
        self.pipes.iter().map(|pipe| pipe.fd.as_fd()).collect()
    }

    pub fn retry_at(&self) -> Option<Instant> {
        self.blocked_until
    }

    /// The end of the output so far, for error messages.
    pub fn tail(&self) -> &str {
        self.tail.trim()
    }

    /// Whether everything that was read lies in the file.
    pub fn is_settled(&self) -> bool {
        self.unwritten.is_empty()
    }

    /// Moves what is there, within a turn's share.
    pub fn pump(&mut self) {
        for _ in 0..READS_A_TURN {
            if !self.write_out() || !self.read_once() {
                return;
            }
        }
        self.write_out();
    }

    /// Moves everything until the pipes end; for when no writer is left.
    pub fn drain(&mut self) {
        self.blocked_until = None;
        while self.write_out() && self.read_once() {}
        for pipe in &mut self.pipes {
            if !pipe.partial.is_empty() {
                pipe.partial.push(b'\n');
                take_lines(pipe, &mut self.unwritten);
            }
        }
        self.write_out();
    }

    /// Reads from each pipe once; false when nothing came.
    fn read_once(&mut self) -> bool {
        let mut chunk = [0; 8192];
        let mut any = false;
        let unwritten = &mut self.unwritten;
        let tail = &mut self.tail;
        self.pipes.retain_mut(|pipe| match rustix::io::read(&pipe.fd, &mut chunk) {
            Ok(0) => {
                if !pipe.partial.is_empty() {
                    pipe.partial.push(b'\n');
                    take_lines(pipe, unwritten);
                }
                false
            }
            Ok(length) => {
                any = true;
                pipe.partial.extend_from_slice(&chunk[..length]);
                remember(tail, &chunk[..length]);
                take_lines(pipe, unwritten);
                true
            }
            Err(_) => true,
        });
        any
    }

    /// False when the disk refused; then the bytes stay and are tried again later.
    fn write_out(&mut self) -> bool {
        if self.unwritten.is_empty() {
            self.blocked_until = None;
            return true;
        }
        match self.append() {
            Ok(()) => {
                self.blocked_until = None;
                true
            }
            Err(_) => {
                // Opened anew next time: the trouble may be with this very file.
                self.file = None;
                self.blocked_until = Some(Instant::now() + Duration::from_secs(1));
                false
            }
        }
    }

    fn append(&mut self) -> io::Result<()> {
        if self.size >= ROTATE_AT {
            fs::rename(&self.path, self.path.with_extension("log.1"))?;
            self.file = None;
        }
        if self.file.is_none() {
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
            self.size = file.metadata()?.len();
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while !self.unwritten.is_empty() {
            let written = file.write(&self.unwritten)?;
            self.size += written as u64;
            self.unwritten.drain(..written);
        }
        Ok(())
    }
}

/// Moves the whole lines of a pipe into the outgoing bytes.
fn take_lines(pipe: &mut Pipe, out: &mut Vec<u8>) {
    loop {
        let end = match pipe.partial.iter().position(|byte| *byte == b'\n') {
            Some(newline) => newline + 1,
            None if pipe.partial.len() > LONGEST_LINE => LONGEST_LINE,
            None => return,
        };
        out.extend_from_slice(format!("{} {} ", timestamp(SystemTime::now()), pipe.name).as_bytes());
        out.extend(pipe.partial.drain(..end));
        if out.last() != Some(&b'\n') {
            out.push(b'\n');
        }
    }
}

fn remember(tail: &mut String, bytes: &[u8]) {
    let from = bytes.len().saturating_sub(TAIL);
    tail.push_str(&String::from_utf8_lossy(&bytes[from..]));
    let mut cut = tail.len().saturating_sub(TAIL);
    while !tail.is_char_boundary(cut) {
        cut += 1;
    }
    tail.drain(..cut);
}

/// RFC 3339 in UTC with nanoseconds.
fn timestamp(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years that start in March put the leap day last; 719468 days lie between 1 March of year 0 and 1970.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let date = day_of_year - (153 * month + 2) / 5 + 1;
    let calendar_month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(calendar_month <= 2);
    format!(
        "{year:04}-{calendar_month:02}-{date:02}T{:02}:{:02}:{:02}.{:09}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_nanos()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_know_leap_years() {
        let at = |secs| timestamp(UNIX_EPOCH + Duration::from_secs(secs));
        assert_eq!(at(0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000000000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000000000Z");
    }

    #[test]
    fn long_lines_are_cut_and_short_ones_wait_for_their_end() {
        let (fd, _) = rustix::pipe::pipe().unwrap();
        let mut pipe = Pipe { name: "stdout", fd, partial: b"half".to_vec() };
        let mut out = Vec::new();
        take_lines(&mut pipe, &mut out);
        assert!(out.is_empty());
        pipe.partial = vec![b'x'; LONGEST_LINE + 5];
        take_lines(&mut pipe, &mut out);
        assert!(out.ends_with(b"x\n") && pipe.partial.len() == 5);
    }
}
