//! Bounds of the channel. Both sides hold themselves to them; a receiver refuses what is larger.

use std::time::Duration;

/// The protocol that this crate speaks. Raised only when an old peer could misunderstand.
pub const PROTOCOL_VERSION: u32 = 1;

/// Events in one request.
pub const MAX_EVENTS: usize = 500;
/// Bytes of one request with events, newlines included.
pub const MAX_EVENTS_BYTES: usize = 256 * 1024;
/// Bytes of one event as JSON. Four fit a request, so that one of them never blocks the others.
pub const MAX_EVENT_BYTES: usize = 64 * 1024;
/// Bytes of unacknowledged events that are kept before progress and output are dropped.
pub const RING_BYTES: u64 = 8 * 1024 * 1024;

/// Bytes of a heartbeat, an attachment or a command's result.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;
/// Bytes of one command on the stream.
pub const MAX_COMMAND_BYTES: usize = 256 * 1024;
/// Commands of one sandbox without a result.
pub const MAX_COMMANDS: usize = 256;

/// Raw bytes in one log frame.
pub const MAX_LOG_FRAME_BYTES: usize = 32 * 1024;
/// Raw bytes of log in one request.
pub const MAX_LOGS_BYTES: usize = 128 * 1024;
/// Bytes of one request with log frames: base64 and the frames' own text on top.
pub const MAX_LOGS_BODY_BYTES: usize = 512 * 1024;

/// Bytes of a fatal report as JSON.
pub const MAX_FATAL_BYTES: usize = 32 * 1024;
/// The end of the output in a fatal report.
pub const MAX_TAIL_BYTES: usize = 8 * 1024;
pub const MAX_TAIL_LINES: usize = 60;

/// Characters of an identifier.
pub const MAX_ID_CHARS: usize = 128;

/// Silence after which the stream of commands is taken for dead. Comments come each [`STREAM_KEEP_ALIVE`].
pub const STREAM_SILENCE: Duration = Duration::from_secs(45);
pub const STREAM_KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Retries wait at least and at most this long.
pub const RETRY_LEAST: Duration = Duration::from_secs(1);
pub const RETRY_MOST: Duration = Duration::from_secs(30);

// A full event and its newline fit a request, a full tail fits a report when every byte of it is escaped to two,
// and a stream is given up later than two comments.
const _: () = assert!(MAX_EVENT_BYTES < MAX_EVENTS_BYTES);
const _: () = assert!(MAX_LOG_FRAME_BYTES <= MAX_LOGS_BYTES && MAX_LOGS_BYTES * 2 < MAX_LOGS_BODY_BYTES);
const _: () = assert!(STREAM_SILENCE.as_secs() > 2 * STREAM_KEEP_ALIVE.as_secs());
