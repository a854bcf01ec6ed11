//! Reading along with a history, as server-sent events.
//!
//! Nothing is pushed at a reader: it is woken, and reads on in the store from where it stands, at its own pace. So no writer ever waits
//! for a reader and no queue grows; a reader that falls too far behind is told so and ends, and may come back with the id it saw last.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use http::{StatusCode, header};
use sandglass_api::lifecycle::SandboxEvent;
use sandglass_sandbox::{SandboxId, ports::StoreError};
use serde_json::{Map, Value, json};
use tracing::warn;

use super::{Types, translate};
use crate::{
    engine::{
        Engine,
        commit::EngineError,
        history::{Bell, Moment},
    },
    http::{
        App,
        error::{ApiError, ApiResult},
        present_workspace::GENERATION,
    },
    tenants::Caller,
};

/// How long a stream is silent at most.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// New lines that may wait for a reader. What it asked to have repeated does not count.
const BEHIND: usize = 1000;

/// Opens a stream after `position`; without one it begins with the sandbox as it is now, or, for one that is gone, with its beginning.
pub(super) async fn open(
    app: &App,
    caller: Caller,
    id: SandboxId,
    position: Option<u64>,
    types: Types,
) -> ApiResult<Response> {
    let engine = &app.engine;
    // Before the look, so that nothing is written between the two unnoticed.
    let bell = engine.listen(id);
    let moment = engine.moment(id).await.map_err(EngineError::from)?;
    let kept = match position {
        Some(seq) => engine.keeps_after(id, seq).await.map_err(EngineError::from)?,
        None => true,
    };
    if moment.entry.is_none() && kept && position.is_some_and(|seq| seq >= moment.seq) {
        // The end has been told; this answer keeps a browser from coming back for ever.
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let mut reader = Reader {
        app: app.clone(),
        engine: engine.clone(),
        caller,
        id,
        bell,
        types,
        after: position.filter(|_| kept).unwrap_or(if moment.entry.is_some() { moment.seq } else { 0 }),
        repeated: moment.seq,
        frames: VecDeque::from([Bytes::from_static(b"retry: 2000\n\n")]),
        over: false,
        orphaned: false,
    };
    if !kept {
        reader.tell("stream.reset", json!({"firstSeq": moment.bounds.map(|b| b.first)}));
    }
    if position.is_none() || !kept {
        reader.show(&moment)?;
    }
    let frames = stream::unfold(reader, |mut reader| async {
        let frame = reader.next().await?;
        Some((Ok::<_, std::convert::Infallible>(frame), reader))
    });
    let headers = [
        (header::CONTENT_TYPE.as_str(), "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL.as_str(), "no-store"),
        // For proxies that would collect the frames.
        ("x-accel-buffering", "no"),
    ];
    Ok((headers, Body::from_stream(frames)).into_response())
}

struct Reader {
    app: App,
    engine: Arc<Engine>,
    /// A stream lasts; a key may be taken back meanwhile.
    caller: Caller,
    id: SandboxId,
    bell: Bell,
    types: Types,
    /// The last line that was read.
    after: u64,
    /// Lines up to here were there when the stream was opened.
    repeated: u64,
    frames: VecDeque<Bytes>,
    over: bool,
    /// The sandbox was gone when last looked at, and its history did not say so.
    orphaned: bool,
}

impl Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Some(frame);
            }
            if self.over || !self.caller.is_still_admitted().await {
                return None;
            }
            if let Err(error) = self.read().await {
                warn!(sandbox = %self.id, %error, "a stream of events ends early");
                return None;
            }
            if !self.frames.is_empty() || self.over {
                continue;
            }
            let closing = self.engine.closing().clone();
            tokio::select! {
                () = self.bell.rung() => {}
                () = closing.cancelled() => return None,
                () = tokio::time::sleep(KEEP_ALIVE) => {
                    // Its last line may have been lost with a store that could not be written.
                    let gone = self.engine.index().get(self.id).is_none();
                    self.over = gone && self.orphaned;
                    self.orphaned = gone;
                    self.frames.push_back(Bytes::from_static(b": keep-alive\n\n"));
                }
            }
        }
    }

    /// Reads on until something is there to be sent.
    async fn read(&mut self) -> Result<(), StoreError> {
        let chunk = u32::try_from(BEHIND + 1).unwrap_or(u32::MAX);
        while self.frames.is_empty() && !self.over {
            let lines = self.engine.store().history_after(self.id, self.after, chunk).await?;
            let all = lines.len() <= BEHIND;
            if lines.iter().filter(|line| line.seq > self.repeated).count() > BEHIND {
                self.tell("stream.lagged", json!({"lastSeq": self.after}));
                self.over = true;
                return Ok(());
            }
            for line in &lines {
                self.after = line.seq;
                let Some(event) = translate::event(line) else { continue };
                let last = event.kind == translate::TERMINATED;
                if last || self.types.contain(&event.kind) {
                    self.frames.push_back(frame(Some(event.seq), &event.kind, &event));
                }
                if last {
                    self.over = true;
                    return Ok(());
                }
            }
            if all {
                return Ok(());
            }
        }
        Ok(())
    }

    /// A frame about the stream itself. It has no id, so that a client that comes back names the last line it saw.
    fn tell(&mut self, kind: &str, data: Value) {
        let data = match data {
            Value::Object(data) => data,
            _ => Map::new(),
        };
        let event = self.event(self.after, kind, data);
        self.frames.push_back(frame(None, kind, &event));
    }

    /// The sandbox as it is.
    fn show(&mut self, moment: &Moment) -> ApiResult<()> {
        let Some(entry) = &moment.entry else { return Ok(()) };
        let shown = serde_json::to_value(self.app.show_in_short(entry)).map_err(|_| ApiError::internal())?;
        let Value::Object(shown) = shown else { return Err(ApiError::internal()) };
        let kind = "sandbox.snapshot";
        let event = self.event(moment.seq, kind, shown);
        self.frames.push_back(frame(Some(moment.seq), kind, &event));
        Ok(())
    }

    fn event(&self, seq: u64, kind: &str, data: Map<String, Value>) -> SandboxEvent {
        let time = self.engine.clock().now().into();
        SandboxEvent { seq, kind: kind.to_owned(), time, generation: GENERATION, data }
    }
}

fn frame(id: Option<u64>, kind: &str, event: &SandboxEvent) -> Bytes {
    let id = id.map_or(String::new(), |id| format!("id: {id}\n"));
    // One line, because JSON has no line breaks of its own.
    let data = serde_json::to_string(event).unwrap_or_default();
    Bytes::from(format!("{id}event: {kind}\ndata: {data}\n\n"))
}
