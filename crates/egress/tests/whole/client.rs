//! What a sandbox does: asks for names and connects. To be called inside its namespace.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{Name, RecordType};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::world::RESOLVER;

/// Only so that a test that fails does not hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// An answer to a question.
#[derive(Debug)]
pub struct Answer {
    pub code: ResponseCode,
    pub addresses: Vec<IpAddr>,
    /// Number and text of the reason, if there is one.
    pub reason: Option<(u16, String)>,
}

/// Asks a resolver that the sandbox chooses, by UDP.
pub fn ask(name: &str, kind: RecordType) -> io::Result<Answer> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect((RESOLVER, 53))?;
    let question = question(name, kind);
    socket.send(&question.to_vec().unwrap())?;
    let mut packet = [0; 2048];
    let length = socket.recv(&mut packet)?;
    Ok(read(&question, &packet[..length]))
}

/// The same by TCP.
pub fn ask_by_stream(name: &str, kind: RecordType) -> io::Result<Answer> {
    let mut stream = connect(RESOLVER.parse::<IpAddr>().unwrap(), 53)?;
    let question = question(name, kind);
    let bytes = question.to_vec().unwrap();
    stream.write_all(&u16::try_from(bytes.len()).unwrap().to_be_bytes())?;
    stream.write_all(&bytes)?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer)?;
    Ok(read(&question, &answer))
}

fn question(name: &str, kind: RecordType) -> Message {
    let mut question = Message::query();
    question.metadata.recursion_desired = true;
    question.queries.push(Query::query(Name::from_ascii(format!("{name}.")).unwrap(), kind));
    question.edns = Some(Edns::new());
    question
}

fn read(question: &Message, bytes: &[u8]) -> Answer {
    let answer = Message::from_vec(bytes).unwrap();
    assert_eq!(answer.metadata.id, question.metadata.id);
    let reason = answer.edns.and_then(|edns| match edns.options().as_ref().first() {
        Some((_, EdnsOption::Unknown(15, data))) => {
            Some((u16::from_be_bytes([data[0], data[1]]), String::from_utf8_lossy(&data[2..]).into_owned()))
        }
        _ => None,
    });
    let addresses = answer.answers.iter().filter_map(|record| record.data.ip_addr()).collect();
    Answer { code: answer.metadata.response_code, addresses, reason }
}

/// The addresses of a name, as `getaddrinfo` would find them.
pub fn resolve(name: &str) -> Vec<IpAddr> {
    ask(name, RecordType::A).unwrap().addresses
}

pub fn connect(address: impl Into<IpAddr>, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(address.into(), port), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Says something that is neither TLS nor HTTP and hears it, through a server that repeats.
pub fn echo(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"\0ord")?;
    let mut heard = [0; 4];
    stream.read_exact(&mut heard)?;
    assert_eq!(&heard, b"\0ord");
    Ok(())
}

/// A request for a host over this stream; the answer's body.
pub fn get(mut stream: impl Read + Write, host: &str, path: &str) -> io::Result<String> {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    stream.flush()?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if answer.is_empty() => return Err(error),
        _ => {}
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// TLS to a host, trusting these authorities only.
pub fn tls(
    stream: TcpStream,
    host: &str,
    authorities: &str,
) -> io::Result<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = builder.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    Ok(stream)
}
