//! What somebody in the box may try.
