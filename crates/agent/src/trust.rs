//! The authority of a credential proxy: waits for its certificate and makes the programs of the box trust it.
//!
//! Everything is best effort, in the order of what most programs read; what an image lacks is left out.
//! Invariant: the files that the variables name exist before anything runs in the box, also when no certificate ever comes. One that is there
//! from the start is trusted from the start.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};

use crate::envs::{self, Env};
use crate::hooks::run;
use crate::http::router::Agent;
use crate::init::spawn;
use crate::journal::{self, Level};

const HOME: &str = "/opt/opensandbox";
const VARIABLE: &str = "OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT";
const ALIAS: &str = "opensandbox-mitmproxy";
/// How long a certificate may take to appear.
const PATIENCE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often it is looked whether the certificate was replaced.
const WATCH_EVERY: Duration = Duration::from_secs(10);
/// How long one program of the image may take.
const TOOL: Duration = Duration::from_secs(60);
/// Larger bundles do not exist.
const MAX_BUNDLE: u64 = 16 << 20;

const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trust {
    ca: PathBuf,
    /// The system's authorities and this one; `None` where it cannot be written.
    merged: Option<PathBuf>,
}

impl Trust {
    /// `None` when no proxy intercepts what the box sends.
    pub fn wanted(env: &Env) -> Option<Self> {
        let said = env.get(VARIABLE)?.trim().to_ascii_lowercase();
        matches!(said.as_str(), "1" | "true" | "yes" | "on").then(|| Self::below(Path::new(HOME)))
    }

    fn below(home: &Path) -> Self {
        let writable = rustix::fs::access(home, rustix::fs::Access::WRITE_OK).is_ok();
        let merged = writable.then(|| home.join("merged-ca-certificates.pem"));
        Trust { ca: home.join("mitmproxy-ca-cert.pem"), merged }
    }

    /// What programs read to find their authorities.
    pub fn export(&self, env: &mut Env) {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let bundle = self.merged.as_deref().unwrap_or(&self.ca);
        env.insert("NODE_EXTRA_CA_CERTS".into(), text(&self.ca));
        env.insert("REQUESTS_CA_BUNDLE".into(), text(bundle));
        env.insert("SSL_CERT_FILE".into(), text(bundle));
    }

    /// What takes no program of the image and hardly any time: done before the agent answers, because clients come as soon as it does.
    pub fn ahead(&self) {
        let bundles = BUNDLES.map(Path::new);
        if let Some(merged) = &self.merged {
            // What goes wrong here is said when everything is installed.
            let _ = merge(bundles.into_iter().find(|bundle| bundle.is_file()), &self.ca, merged);
        }
        if self.version().is_some() {
            for bundle in bundles {
                let _ = append(bundle, &self.ca);
            }
        }
    }

    /// Waits for the certificate and installs it; without one the box goes on as it is.
    pub async fn arrive(&self, agent: &Agent) {
        let deadline = Instant::now() + PATIENCE;
        while self.version().is_none() {
            if Instant::now() >= deadline {
                let text = format!("no certificate in {} after {} s", self.ca.display(), PATIENCE.as_secs());
                journal::note(Level::Warning, &text);
                break;
            }
            sleep(LOOK_EVERY).await;
        }
        self.install(agent).await;
    }

    /// Installs every later certificate, too.
    pub async fn watch(self, agent: std::sync::Arc<Agent>) {
        let mut installed = self.version();
        loop {
            sleep(WATCH_EVERY).await;
            let now = self.version();
            if now.is_some() && now != installed {
                self.install(&agent).await;
                installed = now;
            }
        }
    }

    /// Tells one certificate from another; an empty file is none.
    fn version(&self) -> Option<(u64, SystemTime)> {
        let meta = self.ca.metadata().ok().filter(|meta| meta.is_file() && meta.len() > 0)?;
        Some((meta.len(), meta.modified().ok()?))
    }

    async fn install(&self, agent: &Agent) {
        if self.version().is_some() {
            self.add_to_system(agent).await;
        }
        let certifi = certifi(agent).await;
        let base = certifi.iter().map(PathBuf::as_path).chain(BUNDLES.map(Path::new)).find(|p| p.is_file());
        if let Some(merged) = &self.merged
            && let Err(error) = merge(base, &self.ca, merged)
        {
            journal::note(Level::Warning, &format!("cannot write {}: {error}", merged.display()));
        }
        if self.version().is_some() {
            self.add_to_nss(agent).await;
            self.add_to_java(agent).await;
        }
    }

