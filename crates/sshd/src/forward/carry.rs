//! Moves bytes between a channel and a socket, each direction until its end.

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

pub(super) async fn carry(stream: TcpStream, writer: Writer, inbox: Inbox, closing: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let (reader, sender) = stream.into_split();
    let both = async {
        let both = tokio::join!(from_socket(reader, &writer), to_socket(&inbox, sender));
        // A side that failed has taken the other with it by now, so nothing waits for a peer's good will here.
        let _: ((), ()) = both;
        tokio::time::sleep(CLOSE_WAIT).await;
    };
    tokio::select! {
        () = both => {}
        () = closing.cancelled() => {}
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
