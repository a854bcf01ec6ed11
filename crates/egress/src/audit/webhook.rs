//! Tells the deny webhook about denied names: in order, one at a time, with retries. What does not fit into the queue is dropped.

use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Request, StatusCode, Uri};
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use rustls::pki_types::ServerName;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::diagnostics::tell;
use crate::intercept::Trust;
use crate::outbound::Outbound;
use crate::settings::Level;

/// Denied names that wait to be sent.
const WAITING: usize = 256;

const TIME_FOR_A_TRY: Duration = Duration::from_secs(5);
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];

/// Who tells, in the word of the published receivers.
const SOURCE: &str = "opensandbox-egress";

/// Where gates put denied names.
#[derive(Clone, Debug)]
pub struct Denials(mpsc::Sender<Denial>);

/// One denied name and when it was denied.
#[derive(Debug)]
pub struct Denial {
    pub host: String,
    pub at: Timestamp,
}

impl Denials {
    /// The queue's two ends.
    pub fn queue() -> (Self, mpsc::Receiver<Denial>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        (Self(sender), receiver)
    }

    /// Never waits.
    pub fn report(&self, host: &str) {
        // A full queue drops: the sandbox decides how fast denials come, not how much memory they take.
        let _ = self.0.try_send(Denial { host: host.to_owned(), at: Timestamp::now() });
    }
}

/// Where denials are sent to.
pub struct Webhook {
    pub address: Uri,
    pub sandbox: String,
    pub outbound: Outbound,
    pub trust: Trust,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Told<'a> {
    hostname: &'a str,
    timestamp: String,
    source: &'static str,
    sandbox_id: &'a str,
}

impl Webhook {
    /// Sends until the queue ends.
    pub async fn deliver(self, mut queue: mpsc::Receiver<Denial>) {
        while let Some(denial) = queue.recv().await {
            self.send(&denial).await;
        }
    }

    async fn send(&self, denial: &Denial) {
        let told = Told {
            hostname: &denial.host,
            timestamp: denial.at.to_string(),
            source: SOURCE,
            sandbox_id: &self.sandbox,
        };
        let body = Bytes::from(serde_json::to_vec(&told).expect("texts always serialise"));
        let mut pauses = PAUSES.iter();
        loop {
            let answer = timeout(TIME_FOR_A_TRY, self.post(body.clone())).await;
            let problem = match answer {
                Ok(Ok(status)) if status.is_server_error() => format!("it answered {status}"),
                Ok(Ok(_)) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer in time".to_owned(),
            };
            let Some(pause) = pauses.next() else {
                // The address may carry a key: it is not shown.
                return tell(Level::Warn, format_args!("the deny webhook was not told: {problem}"));
            };
            sleep(*pause).await;
        }
    }

    async fn post(&self, body: Bytes) -> io::Result<StatusCode> {
        let unfit = || io::Error::new(io::ErrorKind::InvalidInput, "the address has no host");
        let host = self.address.host().ok_or_else(unfit)?;
        let encrypted = self.address.scheme_str() == Some("https");
        let port = self.address.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        let stream = self.outbound.connect(host, port).await?;
        let request = self.request(body)?;
        if !encrypted {
            return exchange(stream, request).await;
        }
        let name = host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(name).map_err(io::Error::other)?;
        let connector = TlsConnector::from(self.trust.client(Vec::new()));
        exchange(connector.connect(name, stream).await?, request).await
    }

    fn request(&self, body: Bytes) -> io::Result<Request<Full<Bytes>>> {
        let path = self.address.path_and_query().map_or("/", |path| path.as_str());
        let authority = self.address.authority().map_or("", |authority| authority.as_str());
        let (login, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        let mut request = Request::post(path).header(HOST, host).header(CONTENT_TYPE, "application/json");
        if !login.is_empty() {
            let login = percent_encoding::percent_decode_str(login).collect::<Vec<u8>>();
            request = request.header(AUTHORIZATION, format!("Basic {}", STANDARD.encode(login)));
        }
        request.body(Full::new(body)).map_err(io::Error::other)
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> io::Result<StatusCode>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let answer = sender.send_request(request);
    tokio::pin!(connection, answer);
    tokio::select! {
        answer = &mut answer => answer.map(|answer| answer.status()).map_err(io::Error::other),
        ended = &mut connection => match ended {
            // The answer may have come with the end.
            Ok(()) => answer.await.map(|answer| answer.status()).map_err(io::Error::other),
            Err(error) => Err(io::Error::other(error)),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::dns::upstream::Upstreams;
    use crate::outbound::Mark;
    use crate::settings::Settings;

    #[tokio::test(start_paused = true)]
    async fn a_denial_is_sent_until_it_is_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://a:b@{}/deny?x=1", listener.local_addr().unwrap()).parse().unwrap();
        let (settings, _) = Settings::read(&|_| None).unwrap();
        let upstreams = Arc::new(Upstreams::new(&settings.dns, Mark::None));
        let outbound = Outbound { mark: Mark::None, upstreams };
        let trust = Trust::of(rustls::RootCertStore::empty()).unwrap();
        let webhook = Webhook { address, sandbox: "box-1".into(), outbound, trust };
        let (denials, queue) = Denials::queue();
        let sending = tokio::spawn(webhook.deliver(queue));
        denials.report("bad.test");
        drop(denials);
        for status in ["503 Busy", "500 Broken", "200 OK"] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\"box-1\"}") {
                request.push(stream.read_u8().await.unwrap());
            }
            let text = String::from_utf8(request).unwrap();
            assert!(text.starts_with("POST /deny?x=1 HTTP/1.1\r\n"), "{text}");
            assert!(text.contains("authorization: Basic YTpi"), "{text}");
            assert!(text.contains(r#"{"hostname":"bad.test","timestamp":"20"#), "{text}");
            assert!(text.contains(r#"Z","source":"opensandbox-egress","sandboxId":"box-1"}"#), "{text}");
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        sending.await.unwrap();
    }

    #[tokio::test]
    async fn a_full_queue_drops() {
        let (denials, mut queue) = Denials::queue();
        (0..WAITING * 2).for_each(|number| denials.report(&format!("{number}.test")));
        drop(denials);
        let mut taken = 0;
        while queue.recv().await.is_some() {
            taken += 1;
        }
        assert_eq!(taken, WAITING);
    }
}
