//! What a step says, on its way into the log of its build: bounded, however much faster it comes than it is written down.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use sandglass_builds::{build::StepName, ports::LogSink};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// Bytes of output that may wait to be written down. The log itself keeps no more of a build than its beginning and its end.
const WAITING_MOST: usize = 16 << 20;

#[derive(Default)]
struct Counts {
    waiting: AtomicUsize,
    left_out: AtomicUsize,
}

/// Takes lines, from anywhere and without waiting. Dropped when there are no more.
pub(super) struct Told {
    tell: UnboundedSender<String>,
    counts: Arc<Counts>,
}

impl Told {
    pub(super) fn line(&self, line: &str) {
        let bytes = line.len() + 1;
        if self.counts.waiting.load(Relaxed).saturating_add(bytes) > WAITING_MOST {
            self.counts.left_out.fetch_add(1, Relaxed);
            return;
        }
        self.counts.waiting.fetch_add(bytes, Relaxed);
        let _ = self.tell.send(format!("{line}\n"));
    }
}

/// Lines into a log. The writer ends when the other half was dropped and everything is written.
pub(super) fn into_log(log: &Arc<dyn LogSink>, step: StepName) -> (Told, impl Future<Output = ()> + use<>) {
    let (tell, mut lines) = unbounded_channel::<String>();
    let counts = Arc::<Counts>::default();
    let told = Told { tell, counts: counts.clone() };
    let log = log.clone();
    let writing = async move {
        while let Some(line) = lines.recv().await {
            log.write(step, line.as_bytes()).await;
            counts.waiting.fetch_sub(line.len(), Relaxed);
        }
        let left_out = counts.left_out.load(Relaxed);
        if left_out > 0 {
            let note = format!("{left_out} lines came faster than they could be written down\n");
            log.write(step, note.as_bytes()).await;
        }
    };
    (told, writing)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;

    use super::*;

    #[derive(Default)]
    struct Written(Mutex<Vec<u8>>);

    #[async_trait]
    impl LogSink for Written {
        async fn write(&self, _: StepName, bytes: &[u8]) {
            self.0.lock().unwrap().extend_from_slice(bytes);
        }
    }

    #[tokio::test]
    async fn what_comes_too_fast_is_counted_and_not_collected() {
        let written = Arc::<Written>::default();
        let sink: Arc<dyn LogSink> = written.clone();
        let (told, writing) = into_log(&sink, StepName::Build);
        let line = "a".repeat((1 << 20) - 1);
        (0..20).for_each(|_| told.line(&line));
        drop(told);
        writing.await;
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let (lines, note) = text.trim_end().rsplit_once('\n').unwrap();
        assert_eq!(lines.lines().count(), 16);
        assert_eq!(note, "4 lines came faster than they could be written down");
    }
}
