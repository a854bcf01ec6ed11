//! How connections of clients become requests for whatever answers them: the one listener of the API server and of the gateway.
//!
//! Owns the sockets, TLS, the choice between HTTP/1.1 and HTTP/2, the limits on heads and on silence, and the orderly end. Does not
//! know routes.
//!
//! Invariant: whoever answers sees only requests whose framing has one meaning. What two programs could read differently is refused, and
//! its connection closed.

mod accept;
mod certificates;
mod chunks;
mod connection;
mod gate;
mod head;
mod inspector;
mod keep_alive;
mod malformed;
mod multiplexed;
mod redirect;
mod settings;
mod stream;
mod upload;
mod wire;

pub use accept::{connection_limit, spawn};
pub use certificates::{CertificateError, Certificates, Looked};
pub use malformed::Malformed;
pub use redirect::redirects;
pub use settings::{Answers, Limits, Refuse, Scheme, Serving, Transport, whole_head};