    async fn add_to_system(&self, agent: &Agent) {
        let path = envs::search_path(&agent.env);
        let (anchor, tool) = if spawn::is_there("update-ca-certificates", path) {
            ("/usr/local/share/ca-certificates/opensandbox-mitmproxy-ca.crt", "update-ca-certificates")
        } else if spawn::is_there("update-ca-trust", path) {
            ("/etc/pki/ca-trust/source/anchors/opensandbox-mitmproxy-ca.pem", "update-ca-trust")
        } else {
            return;
        };
        let ca = self.ca.to_string_lossy().into_owned();
        if rustix::process::geteuid().is_root() {
            let copied = Path::new(anchor).parent().map_or(Ok(()), std::fs::create_dir_all);
            if let Err(error) = copied.and_then(|()| std::fs::copy(&ca, anchor)) {
                return journal::note(Level::Warning, &format!("cannot write {anchor}: {error}"));
            }
            tool_run(agent, &[tool]).await;
        } else if spawn::is_there("sudo", path)
            && tool_run(agent, &["sudo", "-n", "install", "-D", "-m", "644", &ca, anchor]).await
        {
            tool_run(agent, &["sudo", "-n", tool]).await;
        }
    }

    async fn add_to_nss(&self, agent: &Agent) {
        if !spawn::is_there("certutil", envs::search_path(&agent.env)) {
            return;
        }
        let dir = format!("{}/.pki/nssdb", agent.home.trim_end_matches('/'));
        let database = format!("sql:{dir}");
        if !Path::new(&dir).join("cert9.db").exists() {
            let _ = std::fs::create_dir_all(&dir);
            tool_run(agent, &["certutil", "-N", "--empty-password", "-d", &database]).await;
        }
        let ca = self.ca.to_string_lossy();
        let add = ["certutil", "-A", "-d", &database, "-t", "C,,", "-n", ALIAS, "-i", &ca];
        tool_run(agent, &add).await;
    }

