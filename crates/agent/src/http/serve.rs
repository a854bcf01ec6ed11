//! Accepting connections. Bounded, and no error of one connection or of `accept` ends the loop.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;

use super::router::{Agent, route};

/// Each connection costs a descriptor and some buffers; beyond this many the kernel queues them.
const MAX_CONNECTIONS: usize = 512;
/// Long enough for any client that really means to send a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(300);

/// Binds as the reference does: IPv4 only, on every address of the box.
pub fn bind(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(([0, 0, 0, 0], port).into())?;
    socket.listen(1024)
}

pub async fn serve(listener: TcpListener, agent: Arc<Agent>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors or memory: wait for some to come back instead of spinning.
                let exhausted = matches!(
                    error.raw_os_error(),
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                );
                tokio::time::sleep(Duration::from_millis(if exhausted { 50 } else { 1 })).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            let _slot = slot;
            let service = service_fn(|request| {
                let agent = Arc::clone(&agent);
                async move { Ok::<_, Infallible>(route(&agent, request, peer).await) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).title_case_headers(true);
            // A broken connection is the client's business; there is nobody to tell.
            let _ = http.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
        });
    }
}
