//! The facts that labels cannot hold because they change: upstream's side files, in its places and its format.
//!
//! `<dir>/<id>.json` is the whole user metadata once it was patched, `<dir>/_expiration/<id>.json` the expiry once it was renewed. Written
//! beside and renamed, so that a reader sees the old or the new content. What cannot be read is as if it were not there.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use sandglass_sandbox::{SandboxId, Timestamp, spec::MutableFacts};
use serde_json::{Value, json};
use tracing::warn;

use super::labels::{instant, spell};

const EXPIRATIONS: &str = "_expiration";

/// What the side files of one sandbox say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Changed {
    pub metadata: Option<BTreeMap<String, String>>,
    /// `Some(None)`: it was made to live until it is removed.
    pub expires_at: Option<Option<Timestamp>>,
}

impl Changed {
    /// The facts as they are now.
    pub(super) fn over(self, created: &MutableFacts) -> MutableFacts {
        MutableFacts {
            expires_at: self.expires_at.unwrap_or(created.expires_at),
            metadata: self.metadata.unwrap_or_else(|| created.metadata.clone()),
        }
    }
}

/// The directory of the side files.
#[derive(Debug, Clone)]
pub(super) struct SideFacts {
    dir: PathBuf,
}

impl SideFacts {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    fn metadata_file(&self, id: SandboxId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    fn expiration_file(&self, id: SandboxId) -> PathBuf {
        self.dir.join(EXPIRATIONS).join(format!("{id}.json"))
    }

    /// What changed since the sandbox was created.
    pub(super) fn read(&self, id: SandboxId) -> Changed {
        Changed {
            metadata: read(&self.metadata_file(id)).and_then(|v| texts(&v)),
            expires_at: read(&self.expiration_file(id)).and_then(|v| expiry(&v)),
        }
    }

    /// The same for every sandbox that has side files, with two looks at directories instead of two at files for each sandbox.
    pub(super) fn read_all(&self) -> HashMap<SandboxId, Changed> {
        let mut all: HashMap<SandboxId, Changed> = HashMap::new();
        for (id, path) in self.files() {
            let Some(value) = read(&path) else { continue };
            let changed = all.entry(id).or_default();
            if path.parent() == Some(&self.dir) {
                changed.metadata = texts(&value);
            } else {
                changed.expires_at = expiry(&value);
            }
        }
        all
    }

    /// Makes `facts` the facts of the sandbox. A fact that is as it was created and was never changed gets no file.
    pub(super) fn write(
        &self,
        id: SandboxId,
        created: &MutableFacts,
        facts: &MutableFacts,
    ) -> io::Result<()> {
        let (metadata, expiration) = (self.metadata_file(id), self.expiration_file(id));
        if facts.expires_at != created.expires_at || expiration.exists() {
            replace(&expiration, &json!({ "expires_at": facts.expires_at.map(spell) }))?;
        }
        if facts.metadata != created.metadata || metadata.exists() {
            replace(&metadata, &json!(facts.metadata))?;
        }
        Ok(())
    }

    /// Forgets a sandbox. None known is success.
    pub(super) fn remove(&self, id: SandboxId) -> io::Result<()> {
        for path in [self.metadata_file(id), self.expiration_file(id)] {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Sandboxes that have side files, none of which was written within `age`.
    pub(super) fn untouched_for(&self, age: Duration) -> Vec<SandboxId> {
        let now = SystemTime::now();
        let mut old: HashMap<SandboxId, bool> = HashMap::new();
        for (id, path) in self.files() {
            let written = fs::metadata(&path).and_then(|m| m.modified()).unwrap_or(now);
            let is_old = now.duration_since(written).is_ok_and(|since| since >= age);
            *old.entry(id).or_insert(true) &= is_old;
        }
        old.into_iter().filter(|(_, is_old)| *is_old).map(|(id, _)| id).collect()
    }

    fn files(&self) -> Vec<(SandboxId, PathBuf)> {
        let mut found = Vec::new();
        for dir in [self.dir.clone(), self.dir.join(EXPIRATIONS)] {
            let entries = match fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(e) => {
                    if e.kind() != io::ErrorKind::NotFound {
                        warn!(dir = %dir.display(), error = %e, "side files cannot be listed");
                    }
                    continue;
                }
            };
            for path in entries.flatten().map(|entry| entry.path()) {
                let id =
                    path.file_name().and_then(|name| name.to_str()).and_then(|n| n.strip_suffix(".json"));
                if let Some(id) = id.and_then(|id| id.parse().ok()) {
                    found.push((id, path));
                }
            }
        }
        found
    }
}

fn read(path: &Path) -> Option<Value> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
        Err(e) => {
            warn!(file = %path.display(), error = %e, "a side file cannot be read and is ignored");
            return None;
        }
    };
    match serde_json::from_slice(&text) {
        Ok(value) => Some(value),
        Err(e) => {
            warn!(file = %path.display(), error = %e, "a side file is no JSON and is ignored");
            None
        }
    }
}

