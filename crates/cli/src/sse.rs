//! Server-sent events: cutting a stream into frames, and reading one for as long as it takes.
//!
//! Owns the framing of the standard and the return to where a broken connection stood. What frames mean is their reader's business.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use reqwest::{
    Method, Response, StatusCode,
    header::{ACCEPT, HeaderValue},
};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinHandle,
    time::sleep,
};

use crate::{
    client::{Client, ClientError},
    lines::{LineSplitter, LineTooLong},
};

/// The first wait after a connection broke; doubled up to [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// Frames that wait for their reader.
const WAITING: usize = 64;

/// One event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// `message` when the stream gives no type.
    pub event: String,
    pub data: String,
    /// Where to go on after this frame.
    pub id: Option<String>,
}

/// Turns chunks into frames.
#[derive(Debug, Default)]
pub struct FrameParser {
    lines: LineSplitter,
    open: Frame,
    data: Option<String>,
}

impl FrameParser {
    /// Appends received bytes.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), LineTooLong> {
        self.lines.push(chunk)
    }

    /// The next frame that is completely received. Comments and frames without data are passed over.
    pub fn next_frame(&mut self) -> Option<Frame> {
        while let Some(line) = self.lines.next_line() {
            let line = String::from_utf8_lossy(line);
            if line.is_empty() {
                let mut frame = std::mem::take(&mut self.open);
                if let Some(data) = self.data.take() {
                    frame.data = data;
                    if frame.event.is_empty() {
                        frame.event.push_str("message");
                    }
                    return Some(frame);
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut self.open.event),
                "id" => self.open.id = Some(value.to_owned()),
                "data" => match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => self.data = Some(value.to_owned()),
                },
                // Comments, `retry`, and what is not of the standard.
                _ => {}
            }
        }
        None
    }
}

/// A stream that is read to its end, over as many connections as that takes.
///
/// Read by a task of its own, so that a reader who turns to something else does not have it begin again with connecting.
#[derive(Debug)]
pub struct EventStream {
    frames: mpsc::Receiver<Result<Frame>>,
    hurry: Arc<Notify>,
    task: JoinHandle<()>,
}

impl EventStream {
    /// A stream below `/v1`.
    pub fn open(client: &Client, segments: &[&str], query: Vec<(&'static str, String)>) -> Self {
        let (sender, frames) = mpsc::channel(WAITING);
        let hurry = Arc::new(Notify::new());
        let connection = Connection {
            client: client.clone(),
            segments: segments.iter().map(|segment| (*segment).to_owned()).collect(),
            query,
            last_id: None,
            hurry: hurry.clone(),
        };
        Self { frames, hurry, task: tokio::spawn(connection.read(sender)) }
    }

    /// The next frame; `None` once the stream was [ended](Self::end) or the server says that nothing more comes. A broken connection is
    /// opened again behind the last frame, for as long as it takes. Safe to cancel.
    ///
    /// # Errors
    /// What the server refuses; nothing comes after it.
    pub async fn next(&mut self) -> Result<Option<Frame>> {
        self.frames.recv().await.transpose()
    }

    /// Says that there is something to be read now, so that a wait for the next connection is cut short.
    pub fn hurry(&self) {
        self.hurry.notify_one();
    }

    /// Says that the last frame has been read, so that the stream is not opened again.
    pub fn end(&mut self) {
        self.task.abort();
        self.frames.close();
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Connection {
    client: Client,
    segments: Vec<String>,
    query: Vec<(&'static str, String)>,
    last_id: Option<String>,
    hurry: Arc<Notify>,
}

impl Connection {
    async fn read(mut self, frames: mpsc::Sender<Result<Frame>>) {
        let mut wait = FIRST_WAIT;
        loop {
            match self.connect().await {
                Ok(Opened::Stream(response)) => match self.pass_on(response, &frames).await {
                    Ok(true) => wait = FIRST_WAIT,
                    Ok(false) => {}
                    Err(Gone) => return,
                },
                Ok(Opened::Later) => {}
                Ok(Opened::Over) => return,
                Err(error) => {
                    // The reader may be gone as well.
                    let _ = frames.send(Err(error)).await;
                    return;
                }
            }
            tokio::select! {
                () = sleep(wait) => {}
                () = self.hurry.notified() => {}
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// Reads one connection to its end, which may be one that nobody announced. Whether anything came.
    async fn pass_on(
        &mut self,
        mut response: Response,
        frames: &mpsc::Sender<Result<Frame>>,
    ) -> Result<bool, Gone> {
        let mut parser = FrameParser::default();
        let mut some = false;
        while let Ok(Some(chunk)) = response.chunk().await {
            if let Err(error) = parser.push(&chunk) {
                let _ = frames.send(Err(error.into())).await;
                return Err(Gone);
            }
            while let Some(frame) = parser.next_frame() {
                some = true;
                if frame.id.is_some() {
                    self.last_id.clone_from(&frame.id);
                }
                frames.send(Ok(frame)).await.map_err(|_| Gone)?;
            }
        }
        Ok(some)
    }

    async fn connect(&self) -> Result<Opened> {
        let segments: Vec<&str> = self.segments.iter().map(String::as_str).collect();
        let mut request = self.client.request(Method::GET, &segments)?.query(&self.query);
        request = request.header(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(id) = &self.last_id {
            request = request.header("last-event-id", id);
        }
        match self.client.send(request).await {
            Ok(response) if response.status() == StatusCode::NO_CONTENT => Ok(Opened::Over),
            Ok(response) => Ok(Opened::Stream(response)),
            Err(ClientError::Refused(error)) if error.status.is_server_error() => Ok(Opened::Later),
            // The server may be starting again.
            Err(ClientError::Unreachable { .. } | ClientError::Interrupted { .. }) => Ok(Opened::Later),
            Err(error) => Err(error.into()),
        }
    }
}

enum Opened {
    Stream(Response),
    /// The server cannot be asked now.
    Later,
    /// Nothing more comes.
    Over,
}

/// The reader is.
struct Gone;

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(text: &str, size: usize) -> Vec<Frame> {
        let mut parser = FrameParser::default();
        let mut frames = Vec::new();
        for chunk in text.as_bytes().chunks(size) {
            parser.push(chunk).unwrap();
            frames.extend(std::iter::from_fn(|| parser.next_frame()));
        }
        frames
    }

    #[test]
    fn frames_survive_every_chunking() {
        let text = "retry: 2000\n\n: keep-alive\n\nid: 4\nevent: a.b\ndata: {\"x\":1}\n\ndata:one\r\ndata: two\r\n\r\nid: 9\nevent: cut\n";
        let frame = |event: &str, data: &str, id: Option<&str>| Frame {
            event: event.into(),
            data: data.into(),
            id: id.map(Into::into),
        };
        let expected = [frame("a.b", "{\"x\":1}", Some("4")), frame("message", "one\ntwo", None)];
        for size in [1, 2, 3, 7, 64, 1000] {
            assert_eq!(frames(text, size), expected, "{size}");
        }
    }
}
