//! Why a tool failed, in the words of whoever refused.

use rmcp::model::{CallToolResult, ContentBlock, MetaObject};
use serde_json::json;

use crate::client::{ApiError, ClientError};

/// Where the parts of a failure stand in a result's `_meta`, for programs; people and models read the text.
///
/// Not in `structuredContent`: some clients check that against the tool's output schema even when the tool failed.
const META_KEY: &str = "sandglass/error";

/// A tool's failure: a code to branch on and a text to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    code: String,
    message: String,
    status: Option<u16>,
    request_id: Option<String>,
}

impl Failure {
    /// A failure of ours.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), status: None, request_id: None }
    }

    /// The arguments do not make sense.
    pub fn arguments(message: impl Into<String>) -> Self {
        Self::new("INVALID_ARGUMENTS", message)
    }

    /// The client took the call back. Nobody reads it: the answer to a cancelled request is dropped.
    pub fn cancelled() -> Self {
        Self::new("CANCELLED", "the call was cancelled")
    }

    /// Adds what was being done.
    pub fn while_doing(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// The code.
    #[cfg(test)]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// Whether there is no such thing.
    pub fn is_absent(&self) -> bool {
        self.status == Some(404)
    }

    /// Whether asking again may help.
    pub fn may_pass(&self) -> bool {
        self.status.is_some_and(|status| status >= 500)
            || matches!(self.code.as_str(), "UNREACHABLE" | "INTERRUPTED")
    }

    /// The text.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The answer to the client.
    pub fn into_result(self) -> CallToolResult {
        let mut known = vec![self.code.clone()];
        known.extend(self.status.map(|status| format!("HTTP {status}")));
        known.extend(self.request_id.as_ref().map(|id| format!("request {id}")));
        let text = format!("{} ({})", self.message, known.join(", "));
        let parts = json!({
            "code": self.code,
            "message": self.message,
            "status": self.status,
            "requestId": self.request_id,
        });
        let mut meta = MetaObject::new();
        meta.0.insert(META_KEY.to_owned(), parts);
        let mut result = CallToolResult::error(vec![ContentBlock::text(text)]);
        result.meta = Some(meta);
        result
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let code = if error.code.is_empty() { "REFUSED".to_owned() } else { error.code };
        let mut message = error.message;
        if error.status == reqwest::StatusCode::UNAUTHORIZED {
            message.push_str("; whoever started this MCP server must give it the key in SANDGLASS_API_KEY");
        }
        Self { code, message, status: Some(error.status.as_u16()), request_id: error.request_id }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(refused) => refused.into(),
            ClientError::Unreachable { base, reason } => {
                Self::new("UNREACHABLE", format!("cannot reach the sandbox server at {base}: {reason}"))
            }
            ClientError::Interrupted { base, reason } => {
                Self::new("INTERRUPTED", format!("no answer from {base}: {reason}"))
            }
            ClientError::NotTheApi { .. } => Self::new("NOT_THE_API", error.to_string()),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<ClientError>() {
            Ok(known) => known.into(),
            Err(other) => Self::new("FAILED", format!("{other:#}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_keeps_code_message_status_and_request() {
        let refused = ApiError {
            status: reqwest::StatusCode::NOT_FOUND,
            code: "SANDBOX::NOT_FOUND".into(),
            message: "no such sandbox".into(),
            request_id: Some("r-1".into()),
        };
        let error = anyhow::Error::from(ClientError::Refused(refused));
        let result = Failure::from(error).into_result();
        assert_eq!(result.is_error, Some(true));
        assert_eq!(result.structured_content, None);
        let text = serde_json::to_string(&result.content).unwrap();
        assert!(text.contains("no such sandbox (SANDBOX::NOT_FOUND, HTTP 404, request r-1)"), "{text}");
        let parts = &result.meta.unwrap().0[META_KEY];
        assert_eq!(parts["code"], "SANDBOX::NOT_FOUND");
        assert_eq!(parts["status"], 404);
    }

    #[test]
    fn a_failure_without_an_answer_has_no_status() {
        let gone = ClientError::Unreachable { base: "http://x".into(), reason: "connection refused".into() };
        let failure = Failure::from(anyhow::Error::from(gone));
        assert_eq!(failure.code(), "UNREACHABLE");
        assert_eq!(failure.status, None);
    }
}
