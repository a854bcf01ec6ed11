use std::path::Path;

use proptest::prelude::*;
use sandglass_sandbox::SystemClock;

use super::*;
use crate::{
    build::StepName,
    logs::{DiskLogs, Limits, Piece, TAIL_BYTES, TAIL_LINES, Until, last_lines},
    ports::{LogError, Logs},
};

fn logs(root: &Path, head: u64, tail: u64) -> DiskLogs {
    DiskLogs::new(root.to_owned(), Limits { head, tail, followers: 2 }, Arc::new(SystemClock))
}

async fn pieces(logs: &DiskLogs, build: ImageBuildId, from: u64) -> Vec<Piece> {
    let mut follower = logs.follow(build, from, Until::Now).await.unwrap();
    let mut pieces = Vec::new();
    while let Some(piece) = follower.next().await.unwrap() {
        pieces.push(piece);
    }
    pieces
}

fn on_disk(root: &Path, build: ImageBuildId) -> u64 {
    let files = std::fs::read_dir(root.join(build.to_string())).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn what_is_read_is_what_was_written_but_for_the_middle(
        chunks in prop::collection::vec(1_usize..300, 1..60), reopen in 0_usize..60, from in 0_u64..9000,
    ) {
        run(async {
            let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
            let (head, tail) = (1000, 1600);
            let mut disk = logs(folder.path(), head, tail);
            let mut all = Vec::new();
            for (n, size) in chunks.iter().enumerate() {
                if n == reopen {
                    disk = logs(folder.path(), head, tail);
                }
                let chunk: Vec<u8> = (0..*size).map(|at| b'a' + ((all.len() + at) % 26) as u8).collect();
                disk.open(build).await.unwrap().write(StepName::Setup, &chunk).await;
                all.extend(chunk);
            }
            let end = all.len() as u64;
            assert_eq!(disk.length(build).await.unwrap(), end);
            let mut position = 0;
            let mut elided = 0;
            for piece in pieces(&disk, build, 0).await {
                match &piece {
                    Piece::Output { offset, bytes, .. } => {
                        assert_eq!(*offset, position);
                        assert_eq!(bytes[..], all[position as usize..position as usize + bytes.len()]);
                    }
                    Piece::Elided { from, to } => {
                        assert_eq!((*from, *from), (position, head), "the whole head is kept");
                        // No more than needed: at least seven eighths of the window stay.
                        assert!(end - to >= tail * 7 / 8 - 300 && end - to <= tail, "{to} of {end}");
                        elided += to - from;
                    }
                }
                position = piece.end();
            }
            assert_eq!(position, end);
            assert_eq!(elided == 0, end <= head + tail - tail / 8 || elided == 0);
            // Any offset can be read from, and leads to the same.
            let part = pieces(&disk, build, from.min(end)).await;
            assert_eq!(part.last().map_or(from.min(end), Piece::end), end);
        });
    }

    #[test]
    fn a_crash_leaves_a_beginning_and_the_log_goes_on(cut in 1_u64..400, garbage in any::<bool>()) {
        run(async {
            let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
            let disk = logs(folder.path(), 10_000, 10_000);
            let sink = disk.open(build).await.unwrap();
            for n in 0..10 {
                sink.write(StepName::Clone, format!("line {n} of the log\n").as_bytes()).await;
            }
            drop((sink, disk));
            let file = folder.path().join(build.to_string()).join(format!("{:020}.log", 0));
            let length = std::fs::metadata(&file).unwrap().len();
            let mut bytes = std::fs::read(&file).unwrap();
            bytes.truncate((length - cut.min(length)) as usize);
            if garbage {
                bytes.extend([7; 40]);
            }
            std::fs::write(&file, bytes).unwrap();

            let disk = logs(folder.path(), 10_000, 10_000);
            let sink = disk.open(build).await.unwrap();
            let before = disk.length(build).await.unwrap();
            sink.write(StepName::Clone, b"after\n").await;
            let text: Vec<u8> = pieces(&disk, build, 0).await.iter().flat_map(Piece::text).collect();
            let text = String::from_utf8(text).unwrap();
            let whole: String = (0..10).map(|n| format!("line {n} of the log\n")).collect();
            assert!(text.ends_with("after\n"));
            assert_eq!(text[..text.len() - 6], whole[..before as usize]);
        });
    }
}

#[test]
fn the_marker_says_how_much_is_missing() {
    run(async {
        let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
        let disk = logs(folder.path(), 100, 80);
        let sink = disk.open(build).await.unwrap();
        sink.write(StepName::Build, &[b'x'; 1000]).await;
        let text: Vec<u8> = pieces(&disk, build, 0).await.iter().flat_map(Piece::text).collect();
        let expected = format!("{}\n[... 820 bytes elided ...]\n{}", "x".repeat(100), "x".repeat(80));
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    });
}

#[test]
fn the_usual_limits_keep_sixteen_mebibytes() {
    run(async {
        let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
        let disk = DiskLogs::new(folder.path().to_owned(), Limits::default(), Arc::new(SystemClock));
        let sink = disk.open(build).await.unwrap();
        let chunk = vec![b'x'; 256 * 1024];
        for _ in 0..80 {
            sink.write(StepName::Build, &chunk).await;
        }
        let mut kept = 0;
        let mut missing = 0;
        for piece in pieces(&disk, build, 0).await {
            match piece {
                Piece::Output { bytes, .. } => kept += bytes.len() as u64,
                Piece::Elided { from, to } => missing += to - from,
            }
        }
        assert_eq!((kept + missing, disk.length(build).await.unwrap()), (20 << 20, 20 << 20));
        assert!((15 << 20..=16 << 20).contains(&kept), "{kept}");
        // Headers are a rounding error of it.
        assert!(on_disk(folder.path(), build) < (16 << 20) + (1 << 16));
    });
}