    async fn add_to_java(&self, agent: &Agent) {
        for store in java_stores(&agent.env) {
            let (keytool, keystore) = (store.keytool.to_string_lossy(), store.keystore.to_string_lossy());
            let of_store = ["-alias", ALIAS, "-keystore", &keystore, "-storepass", "changeit"];
            // One that is there already cannot be replaced in one step; one that is not makes this fail.
            let delete = [&[&*keytool, "-delete"], &of_store[..]].concat();
            let _ = run::run(agent, &owned(&delete), TOOL).await;
            let ca = self.ca.to_string_lossy();
            let import =
                [&[&*keytool, "-importcert", "-noprompt", "-trustcacerts", "-file", &ca], &of_store[..]];
            tool_run(agent, &import.concat()).await;
        }
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

async fn tool_run(agent: &Agent, argv: &[&str]) -> bool {
    match run::run(agent, &owned(argv), TOOL).await {
        Ok(_) => true,
        Err(failed) => {
            journal::note(Level::Warning, &format!("{}: {failed}", argv.join(" ")));
            false
        }
    }
}

/// The bundle of Python's `certifi`, which its programs read instead of the system's.
async fn certifi(agent: &Agent) -> Option<PathBuf> {
    let path = envs::search_path(&agent.env);
    let python = ["python3", "python"].into_iter().find(|name| spawn::is_there(name, path))?;
    let ask = owned(&[python, "-c", "import certifi; print(certifi.where())"]);
    let said = run::run(agent, &ask, TOOL).await.ok()?;
    said.lines().last().map(PathBuf::from).filter(|path| path.is_absolute())
}

fn merge(base: Option<&Path>, ca: &Path, merged: &Path) -> std::io::Result<()> {
    use std::io::Read;
    let mut bytes = Vec::new();
    for part in base.into_iter().chain([ca]) {
        if let Ok(file) = std::fs::File::open(part) {
            file.take(MAX_BUNDLE).read_to_end(&mut bytes)?;
            if !bytes.ends_with(b"\n") {
                bytes.push(b'\n');
            }
        }
    }
    let fresh = merged.with_extension("new");
    std::fs::write(&fresh, bytes)?;
    std::fs::rename(&fresh, merged)
}

/// Adds the certificate to a bundle that is there and does not have it. The system's own tool writes the bundle anew, with the same outcome.
fn append(bundle: &Path, ca: &Path) -> std::io::Result<()> {
    use std::io::Write;
    let (held, added) = (std::fs::read_to_string(bundle)?, std::fs::read_to_string(ca)?);
    if held.contains(added.trim()) {
        return Ok(());
    }
    let gap = if held.is_empty() || held.ends_with('\n') { "" } else { "\n" };
    std::fs::OpenOptions::new().append(true).open(bundle)?.write_all(format!("{gap}{added}").as_bytes())
}

struct JavaStore {
    keytool: PathBuf,
    keystore: PathBuf,
}

fn java_stores(env: &Env) -> Vec<JavaStore> {
    let mut homes: Vec<PathBuf> =
        env.get("JAVA_HOME").filter(|h| h.starts_with('/')).map(PathBuf::from).into_iter().collect();
    for (parent, prefix) in [("/usr/lib/jvm", ""), ("/usr/java", ""), ("/opt/java", ""), ("/opt", "jdk")] {
        let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
        homes.extend(
            entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()),
        );
    }
    let on_path = spawn::search("java", envs::search_path(env)).ok();
    let home_of = |java: PathBuf| Some(java.canonicalize().ok()?.parent()?.parent()?.to_owned());
    homes.extend(on_path.and_then(home_of));
    let mut stores: Vec<JavaStore> = Vec::new();
    for home in homes {
        for below in ["lib/security/cacerts", "jre/lib/security/cacerts"] {
            let keytool = home.join("bin/keytool");
            let Ok(keystore) = home.join(below).canonicalize() else { continue };
            if keytool.is_file() && stores.iter().all(|store| store.keystore != keystore) {
                stores.push(JavaStore { keytool, keystore });
            }
        }
    }
    stores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_intercepting_proxy_is_waited_for() {
        for (said, wanted) in [("1", true), ("On", true), (" yes ", true), ("0", false), ("", false)] {
            let env = Env::from([(VARIABLE.to_owned(), said.to_owned())]);
            assert_eq!(Trust::wanted(&env).is_some(), wanted, "{said:?}");
        }
        assert_eq!(Trust::wanted(&Env::new()), None);
    }

    #[test]
    fn the_bundle_holds_the_systems_authorities_and_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let trust = Trust::below(dir.path());
        let (base, merged) = (dir.path().join("base"), trust.merged.clone().unwrap());
        std::fs::write(&base, "system").unwrap();
        merge(Some(&base), &trust.ca, &merged).unwrap();
        assert_eq!(std::fs::read_to_string(&merged).unwrap(), "system\n", "without a certificate");
        assert_eq!(trust.version(), None);
        std::fs::write(&trust.ca, "").unwrap();
        assert_eq!(trust.version(), None, "an empty file is being written");
        std::fs::write(&trust.ca, "new\n").unwrap();
        assert!(trust.version().is_some());
        merge(Some(&base), &trust.ca, &merged).unwrap();
        assert_eq!(std::fs::read_to_string(&merged).unwrap(), "system\nnew\n");
        let mut env = Env::new();
        trust.export(&mut env);
        assert_eq!(env["SSL_CERT_FILE"], merged.to_string_lossy());
        assert_eq!(env["NODE_EXTRA_CA_CERTS"], trust.ca.to_string_lossy());
    }

    #[test]
    fn a_bundle_gets_the_certificate_once() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, ca) = (dir.path().join("bundle"), dir.path().join("ca"));
        std::fs::write(&ca, "new\n").unwrap();
        assert!(append(&bundle, &ca).is_err() && !bundle.exists(), "an image without a bundle gets none");
        std::fs::write(&bundle, "system").unwrap();
        for _ in 0..2 {
            append(&bundle, &ca).unwrap();
            assert_eq!(std::fs::read_to_string(&bundle).unwrap(), "system\nnew\n");
        }
    }

    #[test]
    fn every_keystore_is_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("jdk");
        for file in ["bin/keytool", "lib/security/cacerts"] {
            std::fs::create_dir_all(home.join(file).parent().unwrap()).unwrap();
            std::fs::write(home.join(file), "").unwrap();
        }
        let env = Env::from([
            ("JAVA_HOME".to_owned(), home.to_string_lossy().into_owned()),
            ("PATH".to_owned(), String::new()),
        ]);
        let ours = java_stores(&env).into_iter().filter(|store| store.keystore.starts_with(dir.path()));
        assert_eq!(ours.count(), 1);
    }
}
