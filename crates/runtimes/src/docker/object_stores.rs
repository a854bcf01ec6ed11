//! Buckets as volumes: mounted on this host by `ossfs` (version 1) or `ossfs2`, and bound into boxes like directories.
//!
//! One mount serves all boxes that ask for the same thing with the same key; its name carries a digest of both, so that nobody reads a
//! bucket through somebody else's key. Who uses a mount is told by the containers' labels, and by this process for boxes that have no
//! container yet. Invariant: keys are in private files only as long as the mounting program runs, and in no message.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsString,
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Component, Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{SandboxId, ports::runtime::RuntimeError, spec::ObjectStoreKey};
use sha2::{Digest, Sha256};
use tokio::process::Command;

use super::{
    Shared,
    errors::{failed, invalid},
    labels,
};

const MOUNT_PATIENCE: Duration = Duration::from_secs(30);
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(20);
/// Private files live here, below the state directory, while a mount is made.
const KEYS: &str = "keys";

/// What is to be mounted.
#[derive(Clone, Copy)]
pub(super) struct Bucket<'a> {
    pub bucket: &'a str,
    pub endpoint: &'a str,
    pub version: u8,
    pub options: &'a [String],
    pub sub_path: Option<&'a Path>,
    pub key: &'a ObjectStoreKey,
}

/// The mounts of this host.
#[derive(Default)]
pub(super) struct ObjectStores {
    /// Where the mounting programs are; empty: on the search path.
    pub programs: PathBuf,
    /// Boxes that are being made with a mount.
    users: Mutex<HashMap<PathBuf, BTreeSet<SandboxId>>>,
    /// Held while one mount point is mounted or unmounted.
    busy: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
}

impl ObjectStores {
    fn users(&self) -> MutexGuard<'_, HashMap<PathBuf, BTreeSet<SandboxId>>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn point(&self, at: &Path) -> Arc<tokio::sync::Mutex<()>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.entry(at.to_owned()).or_default().clone()
    }

    #[cfg(test)]
    pub(super) fn forget_users(&self) {
        self.users().clear();
    }

    fn note(&self, at: &Path, id: SandboxId) {
        self.users().entry(at.to_owned()).or_default().insert(id);
    }

    /// What a box was given that may have no container to tell it.
    fn of(&self, id: SandboxId) -> Vec<PathBuf> {
        let users = self.users();
        users.iter().filter(|(_, of_this)| of_this.contains(&id)).map(|(at, _)| at.clone()).collect()
    }

    /// Whether other boxes of this process use a mount, after `id` does not any more.
    fn is_used_after(&self, at: &Path, id: SandboxId) -> bool {
        let mut users = self.users();
        let Some(of_this) = users.get_mut(at) else { return false };
        of_this.remove(&id);
        if of_this.is_empty() {
            users.remove(at);
            return false;
        }
        true
    }
}

/// A mounting program's invocation, and the private file it reads.
#[derive(Debug, PartialEq, Eq)]
struct Invocation {
    program: &'static str,
    arguments: Vec<OsString>,
}

