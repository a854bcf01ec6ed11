//! `[log]`: what is logged, in which shape, and where to.

use std::path::PathBuf;

use super::choice::{Choice, choice};
use super::kinds::{FilePath, Flag, Int, Size, Words};
use super::reader::Section;
use super::values::ByteSize;

choice! {
    LogFormat {
        /// One readable line a record.
        Human = "human",
        /// One JSON object a line.
        Json = "json",
    }
}

/// The least severe record that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl Choice for LogLevel {
    /// The first word of each level is ours; the others are the Python names that an upstream file may carry.
    const WORDS: &'static [(&'static str, Self)] = &[
        ("INFO", Self::Info),
        ("ERROR", Self::Error),
        ("CRITICAL", Self::Error),
        ("FATAL", Self::Error),
        ("WARNING", Self::Warn),
        ("WARN", Self::Warn),
        ("DEBUG", Self::Debug),
        ("TRACE", Self::Trace),
        ("NOTSET", Self::Trace),
    ];
    const ANY_CASE: bool = true;
}

#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    pub level: LogLevel,
    pub format: LogFormat,
    pub file_enabled: bool,
    pub file_path: PathBuf,
    pub access_file_path: PathBuf,
    pub file_max: ByteSize,
    pub file_backup_count: u32,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            level: LogLevel::Info,
            format: LogFormat::Human,
            file_enabled: false,
            file_path: PathBuf::from("~/logs/opensandbox/server.log"),
            access_file_path: PathBuf::from("~/logs/opensandbox/access.log"),
            file_max: ByteSize::from_bytes(104_857_600),
            file_backup_count: 5,
        }
    }
}

impl LogConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("level", Words::new(), &mut self.level, "Least severe record to write, in any case.");
        section.key("format", Words::new(), &mut self.format, "Lines for people or one JSON object a line.");
        section.key(
            "file_enabled",
            Flag,
            &mut self.file_enabled,
            "Write to the files below instead of standard error.",
        );
        section.key("file_path", FilePath::any(), &mut self.file_path, "The log file.");
        section.key(
            "access_file_path",
            FilePath::any(),
            &mut self.access_file_path,
            "The file for one record a request.",
        );
        section.key(
            "file_max_bytes",
            Size { min: 1 },
            &mut self.file_max,
            "Size at which a file is rotated.",
        );
        section.key(
            "file_backup_count",
            Int::at_least(0),
            &mut self.file_backup_count,
            "Rotated files to keep; with 0 a full file is emptied.",
        );
    }
}
