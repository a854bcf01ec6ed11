//! Where user processes may write: a Landlock ruleset that allows reading everywhere and writing in known places.
//!
//! Writable are temporary directories, the kernel's own file systems, what is mounted into the box, the box's home and
//! working directory, and what the configuration adds. Mounts are looked up once, at start.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::report::Layer;

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
/// Remove and make of every kind.
const CHANGE_DIRECTORY: u64 = 0x1FF0;
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;
/// What may be allowed on something that is no directory.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | (1 << 2) | TRUNCATE;

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: u32 = 1;

const WRITABLE: [&str; 6] = ["/tmp", "/var/tmp", "/dev", "/proc", "/run/lock", "/run/user"];
/// Mounts below these belong to the box itself.
const OURS: [&str; 6] = ["/proc", "/sys", "/dev", "/etc", "/opt/opensandbox", "/run"];

#[repr(C)]
struct RulesetAttributes {
    handled_access_fs: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: i32,
}

/// A ruleset for the configured places, if the kernel can.
pub fn prepare<'a>(places: impl Iterator<Item = &'a PathBuf>) -> (Option<File>, Layer) {
    let version = match version() {
        Ok(version) => version,
        Err(error) => return (None, Layer::unsupported(&format!("this kernel has no Landlock: {error}"))),
    };
    match ruleset(version, places) {
        Ok(ruleset) => (Some(ruleset), Layer::active(&format!("writes are confined (Landlock {version})"))),
        Err(error) => (None, Layer::unsupported(&format!("the ruleset cannot be made: {error}"))),
    }
}

fn ruleset<'a>(version: i64, places: impl Iterator<Item = &'a PathBuf>) -> io::Result<File> {
    let mut handled = WRITE_FILE | CHANGE_DIRECTORY;
    // Not handled is not restricted; but moving between directories is refused as long as it is unknown.
    if version >= 2 {
        handled |= REFER;
    }
    if version >= 3 {
        handled |= TRUNCATE;
    }
    let ruleset = create(handled)?;
    let fixed = WRITABLE.iter().map(PathBuf::from).chain(mounted());
    for place in fixed.chain(places.cloned()) {
        if place != Path::new("/") {
            // A place that does not exist cannot be allowed; it is then as read-only as the rest.
            let _ = allow(ruleset.as_fd(), &place, handled);
        }
    }
    Ok(ruleset)
}

/// What somebody mounted into the box: volumes.
fn mounted() -> Vec<PathBuf> {
    places_of(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

fn places_of(table: &str) -> Vec<PathBuf> {
    let place = |line: &str| Some(PathBuf::from(unescape(line.split(' ').nth(4)?)));
    let ours = |place: &PathBuf| place == Path::new("/") || OURS.iter().any(|at| place.starts_with(at));
    table.lines().filter_map(place).filter(|place| !ours(place)).collect()
}

/// The kernel writes blanks and backslashes as octal numbers.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

fn version() -> io::Result<i64> {
    // SAFETY: without attributes, the call only asks for the version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<RulesetAttributes>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    if version > 0 { Ok(version) } else { Err(io::Error::last_os_error()) }
}

fn create(handled_access_fs: u64) -> io::Result<File> {
    let attributes = RulesetAttributes { handled_access_fs };
    // SAFETY: the structure lives through the call and its size is passed with it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const attributes,
            size_of::<RulesetAttributes>(),
            0_u32,
        )
    };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: a new descriptor, which nobody else owns.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

fn allow(ruleset: BorrowedFd<'_>, place: &Path, access: u64) -> io::Result<()> {
    let opened =
        fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(place)?;
    let access = if opened.metadata()?.is_dir() { access } else { access & OF_FILES };
    let rule = PathBeneath { allowed_access: access, parent_fd: opened.as_raw_fd() };
    // SAFETY: the structure lives through the call and is the one that this kind of rule has.
    let result = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const rule,
            0_u32,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Confines this thread and what it executes; only makes a system call.
pub fn restrict(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes numbers only.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0_u32) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_told_from_the_boxs_own_mounts() {
        let table = "1 0 8:1 / / rw - ext4 a rw\n2 1 0:5 / /proc rw - proc proc rw\n\
                     3 1 8:1 /v /my\\040data rw - ext4 a rw\n4 1 8:1 /h /etc/hosts rw - ext4 a rw\n";
        assert_eq!(places_of(table), [PathBuf::from("/my data")]);
    }
}
