//! What is told while somebody waits: lines on standard error, and on a terminal below them what is under way.

use std::{io::IsTerminal, time::Duration};

use indicatif::ProgressBar;

use crate::output::{note, plain};

const TICK: Duration = Duration::from_millis(100);

/// The place where progress is shown.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    pub fn start() -> Self {
        let bar = std::io::stderr().is_terminal().then(ProgressBar::new_spinner);
        if let Some(bar) = &bar {
            bar.enable_steady_tick(TICK);
        }
        Self { bar }
    }

    /// Prints a line that stays.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// What is under way; shown on terminals alone.
    pub fn doing(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(plain(text).into_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A duration for people: `0.31s`, `12.4s`, `3m05s`.
pub fn took(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match duration.as_secs() {
        0..=9 => format!("{seconds:.2}s"),
        10..=119 => format!("{seconds:.1}s"),
        whole => format!("{}m{:02}s", whole / 60, whole % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        for (ms, expected) in [(0, "0.00s"), (312, "0.31s"), (12_420, "12.4s"), (185_000, "3m05s")] {
            assert_eq!(took(Duration::from_millis(ms)), expected);
        }
    }
}
