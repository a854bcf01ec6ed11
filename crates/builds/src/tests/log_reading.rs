//! What reading a log takes, counted in bytes and listings: a log of many short lines is the usual one.

use std::{
    path::Path,
    sync::atomic::{AtomicI64, Ordering},
};

use proptest::prelude::*;
use sandglass_sandbox::Timestamp;

use super::*;
use crate::{
    build::StepName,
    logs::{Cost, DiskLogs, Limits, Piece, Until},
    ports::Logs,
};

/// Files of 64 KiB, of which one keeps the beginning.
const FILE: u64 = 64 * 1024;

/// Each write has its own instant, until the clock is stopped.
#[derive(Default)]
struct Ticks(AtomicI64, AtomicI64);

impl Ticks {
    fn ticking() -> Arc<Self> {
        Arc::new(Self(AtomicI64::new(1_000), AtomicI64::new(1)))
    }

    fn stop(&self) {
        self.1.store(0, Ordering::Relaxed);
    }
}

impl Clock for Ticks {
    fn now(&self) -> Timestamp {
        Timestamp::clamped(self.0.fetch_add(self.1.load(Ordering::Relaxed), Ordering::Relaxed))
    }
}

fn logs(root: &Path, clock: Arc<Ticks>) -> DiskLogs {
    DiskLogs::new(root.to_owned(), Limits { head: FILE, tail: 8 * FILE, followers: 2 }, clock)
}

/// As wide as divides a file, so that no line is in two.
fn line(n: usize) -> String {
    format!("{:<63}\n", format!("line {n} of what a compiler says"))
}

async fn write(disk: &DiskLogs, build: ImageBuildId, lines: std::ops::Range<usize>) {
    let sink = disk.open(build).await.unwrap();
    for n in lines {
        sink.write(StepName::Build, line(n).as_bytes()).await;
    }
}

async fn pieces(disk: &DiskLogs, build: ImageBuildId, from: u64) -> Vec<Piece> {
    let mut follower = disk.follow(build, from, Until::Now).await.unwrap();
    let mut pieces = Vec::new();
    while let Some(piece) = follower.next().await.unwrap() {
        pieces.push(piece);
    }
    pieces
}

fn on_disk(root: &Path, build: ImageBuildId) -> Cost {
    let files: Vec<_> = std::fs::read_dir(root.join(build.to_string())).unwrap().collect();
    let sizes = files.iter().map(|file| file.as_ref().unwrap().metadata().unwrap().len());
    Cost { bytes: sizes.sum(), listings: files.len() as u64 }
}

fn since(disk: &DiskLogs, before: Cost) -> Cost {
    let now = disk.cost();
    Cost { bytes: now.bytes - before.bytes, listings: now.listings - before.listings }
}

#[tokio::test]
async fn reading_all_takes_little_more_than_what_is_there() {
    let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
    let disk = logs(folder.path(), Ticks::ticking());
    write(&disk, build, 0..6_000).await;
    let (there, before) = (on_disk(folder.path(), build), disk.cost());
    let read = pieces(&disk, build, 0).await;
    let text: Vec<u8> = read.iter().flat_map(Piece::text).collect();
    assert_eq!(String::from_utf8(text).unwrap(), (0..6_000).map(line).collect::<String>());
    assert!(read.len() >= 6_000, "each has an instant of its own");
    let took = since(&disk, before);
    assert!(took.bytes <= there.bytes * 5 / 4, "{took:?} for {there:?}");
    assert!(took.listings <= there.listings + 1, "{took:?} for {there:?}");

    // A build that ended is measured before, which reads one file.
    disk.seal(build).await.unwrap();
    let before = disk.cost();
    assert_eq!(pieces(&disk, build, 0).await, read);
    assert!(since(&disk, before).bytes <= there.bytes * 5 / 4 + 2 * FILE);
}

#[tokio::test]
async fn the_last_lines_are_found_from_the_end() {
    let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
    let disk = logs(folder.path(), Ticks::ticking());
    write(&disk, build, 0..6_000).await;
    let end = disk.length(build).await.unwrap();
    let width = line(0).len() as u64;
    let before = disk.cost();
    let offset = disk.tail_offset(build, 5).await.unwrap();
    assert_eq!(offset, end - 5 * width);
    let text: Vec<u8> = pieces(&disk, build, offset).await.iter().flat_map(Piece::text).collect();
    assert_eq!(String::from_utf8(text).unwrap(), (5_995..6_000).map(line).collect::<String>());
    let took = since(&disk, before);
    // A file with its headers for the search, and one on the way to the offset.
    assert!(took.bytes <= 3 * FILE && took.listings <= 2, "{took:?}");

    // All lines, and more than there are, take one look at everything.
    let before = disk.cost();
    assert_eq!(disk.tail_offset(build, 6_000).await.unwrap(), 0);
    assert_eq!(disk.tail_offset(build, usize::MAX).await.unwrap(), 0);
    assert_eq!(since(&disk, before).bytes, 2 * on_disk(folder.path(), build).bytes);
}

