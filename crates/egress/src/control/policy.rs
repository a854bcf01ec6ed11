//! `/policy`: reads and changes the policy.

use http::{Method, StatusCode};
use serde::Serialize;

use crate::diagnostics::tell;
use crate::plane::{Plane, Unchanged};
use crate::policy::document::{self, Invalid, Policy};
use crate::settings::Level;

use super::Request;
use super::answer::Answer;

/// What is enforced, in the word of the published clients: names and addresses.
const ENFORCEMENT: &str = "dns+nft";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
    status: &'static str,
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    enforcement_mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'a Policy>,
}

impl Shown<'_> {
    fn of(policy: &Policy) -> Self {
        let enforcement_mode = Some(ENFORCEMENT);
        Self { status: "ok", mode: policy.mode(), enforcement_mode, reason: None, policy: None }
    }
}

/// Answers one request.
pub(super) fn answer(plane: &mut Plane, request: &Request) -> Answer {
    let Ok(text) = std::str::from_utf8(&request.body) else {
        return Answer::text(StatusCode::BAD_REQUEST, "the body is not UTF-8");
    };
    let answer = match request.method {
        Method::GET => {
            let policy = plane.policy();
            Ok(Answer::json(&Shown { policy: Some(policy), ..Shown::of(policy) }))
        }
        Method::POST | Method::PUT => put(plane, text),
        Method::PATCH => patch(plane, text),
        Method::DELETE => delete(plane, text),
        _ => Ok(Answer::wrong_method("GET, POST, PUT, PATCH, DELETE")),
    };
    answer.unwrap_or_else(|error| refusal(&error))
}

fn put(plane: &mut Plane, text: &str) -> Result<Answer, Unchanged> {
    if text.trim().is_empty() {
        plane.set(Policy::deny_all())?;
        let reason = Some("policy reset to default deny-all");
        return Ok(Answer::json(&Shown { enforcement_mode: None, reason, ..Shown::of(plane.policy()) }));
    }
    plane.set(Policy::parse(text)?)?;
    Ok(Answer::json(&Shown::of(plane.policy())))
}

fn patch(plane: &mut Plane, text: &str) -> Result<Answer, Unchanged> {
    let rules = document::parse_rules(text)?;
    plane.set(plane.policy().patched(rules))?;
    Ok(Answer::json(&Shown::of(plane.policy())))
}

fn delete(plane: &mut Plane, text: &str) -> Result<Answer, Unchanged> {
    let targets = document::parse_targets(text)?;
    let left = plane.policy().without(&targets);
    if left.egress.len() == plane.policy().egress.len() {
        let reason = Some("no matching targets found");
        return Ok(Answer::json(&Shown { reason, ..Shown::of(plane.policy()) }));
    }
    plane.set(left)?;
    Ok(Answer::json(&Shown::of(plane.policy())))
}

fn refusal(error: &Unchanged) -> Answer {
    let status = match error {
        Unchanged::Invalid(Invalid::TooManyRules { .. } | Invalid::TooLong) => StatusCode::PAYLOAD_TOO_LARGE,
        Unchanged::Invalid(_) | Unchanged::Vault(_) => StatusCode::BAD_REQUEST,
        Unchanged::Store(_) | Unchanged::Kernel(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    if status.is_server_error() {
        tell(Level::Error, error);
    }
    let what = if matches!(error, Unchanged::Invalid(_)) { "invalid policy: " } else { "" };
    Answer::text(status, &format!("{what}{error}"))
}
