//! What is remembered of a provider that has to be asked over the network.
//!
//! Owns when it is asked, and what is answered while it is down. Keys that are nobody's are not remembered: a key that was
//! just handed out must work, and a flood of guesses must not push out the keys that are in use. Guesses wait for each
//! other instead ([`UNKNOWN_AT_ONCE`]), so that they cannot overrun the provider either.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{
    FutureExt,
    future::{Shared, WeakShared},
};
use tokio::{sync::Semaphore, time::Instant};
use tracing::{info, warn};

use super::{
    keyring::{KeyDigest, ProviderUnavailable, TenantProvider},
    principal::Tenant,
};

/// Keys remembered at most.
const MOST_KNOWN: usize = 10_000;
/// Keys of which nothing is known that are asked for at the same time.
const UNKNOWN_AT_ONCE: usize = 64;
/// While the provider is down, it is asked about a key that may still be used this often.
const BETWEEN_FAILURES: Duration = Duration::from_secs(1);
/// Longest time for which an answer is trusted, whatever it says.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// One answer of the provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    Known {
        tenant: Arc<Tenant>,
        ttl: Duration,
    },
    /// The key is nobody's.
    Unknown,
    /// Whatever else; the text is for the log and holds no secret.
    Failed(String),
}

/// Asks the provider. Ends within its own time limit.
#[async_trait]
pub(super) trait Fetch: Send + Sync + 'static {
    async fn fetch(&self, key: &[u8]) -> Fetched;
}

type Outcome = Result<Option<Arc<Tenant>>, ProviderUnavailable>;
type Asking = Pin<Box<dyn Future<Output = Outcome> + Send>>;

struct Known {
    tenant: Arc<Tenant>,
    /// Until then nobody asks.
    fresh_until: Instant,
    /// Until then it is good enough when the provider is down.
    stale_until: Instant,
}

/// How long to wait and to remember.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For a turn among keys of which nothing is known.
    pub(super) turn: Duration,
    /// How long an answer that is no longer fresh still serves.
    pub(super) max_stale: Duration,
}

/// A provider with a memory.
pub(super) struct Cached<F> {
    inner: Arc<Inner<F>>,
}

struct Inner<F> {
    source: F,
    patience: Patience,
    known: Mutex<HashMap<KeyDigest, Known>>,
    /// One question a key; whoever else wants to know waits for its answer. Weak: a question that nobody waits for ends.
    asked: Mutex<HashMap<KeyDigest, WeakShared<Asking>>>,
    turns: Semaphore,
    /// Says when the provider comes and goes, instead of logging every failure.
    down: AtomicBool,
}

