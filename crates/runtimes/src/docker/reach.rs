//! Whether something inside a box answers already.
//!
//! A connection alone says too little: the engine's own port forwarder accepts before anybody listens behind it, and the agent listens
//! before it has started the entrypoint. It answers a request only after that.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// A packet to a network that is just being set up may be lost, and the kernel repeats it only a second later; we do at once.
const CONNECT: Duration = Duration::from_millis(50);
const ANSWER: Duration = Duration::from_secs(1);
/// Between two attempts that were refused.
const STEP: Duration = Duration::from_millis(1);

/// Sends one request without a body and returns the status of the answer.
pub(super) async fn ask(
    address: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    patience: Duration,
) -> io::Result<u16> {
    let connected = timeout(patience.min(CONNECT.max(patience / 4)), TcpStream::connect(address)).await;
    let mut stream = connected.map_err(|_| io::ErrorKind::TimedOut)??;
    let mut request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    let exchange = async {
        stream.write_all(request.as_bytes()).await?;
        // "HTTP/1.1 200": a server that does not say so much speaks something else.
        let mut head = [0; 12];
        stream.read_exact(&mut head).await?;
        let status = head.strip_prefix(b"HTTP/1.").and_then(|rest| std::str::from_utf8(&rest[2..]).ok());
        status.and_then(|s| s.parse().ok()).ok_or_else(|| io::Error::other("not an HTTP answer"))
    };
    timeout(patience, exchange).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Returns once the agent answers anything at all. Never gives up; the caller bounds it.
pub(super) async fn until_agent_answers(address: SocketAddr) {
    loop {
        let attempt = async {
            let mut stream =
                timeout(CONNECT, TcpStream::connect(address)).await.map_err(io::Error::from)??;
            let request = "GET /ping HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).await?;
            let mut first = [0];
            timeout(ANSWER, stream.read_exact(&mut first)).await.map_err(io::Error::from)??;
            Ok::<_, io::Error>(())
        };
        if attempt.await.is_ok() {
            return;
        }
        tokio::time::sleep(STEP).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn answering(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 512];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        address
    }

    #[tokio::test]
    async fn a_status_is_read_and_anything_else_is_no_answer() {
        let patience = Duration::from_secs(5);
        for (answer, status) in [
            ("HTTP/1.1 204 No Content\r\n\r\n", Some(204)),
            ("HTTP/1.0 401 Unauthorized\r\n\r\n", Some(401)),
            ("SSH-2.0-OpenSSH_9", None),
            ("", None),
        ] {
            let address = answering(answer).await;
            assert_eq!(ask(address, "/", &[("A", "b")], patience).await.ok(), status, "{answer}");
        }
    }

    #[tokio::test]
    async fn the_first_byte_of_an_agent_is_enough() {
        until_agent_answers(answering("HTTP/1.1 401 Unauthorized\r\n\r\n").await).await;
    }
}
