//! Keeping secrets out of what is shown: known values in a stream of output, and known shapes of tokens in a finished file.

mod forms;
mod scan;
mod search;
mod stream;

pub use scan::{Finding, TokenKind, scan};
pub use search::Needles;
pub use stream::{RedactStream, Redactor, VALUE_MIN};