impl Bucket<'_> {
    fn prefix(&self) -> String {
        self.sub_path.map(|p| p.to_string_lossy().trim_matches('/').to_owned()).unwrap_or_default()
    }

    fn url(&self) -> String {
        if self.endpoint.contains("://") {
            self.endpoint.to_owned()
        } else {
            format!("https://{}", self.endpoint)
        }
    }

    /// Where it is mounted.
    fn point(&self, root: &Path) -> PathBuf {
        let mut digest = Sha256::new();
        let version = self.version.to_string();
        let prefix = self.prefix();
        let fixed = [self.bucket, self.endpoint, &version, &prefix, &self.key.id, &self.key.secret];
        for part in fixed.into_iter().chain(self.options.iter().map(String::as_str)) {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let name: String = digest.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect();
        root.join(format!("{}-{name}", self.bucket))
    }

    fn private_file(&self) -> String {
        let (key, prefix) = (self.key, self.prefix());
        if self.version == 1 {
            return format!("{}:{}:{}\n", self.bucket, key.id, key.secret);
        }
        let mut lines = vec![
            format!("--oss_endpoint={}", self.url()),
            format!("--oss_bucket={}", self.bucket),
            format!("--oss_access_key_id={}", key.id),
            format!("--oss_access_key_secret={}", key.secret),
        ];
        if !prefix.is_empty() {
            lines.push(format!("--oss_bucket_prefix={prefix}/"));
        }
        lines.extend(self.options.iter().map(|option| format!("--{}", option.trim())));
        lines.join("\n") + "\n"
    }

    fn invocation(&self, at: &Path, private: &Path) -> Invocation {
        if self.version != 1 {
            let arguments = vec!["mount".into(), at.into(), "-c".into(), private.into()];
            return Invocation { program: "ossfs2", arguments };
        }
        let prefix = self.prefix();
        let source =
            if prefix.is_empty() { self.bucket.to_owned() } else { format!("{}:/{prefix}", self.bucket) };
        let options = [format!("url={}", self.url()), format!("passwd_file={}", private.display())];
        let mut arguments: Vec<OsString> = vec![source.into(), at.into()];
        for option in options.iter().map(String::as_str).chain(self.options.iter().map(|o| o.trim())) {
            arguments.extend(["-o".into(), option.into()]);
        }
        Invocation { program: "ossfs", arguments }
    }

    /// Nothing that a request brings may add a line to the private file or look like a flag.
    fn check(&self) -> Result<(), RuntimeError> {
        let texts = [self.bucket, self.endpoint, &self.key.id, &self.key.secret];
        let odd = |text: &str| text.is_empty() || text.starts_with('-') || text.contains(char::is_control);
        let spaced = |text: &str| text.contains(char::is_whitespace);
        let prefix = self.prefix();
        if texts.iter().any(|text| odd(text) || spaced(text))
            || prefix.contains(char::is_control)
            || self.options.iter().any(|option| odd(option.trim()))
            || self.bucket.contains(['/', ':', '.'])
        {
            return Err(invalid("ossfs", "the bucket volume has characters that it cannot be mounted with"));
        }
        Ok(())
    }
}

impl Shared {
    pub(super) fn check_object_store_root(&self) -> Result<(), RuntimeError> {
        if !self.config.engine.is_local() {
            let message = "buckets are mounted on the engine's machine, which is another one";
            return Err(failed("ossfs-root", message));
        }
        if self.config.ossfs_mount_root.is_absolute() {
            return Ok(());
        }
        Err(failed("ossfs-root", "[storage] ossfs_mount_root must be an absolute path"))
    }

    /// Mounts a bucket for a box, unless it is mounted already, and returns where.
    pub(super) async fn mount_object_store(
        &self,
        id: SandboxId,
        bucket: &Bucket<'_>,
    ) -> Result<PathBuf, RuntimeError> {
        self.check_object_store_root()?;
        bucket.check()?;
        let at = bucket.point(&self.config.ossfs_mount_root);
        let point = self.object_stores.point(&at);
        let _busy = point.lock().await;
        // Noted first: from here on nobody else unmounts it.
        self.object_stores.note(&at, id);
        let mounted = if is_mount_point(&at) { Ok(()) } else { self.mount(bucket, &at).await };
        if let Err(e) = mounted {
            self.object_stores.is_used_after(&at, id);
            return Err(e);
        }
        Ok(at)
    }

    async fn mount(&self, bucket: &Bucket<'_>, at: &Path) -> Result<(), RuntimeError> {
        let io = |what: &str, e: io::Error| failed("ossfs", format!("cannot {what}: {e}"));
        fs::create_dir_all(at).map_err(|e| io(&format!("create {}", at.display()), e))?;
        let private = PrivateFile::write(&self.config.state_dir, &bucket.private_file())
            .map_err(|e| io("write the key for the mounting program", e))?;
        let Invocation { program, arguments } = bucket.invocation(at, &private.0);
        let redact = |text: &str| {
            text.replace(&bucket.key.secret, "***").replace(&bucket.key.id, "***").trim().to_owned()
        };
        match run(&self.object_stores.programs.join(program), &arguments, MOUNT_PATIENCE).await {
            Ok(()) => Ok(()),
            Err(e) => {
                let _ = fs::remove_dir(at);
                Err(failed("ossfs", format!("cannot mount bucket {}: {}", bucket.bucket, redact(&e))))
            }
        }
    }

