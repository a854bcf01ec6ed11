//! A kernel behind a Jupyter server that the image runs: sessions over HTTP, messages over a WebSocket.
//!
//! Memory: one message of [`MAX_MESSAGE`] bytes a kernel, and one more on its way. Invariant: the server's session goes
//! with the value.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use http::{Method, Request as HttpRequest, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::kernel::{News, StartError};
use super::message::{Channel, Message, Request, Session, assemble};
use crate::envs::Env;

const MAX_MESSAGE: usize = 32 << 20;
const MAX_ANSWER: usize = 4 << 20;
const CALL: Duration = Duration::from_secs(60);
/// How long a server that is configured but does not listen yet is waited for.
const APPEAR: Duration = Duration::from_secs(20);
const ASK_AGAIN: Duration = Duration::from_millis(500);
const START: Duration = Duration::from_secs(60);

type Problem = Box<dyn std::error::Error + Send + Sync>;

/// Where the server is and what it wants to be told.
#[derive(Clone)]
pub(super) struct Server {
    authority: String,
    prefix: String,
    token: String,
}

#[derive(Deserialize)]
struct Specs {
    kernelspecs: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    spec: Spec,
}

#[derive(Deserialize)]
struct Spec {
    #[serde(default)]
    language: String,
}

#[derive(Deserialize)]
struct Made {
    id: String,
    kernel: MadeKernel,
}

#[derive(Deserialize)]
struct MadeKernel {
    id: String,
}

/// What the environment configures, unless it configures none.
pub(super) fn configured(env: &Env) -> Option<Result<Server, StartError>> {
    let host = env.get("JUPYTER_HOST").filter(|host| !host.is_empty())?;
    let Some(rest) = host.strip_prefix("http://") else {
        return Some(Err(StartError::Server(
            format!("JUPYTER_HOST must begin with http://, and is {host}").into(),
        )));
    };
    let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = if prefix.is_empty() { String::new() } else { format!("/{}", prefix.trim_end_matches('/')) };
    let token = env.get("JUPYTER_TOKEN").cloned().unwrap_or_default();
    Some(Ok(Server { authority: authority.to_owned(), prefix, token }))
}

