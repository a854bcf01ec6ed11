//! Turns a layer's archive into a directory that overlayfs can use as a lower layer.

mod apply;
mod metered;
mod tree;

pub(crate) use apply::{LayerFacts, Unpacking, unpack};
pub(crate) use metered::Metered;
