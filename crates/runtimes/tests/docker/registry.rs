//! Debian's `docker-registry` on a loopback port, with one image.

use std::{net::TcpStream, process::Child, time::Duration};

use super::engine::Engine;

pub struct Registry {
    port: u16,
    process: Child,
    _dir: tempfile::TempDir,
}

impl Registry {
    /// `None`, and says so, where it is not installed.
    pub async fn with(engine: &Engine) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        // Below those that the kernel and the engine give away, so that nobody gets it in between.
        let mut ports = (10_000..30_000).cycle().skip(std::process::id() as usize % 20_000);
        let port = ports.find(|port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_err()).unwrap();
        let data = dir.path().join("data");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n",
            data.display()
        );
        let file = dir.path().join("config.yml");
        std::fs::write(&file, config).unwrap();
        let mut command = std::process::Command::new("docker-registry");
        command
            .arg("serve")
            .arg(&file)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        let Ok(process) = command.spawn() else {
            eprintln!("SKIPPED: no docker-registry to fetch an image from");
            return None;
        };
        let registry = Self { port, process, _dir: dir };
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let image = registry.image();
        engine.docker(&["tag", &engine.image, &image]).await;
        engine.docker(&["push", "-q", &image]).await;
        engine.docker(&["rmi", &image]).await;
        Some(registry)
    }

    pub fn image(&self) -> String {
        format!("127.0.0.1:{}/contract/shell:1", self.port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
