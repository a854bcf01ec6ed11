//! The agent, shim and egress gate carried inside this binary, unpacked by content hash so that boxes of an older server keep theirs.
//! Every backend takes the agent from here, so that it is in the program once.

use std::{
    fs, io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::host_paths::private_dir;

pub(crate) static AGENT: &[u8] = include_bytes!(env!("SANDGLASS_AGENT_BINARY"));
const AGENT_HASH: &str = env!("SANDGLASS_AGENT_BINARY_HASH");
static SHIM: &[u8] = include_bytes!(env!("SANDGLASS_SHIM_BINARY"));
const SHIM_HASH: &str = env!("SANDGLASS_SHIM_BINARY_HASH");
pub(crate) static EGRESS: &[u8] = include_bytes!(env!("SANDGLASS_EGRESS_BINARY"));
pub(crate) const EGRESS_HASH: &str = env!("SANDGLASS_EGRESS_BINARY_HASH");

/// Where the programs lie that the embedded runtime starts.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    pub(crate) agent: PathBuf,
    pub(crate) shim: PathBuf,
    pub(crate) egress: PathBuf,
}

/// Makes sure that all of them lie in `dir`.
pub(crate) fn unpack(dir: &Path) -> io::Result<Binaries> {
    private_dir(dir)?;
    // Boxes bind the agent; the box's root, nobody outside, must reach the file itself, not the directory above.
    Ok(Binaries {
        agent: place(dir, "agent", AGENT_HASH, AGENT)?,
        shim: place(dir, "shim", SHIM_HASH, SHIM)?,
        egress: place(dir, "egress", EGRESS_HASH, EGRESS)?,
    })
}

/// Makes sure that the agent lies in `dir` and returns its path.
pub(crate) fn unpack_agent(dir: &Path) -> io::Result<PathBuf> {
    private_dir(dir)?;
    place(dir, "agent", AGENT_HASH, AGENT)
}

/// The hash is the one computed at build time: reading the content would make it resident.
fn place(dir: &Path, name: &str, hash: &str, content: &'static [u8]) -> io::Result<PathBuf> {
    use std::io::Write;
    let path = dir.join(format!("{name}-{hash}"));
    if fs::metadata(&path).is_ok_and(|m| m.len() == content.len() as u64) {
        return Ok(path);
    }
    let partial = dir.join(format!(".{name}-{hash}.{}", std::process::id()));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o755).open(&partial)?;
    file.write_all(content)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    drop(file);
    fs::rename(&partial, &path)?;
    forget_pages(content);
    Ok(path)
}

/// Gives the memory back into which a part of this program's own file was read; it is read again should anybody ask for it.
pub(crate) fn forget_pages(content: &'static [u8]) {
    let page = rustix::param::page_size();
    let start = content.as_ptr().addr().next_multiple_of(page);
    let end = (content.as_ptr().addr() + content.len()) / page * page;
    if start < end {
        // SAFETY: the range lies inside `content`, which is constant data mapped privately from this program's file and never
        // written to, so dropping its pages changes nothing that can be read. Failing is harmless.
        unsafe {
            libc::madvise(
                content.as_ptr().with_addr(start).cast_mut().cast(),
                end - start,
                libc::MADV_DONTNEED,
            )
        };
    }
}