impl Server {
    async fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = match self.authority.rsplit_once(':') {
            Some((_, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
                TcpStream::connect(self.authority.as_str()).await?
            }
            _ => TcpStream::connect((self.authority.as_str(), 80)).await?,
        };
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Whether it listens, or begins to in time.
    pub(super) async fn is_there(&self) -> bool {
        let deadline = Instant::now() + APPEAR;
        while Instant::now() < deadline {
            if matches!(timeout(Duration::from_secs(5), self.connect()).await, Ok(Ok(_))) {
                return true;
            }
            sleep(Duration::from_millis(100)).await;
        }
        false
    }

    fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let request = HttpRequest::builder().method(method).uri(format!("{}{path}", self.prefix));
        let request = request.header(HOST, &self.authority);
        if self.token.is_empty() {
            request
        } else {
            request.header(AUTHORIZATION, format!("Token {}", self.token))
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<(StatusCode, Bytes), Problem> {
        let exchange = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
            let serving = tokio::spawn(connection);
            let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
            let request =
                self.request(method, path).header(CONTENT_TYPE, "application/json").body(Full::new(body))?;
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await?.to_bytes();
            serving.abort();
            Ok((status, body))
        };
        timeout(CALL, exchange).await?
    }

    /// The last one of the language counts, and Jupyter's own default one does not.
    async fn kernel_for(&self, language: &str) -> Result<Option<String>, Problem> {
        let (status, body) = self.call(Method::GET, "/api/kernelspecs", None).await?;
        if status != StatusCode::OK {
            return Err(format!("it answered {status} when asked for its kernels").into());
        }
        let specs: Specs = serde_json::from_slice(&body)?;
        let named = |entry: &Entry| entry.spec.language.eq_ignore_ascii_case(language);
        let mut names = specs.kernelspecs.into_iter().filter(|(_, entry)| named(entry)).map(|(name, _)| name);
        let (mut other, mut default) = (None, None);
        for name in &mut names {
            if name == "python3" { default = Some(name) } else { other = Some(name) }
        }
        Ok(other.or(default))
    }

    async fn open(&self, kernel: &str, cwd: Option<&Path>) -> Result<Made, Problem> {
        let name = uuid::Uuid::new_v4().simple().to_string();
        let folder = cwd.map(|cwd| format!("{}/", cwd.display())).unwrap_or_default();
        let body = json!({
            "path": format!("{folder}{name}.ipynb"),
            "name": name,
            "type": "notebook",
            "kernel": { "name": kernel },
        });
        let (status, body) = self.call(Method::POST, "/api/sessions", Some(body)).await?;
        if !status.is_success() {
            let text = String::from_utf8_lossy(&body);
            return Err(format!("it answered {status} when asked for a session: {:.300}", text).into());
        }
        Ok(serde_json::from_slice(&body)?)
    }

    /// Ends a session and its kernel. A server that is about to start a dead kernel again fails at that, so not once only.
    async fn close(&self, id: &str) {
        for _ in 0..5 {
            let answer = self.call(Method::DELETE, &format!("/api/sessions/{id}"), None).await;
            if !answer.is_ok_and(|(status, _)| status.is_server_error()) {
                return;
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    async fn channels(
        &self,
        kernel: &str,
    ) -> Result<WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>, Problem> {
        let opening = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
            tokio::spawn(connection.with_upgrades());
            let request = self
                .request(Method::GET, &format!("/api/kernels/{kernel}/channels"))
                .header(CONNECTION, "Upgrade")
                .header(UPGRADE, "websocket")
                .header("sec-websocket-version", "13")
                .header(
                    "sec-websocket-key",
                    tokio_tungstenite::tungstenite::handshake::client::generate_key(),
                )
                .body(Full::<Bytes>::default())?;
            let answer = sender.send_request(request).await?;
            if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Err(Problem::from(format!("it answered {} to the WebSocket", answer.status())));
            }
            let config = WebSocketConfig::default()
                .max_message_size(Some(MAX_MESSAGE))
                .max_frame_size(Some(MAX_MESSAGE));
            let upgraded = TokioIo::new(hyper::upgrade::on(answer).await?);
            Ok(WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await)
        };
        timeout(CALL, opening).await?
    }
}

pub(super) struct Remote {
    server: Server,
    made: Made,
    session: Session,
    out: mpsc::UnboundedSender<String>,
    inbox: mpsc::Receiver<Bytes>,
    carrier: JoinHandle<()>,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.carrier.abort();
        let (server, id) = (self.server.clone(), std::mem::take(&mut self.made.id));
        if let Some(runtime) = tokio::runtime::Handle::try_current().ok().filter(|_| !id.is_empty()) {
            runtime.spawn(async move { server.close(&id).await });
        }
    }
}

impl Remote {
    /// A kernel for the language, or none when the server has none.
    pub(super) async fn start(
        server: &Server,
        language: &str,
        cwd: Option<&Path>,
    ) -> Result<Option<Self>, Problem> {
        let Some(name) = server.kernel_for(language).await? else { return Ok(None) };
        let made = server.open(&name, cwd).await?;
        // From here on the session is deleted whatever happens.
        let (out, orders) = mpsc::unbounded_channel();
        let (news, inbox) = mpsc::channel(1);
        let mut remote = Remote {
            server: server.clone(),
            made,
            session: Session::new(),
            out,
            inbox,
            carrier: tokio::spawn(async {}),
        };
        let socket = server.channels(&remote.made.kernel.id).await?;
        remote.carrier = tokio::spawn(carry(socket, orders, news));
        timeout(START, remote.introduce()).await?.map_err(Problem::from)?;
        Ok(Some(remote))
    }

