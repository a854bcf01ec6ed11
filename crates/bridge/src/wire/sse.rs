//! The stream of commands: server-sent events, written and read.

use super::CommandFrame;
use super::limits::MAX_COMMAND_BYTES;

/// Comment that keeps the stream alive.
pub const KEEP_ALIVE: &str = ": alive\n\n";

/// A command as one event whose position is the command's identifier.
pub fn command(frame: &CommandFrame) -> Result<String, serde_json::Error> {
    // JSON has no raw line breaks, so one data line is enough.
    Ok(format!("id: {}\nevent: command\ndata: {}\n\n", frame.command_id, serde_json::to_string(frame)?))
}

/// One event that was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SseEvent {
    pub id: Option<String>,
    pub event: Option<String>,
    pub data: String,
}

/// The peer sent an event that is larger than any command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event on the stream is larger than {MAX_COMMAND_BYTES} bytes")]
pub struct TooLong;

/// Reads events out of chunks that are cut anywhere.
#[derive(Debug, Default)]
pub struct Reader {
    line: Vec<u8>,
    after_cr: bool,
    event: SseEvent,
    has_data: bool,
}

impl Reader {
    /// Takes a chunk and appends the events that it completes.
    pub fn read(&mut self, chunk: &[u8], into: &mut Vec<SseEvent>) -> Result<(), TooLong> {
        for &byte in chunk {
            let was_cr = std::mem::take(&mut self.after_cr);
            match byte {
                b'\n' if was_cr => {}
                b'\n' | b'\r' => {
                    self.after_cr = byte == b'\r';
                    self.end_line(into);
                }
                _ => {
                    if self.line.len() + self.event.data.len() >= MAX_COMMAND_BYTES {
                        return Err(TooLong);
                    }
                    self.line.push(byte);
                }
            }
        }
        Ok(())
    }

    fn end_line(&mut self, into: &mut Vec<SseEvent>) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                into.push(event);
            }
            return;
        }
        let line = String::from_utf8_lossy(&line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" if !value.contains('\0') => self.event.id = Some(value.to_owned()),
            "event" => self.event.event = Some(value.to_owned()),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.event.data.push_str(value);
            }
            // A comment has an empty name; other fields are for other readers.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&[u8]]) -> Vec<SseEvent> {
        let (mut reader, mut events) = (Reader::default(), Vec::new());
        for chunk in chunks {
            reader.read(chunk, &mut events).unwrap();
        }
        events
    }

    #[test]
    fn a_stream_reads_the_same_wherever_it_is_cut() {
        let text = ": alive\n\nretry: 2000\nid: c-1\r\nevent: command\r\ndata: {\"a\":\r\ndata:1}\r\n\r\nid: c-2\rdata\r\rdata: half";
        let whole = read(&[text.as_bytes()]);
        assert_eq!(whole.len(), 2);
        assert_eq!(
            whole[0],
            SseEvent { id: Some("c-1".into()), event: Some("command".into()), data: "{\"a\":\n1}".into() }
        );
        assert_eq!(whole[1], SseEvent { id: Some("c-2".into()), event: None, data: String::new() });
        for cut in 0..text.len() {
            assert_eq!(read(&[&text.as_bytes()[..cut], &text.as_bytes()[cut..]]), whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_written_command_is_read_back() {
        let frame: CommandFrame =
            serde_json::from_value(serde_json::json!({"commandId": "c-9", "type": "t", "data": "a\nb"}))
                .unwrap();
        let events = read(&[command(&frame).unwrap().as_bytes()]);
        assert_eq!(events[0].id.as_deref(), Some("c-9"));
        assert_eq!(serde_json::from_str::<CommandFrame>(&events[0].data).unwrap(), frame);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let (mut reader, mut events) = (Reader::default(), Vec::new());
        let line = [b"data: ".as_slice(), &vec![b'x'; 60_000], b"\n"].concat();
        let outcome = (0..10).try_for_each(|_| reader.read(&line, &mut events));
        assert_eq!((outcome, events.len()), (Err(TooLong), 0));
    }
}
