//! The stable JSON form of diagnostics.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One kind of diagnostic output of one sandbox, delivered in the answer itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = DiagnosticContentResponse)]
pub struct DiagnosticContent {
    pub sandbox_id: String,
    /// `logs` or `events`.
    pub kind: String,
    pub scope: String,
    /// Always `inline`.
    pub delivery: String,
    pub content_type: String,
    pub content: String,
    /// Bytes of `content` in UTF-8.
    pub content_length: u64,
    /// More existed than was returned.
    pub truncated: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warnings: Option<Vec<String>>,
}

impl DiagnosticContent {
    /// Text delivered inline.
    pub fn inline(sandbox_id: String, kind: &str, scope: String, content: String) -> Self {
        Self {
            sandbox_id,
            kind: kind.to_owned(),
            scope,
            delivery: "inline".to_owned(),
            content_type: "text/plain; charset=utf-8".to_owned(),
            content_length: u64::try_from(content.len()).unwrap_or(u64::MAX),
            content,
            truncated: false,
            warnings: None,
        }
    }
}
