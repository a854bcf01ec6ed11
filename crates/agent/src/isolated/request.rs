//! Reading the bodies of create and run requests. Decides shapes and enumerations; nothing here looks at the disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::plan::Access;
use crate::envs::{self, Env};
use crate::http::query::Object;
use crate::http::reply::{Code, Failure};

/// More mounts than anybody needs; each costs the kernel memory.
const MAX_MOUNTS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Profile {
    Strict,
    Balanced,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workspace {
    pub path: PathBuf,
    pub access: Access,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bind {
    pub source: PathBuf,
    pub dest: PathBuf,
    pub readonly: bool,
}

/// Which variables of the agent a session sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Passthrough {
    /// All but what looks like a secret.
    Usual,
    Deny(Vec<String>),
    Allow(Vec<String>),
}

#[derive(Debug, Clone)]
pub(super) struct CreateRequest {
    pub workspaces: Vec<Workspace>,
    pub profile: Profile,
    pub extra_writable: Vec<PathBuf>,
    pub binds: Vec<Bind>,
    pub share_net: bool,
    pub passthrough: Passthrough,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub own_users: bool,
    pub idle_timeout: Option<Duration>,
    /// The effective parameters, as `GET` repeats them.
    pub echo: Map<String, Value>,
}

impl CreateRequest {
    pub(super) fn parse(body: Value) -> Result<Self, Failure> {
        let object = Object::new(body)?;
        let workspaces = workspaces(&object)?;
        let extra_writable = paths(&object, "extra_writable")?;
        let binds = binds(&object)?;
        if workspaces.len() + extra_writable.len() + binds.len() > MAX_MOUNTS {
            return Err(Failure::invalid(format!("more than {MAX_MOUNTS} mounts")));
        }
        let (passthrough, passthrough_echo) = passthrough(&object)?;
        let idle = match object.integer("idle_timeout_seconds")?.unwrap_or(0) {
            seconds if seconds < 0 => {
                return Err(Failure::invalid("idle_timeout_seconds must not be negative"));
            }
            seconds => seconds.unsigned_abs(),
        };
        let mut request = CreateRequest {
            profile: profile(&object)?,
            share_net: object.flag("share_net")?.unwrap_or(true),
            uid: id(&object, "uid")?,
            gid: id(&object, "gid")?,
            own_users: own_users(&object)?,
            idle_timeout: (idle > 0).then(|| Duration::from_secs(idle)),
            workspaces,
            extra_writable,
            binds,
            passthrough,
            echo: Map::new(),
        };
        request.echo = request.effective(idle);
        request.echo.insert("env_passthrough".into(), passthrough_echo);
        Ok(request)
    }

    fn effective(&self, idle: u64) -> Map<String, Value> {
        let overlays: Vec<Value> = self.workspaces.iter().map(Workspace::echo).collect();
        let binds: Vec<Value> = self
            .binds
            .iter()
            .map(|b| json!({ "source": b.source, "dest": b.dest, "readonly": b.readonly }))
            .collect();
        let shape = json!({
            "overlays": overlays,
            "profile": if self.profile == Profile::Strict { "strict" } else { "balanced" },
            "extra_writable": self.extra_writable,
            "binds": binds,
            "share_net": self.share_net,
            "uid_mode": if self.own_users { "userns" } else { "setpriv" },
            "idle_timeout_seconds": idle,
        });
        let Value::Object(mut map) = shape else { return Map::new() };
        if let [only] = &self.workspaces[..] {
            let mode = mode(only.access);
            map.insert("workspace".into(), json!({ "path": only.path, "mode": mode }));
        }
        for (key, id) in [("uid", self.uid), ("gid", self.gid)] {
            if let Some(id) = id {
                map.insert(key.into(), id.into());
            }
        }
        map
    }
}

impl Workspace {
    fn echo(&self) -> Value {
        match self.access {
            Access::Overlay => json!({ "path": self.path, "mode": "overlay", "persist": true }),
            Access::Scratch => json!({ "path": self.path, "mode": "overlay", "persist": false }),
            other => json!({ "path": self.path, "mode": mode(other) }),
        }
    }
}

fn mode(access: Access) -> &'static str {
    match access {
        Access::Write => "rw",
        Access::Read => "ro",
        Access::Overlay | Access::Scratch => "overlay",
    }
}

fn profile(object: &Object) -> Result<Profile, Failure> {
    match object.string("profile")?.as_deref() {
        None | Some("" | "strict") => Ok(Profile::Strict),
        Some("balanced") => Ok(Profile::Balanced),
        Some(other) => Err(refused(format!("unknown profile {other:?}"))),
    }
}

fn own_users(object: &Object) -> Result<bool, Failure> {
    match object.string("uid_mode")?.as_deref() {
        None | Some("" | "setpriv") => Ok(false),
        Some("userns") => Ok(true),
        Some(other) => Err(Failure::invalid(format!("unknown uid_mode {other:?}"))),
    }
}

