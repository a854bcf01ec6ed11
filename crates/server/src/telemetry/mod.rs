//! What the server says about itself.

pub mod logs;
mod rotation;
