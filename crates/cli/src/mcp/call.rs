//! One call of a tool: who asks, with what, and whether they still want it.

use rmcp::{Peer, RoleServer, model::ProgressToken, service::RequestContext};
use tokio_util::sync::CancellationToken;

use super::{report::Reporter, session::Session};
use crate::{agent::Agent, client::Client, mcp::failure::Failure};

/// What a tool has besides its arguments.
#[derive(Debug, Clone)]
pub struct Call {
    session: Session,
    cancellation: CancellationToken,
    peer: Peer<RoleServer>,
    token: Option<ProgressToken>,
}

impl Call {
    /// A call within a request.
    pub fn new(session: Session, context: RequestContext<RoleServer>) -> Self {
        let token = context.meta.get_progress_token();
        Self { session, cancellation: context.ct, peer: context.peer, token }
    }

    /// The run that the call belongs to.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The client of the sandbox server.
    pub fn client(&self) -> &Client {
        self.session.client()
    }

    /// The agent of a sandbox.
    pub async fn agent(&self, id: &str) -> Result<Agent, Failure> {
        Ok(Agent::connect(self.client(), id).await?)
    }

    /// Waits until the client takes the call back. Safe to cancel.
    pub async fn cancelled(&self) {
        self.cancellation.cancelled().await;
    }

    /// Tells the client how the call is getting on, if it wants to know.
    pub fn reporter(&self) -> Reporter {
        Reporter::new(self.peer.clone(), self.token.clone())
    }
}
