//! The shim against the real kernel. Needs root, `busybox-static` and `gcc`; `runc` and `iproute2` for comparison.

mod isolation;
mod lifecycle;
mod limits;
mod network;
mod runc;
mod stage;
