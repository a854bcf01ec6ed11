//! The body of `POST /command`, checked.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::http::query::Object;
use crate::http::reply::Failure;

#[derive(Debug)]
pub(super) enum What {
    Shell(String),
    Argv(Vec<String>),
}

#[derive(Debug)]
pub(super) struct CommandRequest {
    pub what: What,
    /// What status reports: the text, or the argv as a JSON array.
    pub content: String,
    pub cwd: Option<String>,
    pub background: bool,
    pub timeout: Option<Duration>,
    pub ids: Option<(u32, Option<u32>)>,
    pub envs: BTreeMap<String, String>,
}

impl CommandRequest {
    pub(super) fn parse(body: Value) -> Result<Self, Failure> {
        let object = Object::new(body)?;
        let (what, content) = what(&object)?;
        let timeout = match object.integer("timeout")? {
            Some(millis) if millis < 0 => return Err(invalid("timeout must not be negative")),
            Some(0) | None => None,
            Some(millis) => Some(Duration::from_millis(millis.unsigned_abs())),
        };
        let (uid, gid) = (id(&object, "uid")?, id(&object, "gid")?);
        let ids = match (uid, gid) {
            (None, Some(_)) => return Err(invalid("gid requires uid")),
            (uid, gid) => uid.map(|uid| (uid, gid)),
        };
        Ok(CommandRequest {
            what,
            content,
            cwd: object.string("cwd")?.filter(|c| !c.is_empty()),
            background: object.flag("background")?.unwrap_or(false),
            timeout,
            ids,
            envs: envs(&object)?,
        })
    }
}

fn invalid(message: &str) -> Failure {
    Failure::invalid(format!("invalid request, validation error {message}"))
}

fn what(object: &Object) -> Result<(What, String), Failure> {
    match (object.raw("command"), object.raw("argv")) {
        (Some(_), Some(_)) => Err(invalid("command and argv are mutually exclusive")),
        (None, None) => Err(invalid("command or argv is required")),
        (Some(Value::String(text)), None) if text.contains('\0') => {
            Err(invalid("command must not contain a NUL byte"))
        }
        (Some(Value::String(text)), None) if !text.is_empty() => {
            Ok((What::Shell(text.clone()), text.clone()))
        }
        (Some(_), None) => Err(invalid("command must be a non-empty string")),
        (None, Some(Value::Array(items))) => {
            let argv: Option<Vec<String>> = items.iter().map(|i| i.as_str().map(str::to_owned)).collect();
            let argv = argv.ok_or_else(|| invalid("argv must hold only strings"))?;
            if argv.first().is_none_or(String::is_empty) {
                return Err(invalid("argv must start with a program"));
            }
            if argv.iter().any(|a| a.contains('\0')) {
                return Err(invalid("argv must not contain a NUL byte"));
            }
            let content = Value::from(argv.clone()).to_string();
            Ok((What::Argv(argv), content))
        }
        (None, Some(_)) => Err(invalid("argv must be an array of strings")),
    }
}

fn id(object: &Object, key: &str) -> Result<Option<u32>, Failure> {
    match object.integer(key)? {
        None => Ok(None),
        // The highest value means "no change" to the kernel, so it is not an id.
        Some(id) => u32::try_from(id)
            .ok()
            .filter(|id| *id != u32::MAX)
            .map(Some)
            .ok_or_else(|| invalid(&format!("{key} is out of range"))),
    }
}

/// `envs`: text to text, of names that an environment can have.
pub(crate) fn envs(object: &Object) -> Result<BTreeMap<String, String>, Failure> {
    let Some(value) = object.raw("envs").filter(|v| !v.is_null()) else { return Ok(BTreeMap::new()) };
    let Value::Object(map) = value else { return Err(invalid("envs must be an object")) };
    let mut envs = BTreeMap::new();
    for (key, value) in map {
        let Value::String(value) = value else {
            return Err(invalid(&format!("envs.{key} must be a string")));
        };
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            return Err(invalid(&format!("envs.{key} is not a usable environment variable")));
        }
        envs.insert(key.clone(), value.clone());
    }
    Ok(envs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bad_requests_are_refused() {
        for body in [
            json!({}),
            json!([]),
            json!({"command": null}),
            json!({"command": ""}),
            json!({"command": "a", "argv": ["b"]}),
            json!({"argv": []}),
            json!({"argv": [""]}),
            json!({"argv": ["a", null]}),
            json!({"argv": ["a\0"]}),
            json!({"command": "a", "timeout": -1}),
            json!({"command": "a", "gid": 1}),
            json!({"command": "a", "uid": -1}),
            json!({"command": "a", "uid": 4_294_967_295_u32}),
            json!({"command": "a", "envs": {"A": 1}}),
            json!({"command": "a", "envs": {"A=B": "x"}}),
        ] {
            assert!(CommandRequest::parse(body.clone()).is_err(), "{body}");
        }
        let request = CommandRequest::parse(json!({"argv": ["a", "b c"], "timeout": 5, "uid": 3})).unwrap();
        assert_eq!(request.content, r#"["a","b c"]"#);
        assert_eq!(request.timeout, Some(Duration::from_millis(5)));
        assert_eq!(request.ids, Some((3, None)));
    }
}
