//! The sandbox's side of the name gate: packets and streams, both bounded in number and time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::diagnostics::tell;
use crate::settings::Level;

use super::gate::NameGate;
use super::question::{self, Asked};

/// Questions that are answered at a time. Further ones are not taken: whoever asks asks again.
const MOST_PACKETS: usize = 256;

/// Streams at a time, each with one question at a time.
const MOST_STREAMS: usize = 64;

const IDLE_STREAM: Duration = Duration::from_secs(10);

/// The sockets of the gate.
pub struct Sockets {
    pub packets: Vec<UdpSocket>,
    pub streams: Vec<TcpListener>,
}

impl Sockets {
    /// Answers until it is dropped.
    pub async fn serve(self, gate: Arc<NameGate>) {
        let mut tasks = JoinSet::new();
        for socket in self.packets {
            tasks.spawn(packets(Arc::new(socket), gate.clone()));
        }
        for listener in self.streams {
            tasks.spawn(streams(listener, gate.clone()));
        }
        // None of them ends by itself.
        tasks.join_next().await;
    }
}

async fn packets(socket: Arc<UdpSocket>, gate: Arc<NameGate>) {
    let mut tasks = JoinSet::new();
    let mut packet = [0; 4096];
    loop {
        while tasks.try_join_next().is_some() {}
        let (length, asker) = match socket.recv_from(&mut packet).await {
            Ok(received) => received,
            // An earlier answer that could not be delivered is told here; anything that lasts must not make us spin.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
        };
        match question::read(&packet[..length]) {
            Asked::Nothing => {}
            Asked::Answer(bytes) => _ = socket.send_to(&bytes, asker).await,
            Asked::Question(question) if tasks.len() < MOST_PACKETS => {
                let (socket, gate) = (socket.clone(), gate.clone());
                tasks.spawn(async move {
                    let answer = gate.answer(&question).await;
                    let bytes = question.encode(&answer, question.packet_limit());
                    // An asker that is gone needs no answer.
                    let _ = socket.send_to(&bytes, asker).await;
                });
            }
            Asked::Question(_) => {}
        }
    }
}

async fn streams(listener: TcpListener, gate: Arc<NameGate>) {
    let places = Arc::new(Semaphore::new(MOST_STREAMS));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tell(Level::Warn, format_args!("cannot accept a question: {error}"));
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let gate = gate.clone();
        tasks.spawn(async move {
            // However it ends, the asker sees it.
            let _ = stream_of_questions(stream, &gate).await;
            drop(place);
        });
    }
}

async fn stream_of_questions(mut stream: TcpStream, gate: &NameGate) -> io::Result<()> {
    loop {
        let packet = timeout(IDLE_STREAM, message(&mut stream)).await??;
        let bytes = match question::read(&packet) {
            Asked::Nothing => return Ok(()),
            Asked::Answer(bytes) => bytes,
            Asked::Question(question) => {
                let answer = gate.answer(&question).await;
                question.encode(&answer, u16::MAX)
            }
        };
        let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
        let whole = [&length.to_be_bytes()[..], &bytes].concat();
        timeout(IDLE_STREAM, stream.write_all(&whole)).await??;
    }
}

async fn message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    // A question takes a few hundred bytes.
    if length > 4096 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut packet = vec![0; usize::from(length)];
    stream.read_exact(&mut packet).await?;
    Ok(packet)
}
