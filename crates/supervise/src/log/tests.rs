use std::fs::OpenOptions;
use std::io::Write;

use proptest::prelude::*;

use super::*;

const AT: i64 = 1_700_000_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::clamped(AT + ms)
}

fn small() -> Limits {
    Limits { segment: 1 << 10, per_source: 4 << 10, total: 1 << 20 }
}

/// Everything from an offset, read in small steps.
fn all(logs: &Logs, source: &str, from: u64) -> (u64, Vec<u8>) {
    let mut next = from;
    let mut bytes = Vec::new();
    let mut first = None;
    loop {
        let batch = logs.read(source, next, 100).unwrap();
        for frame in &batch.frames {
            assert!(frame.offset >= next && (bytes.is_empty() || frame.offset == next), "{frame:?}");
            first.get_or_insert(frame.offset);
            next = frame.offset + frame.data.len() as u64;
            bytes.extend_from_slice(&frame.data);
        }
        if batch.frames.is_empty() {
            assert_eq!(batch.next, batch.extent.end);
            return (first.unwrap_or(next), bytes);
        }
    }
}

#[test]
fn output_is_read_from_any_offset_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let logs = Logs::open(folder.path(), Limits::default()).unwrap();
    let writer = logs.writer("boot.setup.a/b");
    writer.append(Stream::Stdout, b"one\n", at(1));
    writer.append(Stream::Stderr, b"two\n", at(2));
    let frames = logs.read("boot.setup.a/b", 2, 1000).unwrap().frames;
    let shown: Vec<_> = frames.iter().map(|f| (f.stream, f.offset, f.time, f.data.as_slice())).collect();
    assert_eq!(
        shown,
        [(Stream::Stdout, 2, at(1), b"e\n".as_slice()), (Stream::Stderr, 4, at(2), b"two\n".as_slice())]
    );
    drop((logs, writer));
    let logs = Logs::open(folder.path(), Limits::default()).unwrap();
    assert_eq!(logs.sources(), ["boot.setup.a/b"]);
    logs.writer("boot.setup.a/b").append(Stream::Stdout, b"three\n", at(3));
    assert_eq!(all(&logs, "boot.setup.a/b", 0), (0, b"one\ntwo\nthree\n".to_vec()));
    assert_eq!(logs.extent("boot.setup.a/b"), Some(Extent { oldest: 0, end: 14 }));
    assert!(matches!(logs.read("other", 0, 1), Err(LogError::NotFound(name)) if name == "other"));
    // Somebody who asks for what never was starts at the end.
    assert_eq!(logs.read("boot.setup.a/b", 99, 1000).unwrap().next, 14);
}

#[test]
fn the_oldest_output_goes_and_offsets_stay_true() {
    let folder = tempfile::tempdir().unwrap();
    let logs = Logs::open(folder.path(), small()).unwrap();
    let writer = logs.writer("web");
    let line = |number: usize| format!("line {number:06}\n");
    for number in 0..1000 {
        writer.append(Stream::Stdout, line(number).as_bytes(), at(0));
    }
    let extent = logs.extent("web").unwrap();
    assert_eq!(extent.end, 12_000);
    assert!(extent.oldest > 0 && logs.size() <= 4 << 10, "{extent:?} {}", logs.size());
    let (first, bytes) = all(&logs, "web", 0);
    assert_eq!(first, extent.oldest);
    let whole: String = (0..1000).map(line).collect();
    assert_eq!(bytes, &whole.as_bytes()[usize::try_from(first).unwrap()..]);
}

#[test]
fn one_talkative_source_does_not_cost_the_others_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits { segment: 4 << 10, per_source: 1 << 20, total: 128 << 10 };
    let logs = Logs::open(folder.path(), limits).unwrap();
    logs.writer("quiet").append(Stream::Stdout, b"started", at(0));
    for number in 0..100 {
        logs.writer(&format!("source{number}")).append(Stream::Stdout, b"x", at(0));
    }
    assert_eq!(logs.sources().len(), MAX_SOURCES);
    let loud = logs.writer("source1");
    for _ in 0..500 {
        loud.append(Stream::Stderr, &[b'y'; 1000], at(0));
    }
    assert!(logs.size() <= 128 << 10, "{}", logs.size());
    assert_eq!(all(&logs, "quiet", 0).1, b"started");
}

#[test]
fn half_a_record_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let logs = Logs::open(folder.path(), Limits::default()).unwrap();
    logs.writer("web").append(Stream::Stdout, b"whole", at(0));
    logs.writer("web").append(Stream::Stdout, b"torn", at(0));
    let path = folder.path().join("web/0000000000000000.log");
    let len = path.metadata().unwrap().len();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
    let logs = Logs::open(folder.path(), Limits::default()).unwrap();
    assert_eq!(logs.extent("web"), Some(Extent { oldest: 0, end: 5 }));
    logs.writer("web").append(Stream::Stdout, b" again", at(0));
    assert_eq!(all(&logs, "web", 0), (0, b"whole again".to_vec()));
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"no record, but as long as one").unwrap();
    let logs = Logs::open(folder.path(), Limits::default()).unwrap();
    assert_eq!(all(&logs, "web", 0), (0, b"whole again".to_vec()));
}

#[test]
fn output_that_cannot_be_kept_is_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let logs = Logs::open(folder.path(), small()).unwrap();
    let writer = logs.writer("web");
    writer.append(Stream::Stdout, &[b'a'; 1000], at(0));
    // The next file cannot be made where a folder is in its way.
    let obstacle = folder.path().join(format!("web/{:016x}.log", 1000));
    std::fs::create_dir(&obstacle).unwrap();
    writer.append(Stream::Stdout, &[b'b'; 100], at(0));
    writer.append(Stream::Stdout, b"c", at(0));
    // Nor is it one after a restart.
    let again = Logs::open(folder.path(), small()).unwrap();
    assert_eq!(again.extent("web"), Some(Extent { oldest: 0, end: 1101 }));
    std::fs::remove_dir(&obstacle).unwrap();
    let batch = logs.read("web", 1000, 100).unwrap();
    assert_eq!((batch.frames[0].offset, batch.frames[0].data.as_slice()), (1100, b"c".as_slice()));
    assert_eq!(batch.extent, Extent { oldest: 0, end: 1101 });
}

#[test]
fn nowhere_keeps_nothing_and_fails_at_nothing() {
    let logs = Logs::nowhere();
    logs.writer("web").append(Stream::Stdout, b"x", at(0));
    assert_eq!((logs.sources().len(), logs.size()), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_is_read_is_what_was_written(
        pieces in proptest::collection::vec((any::<bool>(), 1usize..700), 1..40),
        from in 0u64..12_000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut written = Vec::new();
        for (number, (restart, len)) in pieces.iter().enumerate() {
            let piece: Vec<u8> = (0..*len).map(|at| u8::try_from((at + number) % 251).unwrap()).collect();
            let logs = Logs::open(folder.path(), small()).unwrap();
            logs.writer("s").append(if *restart { Stream::Stderr } else { Stream::Stdout }, &piece, at(0));
            written.extend_from_slice(&piece);
        }
        let logs = Logs::open(folder.path(), small()).unwrap();
        let extent = logs.extent("s").unwrap();
        prop_assert_eq!(extent.end, written.len() as u64);
        prop_assert!(logs.size() <= 4 << 10);
        let (first, bytes) = all(&logs, "s", from);
        if from < extent.end {
            prop_assert_eq!(first, from.max(extent.oldest));
            prop_assert_eq!(bytes, &written[usize::try_from(first).unwrap()..]);
        }
    }
}
