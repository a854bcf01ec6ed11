//! Servers of the world: a resolver with a fixed list, and servers for HTTP, TLS and bare TCP that say who they are.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record, RecordType};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::crypto::{SupportedKxGroup, ring};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::stage::Namespace;

/// The resolver's address.
pub const RESOLVER: &str = "203.0.113.53";

/// What the servers have seen, and the authority that they are certified by.
pub struct World {
    pub authority: String,
    pub questions: Arc<AtomicUsize>,
    /// The list of the resolver; a test may change it.
    pub names: Arc<Mutex<HashMap<String, Vec<Ipv4Addr>>>>,
    /// Heads of the requests that servers got.
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl World {
    /// Starts every server in the namespace. Their threads end with the process.
    pub fn start(namespace: &Namespace) -> Self {
        let list: [(&str, &[[u8; 4]]); 8] = [
            ("good.test", &[[203, 0, 113, 10]]),
            ("www.good.test", &[[203, 0, 113, 10]]),
            ("bad.test", &[[203, 0, 113, 11]]),
            // Shares its address with a good one.
            ("neighbour.test", &[[203, 0, 113, 10]]),
            ("other.test", &[[203, 0, 113, 12]]),
            ("rebound.good.test", &[[127, 0, 0, 1], [169, 254, 1, 1], [10, 9, 9, 9]]),
            ("mixed.good.test", &[[10, 9, 9, 9], [203, 0, 113, 20]]),
            ("hook.test", &[[203, 0, 113, 20]]),
        ];
        let names = list.into_iter().map(|(name, addresses)| {
            (name.to_owned(), addresses.iter().map(|address| Ipv4Addr::from(*address)).collect())
        });
        let certified = Certified::new();
        let world = Self {
            authority: certified.authority.pem(),
            questions: Arc::default(),
            names: Arc::new(Mutex::new(names.collect())),
            requests: Arc::default(),
        };
        let config = certified.server(None);
        namespace.within(|| {
            world.resolve();
            for port in [80, 8080] {
                let requests = world.requests.clone();
                serve(port, move |stream| answer(stream, &requests));
            }
            // The second one asks every client for another hello.
            let retrying = certified.server(Some(vec![ring::kx_group::SECP384R1]));
            for (port, config) in [(443, config), (8443, retrying)] {
                let requests = world.requests.clone();
                serve(port, move |stream| {
                    let connection = ServerConnection::new(config.clone()).unwrap();
                    answer(StreamOwned::new(connection, stream), &requests);
                });
            }
            // Says what it hears.
            serve(7, |mut stream| {
                let mut bytes = [0; 1024];
                while let Ok(length @ 1..) = stream.read(&mut bytes) {
                    if stream.write_all(&bytes[..length]).is_err() {
                        return;
                    }
                }
            });
        });
        world
    }

    fn resolve(&self) {
        let socket = UdpSocket::bind((RESOLVER, 53)).unwrap();
        let (names, questions) = (self.names.clone(), self.questions.clone());
        std::thread::spawn(move || {
            let mut packet = [0; 2048];
            while let Ok((length, asker)) = socket.recv_from(&mut packet) {
                questions.fetch_add(1, Ordering::Relaxed);
                let answer = respond(&packet[..length], &names.lock().unwrap());
                let _ = socket.send_to(&answer, asker);
            }
        });
    }
}

fn respond(packet: &[u8], names: &HashMap<String, Vec<Ipv4Addr>>) -> Vec<u8> {
    let mut message = Message::from_vec(packet).unwrap();
    message.metadata.message_type = MessageType::Response;
    message.edns = None;
    let query = message.queries[0].clone();
    let name = query.name.to_ascii().trim_end_matches('.').to_lowercase();
    match names.get(&name) {
        None => message.metadata.response_code = ResponseCode::NXDomain,
        Some(addresses) if query.query_type == RecordType::A => {
            let records =
                addresses.iter().map(|a| Record::from_rdata(query.name.clone(), 30, RData::A(A(*a))));
            message.answers.extend(records);
        }
        Some(_) => {}
    }
    message.to_vec().unwrap()
}

/// One thread for each connection to any address of the namespace.
fn serve(port: u16, act: impl Fn(TcpStream) + Send + Sync + 'static) {
    let listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
    let act = Arc::new(act);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let act = act.clone();
            std::thread::spawn(move || act(stream));
        }
    });
}

/// Answers requests with their own first line, for as long as they come.
fn answer(mut stream: impl Read + Write, requests: &Mutex<Vec<String>>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte) {
        head.push(byte[0]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let body = format!("served {}", text.lines().next().unwrap_or_default());
        requests.lock().unwrap().push(text);
        head.clear();
        let whole = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        if stream.write_all(whole.as_bytes()).and_then(|()| stream.flush()).is_err() {
            return;
        }
    }
}

struct Certified {
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Certified {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self { authority: CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    /// With these groups for the exchange of keys, or all that clients know too.
    fn server(&self, groups: Option<Vec<&'static dyn SupportedKxGroup>>) -> Arc<ServerConfig> {
        let names = ["good.test", "*.good.test", "bad.test", "neighbour.test", "other.test"];
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(names.map(str::to_owned)).unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut provider = ring::default_provider();
        provider.kx_groups = groups.unwrap_or(provider.kx_groups);
        let builder = ServerConfig::builder_with_provider(Arc::new(provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        Arc::new(builder.with_single_cert(vec![certificate.der().clone()], private).unwrap())
    }
}