    /// Unmounts what only this box used: what its container named, and what it was given before it had one. What is in use, or cannot
    /// be told, stays mounted.
    pub(super) async fn release_object_stores(&self, id: SandboxId, named: &[PathBuf]) {
        let paths: BTreeSet<PathBuf> = named.iter().cloned().chain(self.object_stores.of(id)).collect();
        for at in &paths {
            // The paths come from a label, which anybody who may talk to the engine can write.
            let ours = at.strip_prefix(&self.config.ossfs_mount_root).is_ok_and(|rest| {
                rest.components().next().is_some()
                    && rest.components().all(|c| matches!(c, Component::Normal(_)))
            });
            if !ours {
                tracing::warn!(sandbox = %id, path = %at.display(), "not a mount of ours; it is left alone");
                continue;
            }
            let point = self.object_stores.point(at);
            let _busy = point.lock().await;
            if self.object_stores.is_used_after(at, id) || !is_mount_point(at) {
                continue;
            }
            match self.other_box_uses(at, id).await {
                Ok(false) => unmount(id, at).await,
                Ok(true) => {}
                Err(e) => tracing::warn!(sandbox = %id, error = %e, "a bucket stays mounted"),
            }
        }
    }

    async fn other_box_uses(&self, at: &Path, id: SandboxId) -> Result<bool, RuntimeError> {
        let listed = self.containers_with(labels::OSSFS_MOUNTS).await.map_err(|e| e.during("ossfs"))?;
        let mut parsed = listed.iter().filter_map(|container| labels::parse(&container.labels));
        Ok(parsed.any(|other| other.id != id && other.ossfs_mounts.iter().any(|path| Path::new(path) == at)))
    }
}

async fn unmount(id: SandboxId, at: &Path) {
    let mut last = String::new();
    for (program, flag) in [("fusermount", Some("-u")), ("umount", None)] {
        let arguments: Vec<OsString> = flag.map(OsString::from).into_iter().chain([at.into()]).collect();
        match run(Path::new(program), &arguments, UNMOUNT_PATIENCE).await {
            Ok(()) => {
                let _ = fs::remove_dir(at);
                return;
            }
            Err(e) => last = e,
        }
    }
    tracing::warn!(sandbox = %id, path = %at.display(), error = %last, "a bucket cannot be unmounted");
}

async fn run(program: &Path, arguments: &[OsString], patience: Duration) -> Result<(), String> {
    let mut command = Command::new(program);
    let program = program.display();
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    // A program that stays in the background may keep its standard error open, so a file takes it, not a pipe.
    let errors = tempfile_for_errors().map_err(|e| e.to_string())?;
    command.stderr(errors.try_clone().map_err(|e| e.to_string())?);
    let ended = async { command.spawn()?.wait().await };
    match tokio::time::timeout(patience, ended).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("{program} ended with {status}: {}", said(errors))),
        Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => {
            Err(format!("the program {program} is not installed on this host"))
        }
        Ok(Err(e)) => Err(format!("{program}: {e}")),
        Err(_) => Err(format!("{program} did not end within {} s", patience.as_secs())),
    }
}

fn tempfile_for_errors() -> io::Result<fs::File> {
    let name = c"ossfs-errors";
    rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)
        .map(fs::File::from)
        .map_err(io::Error::from)
}

fn said(mut errors: fs::File) -> String {
    use std::io::{Read as _, Seek as _};
    let mut text = Vec::new();
    let _ = errors.rewind().and_then(|()| errors.take(4096).read_to_end(&mut text));
    String::from_utf8_lossy(&text).trim().to_owned()
}

fn is_mount_point(path: &Path) -> bool {
    let Ok(table) = fs::read_to_string("/proc/self/mountinfo") else { return false };
    mounts(&table).any(|point| Path::new(&point) == path)
}

