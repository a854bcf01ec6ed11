//! `sandglass mcp`: sandboxes as tools for language models.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::{
    Context,
    mcp::{self, AtEnd, Session, http::Listening},
    profile::Secret,
};

/// Serve sandboxes as tools of the Model Context Protocol
#[derive(Args, Debug)]
#[command(after_help = "\
Register it with a client as the command `sandglass mcp`, with SANDGLASS_URL and SANDGLASS_API_KEY in its environment. Over HTTP the
address is http://HOST:PORT/mcp; with SANDGLASS_MCP_TOKEN set, clients must send it as `Authorization: Bearer TOKEN`, and beyond
loopback it must be set. Requests of web pages are refused unless their origin is allowed.")]
pub struct Mcp {
    /// How clients reach it
    #[arg(long, value_enum, default_value_t)]
    transport: Transport,
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Host name that requests may name besides HOST, e.g. that of a reverse proxy; may be repeated
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Origin of web pages that may use it, e.g. https://app.example:443; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    allowed_origin: Vec<String>,
    /// Remove the sandboxes that were created through it when it ends
    #[arg(long)]
    cleanup: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Transport {
    /// One client, at standard input and output
    #[default]
    Stdio,
    /// Any number of clients, over HTTP
    StreamableHttp,
}

impl Mcp {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let session = Session::new(context.client.clone());
        let at_end = if self.cleanup { AtEnd::Remove } else { AtEnd::Keep };
        if self.transport == Transport::Stdio {
            ensure!(
                self.allowed_host.is_empty() && self.allowed_origin.is_empty(),
                "--allowed-host and --allowed-origin belong to --transport streamable-http"
            );
            return mcp::stdio::serve(session, at_end).await;
        }
        let token = std::env::var(mcp::http::TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
        let listening = Listening {
            address: SocketAddr::new(self.host, self.port),
            allowed_hosts: self.allowed_host,
            allowed_origins: self.allowed_origin,
            token: token.map(Secret::from),
        };
        mcp::http::serve(session, listening, at_end).await
    }
}
