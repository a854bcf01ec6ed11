//! Lines for whoever operates this, on standard error. Never a secret, and bounded: what the sandbox can cause must not fill a disk.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::audit::limit::Budget;
use crate::settings::Level;

static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);
static BUDGET: Mutex<Option<Budget>> = Mutex::new(None);

const LINES_AT_ONCE: u32 = 100;
const LINES_PER_SECOND: u32 = 5;

/// Lines less important than this are not written.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Writes a line, unless too many have been written.
pub fn tell(level: Level, what: impl Display) {
    if level as u8 > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let mut budget = BUDGET.lock().unwrap_or_else(PoisonError::into_inner);
    if !budget.get_or_insert_with(|| Budget::new(LINES_AT_ONCE, LINES_PER_SECOND)).take() {
        return;
    }
    let word = match level {
        Level::Error => "error",
        Level::Warn => "warning",
        Level::Info => "info",
        Level::Debug => "debug",
    };
    // Nobody to tell is no reason to stop enforcing.
    let _ = writeln!(std::io::stderr().lock(), "sandglass-egress: {word}: {what}");
}
