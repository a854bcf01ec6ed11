//! Builds of images from repositories: which build runs when, what becomes of it, and how long its image stays.
//!
//! Owns the records ([`build`], [`image`], [`prebuild`]), every decision about them ([`decide`], pure), the driver that carries the
//! decisions out over ports ([`driver`]), and the build logs ([`logs`]). Does not own how an image is made (the [`ports::Engine`]), where rows
//! are kept (the [`ports::BuildStore`]), what a repository's key is (the [`ports::Resolver`]) or what a log must not say ([`ports::Filter`]).
//!
//! Invariants: a row is written before anything is done in the world, and says what has to be undone; at most one build of a key is under way;
//! an image exists for the record exactly if one transaction accepted it; every state that is not final has an owner and a deadline.

pub mod build;
mod build_parts;
pub mod decide;
pub mod driver;
pub mod image;
pub mod key;
pub mod logs;
pub mod ports;
pub mod prebuild;
pub mod submission;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time;

#[cfg(test)]
mod tests;

pub use driver::{Builds, Ports, Settings};
pub use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId};
