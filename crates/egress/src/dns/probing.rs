//! Finds out which resolvers live, so that nobody waits for one that does not.

use std::sync::Arc;
use std::time::Duration;

use hickory_proto::rr::{Name, RecordType};

use super::upstream::Upstreams;

/// Asks every resolver now and then, until it is dropped.
pub async fn probe(upstreams: Arc<Upstreams>, name: String, interval: Duration) {
    if !upstreams.has_choice() {
        return std::future::pending().await;
    }
    let name = Name::from_utf8(&name).unwrap_or_else(|_| Name::root());
    let kind = if name.is_root() { RecordType::NS } else { RecordType::A };
    let mut every = tokio::time::interval(interval);
    loop {
        every.tick().await;
        upstreams.probe(&name, kind).await;
    }
}