/// A request that is well-formed and not to be granted.
pub(super) fn refused(message: impl Into<String>) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, Code::RuntimeError, message)
}

fn workspaces(object: &Object) -> Result<Vec<Workspace>, Failure> {
    let mut found = Vec::new();
    if let Some(value) = present(object, "workspace") {
        found.push(workspace(value, "workspace")?);
    }
    for value in list(object, "overlays")? {
        found.push(workspace(value, "overlays")?);
    }
    if found.is_empty() {
        return Err(Failure::invalid("workspace.path is required"));
    }
    let mut seen: Vec<&PathBuf> = found.iter().map(|w| &w.path).collect();
    seen.sort();
    if seen.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Failure::invalid("overlays: paths must be unique"));
    }
    Ok(found)
}

fn workspace(value: &Value, of: &str) -> Result<Workspace, Failure> {
    let object = Object::new(value.clone())?;
    let path = absolute(&object.string("path")?.unwrap_or_default(), &format!("{of}.path"))?;
    let persist = object.flag("persist")?;
    let access = match object.string("mode")?.as_deref() {
        None | Some("" | "overlay") if persist == Some(false) => Access::Scratch,
        None | Some("" | "overlay") => Access::Overlay,
        Some("rw") => Access::Write,
        Some("ro") => Access::Read,
        Some(other) => return Err(Failure::invalid(format!("{of}.mode: unknown mode {other:?}"))),
    };
    if persist.is_some() && matches!(access, Access::Write | Access::Read) {
        return Err(Failure::invalid(format!("{of}.persist is for mode overlay only")));
    }
    Ok(Workspace { path, access })
}

fn binds(object: &Object) -> Result<Vec<Bind>, Failure> {
    list(object, "binds")?
        .iter()
        .map(|value| {
            let bind = Object::new((*value).clone())?;
            let source = bind.string("source")?.unwrap_or_default();
            if !source.starts_with('/') {
                return Err(refused(format!("binds: source {source:?} is not an absolute path")));
            }
            let dest = bind.string("dest")?.filter(|d| !d.is_empty()).unwrap_or_else(|| source.clone());
            Ok(Bind {
                source: absolute(&source, "binds.source")?,
                dest: absolute(&dest, "binds.dest")?,
                readonly: bind.flag("readonly")?.unwrap_or(false),
            })
        })
        .collect()
}

fn passthrough(object: &Object) -> Result<(Passthrough, Value), Failure> {
    let Some(value) = present(object, "env_passthrough") else {
        return Ok((Passthrough::Usual, json!({ "mode": "deny", "keys": [] })));
    };
    let spec = Object::new(value.clone())?;
    let text = |key: &&Value| key.as_str().map(str::to_owned);
    let keys: Option<Vec<String>> = list(&spec, "keys")?.iter().map(text).collect();
    let keys = keys.ok_or_else(|| Failure::invalid("env_passthrough.keys must be strings"))?;
    let mode = spec.string("mode")?.filter(|m| !m.is_empty()).unwrap_or_else(|| "deny".into());
    let echo = json!({ "mode": mode, "keys": keys });
    let passthrough = match mode.as_str() {
        "deny" if keys.is_empty() => Passthrough::Usual,
        "deny" => Passthrough::Deny(keys),
        "allow" => Passthrough::Allow(keys),
        other => return Err(Failure::invalid(format!("env_passthrough: unknown mode {other:?}"))),
    };
    Ok((passthrough, echo))
}

fn paths(object: &Object, key: &str) -> Result<Vec<PathBuf>, Failure> {
    list(object, key)?.iter().map(|value| absolute(value.as_str().unwrap_or_default(), key)).collect()
}

fn absolute(path: &str, key: &str) -> Result<PathBuf, Failure> {
    if path.is_empty() {
        return Err(Failure::invalid(format!("{key} is required")));
    }
    if !path.starts_with('/') || path.contains('\0') {
        return Err(Failure::invalid(format!("{key}: {path:?} is not an absolute path")));
    }
    let clean = envs::clean(Path::new("/"), path);
    if clean == Path::new("/") {
        return Err(Failure::invalid(format!("{key}: the root cannot be mounted")));
    }
    Ok(clean)
}

fn present<'a>(object: &'a Object, key: &str) -> Option<&'a Value> {
    object.raw(key).filter(|value| !value.is_null())
}

fn list<'a>(object: &'a Object, key: &str) -> Result<Vec<&'a Value>, Failure> {
    match present(object, key) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => Ok(items.iter().collect()),
        Some(_) => Err(Failure::invalid(format!("{key} must be an array"))),
    }
}

fn id(object: &Object, key: &str) -> Result<Option<u32>, Failure> {
    let Some(id) = object.integer(key)? else { return Ok(None) };
    // The highest value means "no change" to the kernel, so it is not an id.
    let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
    id.map(Some).ok_or_else(|| Failure::invalid(format!("{key} is out of range")))
}

