//! The port at which clients look for a Jupyter server before they run code.
//!
//! They only connect; nothing is served here. Where the image has a Jupyter server of its own, the port is left to it.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::net::TcpListener;

use crate::envs::Env;

const DEFAULT_PORT: u16 = 44771;

/// The port to listen on, or none when the image names a server.
pub fn port(env: &Env) -> Option<u16> {
    if env.get("JUPYTER_HOST").is_some_and(|host| !host.is_empty()) {
        return None;
    }
    let given = env.get("JUPYTER_PORT").and_then(|port| port.parse().ok());
    Some(given.filter(|port| *port != 0).unwrap_or(DEFAULT_PORT))
}

/// Accepts and closes. Somebody else on the port is as good an answer to whoever asks.
pub async fn answer(port: Option<u16>) {
    let Some(port) = port else { return };
    let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await else { return };
    loop {
        if listener.accept().await.is_err() {
            // Out of descriptors: some come back.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
