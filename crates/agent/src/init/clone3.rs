//! For old sandboxes and kernels that refuse `clone3` the wrong way: a filter that makes it look like a system call that does not exist.

use std::io;

use rustix::io::Errno;

const GUARD: &str = "_EXECD_CLONE3_COMPAT_APPLIED";
const CLONE3: u32 = 435;

/// What `EXECD_CLONE3_COMPAT` may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compat {
    Off,
    On,
    /// The agent is executed once more below the filter.
    Again,
}

impl Compat {
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text.trim().to_ascii_lowercase().as_str() {
            "" | "0" | "false" | "off" | "no" => Self::Off,
            "1" | "true" | "yes" | "on" => Self::On,
            "reexec" => Self::Again,
            _ => return None,
        })
    }

    /// Installs the filter for this process and everything that it starts. Must come before the first thread.
    pub fn apply(self) -> io::Result<()> {
        if self == Self::Off || std::env::var_os(GUARD).is_some() {
            return Ok(());
        }
        install()?;
        if self == Self::Again {
            use std::os::unix::process::CommandExt;
            let mut again = std::process::Command::new(std::env::current_exe()?);
            again.args(std::env::args_os().skip(1)).env(GUARD, "1");
            if let Some(name) = std::env::args_os().next() {
                again.arg0(name);
            }
            return Err(again.exec());
        }
        Ok(())
    }
}

fn install() -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | Errno::NOSYS.raw_os_error().unsigned_abs();
    // The number of the call comes first in what the filter sees; it is 435 on every architecture.
    let mut filter = [
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 1, CLONE3),
        step(RETURN, 0, 0, refuse),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    let set = || {
        // SAFETY: `program` and the instructions that it points to live until the call returns; the kernel copies them.
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0 }
    };
    // Without the right to do so, only who can gain no rights any more may filter.
    if set() || (rustix::thread::set_no_new_privs(true).is_ok() && set()) {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_may_say() {
        for (text, means) in [
            ("", Some(Compat::Off)),
            ("No", Some(Compat::Off)),
            ("TRUE", Some(Compat::On)),
            ("reexec", Some(Compat::Again)),
            ("maybe", None),
        ] {
            assert_eq!(Compat::parse(text), means, "{text}");
        }
    }
}
