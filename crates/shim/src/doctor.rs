//! Can this machine run boxes? Each probe tries the thing itself where that leaves no trace, and says what to do.
//!
//! Used by `sandglass doctor` and by the server before it offers the embedded runtime.
//! Invariant: probing changes nothing on the host and takes milliseconds.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::pipe::PipeFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions};
use rustix::thread::{CapabilitySet, capabilities};
use serde::Serialize;

use crate::cgroup::{Controller, Layout};
use crate::egress;
use crate::kernel::mounts::{Reach, set_attributes};
use crate::kernel::process::{Cloned, Side, clone_child, exit_now};
use crate::network::nftables;
use crate::seccomp;
use sandglass_netlink::route;
use sandglass_netlink::socket::Socket;

/// One probe's finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    /// Without it no box can run; otherwise something is only weaker or missing.
    pub required: bool,
    pub found: String,
    /// What to do when it is not ok; empty otherwise.
    pub remedy: String,
}

/// The oldest kernel whose overlayfs takes id-mapped layers.
const OLDEST_KERNEL: (u32, u32) = (5, 19);

/// What the shim does as root.
const NEEDED: [(&str, CapabilitySet); 10] = [
    ("SYS_ADMIN", CapabilitySet::SYS_ADMIN),
    ("NET_ADMIN", CapabilitySet::NET_ADMIN),
    ("SETUID", CapabilitySet::SETUID),
    ("SETGID", CapabilitySet::SETGID),
    ("SETPCAP", CapabilitySet::SETPCAP),
    ("CHOWN", CapabilitySet::CHOWN),
    ("DAC_OVERRIDE", CapabilitySet::DAC_OVERRIDE),
    ("FOWNER", CapabilitySet::FOWNER),
    ("KILL", CapabilitySet::KILL),
    ("SYS_CHROOT", CapabilitySet::SYS_CHROOT),
];

/// Probes this machine. The state directory need not exist yet; then the nearest parent that does is looked at.
pub fn probe(state_dir: &Path) -> Vec<Check> {
    let state_dir = state_dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let mut checks = vec![privileges(), kernel(), user_namespaces()];
    checks.extend([overlay(), id_mapping(state_dir)]);
    checks.extend(control_groups());
    checks.extend([system_call_filter(), pidfd(), veth(), nf_tables(), connection_limits()]);
    checks.push(egress_policies());
    checks.extend([forwarding_policy(), disk(state_dir)]);
    if !checks[0].ok {
        // Without privileges most probes can only tell that they were not allowed to look.
        for denied in
            checks.iter_mut().skip(1).filter(|check| !check.ok && check.found.contains("not permitted"))
        {
            denied.found = "cannot be looked at without privileges".into();
            denied.remedy = "see privileges".into();
        }
    }
    checks
}

fn check(name: &'static str, required: bool, result: Result<String, String>, remedy: &str) -> Check {
    let ok = result.is_ok();
    let remedy = if ok { String::new() } else { remedy.to_owned() };
    let found = result.unwrap_or_else(|found| found);
    Check { name, ok, required, found, remedy }
}

fn privileges() -> Check {
    let held = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    let missing: Vec<&str> =
        NEEDED.iter().filter(|(_, one)| !held.contains(*one)).map(|(name, _)| *name).collect();
    let result = match (rustix::process::geteuid().is_root(), missing.as_slice()) {
        (false, _) => Err("not root".into()),
        (true, []) => Ok("root with all needed capabilities".into()),
        (true, missing) => Err(format!("root without {}", missing.join(", "))),
    };
    check("privileges", true, result, "run the server as root, with the capabilities of a plain root login")
}

fn kernel() -> Check {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let result = if version >= OLDEST_KERNEL { Ok(release) } else { Err(release) };
    check("kernel", true, result, "boxes need Linux 5.19 or newer")
}

fn user_namespaces() -> Check {
    let result = Namespace::make().map(|_| "available".into()).map_err(|error| error.to_string());
    check("user namespaces", true, result, "sysctl -w user.max_user_namespaces=65536")
}

fn overlay() -> Check {
    let listed = || fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.contains("\toverlay\n"));
    let result = if listed() || (load("overlay") && listed()) {
        Ok("available".into())
    } else {
        Err("the kernel does not know overlayfs".into())
    };
    check("overlayfs", true, result, "load or build the `overlay` kernel module")
}

/// Modules are loaded by themselves when root asks for the thing; this only makes the probe say so.
fn load(module: &str) -> bool {
    Command::new("modprobe").arg(module).status().is_ok_and(|status| status.success())
}

/// A process that does nothing but hold a user namespace, for as long as this value lives.
struct Namespace {
    process: Cloned,
    _end: OwnedFd,
}