#[derive(Debug)]
pub(super) struct RunRequest {
    pub code: String,
    pub envs: Env,
    pub timeout: Option<Duration>,
    pub background: bool,
}

impl RunRequest {
    pub(super) fn parse(body: Value) -> Result<Self, Failure> {
        let object = Object::new(body)?;
        let code = object.string("code")?.filter(|code| !code.trim().is_empty());
        let code = code.ok_or_else(|| Failure::invalid("code is required"))?;
        if code.contains('\0') {
            return Err(Failure::invalid("code must not contain a NUL byte"));
        }
        let timeout = match object.integer("timeout_seconds")? {
            Some(seconds) if seconds < 0 => {
                return Err(Failure::invalid("timeout_seconds must not be negative"));
            }
            Some(0) | None => None,
            Some(seconds) => Some(Duration::from_secs(seconds.unsigned_abs())),
        };
        let background = object.flag("background")?.unwrap_or(false);
        Ok(RunRequest { code, envs: run_envs(&object)?, timeout, background })
    }

    /// What the shell is to read: the variables, then the code.
    pub(super) fn script(&self) -> String {
        let mut script = String::with_capacity(self.code.len() + 64);
        for (name, value) in &self.envs {
            script.push_str(&format!("export {name}='{}'\n", value.replace('\'', "'\\''")));
        }
        script.push_str(&self.code);
        script.push('\n');
        script
    }
}

fn run_envs(object: &Object) -> Result<Env, Failure> {
    let Some(value) = present(object, "envs") else { return Ok(Env::new()) };
    let Value::Object(map) = value else { return Err(Failure::invalid("envs must be an object")) };
    map.iter()
        .map(|(name, value)| {
            let named = !name.is_empty()
                && !name.starts_with(|c: char| c.is_ascii_digit())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            match value.as_str().filter(|value| named && !value.contains('\0')) {
                Some(value) => Ok((name.clone(), value.to_owned())),
                None => Err(Failure::invalid(format!("envs.{name} is not a usable environment variable"))),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_request_has_the_documented_defaults() {
        let request = CreateRequest::parse(json!({ "workspace": { "path": "/workspace/" } })).unwrap();
        assert_eq!(request.workspaces, [Workspace { path: "/workspace".into(), access: Access::Overlay }]);
        let echo = Value::Object(request.echo);
        assert_eq!(echo["workspace"], json!({ "path": "/workspace", "mode": "overlay" }));
        assert_eq!((&echo["profile"], &echo["share_net"]), (&json!("strict"), &json!(true)));
        assert_eq!((&echo["uid_mode"], &echo["idle_timeout_seconds"]), (&json!("setpriv"), &json!(0)));
        assert!(echo.get("uid").is_none());
    }

    #[test]
    fn bad_requests_are_refused_with_the_code_of_their_kind() {
        let with = |key: &str, value: Value| {
            let mut body = json!({ "workspace": { "path": "/w" } });
            body[key] = value;
            body
        };
        for (body, code) in [
            (json!({}), Code::InvalidRequestBody),
            (json!({ "workspace": {} }), Code::InvalidRequestBody),
            (json!({ "workspace": { "path": "w" } }), Code::InvalidRequestBody),
            (json!({ "workspace": { "path": "/a/.." } }), Code::InvalidRequestBody),
            (json!({ "workspace": { "path": "/w", "mode": "x" } }), Code::InvalidRequestBody),
            (json!({ "overlays": [{ "path": "/w" }, { "path": "/w/" }] }), Code::InvalidRequestBody),
            (
                with("overlays", json!([{ "path": "/v", "mode": "rw", "persist": true }])),
                Code::InvalidRequestBody,
            ),
            (with("profile", json!("loose")), Code::RuntimeError),
            (with("uid_mode", json!("x")), Code::InvalidRequestBody),
            (with("uid", json!(-1)), Code::InvalidRequestBody),
            (with("binds", json!([{ "source": "x" }])), Code::RuntimeError),
            (with("env_passthrough", json!({ "mode": "x" })), Code::InvalidRequestBody),
            (with("idle_timeout_seconds", json!(-1)), Code::InvalidRequestBody),
        ] {
            assert_eq!(CreateRequest::parse(body.clone()).unwrap_err().code, code, "{body}");
        }
    }

    #[test]
    fn variables_of_a_run_are_quoted() {
        let run = RunRequest::parse(json!({ "code": "echo $A", "envs": { "A": "it's $x\n" } })).unwrap();
        assert_eq!(run.script(), "export A='it'\\''s $x\n'\necho $A\n");
        for body in [
            json!({}),
            json!({ "code": " " }),
            json!({ "code": "x", "envs": { "A;b": "" } }),
            json!({ "code": "x", "timeout_seconds": -1 }),
        ] {
            assert!(RunRequest::parse(body.clone()).is_err(), "{body}");
        }
    }
}
