//! Makes the interceptor with everything that it asks for.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpStream;

use crate::audit::Audit;
use crate::dns::upstream::Upstreams;
use crate::intercept::{
    Authority, AuthorityError, Interceptor, InvalidProxy, Kernel, Parts, Pending, Room, Trust, UpstreamProxy,
    Way,
};
use crate::plane::Plane;
use crate::policy::Resolved;
use crate::settings::{Intercept, Switch};
use crate::state::Kept;
use crate::vault::{Lent, Secret};

/// What names have led to, as the plane knows it.
pub(super) struct Names(pub(super) Arc<Mutex<Plane>>);

impl Resolved for Names {
    fn leads_to(&self, name: &str, address: IpAddr) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).leads_to(name, address)
    }
}

/// The kernel's ways with our own resolvers: the system's may be out of our reach.
pub(super) struct OwnWay {
    pub(super) kernel: Kernel,
    pub(super) upstreams: Arc<Upstreams>,
}

impl Way for OwnWay {
    fn destination(&self, stream: &TcpStream) -> io::Result<SocketAddr> {
        self.kernel.destination(stream)
    }

    fn connect(&self, address: SocketAddr) -> Pending<TcpStream> {
        self.kernel.connect(address)
    }

    fn resolve(&self, name: &str) -> Pending<Vec<IpAddr>> {
        let (upstreams, name) = (self.upstreams.clone(), name.to_owned());
        Box::pin(async move { upstreams.addresses(&name).await })
    }
}

/// The authority of this sandbox: the one that an earlier worker made, or a new one.
pub(super) fn authority(kept: &Kept) -> Result<Authority, AuthorityError> {
    // Whatever cannot be read is no authority that the sandbox could know.
    let held = kept.read().ok().filter(|held| !held.is_empty()).and_then(|held| String::from_utf8(held).ok());
    if let Some(held) = held {
        return Authority::restore(&Secret::new(held));
    }
    Authority::create()
}

/// Keeps the authority for the next worker, then shows its certificate to the sandbox if it will meet it.
pub(super) fn publish(authority: &Authority, kept: &Kept, settings: &Intercept) -> io::Result<()> {
    kept.replace(authority.save().expose().as_bytes())?;
    match settings.tls {
        Switch::On => authority.export(Path::new(&settings.authority_folder)),
        Switch::Off => Ok(()),
    }
}

/// The proxy that is configured, if one is.
pub(super) fn proxy(settings: &Intercept) -> Result<Option<UpstreamProxy>, InvalidProxy> {
    let address = settings.proxy.as_deref();
    address.map(|address| UpstreamProxy::parse(address, settings.proxy_authorization.clone())).transpose()
}

/// Whom the interceptor asks.
pub(super) struct Asked {
    pub(super) plane: Arc<Mutex<Plane>>,
    pub(super) audit: Arc<dyn Audit>,
    pub(super) lent: Lent,
}

/// What it works with.
pub(super) struct Means {
    pub(super) authority: Arc<Authority>,
    pub(super) trust: Trust,
    pub(super) proxy: Option<UpstreamProxy>,
    pub(super) way: OwnWay,
}

pub(super) fn interceptor(asked: Asked, means: Means) -> Interceptor {
    let rules = asked.plane.lock().unwrap_or_else(PoisonError::into_inner).rules();
    Interceptor::new(Parts {
        rules,
        resolved: Arc::new(Names(asked.plane)),
        audit: asked.audit,
        lent: asked.lent,
        authority: means.authority,
        trust: means.trust,
        way: Arc::new(means.way),
        proxy: means.proxy,
        room: Room::default(),
    })
}