#[test]
fn followers_come_to_the_end_when_the_build_does_and_are_bounded() {
    run(async {
        let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
        let disk = logs(folder.path(), 1000, 1000);
        assert!(matches!(disk.follow(build, 0, Until::Sealed).await, Err(LogError::NotFound)));
        let sink = disk.open(build).await.unwrap();
        let mut follower = disk.follow(build, 0, Until::Sealed).await.unwrap();
        let other = disk.follow(build, 0, Until::Sealed).await.unwrap();
        assert!(matches!(disk.follow(build, 0, Until::Sealed).await, Err(LogError::Busy)));
        drop(other);
        let reader = tokio::spawn(async move {
            let mut text = Vec::new();
            while let Some(piece) = follower.next().await.unwrap() {
                text.extend(piece.text());
            }
            String::from_utf8(text).unwrap()
        });
        for n in 0..3 {
            sink.write(StepName::Clone, format!("{n}\n").as_bytes()).await;
            tokio::task::yield_now().await;
        }
        disk.seal(build).await.unwrap();
        sink.write(StepName::Clone, b"too late\n").await;
        assert_eq!(reader.await.unwrap(), "0\n1\n2\n");
        // Afterwards it is read without anybody who writes.
        assert_eq!(disk.tail(build).await.unwrap(), "0\n1\n2\n");
        assert_eq!(disk.tail_offset(build, 2).await.unwrap(), 2);
        assert_eq!(disk.tail_offset(build, 9).await.unwrap(), 0);
        assert_eq!(disk.tail_offset(build, 0).await.unwrap(), 6);
        disk.remove(build).await.unwrap();
        disk.remove(build).await.unwrap();
        assert!(matches!(disk.follow(build, 0, Until::Now).await, Err(LogError::NotFound)));
        assert_eq!(disk.tail(build).await.unwrap(), "");
    });
}

#[test]
fn a_log_that_many_open_at_once_has_one_writer() {
    run(async {
        let (folder, build) = (tempfile::tempdir().unwrap(), ImageBuildId::random());
        let disk = logs(folder.path(), 10_000, 10_000);
        let writes = (0..20).map(|_| async {
            let sink = disk.open(build).await.unwrap();
            for _ in 0..5 {
                sink.write(StepName::Clone, b"0123456789").await;
            }
        });
        futures_util::future::join_all(writes).await;
        let text: Vec<u8> = pieces(&disk, build, 0).await.iter().flat_map(Piece::text).collect();
        assert_eq!(text, b"0123456789".repeat(100));
    });
}

#[test]
fn the_tail_is_whole_lines_within_its_bounds() {
    let many: String = (0..1000).map(|n| format!("line {n}\n")).collect();
    let tail = last_lines(many.as_bytes(), false);
    assert_eq!(tail.lines().count(), TAIL_LINES);
    assert!(tail.starts_with("line 800\n") && tail.ends_with("line 999\n"));

    let wide: String = (0..100).map(|n| format!("{n:0>200}\n")).collect();
    let tail = last_lines(wide.as_bytes(), false);
    assert!(tail.len() <= TAIL_BYTES && tail.lines().all(|line| line.len() == 200), "{}", tail.len());

    // One line without an end is shown in part rather than not at all.
    assert_eq!(last_lines(&vec![b'x'; 20_000], false).len(), TAIL_BYTES);
    // Bytes that are no text become three bytes each.
    assert!(last_lines(&vec![0xff; 20_000], false).len() <= TAIL_BYTES);
    assert_eq!(last_lines(b"", false), "");
}

#[tokio::test]
async fn who_follows_a_waiting_build_comes_to_the_end_when_it_is_cancelled_and_sees_all_when_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let around = Surroundings::default();
    let mut ports = around.ports(&Arc::default());
    let disk = Arc::new(logs(folder.path(), 1000, 1000));
    ports.logs = disk.clone();
    around.world.lock().unwrap().step_takes = Duration::from_millis(50);
    let mut settings = around.settings(0);
    settings.rules.per_host = 1;
    let builds = Builds::start(ports, settings).await.unwrap();
    let mut readers = Vec::new();
    let mut ids = Vec::new();
    for recipe in 1..=2 {
        let Submitted::Build { build, .. } = builds.submit(explicit(recipe, 1)).await.unwrap() else {
            panic!("no build")
        };
        let mut follower = disk.follow(build.id, 0, Until::Sealed).await.unwrap();
        ids.push(build.id);
        readers.push(tokio::spawn(async move {
            let mut text = Vec::new();
            while let Some(piece) = follower.next().await.unwrap() {
                text.extend(piece.text());
            }
            String::from_utf8(text).unwrap()
        }));
    }
    builds.cancel(ids[1]).await.unwrap();
    assert_eq!(readers.pop().unwrap().await.unwrap(), "");
    let text = readers.pop().unwrap().await.unwrap();
    assert_eq!(text, "clone runs\nsetup runs\nsanitize runs\nexport runs\n");
    assert!(builds.wait(ids[0]).await.unwrap().is_ok());
}
