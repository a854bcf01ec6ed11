//! The proxy that connections go through where the network demands one.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http::Uri;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use crate::vault::Secret;

use super::host::literal;
use super::service::Shared;
use super::tunnel::Stream;

const WAIT: Duration = Duration::from_secs(15);
const MAX_ANSWER: usize = 16 << 10;

/// An HTTP or HTTPS proxy that takes CONNECT.
#[derive(Clone, Debug)]
pub struct UpstreamProxy {
    host: String,
    port: u16,
    encrypted: bool,
    /// The whole value of `Proxy-Authorization`.
    authorization: Option<Secret>,
}

/// The configured address is no proxy's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProxy {
    #[error(
        "the upstream proxy must be http://host[:port] or https://host[:port], without a user, path or query"
    )]
    Address,
    #[error("the upstream proxy's authorization has characters that no header may have")]
    Authorization,
}

impl UpstreamProxy {
    /// From its address and the value of `Proxy-Authorization`.
    pub fn parse(address: &str, authorization: Option<Secret>) -> Result<Self, InvalidProxy> {
        let uri: Uri = address.trim().parse().map_err(|_| InvalidProxy::Address)?;
        let encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(InvalidProxy::Address),
        };
        let authority = uri.authority().ok_or(InvalidProxy::Address)?;
        if authority.as_str().contains('@') || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(InvalidProxy::Address);
        }
        if authorization.as_ref().is_some_and(|value| value.expose().bytes().any(|b| b.is_ascii_control())) {
            return Err(InvalidProxy::Authorization);
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = authority.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        Ok(Self { host, port, encrypted, authorization })
    }
}

/// A stream to the destination: straight, or through the proxy to the name that was judged together with it.
pub(super) async fn reach(
    shared: &Shared,
    destination: SocketAddr,
    name: Option<&str>,
) -> io::Result<Box<dyn Stream>> {
    let Some(proxy) = &shared.proxy else {
        return Ok(Box::new(shared.way.connect(destination).await?));
    };
    let through = async {
        let mut stream = connect(shared, proxy).await?;
        let target = match name {
            Some(name) if literal(name).is_none() => format!("{name}:{}", destination.port()),
            _ => destination.to_string(),
        };
        ask(&mut stream, proxy, &target).await?;
        Ok(stream)
    };
    tokio::time::timeout(WAIT, through)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the upstream proxy does not answer"))?
}

async fn connect(shared: &Shared, proxy: &UpstreamProxy) -> io::Result<Box<dyn Stream>> {
    let addresses = match proxy.host.parse::<IpAddr>() {
        Ok(address) => vec![address],
        Err(_) => shared.way.resolve(&proxy.host).await?,
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the upstream proxy has no address");
    for address in addresses {
        match shared.way.connect(SocketAddr::from((address, proxy.port))).await {
            Ok(stream) if proxy.encrypted => {
                let name = ServerName::try_from(proxy.host.clone()).map_err(io::Error::other)?;
                let connector = TlsConnector::from(shared.trust.client(Vec::new()));
                return Ok(Box::new(connector.connect(name, stream).await?));
            }
            Ok(stream) => return Ok(Box::new(stream)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn ask(stream: &mut Box<dyn Stream>, proxy: &UpstreamProxy, target: &str) -> io::Result<()> {
    let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
    if let Some(authorization) = &proxy.authorization {
        request.push_str("Proxy-Authorization: ");
        request.push_str(authorization.expose());
        request.push_str("\r\n");
    }
    request.push_str("\r\n");
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut answer = Vec::new();
    // One byte at a time: what follows the head belongs to the tunnel.
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() >= MAX_ANSWER {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the upstream proxy's answer is too long",
            ));
        }
        answer.push(stream.read_u8().await?);
    }
    let status = answer
        .split(|b| *b == b' ')
        .nth(1)
        .and_then(|code| std::str::from_utf8(code).ok())
        .unwrap_or("no status");
    if status.starts_with('2') {
        return Ok(());
    }
    let shown: String = status.chars().take(16).filter(|c| !c.is_control()).collect();
    Err(io::Error::new(
        io::ErrorKind::ConnectionRefused,
        format!("the upstream proxy refused the connection ({shown})"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_proxies() {
        let proxy = UpstreamProxy::parse("http://proxy.example.com:3128/", None).unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port, proxy.encrypted), ("proxy.example.com", 3128, false));
        let proxy = UpstreamProxy::parse("https://[2001:db8::1]", Some(Secret::new("Basic x"))).unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port, proxy.encrypted), ("2001:db8::1", 443, true));
        for wrong in [
            "proxy:3128",
            "socks5://proxy:1080",
            "http://user:pass@proxy",
            "http://proxy/path",
            "http://proxy/?x",
        ] {
            assert_eq!(UpstreamProxy::parse(wrong, None).unwrap_err(), InvalidProxy::Address, "{wrong}");
        }
        let split = Some(Secret::new("Basic x\r\nHost: y"));
        assert_eq!(UpstreamProxy::parse("http://proxy", split).unwrap_err(), InvalidProxy::Authorization);
    }
}
