//! The stream of commands while it is opened and read.

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout_at};

use crate::wire::limits::STREAM_SILENCE;
use crate::wire::{Refusal, sse};

use super::action::Call;
use super::lane::Failure;
use super::transport::{Answer, Chunks, TransportError};

/// The stream, from the call that opens it.
pub(super) struct StreamRun {
    pub call: Call,
    state: StreamState,
    silent_until: Instant,
}

enum StreamState {
    Opening(BoxFuture<'static, Result<Result<Chunks, Answer>, TransportError>>),
    Open(Chunks, sse::Reader),
}

pub(super) enum StreamNews {
    Events(Vec<sse::SseEvent>),
    Over(Failure),
}

impl StreamRun {
    pub fn opening(
        call: Call,
        opening: BoxFuture<'static, Result<Result<Chunks, Answer>, TransportError>>,
    ) -> Self {
        Self { call, state: StreamState::Opening(opening), silent_until: Instant::now() + STREAM_SILENCE }
    }

    /// The next thing that the stream has to say. May be dropped and called again at any time.
    async fn next_news(&mut self) -> StreamNews {
        loop {
            match &mut self.state {
                StreamState::Opening(opening) => match opening.await {
                    Ok(Ok(chunks)) => {
                        self.silent_until = Instant::now() + STREAM_SILENCE;
                        self.state = StreamState::Open(chunks, sse::Reader::default());
                    }
                    Ok(Err(answer)) => return StreamNews::Over(failure_of(&answer)),
                    Err(_) => return StreamNews::Over(Failure::Link),
                },
                StreamState::Open(chunks, reader) => {
                    let Ok(Some(Ok(chunk))) = timeout_at(self.silent_until, chunks.next()).await else {
                        return StreamNews::Over(Failure::Link);
                    };
                    self.silent_until = Instant::now() + STREAM_SILENCE;
                    let mut events = Vec::new();
                    return match reader.read(&chunk, &mut events) {
                        Ok(()) => StreamNews::Events(events),
                        Err(sse::TooLong) => StreamNews::Over(Failure::Useless),
                    };
                }
            }
        }
    }
}

/// What the stream says next; nothing, if there is none.
pub(super) async fn news(stream: &mut Option<StreamRun>) -> StreamNews {
    match stream {
        Some(run) => run.next_news().await,
        None => std::future::pending().await,
    }
}

/// Why an answer is not a good one.
pub(super) fn failure_of(answer: &Answer) -> Failure {
    Refusal::of_answer(answer.status, &answer.body).map_or(Failure::Status(answer.status), Failure::Refused)
}
