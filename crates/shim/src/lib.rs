//! The embedded runtime's kernel part: what turns a directory with a `spec.json` into a running box.
//!
//! Three processes use this crate:
//!
//! * the **server** uses [`Zygote`], [`client`], [`teardown`], [`end_by_id`], [`host_network`] and [`doctor`];
//! * the **zygote** (`sandglass-shim zygote`) forks one shim for each create;
//! * the **shim** makes the box, supervises it, and lives as long as the sandbox directory.
//!
//! A box is a process tree in its own user, mount, pid, uts, ipc, net and cgroup namespace. Its root is an overlay
//! over id-mapped image layers; its root user is an unprivileged user of the host. On top of that: Docker's default
//! capabilities, a system-call allow-list, no_new_privs, masked and read-only kernel files, control groups (v1 or v2;
//! device rules on v1 only, because on v2 the user namespace alone forbids device nodes), and a routed veth pair
//! with an nftables table that separates boxes from the host and from each other. The kernel is shared: this is as
//! strong as Linux namespaces are, not a virtual machine.
//!
//! Needs: root with the usual capabilities (not CAP_SYS_RESOURCE), Linux 5.19 (id-mapped overlay layers) or newer.
//! Invariant: a create that fails and a box that ends leave nothing behind but their directory.

pub mod client;
pub mod create;
pub mod doctor;
pub mod host_network;
pub mod protocol;
pub mod spec;

mod capabilities;
mod cgroup;
mod directory;
mod egress;
mod host;
mod kernel;
mod launch;
mod network;
mod remains;
mod seccomp;
mod supervise;
mod teardown;
mod zygote;

pub use create::Zygote;
pub use directory::EVENT_FILES;
pub use egress::Event as EgressEvent;
pub use teardown::{TeardownError, end_by_id, remove_dir, shim_alive, teardown};
pub use zygote::{run as shim_main, zygote as zygote_main};