impl Namespace {
    fn make() -> io::Result<Self> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        match clone_child(libc::CLONE_NEWUSER, None)? {
            // Also in a copy of a threaded server this is sound: it makes two system calls and touches no memory.
            Side::Child => {
                let _ = rustix::io::read(&read, &mut [0; 1]);
                exit_now(0)
            }
            Side::Parent(process) => {
                let pid = process.pid.as_raw_nonzero();
                let made = Self { process, _end: write };
                fs::write(format!("/proc/{pid}/uid_map"), "0 65536 65536")?;
                fs::write(format!("/proc/{pid}/gid_map"), "0 65536 65536")?;
                Ok(made)
            }
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.process.pidfd, Signal::KILL);
        let _ = rustix::process::waitid(WaitId::PidFd(self.process.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

/// Maps ids on a clone that is attached nowhere.
fn id_mapping(state_dir: &Path) -> Check {
    let attempt = || -> io::Result<()> {
        let namespace = Namespace::make()?;
        let owner = fs::File::open(format!("/proc/{}/ns/user", namespace.process.pid.as_raw_nonzero()))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let clone = open_tree(rustix::fs::CWD, state_dir, flags)?;
        set_attributes(clone.as_fd(), 0, Some(owner.as_fd()), Reach::This)
    };
    let result = attempt().map(|()| "supported".into()).map_err(|e| format!("{}: {e}", state_dir.display()));
    let remedy = "put the state directory on ext4, xfs, btrfs or another file system that supports them";
    check("id-mapped mounts", true, result, remedy)
}

fn control_groups() -> Vec<Check> {
    let layout = match Layout::detect() {
        Ok(layout) => layout,
        Err(error) => {
            let remedy = "mount the cgroup file system at /sys/fs/cgroup";
            return vec![check("control groups", true, Err(error.to_string()), remedy)];
        }
    };
    let version = if matches!(layout, Layout::V1 { .. }) { "v1" } else { "v2" };
    let one = |name, controller: Controller, required| {
        let result = if layout.has(controller) {
            Ok(format!("cgroup {version}"))
        } else {
            Err(format!("cgroup {version} without `{}`", controller.name()))
        };
        check(name, required, result, "enable the controller at boot (kernel command line)")
    };
    vec![
        one("process limits", Controller::Pids, true),
        one("memory limits", Controller::Memory, false),
        one("cpu limits", Controller::Cpu, false),
        one("pause", Controller::Freezer, false),
    ]
}

fn system_call_filter() -> Check {
    let available = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    let result = match seccomp::compile(seccomp::Extent::Usual) {
        Ok(program) if available.contains("kill_process") => Ok(format!("{} instructions", program.len())),
        Ok(_) => Err("the kernel cannot filter system calls".into()),
        Err(error) => Err(error.to_string()),
    };
    check("seccomp", true, result, "use a kernel with CONFIG_SECCOMP_FILTER")
}

fn pidfd() -> Check {
    let result = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    check(
        "pidfd",
        true,
        result.map(|_| "available".into()).map_err(|e| e.to_string()),
        "use Linux 5.19 or newer",
    )
}

/// Asks for a pair with an impossible size: the kernel finds the driver first and then refuses.
fn veth() -> Check {
    let end = |name| route::End { name, mac: [2, 0, 0, 0, 0, 1] };
    let attempt = Socket::route().and_then(|mut socket| {
        socket.request(route::add_veth(
            &end("sgprobe0"),
            &end("sgprobe1"),
            route::Namespace::Of(-1),
            u32::MAX,
        ))
    });
    let result = match attempt {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            Err("the kernel has no veth driver".into())
        }
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(error.to_string()),
        _ => Ok("available".into()),
    };
    check("veth", true, result, "load or build the `veth` kernel module")
}

fn nf_tables() -> Check {
    let result = nftables::probe().map(|()| "available".into()).map_err(|error| error.to_string());
    check("nf_tables", true, result, "load or build the `nf_tables` and `nft_masq` kernel modules")
}

/// Modules are loaded by the trial itself.
fn egress_policies() -> Check {
    let remedy = "load or build these modules; until then sandboxes with a networkPolicy cannot be created";
    check("egress policies", false, egress::probe(), remedy)
}

/// In a namespace of its own, which ends with the probe.
fn connection_limits() -> Check {
    let result = egress::in_middle(nftables::probe_limits);
    let result = result.map(|()| "available".into()).map_err(|error| error.to_string());
    let remedy = "use a kernel with CONFIG_NFT_CONNLIMIT; until then one sandbox can fill the host's table of connections";
    check("connection limits", false, result, remedy)
}

/// Our table accepts boxes' traffic, but in netfilter a drop elsewhere is final.
fn forwarding_policy() -> Check {
    let drops = nftables::foreign_forward_drops();
    let result = match drops {
        Ok(tables) if tables.is_empty() => Ok("nobody else drops forwarded packets".into()),
        Ok(tables) => Err(format!("default drop in {}", tables.join(", "))),
        Err(error) => Err(error.to_string()),
    };
    let remedy = "boxes have no way out: accept interfaces of the boxes there, for example in Docker's DOCKER-USER chain";
    check("forwarding", false, result, remedy)
}

fn disk(state_dir: &Path) -> Check {
    const OVERLAY_MAGIC: i64 = 0x794c_7630;
    const NFS_MAGIC: i64 = 0x6969;
    const PLENTY: u64 = 1 << 30;
    let result = match rustix::fs::statfs(state_dir) {
        Err(error) => Err(error.to_string()),
        Ok(stat) => {
            let free = stat.f_bavail * u64::try_from(stat.f_bsize).unwrap_or(0);
            match stat.f_type {
                OVERLAY_MAGIC => Err("an overlay, on which no overlay can write".into()),
                NFS_MAGIC => Err("nfs, on which no overlay can write".into()),
                _ if free < PLENTY => Err(format!("{} MiB free", free >> 20)),
                _ => Ok(format!("{} MiB free", free >> 20)),
            }
        }
    };
    check("state directory", true, result, "choose a directory on a local disk with room")
}
