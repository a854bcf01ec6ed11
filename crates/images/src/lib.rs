//! Images as data: references, registry pulls, archive imports, and a store of unpacked layers.
//!
//! Owns the directory `<state_dir>/images` and everything below it. Does not mount anything and knows no sandboxes:
//! callers say what is in use.
//!
//! Invariant: whatever is reachable under `layers/` and `images/` is complete and verified. Everything unfinished
//! lives under `tmp/` and disappears with its process.

mod collect;
mod commit;
mod compression;
mod error;
mod host_image;
mod image;
mod import;
mod layers;
mod limits;
mod lock;
mod manifest;
mod pull;
mod reference;
mod registry;
mod store;
mod tar_reader;
mod unpack;

pub use commit::Commit;
pub use error::{ImageError, ImageErrorKind};
pub use image::{
    Collected, Credentials, Image, ImageConfig, ImageDigest, Platform, Progress, ProgressFn, ProgressPhase,
};
pub use limits::{StoreOptions, UnpackLimits};
pub use reference::Reference;
pub use store::ImageStore;
