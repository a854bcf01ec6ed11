//! The same image under `runc`, as a yardstick for the isolation cases.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::stage::{IDS, agent, lay_out_busybox};

pub struct Runc {
    id: String,
    state: PathBuf,
}

impl Runc {
    /// `None` with the reason when it cannot be used here.
    pub fn start(home: &Path) -> Result<Self, String> {
        Command::new("runc")
            .arg("--version")
            .output()
            .map_err(|_| "runc is not installed (package `runc`)")?;
        let bundle = home.join("bundle");
        let rootfs = bundle.join("rootfs");
        fs::create_dir_all(&rootfs).unwrap();
        // So that the box's root gets through to it.
        fs::set_permissions(home, std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
        lay_out_busybox(&rootfs);
        fs::create_dir_all(rootfs.join("opt/opensandbox")).unwrap();
        fs::copy(agent(), rootfs.join("opt/opensandbox/execd")).unwrap();
        let owner = format!("{0}:{0}", IDS.base);
        assert!(Command::new("chown").args(["-hR", &owner]).arg(&rootfs).status().unwrap().success());
        fs::write(bundle.join("config.json"), serde_json::to_vec(&config(&bundle)?).unwrap()).unwrap();
        let runc = Self { id: format!("sgt-runc-{}", std::process::id()), state: home.join("runc") };
        let started = runc
            .command()
            .args(["run", "--detach", "--bundle"])
            .arg(&bundle)
            .arg(&runc.id)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(home.join("runc.log")).unwrap())
            .status()
            .unwrap();
        if started.success() {
            return Ok(runc);
        }
        Err(format!(
            "runc does not start: {}",
            fs::read_to_string(home.join("runc.log")).unwrap_or_default().trim()
        ))
    }

    fn command(&self) -> Command {
        let mut command = Command::new("runc");
        command.arg("--root").arg(&self.state);
        command
    }

    pub fn run(&self, script: &str) -> (String, i32) {
        let output = self
            .command()
            .args(["exec", &self.id, "/bin/sh", "-c", &format!("{script} 2>&1")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (text, output.status.code().unwrap_or(-1))
    }
}

impl Drop for Runc {
    fn drop(&mut self) {
        let _ = self.command().args(["delete", "--force", &self.id]).status();
    }
}

/// What `runc spec` gives, plus a user namespace, Docker's capabilities and device rules: comparable but for seccomp,
/// for which runc ships no profile.
fn config(bundle: &Path) -> Result<Value, String> {
    let made = Command::new("runc").arg("spec").current_dir(bundle).status().map_err(|e| e.to_string())?;
    assert!(made.success());
    let mut config: Value = serde_json::from_slice(&fs::read(bundle.join("config.json")).unwrap()).unwrap();
    let names = "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE";
    let capabilities: Vec<String> = names.split(' ').map(|name| format!("CAP_{name}")).collect();
    config["process"]["args"] = json!(["/bin/sleep", "1000"]);
    config["process"]["terminal"] = json!(false);
    config["process"]["noNewPrivileges"] = json!(true);
    config["process"]["env"] = json!(["PATH=/bin:/sbin"]);
    for set in ["bounding", "effective", "permitted"] {
        config["process"]["capabilities"][set] = json!(capabilities);
    }
    config["process"]["rlimits"] = json!([]);
    config["root"]["readonly"] = json!(false);
    let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
    namespaces.push(json!({ "type": "user" }));
    let map = json!([{ "containerID": 0, "hostID": IDS.base, "size": IDS.count }]);
    config["linux"]["uidMappings"] = map.clone();
    config["linux"]["gidMappings"] = map;
    Ok(config)
}
