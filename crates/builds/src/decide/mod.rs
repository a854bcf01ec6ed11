//! Every decision about builds and images, pure: rows and the time in, what to do out.

pub mod admit;
pub mod attempt;
pub mod ending;
pub mod prebuild;
pub mod recover;
pub mod removal;
pub mod retention;
pub mod rules;
pub mod schedule;
pub mod waiters;

pub use rules::Rules;
