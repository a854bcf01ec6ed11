//! An interceptor, the servers behind it and what they have seen.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use ipnet::IpNet;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sandglass_egress::audit::{Audit, Event};
use sandglass_egress::intercept::{Authority, Interceptor, Parts, Pending, Room, Trust, UpstreamProxy, Way};
use sandglass_egress::policy::{Action, Resolved, Rules, Verdict};
use sandglass_egress::vault::{Call, Conditions, Transport, Vault, handle};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Where clients believe that servers are.
pub const SERVER: &str = "192.0.2.10";
pub const SECRET: &str = "s3cr3t-value-7f3a";
pub const NAME: &str = "api.example.com";

pub type Body = UnsyncBoxBody<Bytes, io::Error>;
pub type Handler =
    Arc<dyn Fn(Request<Incoming>) -> Pin<Box<dyn Future<Output = Response<Body>> + Send>> + Send + Sync>;

/// Rules, resolver and audit of the tests.
#[derive(Default)]
pub struct World {
    pub names: Mutex<HashSet<String>>,
    pub denied: Mutex<HashSet<String>>,
    pub addresses: Mutex<HashMap<IpAddr, Action>>,
    pub led: Mutex<HashSet<(String, IpAddr)>>,
    pub events: Mutex<Vec<Event>>,
    /// The default is to allow.
    pub open: AtomicBool,
}

impl Rules for World {
    fn name(&self, name: &str) -> Verdict {
        let names = self.names.lock().unwrap();
        if self.denied.lock().unwrap().contains(name) {
            return Verdict { action: Action::Deny, rule: format!("deny {name}") };
        }
        let wildcards = name.match_indices('.').map(|(at, _)| format!("*{}", &name[at..]));
        match std::iter::once(name.to_owned()).chain(wildcards).find(|pattern| names.contains(pattern)) {
            Some(rule) => Verdict { action: Action::Allow, rule: format!("allow {rule}") },
            None => Verdict { action: self.default_action(), rule: "default".to_owned() },
        }
    }

    fn address(&self, address: IpAddr) -> Option<Verdict> {
        let action = *self.addresses.lock().unwrap().get(&address)?;
        let word = if action == Action::Allow { "allow" } else { "deny" };
        Some(Verdict { action, rule: format!("{word} {address}") })
    }

    fn default_action(&self) -> Action {
        if self.open.load(Ordering::Relaxed) { Action::Allow } else { Action::Deny }
    }

    fn networks(&self) -> Vec<(Action, IpNet)> {
        Vec::new()
    }
}

impl Resolved for World {
    fn leads_to(&self, name: &str, address: IpAddr) -> bool {
        self.led.lock().unwrap().contains(&(name.to_owned(), address))
    }
}