fn texts(value: &Value) -> Option<BTreeMap<String, String>> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    value.as_object().map(|map| map.iter().map(|(k, v)| (k.clone(), text(v))).collect())
}

fn expiry(value: &Value) -> Option<Option<Timestamp>> {
    match value.get("expires_at")? {
        Value::Null => Some(None),
        Value::String(text) => instant(text).map(Some),
        _ => None,
    }
}

/// The temporary's name is ours alone: two that write at once leave the content of one of them, never a mixture.
pub(super) fn replace(path: &Path, value: &Value) -> io::Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let partial =
        path.with_extension(format!("{}-{}.tmp", std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed)));
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    let written = file.write_all(value.to_string().as_bytes()).and_then(|()| file.sync_data());
    drop(file);
    let done = written.and_then(|()| fs::rename(&partial, path));
    if done.is_err() {
        let _ = fs::remove_file(&partial);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(expires_ms: Option<i64>, metadata: &[(&str, &str)]) -> MutableFacts {
        MutableFacts {
            expires_at: expires_ms.map(Timestamp::clamped),
            metadata: metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }

    #[test]
    fn what_changed_takes_precedence_and_what_did_not_gets_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let side = SideFacts::new(&dir.path().join("deep/metadata"));
        let id = SandboxId::random();
        let created = facts(Some(1_893_456_000_000), &[("a", "b")]);
        assert_eq!(side.read(id).over(&created), created);
        side.write(id, &created, &created).unwrap();
        assert_eq!(side.files(), []);

        let renewed = facts(Some(1_893_456_111_000), &[("a", "b")]);
        side.write(id, &created, &renewed).unwrap();
        assert_eq!(side.files().len(), 1);
        let text = fs::read_to_string(side.expiration_file(id)).unwrap();
        assert_eq!(text, r#"{"expires_at":"2030-01-01T00:01:51.000000+00:00"}"#);
        let patched = facts(None, &[]);
        side.write(id, &created, &patched).unwrap();
        assert_eq!(side.read(id).over(&created), patched);
        assert_eq!(side.read_all(), HashMap::from([(id, side.read(id))]));
        // Back to what it was is a change too.
        side.write(id, &created, &created).unwrap();
        assert_eq!(side.read(id).over(&created), created);
        side.remove(id).unwrap();
        side.remove(id).unwrap();
        assert_eq!(side.files(), []);
    }

    #[test]
    fn files_of_the_reference_are_understood_and_nonsense_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let side = SideFacts::new(dir.path());
        let id = SandboxId::random();
        fs::create_dir(dir.path().join(EXPIRATIONS)).unwrap();
        fs::write(side.metadata_file(id), r#"{"team": "blue", "n": "1"}"#).unwrap();
        fs::write(side.expiration_file(id), r#"{"expires_at": "2030-01-01T00:00:00.000001+00:00"}"#).unwrap();
        let read = side.read(id);
        assert_eq!(read.metadata.unwrap()["team"], "blue");
        assert_eq!(read.expires_at, Some(Some(Timestamp::clamped(1_893_456_000_000))));
        for nonsense in ["", "{", "[1]", "\u{0}", r#"{"expires_at": 5}"#, r#"{"expires_at": "soon"}"#] {
            fs::write(side.expiration_file(id), nonsense).unwrap();
            assert_eq!(side.read(id).expires_at, None, "{nonsense}");
        }
        fs::write(dir.path().join("notes.json"), "{}").unwrap();
        assert_eq!(side.files().len(), 2);
    }

    #[test]
    fn only_old_files_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        let side = SideFacts::new(dir.path());
        let id = SandboxId::random();
        side.write(id, &MutableFacts::default(), &facts(None, &[("a", "b")])).unwrap();
        assert_eq!(side.untouched_for(Duration::from_secs(3600)), []);
        assert_eq!(side.untouched_for(Duration::ZERO), [id]);
    }
}
