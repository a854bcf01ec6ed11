//! The short dialect of a create: `repo_url`, `image_tag`, `env`, `ttl_seconds`.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::http::error::{ApiError, ApiResult};

const URL: &str = "repo_url";
const TAG: &str = "image_tag";
const ENV: &str = "env";
const TTL: &str = "ttl_seconds";
/// The least life, as for `timeout`.
const LEAST_TTL: f64 = 60.0;

/// The body in the names that everything else knows. One without a word of the short dialect stays as it is.
///
/// # Errors
/// 400 when the dialects are mixed, or the life that is asked for is too short.
pub(super) fn canonical(value: &Value) -> ApiResult<Cow<'_, Value>> {
    let Some(object) = value.as_object() else { return Ok(Cow::Borrowed(value)) };
    if ![URL, TAG, TTL].iter().any(|name| object.contains_key(*name)) {
        return Ok(Cow::Borrowed(value));
    }
    let foreign: Vec<&str> =
        object.keys().map(String::as_str).filter(|name| ![URL, TAG, ENV, TTL].contains(name)).collect();
    if !foreign.is_empty() {
        // Names are not repeated as they came: they may be anything.
        return Err(ApiError::invalid_parameter(
            "repo_url, image_tag and ttl_seconds go with env alone; use repository, imageBuild and timeout with other fields",
        ));
    }
    if !object.contains_key(URL) {
        return Err(ApiError::invalid_parameter("image_tag and ttl_seconds need repo_url"));
    }
    let mut canonical = Map::new();
    canonical.insert("repository".to_owned(), json!({"url": object[URL]}));
    if let Some(tag) = object.get(TAG).filter(|tag| !tag.is_null()) {
        canonical.insert("imageBuild".to_owned(), json!({"tag": tag}));
    }
    if let Some(env) = object.get(ENV) {
        canonical.insert(ENV.to_owned(), env.clone());
    }
    if let Some(ttl) = object.get(TTL).filter(|ttl| !ttl.is_null()) {
        if ttl.as_f64().is_some_and(|ttl| ttl < LEAST_TTL) {
            return Err(ApiError::invalid_parameter("ttl_seconds must be at least 60"));
        }
        canonical.insert("timeout".to_owned(), ttl.clone());
    }
    Ok(Cow::Owned(Value::Object(canonical)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_fields_stand_for_a_repository_and_its_life() {
        let seed = json!({"repo_url": "https://h/a/b", "image_tag": "latest", "env": {"A": "b"}, "ttl_seconds": 600});
        assert_eq!(
            *canonical(&seed).unwrap(),
            json!({"repository": {"url": "https://h/a/b"}, "imageBuild": {"tag": "latest"}, "env": {"A": "b"},
                "timeout": 600})
        );
        let plain = json!({"image": {"uri": "x"}, "env": {}});
        assert_eq!(*canonical(&plain).unwrap(), plain);
    }

    #[test]
    fn dialects_are_not_mixed() {
        for mixed in [
            json!({"repo_url": "u", "repository": {"url": "u"}}),
            json!({"repo_url": "u", "timeout": 60}),
            json!({"image": {"uri": "x"}, "ttl_seconds": 60}),
            json!({"ttl_seconds": 60}),
            json!({"repo_url": "u", "ttl_seconds": 59}),
            json!({"repo_url": "u", "ttl_seconds": 0}),
        ] {
            assert_eq!(canonical(&mixed).unwrap_err().status, 400, "{mixed}");
        }
    }
}
