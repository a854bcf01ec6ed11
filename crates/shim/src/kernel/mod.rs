//! The kernel calls that neither std nor rustix offers, each as a safe function. The only files with `unsafe`.

pub mod mounts;
pub mod process;
