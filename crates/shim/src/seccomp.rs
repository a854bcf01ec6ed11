//! The system calls that a box may make.
//!
//! An allow-list in the manner of Docker's default profile for the capabilities that boxes have. Everything else
//! fails with EPERM, except calls newer than this list and `clone3`, which fail with ENOSYS so that C libraries
//! fall back to older calls. Sockets of MPTCP fail as on a kernel without it, so that programs fall back to TCP: over several
//! ways at once, no rule of the network sees what a connection says. Programs of another architecture are killed.
//! A box with isolated sessions gets the calls that make them, too; for those the kernel wants CAP_SYS_ADMIN, which only
//! its agent has. User namespaces stay forbidden there as well: in one of its own, any process has every capability.
//! Invariant: nothing here makes user namespaces, loads code into the kernel or reaches keys or other tasks'
//! descriptors beyond what Docker allows; nothing in the usual list mounts or makes namespaces of any kind. That one is
//! compiled once, in the zygote.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

mod calls;

/// CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME.
const NEW_NAMESPACES: u64 = 0x7E02_0080;

/// `personality` values that change nothing dangerous: default, 16-bit uids, 32-bit, both, and "only ask".
const PERSONALITIES: [u64; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xFFFF_FFFF];

/// Address families that no box gets: every packet of the interface (with the agent's token in it), also by way of
/// AF_XDP, and the hypervisor.
const FORBIDDEN_FAMILIES: [u64; 3] = [libc::AF_PACKET as u64, libc::AF_VSOCK as u64, libc::AF_XDP as u64];

/// The socket types that anybody gets: stream, datagram, rdm, seqpacket, dccp. Not SOCK_PACKET, another name of
/// AF_PACKET, and not SOCK_RAW, see [`RAW_SOCKETS`].
const SOCKET_TYPES: [u64; 5] = [1, 2, 4, 5, 6];

/// The bits of a socket's type that are not flags.
const SOCKET_TYPE_BITS: u64 = 0xf;

/// Family and, where it matters, protocol of the raw sockets that boxes get: netlink and Unix, where raw means nothing
/// special, and what `ping` needs. A raw socket of TCP would read the agent's connections.
const RAW_SOCKETS: [(i32, Option<i32>); 4] = [
    (libc::AF_UNIX, None),
    (libc::AF_NETLINK, None),
    (libc::AF_INET, Some(libc::IPPROTO_ICMP)),
    (libc::AF_INET6, Some(libc::IPPROTO_ICMPV6)),
];

/// Socket options, by level, with which a program writes its packets' headers or source addresses itself: it would speak for
/// others. `ping` needs none of them.
const FORBIDDEN_OPTIONS: [(i32, &[i32]); 3] = [
    (libc::IPPROTO_IP, &[libc::IP_HDRINCL, libc::IP_TRANSPARENT]),
    (libc::IPPROTO_IPV6, &[IPV6_HDRINCL, libc::IPV6_TRANSPARENT]),
    (SOL_RAW, &[IPV6_HDRINCL]),
];
const IPV6_HDRINCL: i32 = 36;
const SOL_RAW: i32 = 255;

/// System calls from this number on did not exist when the list was written.
const FIRST_UNKNOWN_CALL: u32 = 470;

/// Which list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    Usual,
    /// For a box whose agent makes namespaces inside.
    Sessions,
}

/// Compiles the filter.
pub fn compile(extent: Extent) -> io::Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls::ALLOWED.iter().chain(calls::ALLOWED_OLD).map(|call| (*call, Vec::new())).collect();
    let values = |value: &u64| rule(vec![condition(0, SeccompCmpOp::Eq, *value)?]);
    rules.insert(libc::SYS_personality, PERSONALITIES.iter().map(values).collect::<io::Result<_>>()?);
    rules
        .insert(libc::SYS_clone, vec![rule(vec![condition(0, SeccompCmpOp::MaskedEq(NEW_NAMESPACES), 0)?])?]);
    rules.insert(libc::SYS_socket, sockets()?);
    rules.insert(libc::SYS_setsockopt, socket_options()?);
    rules.insert(libc::SYS_prlimit64, own_limits()?);
    if extent == Extent::Sessions {
        rules.extend(calls::OF_SESSIONS.iter().map(|call| (*call, Vec::new())));
        let no_users = condition(0, SeccompCmpOp::MaskedEq(libc::CLONE_NEWUSER as u64), 0)?;
        rules.insert(libc::SYS_unshare, vec![rule(vec![no_users])?]);
    }
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        architecture()?,
    )
    .map_err(io::Error::other)?;
    let listed: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    let mut program = prelude();
    program.extend(listed);
    Ok(program)
}

