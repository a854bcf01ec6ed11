//! Error bodies. Every error of the API, whatever its status, is a JSON object with both `code` and `message`,
//! because the published clients fail to read anything else.
//!
//! The invariant: nothing that the caller sent is repeated in an error body except the names of fields.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The code of a body or parameter that does not have the required shape.
pub const VALIDATION_ERROR: &str = "GENERAL::VALIDATION_ERROR";

/// An application error. Exactly these two keys: the schema of the clients allows no further property.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ErrorResponse)]
pub struct ErrorBody {
    /// Machine-readable reason, for instance `SANDBOX::INVALID_PARAMETER`.
    pub code: String,
    /// Text for a person; clients never match on it.
    pub message: String,
}

/// A 404 or 405 of the router, readable by clients that look for `detail` and by those that look for `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RouterErrorBody {
    pub code: String,
    pub message: String,
    pub detail: String,
}

/// A 422: the request's shape is wrong. Lists every offending field, never what was in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = HTTPValidationError)]
pub struct ValidationBody {
    pub code: String,
    pub message: String,
    pub detail: Vec<FieldError>,
}

/// One offending field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ValidationError)]
pub struct FieldError {
    /// Stable word for the kind of mistake, for instance `missing` or `string_type`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Where: `body`, `query` or `path`, then field names and list positions.
    pub loc: Vec<Loc>,
    pub msg: String,
}

/// One step of a location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Loc {
    Index(u64),
    Field(String),
}

impl From<&str> for Loc {
    fn from(name: &str) -> Self {
        Self::Field(name.to_owned())
    }
}

impl From<usize> for Loc {
    fn from(index: usize) -> Self {
        Self::Index(u64::try_from(index).unwrap_or(u64::MAX))
    }
}