    /// As with a kernel of our own: output may be lost until something about a request has been heard.
    async fn introduce(&mut self) -> Result<(), String> {
        let (mut answered, mut heard) = (false, false);
        while !(answered && heard) {
            let request = self.session.request("kernel_info_request", json!({}));
            self.send(&request);
            let again = Instant::now() + ASK_AGAIN;
            while !(answered && heard) {
                match tokio::time::timeout_at(again, self.next()).await {
                    Ok(News::Message(message)) => match message.channel {
                        Channel::Shell => answered = true,
                        Channel::Iopub => heard |= message.parent == request.id,
                    },
                    Ok(News::Ended(why)) => return Err(why),
                    Err(_) if answered => break,
                    Err(_) => {
                        if let News::Ended(why) = self.next_or_wait().await {
                            return Err(why);
                        }
                        answered = true;
                    }
                }
            }
        }
        Ok(())
    }

    async fn next_or_wait(&mut self) -> News {
        loop {
            match self.next().await {
                News::Message(message) if message.channel == Channel::Iopub => {}
                news => return news,
            }
        }
    }

    fn send(&self, request: &Request) {
        let frame = json!({
            "header": request.header,
            "parent_header": {},
            "metadata": {},
            "content": request.content,
            "channel": "shell",
            "buffers": [],
        });
        // Without a carrier the kernel counts as ended, which `next` tells.
        let _ = self.out.send(frame.to_string());
    }

    pub(super) fn execute(&mut self, code: &str) -> String {
        let request = self.session.execute(code);
        self.send(&request);
        request.id
    }

    /// May be cancelled at any time.
    pub(super) async fn next(&mut self) -> News {
        loop {
            let Some(text) = self.inbox.recv().await else {
                return News::Ended("the connection to the Jupyter server was lost".to_owned());
            };
            let Some(message) = parse(&text) else { continue };
            // What the server tells of a kernel that died and that it starts again, or gave up.
            if message.kind == "status" && message.parent.is_empty() {
                let state: Value = serde_json::from_slice(&message.content).unwrap_or_default();
                if matches!(state["execution_state"].as_str(), Some("restarting" | "dead")) {
                    return News::Ended("the Jupyter server says that it died".to_owned());
                }
            }
            return News::Message(message);
        }
    }

    pub(super) fn interrupt(&self) {
        let (server, path) = (self.server.clone(), format!("/api/kernels/{}/interrupt", self.made.kernel.id));
        tokio::spawn(async move { server.call(Method::POST, &path, None).await.map(drop) });
    }

    pub(super) async fn end(mut self) {
        let id = std::mem::take(&mut self.made.id);
        self.server.close(&id).await;
    }
}

#[derive(Deserialize)]
struct Incoming<'a> {
    #[serde(default)]
    channel: String,
    #[serde(borrow)]
    header: &'a RawValue,
    #[serde(borrow, default)]
    parent_header: Option<&'a RawValue>,
    #[serde(borrow)]
    content: &'a RawValue,
}

fn parse(text: &[u8]) -> Option<Message> {
    let incoming: Incoming<'_> = serde_json::from_slice(text).ok()?;
    let channel = match incoming.channel.as_str() {
        "shell" => Channel::Shell,
        "iopub" => Channel::Iopub,
        _ => return None,
    };
    let parent = incoming.parent_header.map_or("{}", RawValue::get);
    let headers = (incoming.header.get().as_bytes(), parent.as_bytes());
    assemble(channel, headers, incoming.content.get().as_bytes().to_vec())
}

/// Carries messages both ways until either side is gone.
async fn carry(
    mut socket: WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>,
    mut orders: mpsc::UnboundedReceiver<String>,
    news: mpsc::Sender<Bytes>,
) {
    loop {
        tokio::select! {
            order = orders.recv() => {
                let Some(order) = order else { return };
                if socket.send(Frame::text(order)).await.is_err() {
                    return;
                }
            }
            frame = socket.next() => match frame {
                Some(Ok(frame @ (Frame::Text(_) | Frame::Binary(_)))) => {
                    if news.send(frame.into_data()).await.is_err() {
                        return;
                    }
                }
                // Pings are answered by the library.
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return,
            },
        }
    }
}