/// When `socket` is allowed.
fn sockets() -> io::Result<Vec<SeccompRule>> {
    let of_type = |kind: u64| condition(1, SeccompCmpOp::MaskedEq(SOCKET_TYPE_BITS), kind);
    let ordinary = SOCKET_TYPES.iter().map(|kind| {
        let mut all = vec![of_type(*kind)?];
        for family in FORBIDDEN_FAMILIES {
            all.push(condition(0, SeccompCmpOp::Ne, family)?);
        }
        rule(all)
    });
    let raw = RAW_SOCKETS.iter().map(|(family, protocol)| {
        let mut all = vec![of_type(libc::SOCK_RAW as u64)?, condition(0, SeccompCmpOp::Eq, *family as u64)?];
        if let Some(protocol) = protocol {
            all.push(condition(2, SeccompCmpOp::Eq, *protocol as u64)?);
        }
        rule(all)
    });
    ordinary.chain(raw).collect()
}

/// When `setsockopt` is allowed.
fn socket_options() -> io::Result<Vec<SeccompRule>> {
    let no_level = FORBIDDEN_OPTIONS.iter().map(|(level, _)| condition(1, SeccompCmpOp::Ne, *level as u64));
    let mut rules = vec![rule(no_level.collect::<io::Result<_>>()?)?];
    for (level, options) in FORBIDDEN_OPTIONS {
        let mut all = vec![condition(1, SeccompCmpOp::Eq, level as u64)?];
        for option in options {
            all.push(condition(2, SeccompCmpOp::Ne, *option as u64)?);
        }
        rules.push(rule(all)?);
    }
    Ok(rules)
}

/// When `prlimit64` is allowed: for the caller itself, or to ask. The box's root has the same user as the box's init,
/// and could take away its descriptors or memory otherwise.
fn own_limits() -> io::Result<Vec<SeccompRule>> {
    Ok(vec![
        rule(vec![condition(0, SeccompCmpOp::Eq, 0)?])?,
        rule(vec![condition(2, SeccompCmpOp::MaskedEq(u64::MAX), 0)?])?,
    ])
}

/// Applies the filter to this thread and what it executes; sets no_new_privs as well.
pub fn apply(program: &BpfProgram) -> io::Result<()> {
    seccompiler::apply_filter(program).map_err(io::Error::other)
}

/// Answers ENOSYS for `clone3` and unknown calls and EPROTONOSUPPORT for MPTCP, before the list; other architectures go on to
/// be killed there.
fn prelude() -> BpfProgram {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    /// Numbers of the x32 ABI start here: not unknown, but denied by the list.
    const X32: u32 = 0x4000_0000;
    /// Of `struct seccomp_data`: the third argument's lower half, all that the kernel looks at in an `int`.
    const PROTOCOL: u32 = 16 + 2 * 8;
    let line = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let fail = |errno: i32| line(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32);
    vec![
        line(LOAD, 0, 0, 4), // the architecture
        line(EQUAL, 0, 9, audit_architecture()),
        line(LOAD, 0, 0, 0), // the number
        line(EQUAL, 3, 0, libc::SYS_socket as u32),
        line(EQUAL, 4, 0, libc::SYS_clone3 as u32),
        line(AT_LEAST, 5, 0, X32),
        line(AT_LEAST, 2, 4, FIRST_UNKNOWN_CALL),
        line(LOAD, 0, 0, PROTOCOL),
        line(EQUAL, 1, 2, libc::IPPROTO_MPTCP as u32),
        fail(libc::ENOSYS),
        fail(libc::EPROTONOSUPPORT),
    ]
}

fn rule(conditions: Vec<SeccompCondition>) -> io::Result<SeccompRule> {
    SeccompRule::new(conditions).map_err(io::Error::other)
}

