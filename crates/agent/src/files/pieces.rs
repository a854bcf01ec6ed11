//! Answers that are produced in pieces: no thread is held, and nothing is produced, while a slow client reads.
//!
//! Memory: what a producer holds, [`HELD`] bytes before the answer begins, and two pieces afterwards.

use bytes::Bytes;
use http::StatusCode;

use super::Scope;
use crate::http::body::{Body, ChunkSender};
use crate::http::reply::{self, Failure, Outcome};

/// Up to here an error still becomes an error answer; a longer answer is broken off.
const HELD: usize = 256 << 10;

pub(super) enum Piece {
    More(Vec<u8>),
    Last(Vec<u8>),
}

/// Work that goes on in steps, each short and each with a piece of the answer, which may be empty.
pub(super) trait Pieces: Send + 'static {
    fn step(&mut self) -> Result<Piece, Failure>;
}

/// The whole answer, with its length when it is short.
pub(super) async fn answer(scope: Scope, mut work: impl Pieces, content_type: &'static str) -> Outcome {
    let mut held = Vec::new();
    while held.len() < HELD {
        let (rest, piece) = step(&scope, work).await?;
        work = rest;
        match piece {
            Piece::More(bytes) => held.extend_from_slice(&bytes),
            Piece::Last(bytes) => {
                held.extend_from_slice(&bytes);
                let body = if held.is_empty() { Body::Empty } else { Body::Full(held.into()) };
                return Ok(reply::with_type(StatusCode::OK, content_type, body));
            }
        }
    }
    let (tx, body) = Body::channel(1, None);
    // Ends with the work or with its reader, whichever is first.
    tokio::spawn(async move {
        if tx.send(Ok(held.into())).await.is_ok() {
            send_rest(&scope, work, &tx).await;
        }
    });
    Ok(reply::with_type(StatusCode::OK, content_type, body))
}

async fn step<W: Pieces>(scope: &Scope, mut work: W) -> Result<(W, Piece), Failure> {
    scope.blocking(move || work.step().map(|piece| (work, piece))).await
}

async fn send_rest(scope: &Scope, mut work: impl Pieces, tx: &ChunkSender) {
    while !tx.is_closed() {
        let (bytes, last) = match step(scope, work).await {
            Ok((rest, Piece::More(bytes))) => {
                work = rest;
                (bytes, false)
            }
            Ok((rest, Piece::Last(bytes))) => {
                work = rest;
                (bytes, true)
            }
            Err(failure) => {
                let _ = tx.send(Err(std::io::Error::other(failure.message))).await;
                return;
            }
        };
        if !bytes.is_empty() && tx.send(Ok(Bytes::from(bytes))).await.is_err() || last {
            return;
        }
    }
}
