//! `RUN --mount=…`.

/// What is mounted while one `RUN` runs. Numbers and paths are as in the Dockerfile's reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mount {
    /// Files of the context, a stage or an image.
    Bind {
        target: String,
        source: Option<String>,
        from: Option<String>,
        read_write: bool,
    },
    Cache(CacheMount),
    Tmpfs {
        target: String,
        size: Option<u64>,
    },
    Secret(SecretMount),
    /// The caller's ssh agent.
    Ssh {
        id: Option<String>,
        target: Option<String>,
        required: bool,
    },
}

/// A folder that outlives the build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMount {
    pub target: String,
    /// The target when absent.
    pub id: Option<String>,
    pub sharing: Sharing,
    pub read_only: bool,
    pub from: Option<String>,
    pub source: Option<String>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Shared,
    Private,
    Locked,
}

/// A build secret as a file, a variable, or both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretMount {
    pub id: String,
    /// `/run/secrets/<id>` unless given, or unless only a variable is wanted.
    pub target: Option<String>,
    pub env: Option<String>,
    pub required: bool,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// The options of one mount, each taken by the kind that knows it.
struct Options(Vec<(String, Option<String>)>);

impl Options {
    fn take(&mut self, names: &[&str]) -> Result<Option<String>, String> {
        let mut found = None;
        for name in names {
            while let Some(index) = self.0.iter().position(|(option, _)| option == name) {
                let (_, value) = self.0.remove(index);
                if found.is_some() {
                    return Err(format!("{name} is given twice"));
                }
                found = Some(value.ok_or_else(|| format!("{name} has no value"))?);
            }
        }
        Ok(found)
    }

    fn take_switch(&mut self, name: &str) -> Result<Option<bool>, String> {
        let Some(index) = self.0.iter().position(|(option, _)| option == name) else { return Ok(None) };
        match self.0.remove(index).1.as_deref() {
            None | Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(_) => Err(format!("{name} is neither true nor false")),
        }
    }

    fn take_number(&mut self, name: &str, radix: u32) -> Result<Option<u32>, String> {
        let Some(text) = self.take(&[name])? else { return Ok(None) };
        u32::from_str_radix(&text, radix).map(Some).map_err(|_| format!("{name} is not a number"))
    }

    fn take_target(&mut self) -> Result<Option<String>, String> {
        self.take(&["target", "dst", "destination"])
    }

    fn finish(self) -> Result<(), String> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(format!("the option {name} is not known for this kind of mount")),
        }
    }
}

impl Mount {
    /// Reads what follows `--mount=`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut options = Options(
            text.split(',')
                .map(|option| match option.split_once('=') {
                    Some((name, value)) => (name.trim().to_ascii_lowercase(), Some(value.to_owned())),
                    None => (option.trim().to_ascii_lowercase(), None),
                })
                .collect(),
        );
        let kind = options.take(&["type"])?.unwrap_or_else(|| "bind".into());
        let mount = match kind.as_str() {
            "bind" => bind(&mut options)?,
            "cache" => Self::Cache(cache(&mut options)?),
            "tmpfs" => Self::Tmpfs {
                target: required(options.take_target()?)?,
                size: size(options.take(&["size"])?)?,
            },
            "secret" => Self::Secret(secret(&mut options)?),
            "ssh" => Self::Ssh {
                id: options.take(&["id"])?,
                target: options.take_target()?,
                required: options.take_switch("required")?.unwrap_or(false),
            },
            other => return Err(format!("the kind of mount `{other}` is not known")),
        };
        options.finish()?;
        Ok(mount)
    }

    /// The kind, as `type=` names it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Bind { .. } => "bind",
            Self::Cache(_) => "cache",
            Self::Tmpfs { .. } => "tmpfs",
            Self::Secret(_) => "secret",
            Self::Ssh { .. } => "ssh",
        }
    }
}

fn required(target: Option<String>) -> Result<String, String> {
    target.filter(|target| !target.is_empty()).ok_or_else(|| "target is missing".into())
}

fn bind(options: &mut Options) -> Result<Mount, String> {
    let writable = options.take_switch("rw")?.or(options.take_switch("readwrite")?);
    let read_only = options.take_switch("ro")?.or(options.take_switch("readonly")?);
    Ok(Mount::Bind {
        target: required(options.take_target()?)?,
        source: options.take(&["source", "src"])?,
        from: options.take(&["from"])?,
        read_write: writable.unwrap_or(!read_only.unwrap_or(true)),
    })
}

fn cache(options: &mut Options) -> Result<CacheMount, String> {
    let read_only = options.take_switch("ro")?.or(options.take_switch("readonly")?);
    let sharing = match options.take(&["sharing"])?.as_deref() {
        None | Some("shared") => Sharing::Shared,
        Some("private") => Sharing::Private,
        Some("locked") => Sharing::Locked,
        Some(_) => return Err("sharing is none of shared, private and locked".into()),
    };
    Ok(CacheMount {
        target: required(options.take_target()?)?,
        id: options.take(&["id"])?,
        sharing,
        read_only: read_only.unwrap_or(false),
        from: options.take(&["from"])?,
        source: options.take(&["source", "src"])?,
        mode: options.take_number("mode", 8)?.unwrap_or(0o755),
        uid: options.take_number("uid", 10)?.unwrap_or(0),
        gid: options.take_number("gid", 10)?.unwrap_or(0),
    })
}

fn secret(options: &mut Options) -> Result<SecretMount, String> {
    let (source, target) = (options.take(&["source", "src"])?, options.take_target()?);
    let env = options.take(&["env"])?;
    let named = options.take(&["id"])?.or(source);
    let last = |path: &String| path.rsplit('/').next().map(str::to_owned);
    let id = named.or_else(|| target.as_ref().and_then(last)).or_else(|| env.clone());
    let id = id.filter(|id| !id.is_empty()).ok_or("the secret's id is missing")?;
    let target = match (target, &env) {
        (Some(target), _) if target.starts_with('/') => Some(target),
        (Some(target), _) => Some(format!("/run/secrets/{target}")),
        (None, None) => Some(format!("/run/secrets/{id}")),
        (None, Some(_)) => None,
    };
    Ok(SecretMount {
        id,
        target,
        env,
        required: options.take_switch("required")?.unwrap_or(false),
        mode: options.take_number("mode", 8)?.unwrap_or(0o400),
        uid: options.take_number("uid", 10)?.unwrap_or(0),
        gid: options.take_number("gid", 10)?.unwrap_or(0),
    })
}

/// `64m`, `1g`, `4096`.
fn size(text: Option<String>) -> Result<Option<u64>, String> {
    let Some(text) = text else { return Ok(None) };
    let lower = text.to_ascii_lowercase();
    let lower = lower.strip_suffix('b').unwrap_or(&lower);
    let (digits, shift) = match lower.char_indices().last() {
        Some((at, 'k')) => (&lower[..at], 10),
        Some((at, 'm')) => (&lower[..at], 20),
        Some((at, 'g')) => (&lower[..at], 30),
        _ => (lower, 0),
    };
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .map(Some)
        .ok_or_else(|| "size is not a size like 64m".into())
}
