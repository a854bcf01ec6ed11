//! The store as its callers see it: archives, registries and hostile input, against a real directory.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is all there is to say")]

mod cases;
