//! Serves this machine on a loopback port: `serve PORT HOST_KEY AUTHORIZED_KEYS`.
//!
//! For trying clients by hand. It is also the smallest program with the whole server in it, so its size tells what the
//! server adds to another.

use std::sync::Arc;
use std::time::SystemTime;

use sandglass_sshd::{
    Access, AuthorizedKey, Forwarding, HostKey, Limits, LiteralNames, LocalLaunch, Server, Settings,
    SftpProgram,
};
use tokio::net::TcpListener;
use tokio::sync::watch;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: serve PORT HOST_KEY AUTHORIZED_KEYS | serve sftp");
    let first = next()?;
    if first == "sftp" {
        return Ok(sandglass_sshd::sftp::serve_standard_streams()?);
    }
    let (port, host_key) = (first.parse::<u16>()?, HostKey::load_or_create(next()?.as_ref())?);
    let lines = AuthorizedKey::parse_file(&std::fs::read_to_string(next()?)?);
    let keys = lines.into_iter().collect::<Result<Vec<_>, _>>()?;
    let (_sender, access) = watch::channel(Arc::new(Access { keys, ..Access::default() }));
    let server = Server::new(Settings {
        host_key,
        access,
        launch: Arc::new(LocalLaunch::default()),
        resolve: Arc::new(LiteralNames),
        clock: Arc::new(SystemTime::now),
        observe: Arc::new(|event| eprintln!("{event:?}")),
        sftp: Some(SftpProgram { path: std::env::current_exe()?, argv: vec!["serve".into(), "sftp".into()] }),
        forwarding: Forwarding::LoopbackOnly,
        limits: Limits::default(),
    });
    eprintln!("host key {}", server.fingerprint());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async move {
        server.serve_tcp(TcpListener::bind(("127.0.0.1", port)).await?).await;
        Ok(())
    })
}
