//! One POST to the collector, bounded in time, without anything of the answer but its status.

use std::{io::Write as _, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use super::settings::Destination;

/// Why a destination cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub enum DestinationError {
    #[error("the collector's address is not a URL")]
    Url,
    #[error("a header for the collector cannot be sent")]
    Header,
    #[error("cannot read the collector's certificate {path}: {source}")]
    CertificateFile { path: String, source: std::io::Error },
    #[error("the HTTP client for the collector cannot be set up")]
    Client(#[source] reqwest::Error),
}

/// Why an export did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    #[error("the collector cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    #[error("the collector answered {0}")]
    Refused(StatusCode),
}

impl SendError {
    /// Whether the same export may be taken later.
    pub(super) fn passing(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }
}

/// A client for one destination.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    client: reqwest::Client,
    url: reqwest::Url,
    headers: HeaderMap,
    gzip: bool,
}

impl Sender {
    pub(super) fn new(destination: &Destination) -> Result<Self, DestinationError> {
        crate::tls::use_ring();
        let url = reqwest::Url::parse(&destination.url).map_err(|_| DestinationError::Url)?;
        let mut headers = HeaderMap::new();
        for (name, value) in &destination.headers {
            let name = HeaderName::try_from(name.as_str()).map_err(|_| DestinationError::Header)?;
            let mut value = HeaderValue::try_from(value.as_str()).map_err(|_| DestinationError::Header)?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        if destination.gzip {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let mut client = reqwest::Client::builder()
            .user_agent(concat!("sandglass/", env!("CARGO_PKG_VERSION")))
            .timeout(destination.timeout)
            .connect_timeout(destination.timeout.min(Duration::from_secs(5)))
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(1);
        if is_this_machine(&url) {
            client = client.no_proxy();
        }
        if let Some(path) = &destination.certificate {
            let read = std::fs::read(path);
            let pem =
                read.map_err(|source| DestinationError::CertificateFile { path: path.clone(), source })?;
            let authority = reqwest::Certificate::from_pem(&pem).map_err(DestinationError::Client)?;
            client = client.tls_certs_only([authority]);
        }
        let client = client.build().map_err(DestinationError::Client)?;
        Ok(Self { client, url, headers, gzip: destination.gzip })
    }

    pub(super) async fn send(&self, body: Vec<u8>) -> Result<(), SendError> {
        let body = if self.gzip { compressed(&body) } else { body };
        let request = self.client.post(self.url.clone()).headers(self.headers.clone()).body(body);
        // Without the address, which may hold credentials.
        let answer = request.send().await.map_err(|error| SendError::Unreachable(error.without_url()))?;
        if answer.status().is_success() { Ok(()) } else { Err(SendError::Refused(answer.status())) }
    }
}

fn is_this_machine(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn compressed(body: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    // Writing into memory cannot fail.
    let _infallible = gzip.write_all(body);
    gzip.finish().unwrap_or_default()
}
