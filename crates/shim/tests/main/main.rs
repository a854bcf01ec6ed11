//! The shim against the real kernel. Needs root, `busybox-static` and `gcc`; `runc` and `iproute2` for comparison.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod doctor;
mod egress;
mod isolation;
mod lifecycle;
mod limits;
mod measure;
mod network;
mod runc;
mod stage;