impl<F: Fetch> Cached<F> {
    pub(super) fn new(source: F, patience: Patience) -> Self {
        let inner = Inner {
            source,
            patience,
            known: Mutex::default(),
            asked: Mutex::default(),
            turns: Semaphore::new(UNKNOWN_AT_ONCE),
            down: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    fn question(&self, digest: KeyDigest, key: &[u8]) -> Shared<Asking> {
        let mut asked = self.inner.asked();
        if let Some(question) = asked.get(&digest).and_then(WeakShared::upgrade) {
            return question;
        }
        let (inner, key) = (Arc::clone(&self.inner), key.to_vec());
        let asking: Asking = Box::pin(async move {
            let outcome = inner.ask(digest, &key).await;
            inner.asked().remove(&digest);
            outcome
        });
        let question = asking.shared();
        if asked.len() > 2 * UNKNOWN_AT_ONCE {
            asked.retain(|_, weak| weak.upgrade().is_some());
        }
        if let Some(weak) = question.downgrade() {
            asked.insert(digest, weak);
        }
        question
    }
}

#[async_trait]
impl<F: Fetch> TenantProvider for Cached<F> {
    async fn tenant(&self, key: &[u8]) -> Outcome {
        let digest = KeyDigest::of(key);
        if let Some(known) = self.inner.known().get(&digest)
            && Instant::now() < known.fresh_until
        {
            return Ok(Some(Arc::clone(&known.tenant)));
        }
        let question = self.question(digest, key);
        question.await
    }
}

impl<F: Fetch> Inner<F> {
    fn known(&self) -> MutexGuard<'_, HashMap<KeyDigest, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<KeyDigest, WeakShared<Asking>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(&self, digest: KeyDigest, key: &[u8]) -> Outcome {
        let fetched = if self.known().contains_key(&digest) {
            self.source.fetch(key).await
        } else {
            match tokio::time::timeout(self.patience.turn, self.turns.acquire()).await {
                Ok(Ok(_turn)) => self.source.fetch(key).await,
                _ => Fetched::Failed("too many unknown keys at once".to_owned()),
            }
        };
        if !matches!(fetched, Fetched::Failed(_)) && self.down.swap(false, Ordering::Relaxed) {
            info!("the tenant provider answers again");
        }
        match fetched {
            Fetched::Known { tenant, ttl } => {
                self.remember(digest, Arc::clone(&tenant), ttl);
                Ok(Some(tenant))
            }
            Fetched::Unknown => {
                self.known().remove(&digest);
                Ok(None)
            }
            Fetched::Failed(error) => {
                if !self.down.swap(true, Ordering::Relaxed) {
                    warn!(%error, "the tenant provider cannot be asked; known keys stay valid for a while");
                }
                self.recall(digest)
            }
        }
    }

    fn remember(&self, digest: KeyDigest, tenant: Arc<Tenant>, ttl: Duration) {
        let now = Instant::now();
        let fresh_until = now + ttl.min(LONGEST);
        let stale_until = fresh_until.checked_add(self.patience.max_stale).unwrap_or(fresh_until + LONGEST);
        let mut known = self.known();
        if known.len() >= MOST_KNOWN && !known.contains_key(&digest) {
            known.retain(|_, old| now < old.stale_until);
            let oldest = known.iter().min_by_key(|(_, old)| old.fresh_until).map(|(digest, _)| *digest);
            if let Some(oldest) = oldest.filter(|_| known.len() >= MOST_KNOWN) {
                known.remove(&oldest);
            }
        }
        known.insert(digest, Known { tenant, fresh_until, stale_until });
    }

    /// What is still good enough while the provider is down.
    fn recall(&self, digest: KeyDigest) -> Outcome {
        let now = Instant::now();
        let mut all = self.known();
        let known = all.get_mut(&digest).ok_or(ProviderUnavailable)?;
        if now >= known.stale_until {
            all.remove(&digest);
            return Err(ProviderUnavailable);
        }
        // Not every request has to wait for the provider's time-out.
        known.fresh_until = (now + BETWEEN_FAILURES).min(known.stale_until);
        Ok(Some(Arc::clone(&known.tenant)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::Notify;

    use super::*;

    /// Answers what it is told to, and counts the questions.
    #[derive(Clone)]
    struct Script(Arc<State>);

    struct State {
        answer: Mutex<Fetched>,
        questions: AtomicUsize,
        /// When set, questions are held until it is notified.
        gate: Mutex<Option<Arc<Notify>>>,
    }

    #[async_trait]
    impl Fetch for Script {
        async fn fetch(&self, _: &[u8]) -> Fetched {
            self.0.questions.fetch_add(1, Ordering::SeqCst);
            let gate = self.0.gate.lock().unwrap().clone();
            if let Some(gate) = gate {
                gate.notified().await;
            }
            self.0.answer.lock().unwrap().clone()
        }
    }

    fn tenant(name: &str) -> Arc<Tenant> {
        Arc::new(Tenant { name: name.to_owned(), namespace: name.to_owned() })
    }

    fn known(name: &str, ttl: u64) -> Fetched {
        Fetched::Known { tenant: tenant(name), ttl: Duration::from_secs(ttl) }
    }

    fn failed() -> Fetched {
        Fetched::Failed("down".to_owned())
    }

    fn cached(answer: Fetched, max_stale: u64) -> (Arc<Cached<Script>>, Script) {
        let state =
            State { answer: Mutex::new(answer), questions: AtomicUsize::new(0), gate: Mutex::default() };
        let script = Script(Arc::new(state));
        let patience = Patience { turn: Duration::from_secs(5), max_stale: Duration::from_secs(max_stale) };
        (Arc::new(Cached::new(script.clone(), patience)), script)
    }

    impl Script {
        fn answer(&self, answer: Fetched) {
            *self.0.answer.lock().unwrap() = answer;
        }

        fn questions(&self) -> usize {
            self.0.questions.load(Ordering::SeqCst)
        }
    }

    async fn seconds(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_serves_for_its_time_and_longer_only_while_the_provider_is_down() {
        let (provider, script) = cached(known("a", 30), 300);
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
        seconds(29).await;
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
        assert_eq!(script.questions(), 1);
        seconds(1).await;
        script.answer(known("b", 30));
        assert_eq!(
            provider.tenant(b"k").await,
            Ok(Some(tenant("b"))),
            "what has changed is seen after the time"
        );
        assert_eq!(script.questions(), 2);

        script.answer(failed());
        seconds(30).await;
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("b"))));
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("b"))));
        assert_eq!(script.questions(), 3, "the next question waits a moment");
        seconds(299).await;
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("b"))), "30 s and 299 s old");
        seconds(1).await;
        assert_eq!(provider.tenant(b"k").await, Err(ProviderUnavailable), "30 s and 300 s old");
        script.answer(known("b", 30));
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("b"))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_was_taken_back_is_forgotten_at_once() {
        let (provider, script) = cached(known("a", 30), 300);
        provider.tenant(b"k").await.unwrap();
        seconds(30).await;
        script.answer(Fetched::Unknown);
        assert_eq!(provider.tenant(b"k").await, Ok(None));
        script.answer(failed());
        assert_eq!(provider.tenant(b"k").await, Err(ProviderUnavailable), "nothing stale is left of it");
        script.answer(known("a", 30));
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))), "a refusal is not remembered");
    }

    #[tokio::test(start_paused = true)]
    async fn a_time_of_zero_asks_every_time_and_no_staleness_means_none() {
        let (provider, script) = cached(known("a", 0), 0);
        for asked in 1..=3 {
            assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
            assert_eq!(script.questions(), asked);
        }
        script.answer(failed());
        assert_eq!(provider.tenant(b"k").await, Err(ProviderUnavailable));
        // Out of any clock's range, and still no overflow.
        let (provider, _) = cached(known("a", u64::MAX), u64::MAX);
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
    }

    #[tokio::test(start_paused = true)]
    async fn everybody_waits_for_one_question_about_a_key() {
        let (provider, script) = cached(known("a", 0), 300);
        let gate = Arc::new(Notify::new());
        *script.0.gate.lock().unwrap() = Some(Arc::clone(&gate));
        let ask = |key: &'static str| {
            let provider = Arc::clone(&provider);
            tokio::spawn(async move { provider.tenant(key.as_bytes()).await })
        };
        let first = ask("k");
        let same: Vec<_> = (0..20).map(|_| ask("k")).collect();
        let other = ask("another");
        seconds(1).await;
        assert_eq!(script.questions(), 2, "one a key");
        // The one who asked first leaves; the answer still comes to the others.
        first.abort();
        seconds(1).await;
        gate.notify_waiters();
        for waiting in same.into_iter().chain([other]) {
            assert_eq!(waiting.await.unwrap(), Ok(Some(tenant("a"))));
        }
        assert_eq!(script.questions(), 2);

        // A question that nobody waits for any more is asked anew.
        let alone = ask("k");
        seconds(1).await;
        alone.abort();
        let _ = alone.await;
        *script.0.gate.lock().unwrap() = None;
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
        assert_eq!(script.questions(), 4);
        assert!(provider.inner.asked().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn guesses_neither_overrun_the_provider_nor_hold_up_known_keys() {
        let (provider, script) = cached(known("a", 30), 300);
        provider.tenant(b"k").await.unwrap();
        seconds(30).await;
        *script.0.gate.lock().unwrap() = Some(Arc::new(Notify::new()));
        let guesses: Vec<_> = (0..3 * UNKNOWN_AT_ONCE)
            .map(|n| {
                let provider = Arc::clone(&provider);
                tokio::spawn(async move { provider.tenant(format!("guess {n}").as_bytes()).await })
            })
            .collect();
        seconds(1).await;
        assert_eq!(script.questions(), 1 + UNKNOWN_AT_ONCE);
        *script.0.gate.lock().unwrap() = None;
        assert_eq!(provider.tenant(b"k").await, Ok(Some(tenant("a"))));
        seconds(5).await;
        let refused = guesses.iter().filter(|guess| guess.is_finished()).count();
        assert_eq!(refused, 2 * UNKNOWN_AT_ONCE, "those that did not get their turn");
        guesses.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_is_bounded() {
        let (provider, _) = cached(known("a", 30), 300);
        for n in 0..MOST_KNOWN + 10 {
            provider.tenant(format!("{n}").as_bytes()).await.unwrap();
        }
        assert_eq!(provider.inner.known().len(), MOST_KNOWN);
        seconds(330).await;
        provider.tenant(b"new").await.unwrap();
        assert_eq!(provider.inner.known().len(), 1, "what is no longer of use makes room");
    }
}