fn condition(argument: u8, operator: SeccompCmpOp, value: u64) -> io::Result<SeccompCondition> {
    let length = match operator {
        SeccompCmpOp::MaskedEq(_) => SeccompCmpArgLen::Qword,
        _ => SeccompCmpArgLen::Dword,
    };
    SeccompCondition::new(argument, length, operator, value).map_err(io::Error::other)
}

fn architecture() -> io::Result<TargetArch> {
    TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)
}

const fn audit_architecture() -> u32 {
    #[cfg(target_arch = "x86_64")]
    return 0xC000_003E;
    #[cfg(target_arch = "aarch64")]
    return 0xC000_00B7;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_compiles_and_fits_the_kernel() {
        for extent in [Extent::Usual, Extent::Sessions] {
            let program = compile(extent).unwrap();
            assert!(program.len() > 300 && program.len() < 4096, "{} instructions", program.len());
        }
    }

    #[test]
    fn calls_that_cross_the_border_are_not_listed() {
        let denied = [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_open_by_handle_at,
            libc::SYS_init_module,
            libc::SYS_kexec_load,
            libc::SYS_reboot,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_mount_setattr,
            libc::SYS_pivot_root,
            libc::SYS_clone3,
        ];
        for call in denied {
            assert!(!calls::ALLOWED.contains(&call) && !calls::ALLOWED_OLD.contains(&call), "{call}");
        }
    }
    /// What a call gives in a process of its own that has the filter: 0, or what it fails with.
    fn under(program: &BpfProgram, call: impl FnOnce() -> libc::c_long) -> i32 {
        // SAFETY: the child makes system calls only, and ends without running anything of the parent's.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let applied = apply(program).is_ok();
            let result = call();
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
            // SAFETY: ends the child and nothing else.
            unsafe {
                libc::_exit(if !applied {
                    255
                } else if result < 0 {
                    errno
                } else {
                    0
                })
            }
        }
        let mut status = 0;
        // SAFETY: the pointer is to a number that outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "{status}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn sockets_over_several_ways_are_as_on_a_kernel_without_them() {
        for extent in [Extent::Usual, Extent::Sessions] {
            let program = compile(extent).unwrap();
            let socket = |family: i32, protocol: i64| {
                // SAFETY: takes numbers only.
                under(&program, || unsafe {
                    libc::syscall(libc::SYS_socket, family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol)
                })
            };
            for family in [libc::AF_INET, libc::AF_INET6] {
                // The kernel takes the lower half for the number.
                for protocol in [262, 262 | 1 << 32] {
                    assert_eq!(socket(family, protocol), libc::EPROTONOSUPPORT, "{protocol:x}");
                }
            }
            assert_eq!(socket(libc::AF_INET, 0), 0);
            assert_eq!(socket(libc::AF_INET, libc::IPPROTO_TCP.into()), 0);
            // SAFETY: both calls fail before they look at their arguments, or have none.
            let unknown = |number| under(&program, || unsafe { libc::syscall(number, 0, 0, 0) });
            assert_eq!(unknown(libc::SYS_clone3), libc::ENOSYS);
            assert_eq!(unknown(FIRST_UNKNOWN_CALL.into()), libc::ENOSYS);
            assert_eq!(unknown(libc::SYS_bpf), libc::EPERM);
            assert_eq!(unknown(libc::SYS_getpid), 0);
        }
    }

    #[test]
    fn nobody_writes_headers_or_source_addresses() {
        let program = compile(Extent::Usual).unwrap();
        // What the filter lets through fails with EBADF.
        let set = |level: i64, option: i64| {
            let one = 1_i32;
            // SAFETY: there is no such descriptor; the pointer is to a number that outlives the call.
            under(&program, || unsafe {
                libc::syscall(libc::SYS_setsockopt, -1, level, option, &raw const one, 4)
            })
        };
        for (level, option) in
            [(0, 3), (0, 19), (41, 36), (41, 75), (255, 36), (1 << 32, 3), (0, 3 | 1 << 32)]
        {
            assert_eq!(set(level, option), libc::EPERM, "{level} {option}");
        }
        // TTL, ICMP_FILTER, IPV6_CHECKSUM, IPV6_UNICAST_HOPS, SO_REUSEADDR, TCP_NODELAY.
        for (level, option) in [(0, 2), (255, 1), (255, 7), (41, 16), (1, 2), (6, 1)] {
            assert_eq!(set(level, option), libc::EBADF, "{level} {option}");
        }
    }
}
