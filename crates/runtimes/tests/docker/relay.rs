//! A way to the engine that can be cut, can hang, and counts requests.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use sandglass_runtimes::docker::EngineAddress;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    task::{AbortHandle, JoinSet},
};

pub struct Relay {
    dir: tempfile::TempDir,
    engine: PathBuf,
    requests: Arc<AtomicUsize>,
    task: Mutex<Option<AbortHandle>>,
    open: tokio::sync::watch::Sender<bool>,
}

impl Relay {
    pub async fn to(engine: PathBuf) -> Self {
        let relay = Self {
            dir: tempfile::tempdir().unwrap(),
            engine,
            requests: Arc::default(),
            task: Mutex::default(),
            open: tokio::sync::watch::Sender::new(true),
        };
        relay.mend().await;
        relay
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    pub fn address(&self) -> EngineAddress {
        EngineAddress::Unix(self.path())
    }

    /// Requests since the beginning.
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    /// Every connection breaks and new ones are refused.
    pub async fn cut(&self) {
        if let Some(task) = self.task.lock().unwrap().take() {
            task.abort();
        }
        let _ = std::fs::remove_file(self.path());
    }

    /// Connections stay, new ones are accepted, nothing gets through.
    pub fn hang(&self) {
        self.open.send_replace(false);
    }

    pub async fn mend(&self) {
        self.cut().await;
        self.open.send_replace(true);
        let listener = UnixListener::bind(self.path()).unwrap();
        let (engine, requests, open) = (self.engine.clone(), self.requests.clone(), self.open.subscribe());
        let task = tokio::spawn(async move {
            // Ends with the task, and all connections with it.
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = UnixStream::connect(&engine).await else { continue };
                let (near_in, near_out) = near.into_split();
                let (far_in, far_out) = far.into_split();
                connections.spawn(copy(near_in, far_out, open.clone(), Some(requests.clone())));
                connections.spawn(copy(far_in, near_out, open.clone(), None));
            }
        });
        *self.task.lock().unwrap() = Some(task.abort_handle());
    }
}

async fn copy(
    mut from: tokio::net::unix::OwnedReadHalf,
    mut to: tokio::net::unix::OwnedWriteHalf,
    mut open: tokio::sync::watch::Receiver<bool>,
    requests: Option<Arc<AtomicUsize>>,
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if let Some(requests) = &requests {
            // One request at a time is on a connection, and each head says this once.
            let heads = buffer[..count].windows(9).filter(|w| *w == b" HTTP/1.1").count();
            requests.fetch_add(heads, Ordering::SeqCst);
        }
        if open.wait_for(|open| *open).await.is_err() || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().unwrap().take() {
            task.abort();
        }
    }
}
