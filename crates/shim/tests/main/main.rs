//! The shim against the real kernel. Needs root, `busybox-static` and `gcc`.

mod lifecycle;
mod stage;
