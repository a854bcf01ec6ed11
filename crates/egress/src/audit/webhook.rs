//! Tells the deny webhook about denied names: in order, one at a time, with retries. What does not fit into the queue is dropped.

use jiff::Timestamp;
use tokio::sync::mpsc;

/// Denied names that wait to be sent.
const WAITING: usize = 256;

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
