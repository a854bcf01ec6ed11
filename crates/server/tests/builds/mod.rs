//! Image builds over HTTP: real git and a real database, the runtime and the inside of its sandboxes faked.

mod dockerfile;
mod harness;
mod images;
mod increments;
mod life;
mod prebuilds;
mod pushes;
mod sandboxes;
mod secrets;