impl Audit for World {
    fn tell(&self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

/// Every connection of one listener wanted to go to one place, and places are on loopback.
struct Loopback {
    destination: SocketAddr,
    servers: Arc<Mutex<HashMap<SocketAddr, SocketAddr>>>,
}

impl Way for Loopback {
    fn destination(&self, _: &TcpStream) -> io::Result<SocketAddr> {
        Ok(self.destination)
    }

    fn connect(&self, address: SocketAddr) -> Pending<TcpStream> {
        let real = self.servers.lock().unwrap().get(&address).copied();
        Box::pin(async move { TcpStream::connect(real.ok_or(io::ErrorKind::ConnectionRefused)?).await })
    }

    fn resolve(&self, name: &str) -> Pending<Vec<IpAddr>> {
        let known = name == "proxy.example.net";
        Box::pin(async move {
            if known { Ok(vec!["192.0.2.99".parse().unwrap()]) } else { Err(io::ErrorKind::NotFound.into()) }
        })
    }
}

/// Everything of one test.
pub struct Stack {
    pub world: Arc<World>,
    pub vault: Arc<Mutex<Vault>>,
    pub authority: Arc<Authority>,
    pub interceptors: Vec<Interceptor>,
    pub proxy: Option<UpstreamProxy>,
    pub room: Room,
    issuer: Issuer<'static, KeyPair>,
    pub public_ca: String,
    servers: Arc<Mutex<HashMap<SocketAddr, SocketAddr>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

pub fn conditions() -> Conditions {
    Conditions { token: true, interception: true, ..Conditions::default() }
}

impl Stack {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let public_ca = params.self_signed(&key).unwrap().pem();
        let mut vault = Vault::new(conditions());
        vault.restore(None).unwrap();
        vault.intercepting();
        let world = Arc::new(World::default());
        world.names.lock().unwrap().insert(NAME.to_owned());
        let stack = Self {
            world,
            vault: Arc::new(Mutex::new(vault)),
            authority: Arc::new(Authority::create().unwrap()),
            interceptors: Vec::new(),
            proxy: None,
            room: Room::default(),
            issuer: Issuer::new(params, key),
            public_ca,
            servers: Arc::default(),
            tasks: Vec::new(),
        };
        stack.leads(NAME, SERVER);
        stack
    }

    /// With a bearer credential for everything at `api.example.com`.
    pub fn bound() -> Self {
        let stack = Self::new();
        stack.write(Method::POST, &bearer(""), StatusCode::CREATED);
        stack
    }

    pub fn leads(&self, name: &str, address: &str) {
        self.world.led.lock().unwrap().insert((name.to_owned(), address.parse().unwrap()));
    }

    pub fn write(&self, method: Method, body: &str, expected: StatusCode) -> String {
        let mut vault = self.vault.lock().unwrap();
        let transport = Transport::Plain("127.0.0.1".parse().unwrap());
        let call = Call {
            method: &method,
            path: "/credential-vault",
            body: body.as_bytes(),
            transport,
            rules: &*self.world,
            keep: &|_| Ok(()),
        };
        let answer = handle(&mut vault, call);
        assert_eq!(answer.status, expected, "{}", answer.body);
        answer.body
    }

    /// What has been told so far, as it would be written.
    pub fn told(&self) -> String {
        serde_json::to_string(&*self.world.events.lock().unwrap()).unwrap()
    }

    /// Starts an interceptor for connections that wanted to go there.
    pub async fn intercept(&mut self, destination: &str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let way = Loopback { destination: destination.parse().unwrap(), servers: Arc::clone(&self.servers) };
        self.intercept_by(listener, Arc::new(way));
        address
    }

    /// The same at the destination's own port, for clients that say the port which they connect to: an address of loopback that
    /// nobody else has. Nothing without the right to take such a port.
    pub async fn intercept_at_its_port(&mut self, destination: &str) -> Option<SocketAddr> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let destination: SocketAddr = destination.parse().unwrap();
        let [.., high, low] = std::process::id().to_be_bytes();
        let own = 128 + NEXT.fetch_add(1, Ordering::Relaxed) as u8;
        let at = SocketAddr::from(([127, own, high, low], destination.port()));
        let listener = match TcpListener::bind(at).await {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                eprintln!("{at}: {error}: left out");
                return None;
            }
            bound => bound.unwrap(),
        };
        self.intercept_by(listener, Arc::new(Loopback { destination, servers: Arc::clone(&self.servers) }));
        Some(at)
    }

