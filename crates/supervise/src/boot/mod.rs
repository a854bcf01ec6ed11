//! From the agent's start to *Ready*, step by step.

pub mod deadline;
mod run;
mod step;

pub use run::{Boot, Outcome};
