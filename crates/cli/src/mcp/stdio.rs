//! One client at our standard input and output.
//!
//! Invariant: nothing but protocol messages is ever written to standard output.

use anyhow::{Result, bail};
use rmcp::{ServiceExt, service::ServerInitializeError, transport::stdio_pipes};

use super::{AtEnd, Session, handler::Handler};
use crate::interrupts::Interrupts;

/// Serves until the client closes our input or a signal arrives.
pub async fn serve(session: Session, at_end: AtEnd) -> Result<u8> {
    let mut interrupts = Interrupts::listen()?;
    let starting = Handler::new(session.clone()).serve(stdio_pipes());
    let started = tokio::select! {
        started = starting => started,
        _ = interrupts.next() => return Ok(0),
    };
    let running = match started {
        Ok(running) => running,
        // A client that asks nothing and leaves has done nothing wrong.
        Err(ServerInitializeError::ConnectionClosed(_)) => return Ok(0),
        Err(error) => bail!("the client did not begin as the protocol demands: {error}"),
    };
    let cancel = running.cancellation_token();
    let mut ended = std::pin::pin!(running.waiting());
    tokio::select! {
        _ = &mut ended => {}
        _ = interrupts.next() => {
            cancel.cancel();
            // What is under way is waited for below.
            let _ = ended.await;
        }
    }
    session.end(at_end).await;
    Ok(0)
}
