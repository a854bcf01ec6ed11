//! Images as data: references, registry pulls, archive imports, and a store of unpacked layers.
//!
//! Owns the directory `<state_dir>/images` and everything below it. Does not mount anything and knows no sandboxes:
//! callers say what is in use.
//!
//! Invariant: whatever is reachable under `layers/` and `images/` is complete and verified. Everything unfinished
//! lives under `tmp/` and disappears with its process.

mod error;
mod image;
mod limits;
mod store;

pub use error::{ImageError, ImageErrorKind};
pub use image::{
    Collected, Credentials, Image, ImageConfig, ImageDigest, Platform, Progress, ProgressFn, ProgressPhase,
};
pub use limits::{StoreOptions, UnpackLimits};
pub use store::ImageStore;