    /// Starts an interceptor with a way of its own.
    pub fn intercept_by(&mut self, listener: TcpListener, way: Arc<dyn Way>) {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.public_ca.as_bytes()).unwrap()).unwrap();
        let interceptor = Interceptor::new(Parts {
            rules: Arc::clone(&self.world) as Arc<dyn Rules>,
            resolved: Arc::clone(&self.world) as Arc<dyn Resolved>,
            audit: Arc::clone(&self.world) as Arc<dyn Audit>,
            lent: self.vault.lock().unwrap().lent(),
            authority: Arc::clone(&self.authority),
            trust: Trust::of(roots).unwrap(),
            way,
            proxy: self.proxy.clone(),
            room: self.room.clone(),
        });
        self.interceptors.push(interceptor.clone());
        self.tasks.push(tokio::spawn(async move { interceptor.serve(listener).await }));
    }

    /// The certificate of a server, by the authority that upstream servers are verified with.
    pub fn identity(&self, name: &str, protocols: &[&[u8]]) -> TlsAcceptor {
        self.identity_by(ring::default_provider(), name, protocols)
    }

    /// The same, with means of its own.
    pub fn identity_by(&self, means: CryptoProvider, name: &str, protocols: &[&[u8]]) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let builder = ServerConfig::builder_with_provider(Arc::new(means));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let mut config = builder.with_single_cert(vec![certificate.der().clone()], key).unwrap();
        config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }

    /// Starts a server that clients know under this address.
    pub async fn serve(&mut self, known_as: &str, tls: Option<TlsAcceptor>, handler: Handler) {
        let listener = self.listen(known_as).await;
        self.serve_on(listener, tls, handler);
    }

    /// Starts a server on a listener.
    pub fn serve_on(&mut self, listener: TcpListener, tls: Option<TlsAcceptor>, handler: Handler) {
        self.tasks.push(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, handler) = (tls.clone(), Arc::clone(&handler));
                tokio::spawn(async move {
                    let service = service_fn(move |request| {
                        let answer = handler(request);
                        async move { Ok::<_, io::Error>(answer.await) }
                    });
                    let builder = auto::Builder::new(TokioExecutor::new());
                    match tls {
                        Some(tls) => {
                            let Ok(stream) = tls.accept(stream).await else { return };
                            let _ =
                                builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
                        }
                        None => {
                            let _ =
                                builder.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
                        }
                    }
                });
            }
        }));
    }

    /// A listener of which clients know only this address.
    pub async fn listen(&self, known_as: &str) -> TcpListener {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.servers.lock().unwrap().insert(known_as.parse().unwrap(), listener.local_addr().unwrap());
        listener
    }

    /// Where the server with this address really is.
    pub fn real(&self, known_as: &str) -> String {
        self.servers.lock().unwrap()[&known_as.parse::<SocketAddr>().unwrap()].to_string()
    }

    pub fn own(&mut self, task: JoinHandle<()>) {
        self.tasks.push(task);
    }

    /// A TLS connection as a client in the sandbox makes it, trusting only what it is told to.
    pub async fn handshake(
        &self,
        through: SocketAddr,
        name: &str,
        pem: &str,
        protocols: &[&[u8]],
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|p| p.to_vec()).collect();
        let stream = TcpStream::connect(through).await?;
        TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from(name.to_owned()).unwrap(), stream)
            .await
    }

    /// The same, trusting the sandbox's authority.
    pub async fn inside(&self, through: SocketAddr, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
        self.handshake(through, NAME, self.authority.certificate(), protocols).await.unwrap()
    }
}

/// A vault with one bearer binding and more members of its match.
pub fn bearer(more: &str) -> String {
    format!(
        r#"{{"credentials":[{{"name":"token","source":{{"value":"{SECRET}"}}}}],
            "bindings":[{{"name":"api","match":{{"hosts":["{NAME}"]{more}}},"auth":{{"type":"bearer","credential":"token"}}}}]}}"#
    )
}

/// What a server got.
#[derive(Clone, Default)]
pub struct Seen(pub Arc<Mutex<Vec<Noted>>>);

/// A request and its body.
pub type Noted = (Request<()>, Bytes);

impl Seen {
    pub fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn last(&self) -> Noted {
        self.0.lock().unwrap().last().cloned().expect("the server got a request")
    }

    pub fn header(&self, name: &str) -> Option<String> {
        self.last().0.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
    }
}

/// A server that notes each request and repeats its `Authorization` and target in headers of the answer.
pub fn recorder() -> (Seen, Handler) {
    let seen = Seen::default();
    let notes = seen.clone();
    let handler: Handler = Arc::new(move |request| {
        let notes = notes.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            let mut response = Response::builder().header("x-target", parts.uri.to_string());
            if let Some(value) = parts.headers.get("authorization") {
                response = response.header("x-echo", value);
            }
            notes.0.lock().unwrap().push((Request::from_parts(parts, ()), body));
            response.body(text("hello")).unwrap()
        })
    });
    (seen, handler)
}

pub fn text(text: &str) -> Body {
    Full::new(Bytes::from(text.to_owned())).map_err(|never| match never {}).boxed_unsync()
}

/// Sends one HTTP/1 request over a stream and reads the whole answer.
pub async fn ask(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    request: Request<Body>,
) -> Response<Bytes> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    driver.abort();
    Response::from_parts(parts, body)
}

pub fn get(host: &str, target: &str) -> Request<Body> {
    Request::builder().uri(target).header("host", host).body(text("")).unwrap()
}
