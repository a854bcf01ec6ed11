//! How far each log of one sandbox has been taken.

use std::collections::BTreeMap;

use crate::wire::{AckedLog, LogFrame, LogsReply};

/// Logs of one sandbox. Sources are services and phases; an agent keeps no more of them either.
const MOST_LOGS: usize = 64;
/// Bytes of a source's or stream's name.
const MOST_NAME: usize = 128;

#[derive(Debug, Default)]
pub(super) struct LogOffsets(BTreeMap<(String, String), u64>);

/// New bytes of one log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPiece {
    pub source: String,
    pub stream: String,
    pub offset: u64,
    /// Bytes that the agent had to drop in front of these.
    pub lost: u64,
    pub bytes: Vec<u8>,
}

/// What of a request is new, and the answer once it is written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogBatch {
    pub pieces: Vec<LogPiece>,
    pub reply: LogsReply,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox has at most {MOST_LOGS} logs, with names of at most {MOST_NAME} bytes")]
pub struct TooManyLogs;

impl LogOffsets {
    /// Passes over what is known. Positions move at once: a log may lose bytes when its writer fails, never repeat them.
    pub fn admit(&mut self, frames: Vec<LogFrame>) -> Result<LogBatch, TooManyLogs> {
        let mut batch = LogBatch::default();
        for mut frame in frames {
            let key = (frame.source, frame.stream);
            let full = self.0.len() >= MOST_LOGS && !self.0.contains_key(&key);
            if full || key.0.len() > MOST_NAME || key.1.len() > MOST_NAME {
                return Err(TooManyLogs);
            }
            let end = frame.offset.saturating_add(frame.data.0.len() as u64);
            let at = self.0.entry(key.clone()).or_insert(0);
            let known = usize::try_from(at.saturating_sub(frame.offset)).unwrap_or(usize::MAX);
            if known < frame.data.0.len() {
                frame.data.0.drain(..known);
                batch.pieces.push(LogPiece {
                    source: key.0.clone(),
                    stream: key.1.clone(),
                    offset: (*at).max(frame.offset),
                    lost: frame.offset.saturating_sub(*at),
                    bytes: frame.data.0,
                });
            }
            *at = (*at).max(end);
            let offset = *at;
            batch.reply.acked.retain(|log| (&log.source, &log.stream) != (&key.0, &key.1));
            batch.reply.acked.push(AckedLog { source: key.0, stream: key.1, offset });
        }
        Ok(batch)
    }

    pub fn get(&self) -> impl Iterator<Item = AckedLog> + '_ {
        self.0.iter().map(|((source, stream), offset)| AckedLog {
            source: source.clone(),
            stream: stream.clone(),
            offset: *offset,
        })
    }

    pub fn of(offsets: Vec<AckedLog>) -> Self {
        Self(offsets.into_iter().map(|log| ((log.source, log.stream), log.offset)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::LogBytes;

    fn frame(source: &str, offset: u64, text: &str) -> LogFrame {
        LogFrame { source: source.into(), stream: "stdout".into(), offset, data: LogBytes(text.into()) }
    }

    #[test]
    fn bytes_are_taken_once_and_losses_are_counted() {
        let mut offsets = LogOffsets::default();
        let mut take = |frames| {
            let batch = offsets.admit(frames).unwrap();
            let texts: Vec<_> = batch
                .pieces
                .iter()
                .map(|piece| (piece.offset, piece.lost, String::from_utf8(piece.bytes.clone()).unwrap()))
                .collect();
            (texts, batch.reply.acked.iter().map(|log| log.offset).collect::<Vec<_>>())
        };
        assert_eq!(
            take(vec![frame("a", 0, "hello"), frame("a", 5, " you")]),
            (vec![(0, 0, "hello".into()), (5, 0, " you".into())], vec![9])
        );
        assert_eq!(take(vec![frame("a", 5, " you two")]), (vec![(9, 0, " two".into())], vec![13]));
        assert_eq!(take(vec![frame("a", 0, "hello")]), (vec![], vec![13]));
        assert_eq!(take(vec![frame("a", 20, "x")]), (vec![(20, 7, "x".into())], vec![21]));
    }

    #[test]
    fn an_agent_cannot_open_logs_without_end() {
        let mut offsets = LogOffsets::default();
        for n in 0..MOST_LOGS {
            offsets.admit(vec![frame(&n.to_string(), 0, "x")]).unwrap();
        }
        assert_eq!(offsets.admit(vec![frame("more", 0, "x")]), Err(TooManyLogs));
        assert!(offsets.admit(vec![frame("0", 1, "x")]).is_ok());
        assert_eq!(LogOffsets::default().admit(vec![frame(&"n".repeat(200), 0, "x")]), Err(TooManyLogs));
    }
}