/// The mount points of a `mountinfo` table, with its escapes undone.
fn mounts(table: &str) -> impl Iterator<Item = String> {
    table.lines().filter_map(|line| line.split(' ').nth(4)).map(|field| {
        [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
            .iter()
            .fold(field.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
    })
}

/// A file that only its owner can read, removed when dropped.
struct PrivateFile(PathBuf);

impl PrivateFile {
    fn write(state_dir: &Path, content: &str) -> io::Result<Self> {
        use std::io::Write as _;
        let dir = state_dir.join(KEYS);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let file = Self(dir.join(uuid::Uuid::new_v4().simple().to_string()));
        let mut open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file.0)?;
        open.write_all(content.as_bytes())?;
        Ok(file)
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Removes the private files of a server that was killed while it mounted something.
pub(super) fn forget_keys(state_dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(state_dir.join(KEYS)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> ObjectStoreKey {
        ObjectStoreKey { id: "AKID".into(), secret: "hush-hush".into() }
    }

    fn bucket<'a>(key: &'a ObjectStoreKey, version: u8, options: &'a [String]) -> Bucket<'a> {
        Bucket {
            bucket: "data",
            endpoint: "oss.example.com",
            version,
            options,
            sub_path: Some(Path::new("a/b")),
            key,
        }
    }

    #[test]
    fn the_first_version_is_told_by_arguments() {
        let (key, options) = (key(), ["allow_other".to_owned()]);
        let bucket = bucket(&key, 1, &options);
        let invocation = bucket.invocation(Path::new("/m"), Path::new("/p"));
        assert_eq!(invocation.program, "ossfs");
        let expected = [
            "data:/a/b",
            "/m",
            "-o",
            "url=https://oss.example.com",
            "-o",
            "passwd_file=/p",
            "-o",
            "allow_other",
        ];
        assert_eq!(invocation.arguments, expected.map(OsString::from));
        assert_eq!(bucket.private_file(), "data:AKID:hush-hush\n");
    }

    #[test]
    fn the_second_version_is_told_by_its_file() {
        let (key, options) = (key(), ["attr_timeout=5".to_owned()]);
        let bucket = bucket(&key, 2, &options);
        let invocation = bucket.invocation(Path::new("/m"), Path::new("/p"));
        assert_eq!(
            (invocation.program, invocation.arguments),
            ("ossfs2", ["mount", "/m", "-c", "/p"].map(OsString::from).to_vec())
        );
        assert_eq!(
            bucket.private_file(),
            "--oss_endpoint=https://oss.example.com\n--oss_bucket=data\n--oss_access_key_id=AKID\n\
             --oss_access_key_secret=hush-hush\n--oss_bucket_prefix=a/b/\n--attr_timeout=5\n"
        );
    }

    #[test]
    fn another_key_is_another_mount() {
        let (mine, other) = (key(), ObjectStoreKey { secret: "guessed".into(), ..key() });
        let root = Path::new("/mnt/ossfs");
        let at = bucket(&mine, 2, &[]).point(root);
        assert_eq!(at, bucket(&mine, 2, &[]).point(root));
        assert_ne!(at, bucket(&other, 2, &[]).point(root));
        assert!(at.starts_with(root) && at.to_string_lossy().contains("/data-"));
    }

    #[test]
    fn no_value_adds_a_line_or_a_flag() {
        let key = key();
        assert!(bucket(&key, 2, &["ok=1".into()]).check().is_ok());
        for option in ["a\n--oss_bucket=other", "", " ", "-x"] {
            assert!(bucket(&key, 2, &[option.into()]).check().is_err(), "{option:?}");
        }
        let key = ObjectStoreKey { id: "a\nb".into(), ..key };
        assert!(bucket(&key, 2, &[]).check().is_err());
    }

    #[test]
    fn a_mount_is_used_until_its_last_box_is_gone() {
        let stores = ObjectStores::default();
        let (at, [one, two]) = (Path::new("/m"), [(); 2].map(|()| SandboxId::random()));
        stores.note(at, one);
        stores.note(at, two);
        assert!(stores.is_used_after(at, one));
        assert!(!stores.is_used_after(at, two));
        assert!(!stores.is_used_after(at, two));
    }

    #[test]
    fn mount_points_are_found_by_their_plain_names() {
        let table = "36 35 98:0 /mnt1 /mnt/with\\040space rw,noatime master:1 - ext3 /dev/root rw\n\
                     37 35 0:5 / /proc rw - proc proc rw\n";
        assert_eq!(mounts(table).collect::<Vec<_>>(), ["/mnt/with space", "/proc"]);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_or_fails_says_so() {
        let patience = Duration::from_secs(30);
        let absent = run(Path::new("sandglass-no-such-program"), &[], patience).await.unwrap_err();
        assert!(absent.contains("not installed"), "{absent}");
        let arguments = ["-c".into(), "echo broken >&2; exit 3".into()];
        let failed = run(Path::new("sh"), &arguments, patience).await.unwrap_err();
        assert!(failed.contains("broken") && failed.contains('3'), "{failed}");
    }

    #[test]
    fn keys_do_not_outlive_their_use() {
        let dir = tempfile::tempdir().unwrap();
        let file = PrivateFile::write(dir.path(), "secret").unwrap();
        let path = file.0.clone();
        assert_eq!(fs::read_to_string(&path).unwrap(), "secret");
        drop(file);
        assert!(!path.exists());
        std::mem::forget(PrivateFile::write(dir.path(), "secret").unwrap());
        forget_keys(dir.path()).unwrap();
        forget_keys(dir.path()).unwrap();
        assert!(!dir.path().join(KEYS).exists());
    }
}
