//! Firewall and inspector in namespaces of their own. Needs root, `ip`, and a kernel with nf_tables and NFQUEUE.

mod attacks;
mod measure;
mod placements;
mod stage;