#[tokio::test]
async fn who_follows_reads_what_is_new() {
    let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
    let disk = logs(folder.path(), Ticks::ticking());
    write(&disk, build, 0..1).await;
    let mut follower = disk.follow(build, 0, Until::Sealed).await.unwrap();
    let before = disk.cost();
    for n in 0..4_000 {
        let piece = follower.next().await.unwrap().unwrap();
        assert_eq!(piece.text(), line(n).as_bytes());
        assert_eq!(follower.position(), piece.end());
        write(&disk, build, n + 1..n + 2).await;
    }
    let (there, took) = (on_disk(folder.path(), build), since(&disk, before));
    assert!(took.bytes <= there.bytes && took.listings <= there.listings + 1, "{took:?} for {there:?}");
}

#[tokio::test]
async fn what_is_left_out_under_a_reader_is_marked_and_it_goes_on() {
    let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
    let disk = logs(folder.path(), Ticks::ticking());
    write(&disk, build, 0..3_000).await;
    // In the second file, the first one that goes.
    let width = line(0).len() as u64;
    let from = (FILE / width + 10) * width;
    let mut follower = disk.follow(build, from, Until::Sealed).await.unwrap();
    let mut position = follower.next().await.unwrap().unwrap().end();
    write(&disk, build, 3_000..20_000).await;
    disk.seal(build).await.unwrap();
    let (mut elided, mut text) = (0, Vec::new());
    while let Some(piece) = follower.next().await.unwrap() {
        match &piece {
            Piece::Elided { from, to } => {
                assert_eq!(*from, position);
                elided += to - from;
                text.clear();
            }
            Piece::Output { offset, bytes, .. } => {
                assert_eq!(*offset, position);
                text.extend_from_slice(bytes);
            }
        }
        position = piece.end();
    }
    assert_eq!(position, 20_000 * width);
    assert!(elided > 0);
    let all: String = (0..20_000).map(line).collect();
    assert!(text.len() as u64 > 6 * FILE && all.as_bytes().ends_with(&text));
}

#[tokio::test]
async fn what_a_step_says_in_one_instant_is_one_piece() {
    let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
    let clock = Ticks::ticking();
    let disk = logs(folder.path(), clock.clone());
    let sink = disk.open(build).await.unwrap();
    sink.write(StepName::Clone, b"first\n").await;
    clock.stop();
    sink.write(StepName::Clone, b"se").await;
    sink.write(StepName::Clone, b"cond\n").await;
    sink.write(StepName::Setup, b"third\n").await;
    let read = pieces(&disk, build, 0).await;
    let seen: Vec<_> =
        read.iter().map(|piece| (piece.end(), String::from_utf8(piece.text()).unwrap())).collect();
    let expected = [(6, "first\n"), (13, "second\n"), (19, "third\n")];
    assert_eq!(seen, expected.map(|(end, text)| (end, text.to_owned())));
    // A reader that comes back in the middle of it sees the rest.
    assert_eq!(pieces(&disk, build, 9).await[0].text(), b"ond\n");

    // A piece is never more than 64 KiB.
    for _ in 0..40 {
        sink.write(StepName::Setup, &[b'x'; 4096]).await;
    }
    for piece in pieces(&disk, build, 0).await {
        assert!(piece.text().len() <= 64 * 1024);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_last_lines_begin_where_a_reading_of_everything_says(
        chunks in prop::collection::vec(("[ab\n]{1,40}", 1_usize..8), 0..60), lines in 0_usize..80, ended in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
            let limits = Limits { head: 300, tail: 400, followers: 2 };
            let disk = DiskLogs::new(folder.path().to_owned(), limits, Ticks::ticking());
            let sink = disk.open(build).await.unwrap();
            for (text, times) in &chunks {
                sink.write(StepName::Build, text.repeat(*times).as_bytes()).await;
            }
            if ended {
                disk.seal(build).await.unwrap();
            }
            let end = disk.length(build).await.unwrap();
            let mut begins = vec![0];
            for piece in pieces(&disk, build, 0).await {
                if let Piece::Output { offset, bytes, .. } = piece {
                    let ends = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
                    begins.extend(ends.map(|(at, _)| offset + at as u64 + 1).filter(|at| *at < end));
                }
            }
            let expected = match lines {
                0 => end,
                _ => begins[begins.len().saturating_sub(lines)],
            };
            assert_eq!(disk.tail_offset(build, lines).await.unwrap(), expected);
        });
    }
}
