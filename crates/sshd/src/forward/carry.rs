//! Moves bytes between a channel and a socket, each direction until its end.

use std::pin::pin;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio_util::sync::CancellationToken;

use crate::flow::Inbox;
use crate::session::Writer;

const READ: usize = 32 << 10;
/// For the peer to close a channel whose both directions have ended, which spares the library a remnant of it.
const CLOSE_WAIT: Duration = Duration::from_secs(2);
/// For a socket to take what is left when the channel has gone.
const DELIVERY: Duration = Duration::from_secs(30);

pub(super) async fn carry(stream: TcpStream, writer: Writer, inbox: Inbox, closing: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let (reader, sender) = stream.into_split();
    let (mut inward, mut outward) = (pin!(to_socket(&inbox, sender)), pin!(from_socket(reader, &writer)));
    let (mut inward_done, mut outward_done) = (false, false);
    loop {
        tokio::select! {
            () = &mut inward, if !inward_done => inward_done = true,
            () = &mut outward, if !outward_done => outward_done = true,
            () = closing.cancelled() => break,
            () = tokio::time::sleep(CLOSE_WAIT), if inward_done && outward_done => break,
        }
    }
    if !inward_done {
        // A peer closes a channel as soon as it has nothing to add: what it sent before is still owed.
        let _ = tokio::time::timeout(DELIVERY, inward).await;
    }
    inbox.discard();
    let _ = writer.close().await;
}

async fn from_socket(mut reader: OwnedReadHalf, writer: &Writer) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(READ);
        match reader.read_buf(&mut buffer).await {
            Ok(count) if count > 0 => {
                if writer.data_bytes(buffer.split().freeze()).await.is_err() {
                    return;
                }
            }
            _ => break,
        }
    }
    let _ = writer.eof().await;
}

async fn to_socket(inbox: &Inbox, mut sender: OwnedWriteHalf) {
    while let Some(piece) = inbox.next().await {
        if sender.write_all(&piece).await.is_err() {
            inbox.discard();
            return;
        }
    }
    let _ = sender.shutdown().await;
}
