//! Requests to paused sandboxes that are to run when somebody wants them: the request waits, the sandbox is resumed.
//!
//! Invariants: a sandbox is resumed once however many requests wait for it; how many wait in all, and for how long, is bounded; only
//! requests that were admitted wait.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::Semaphore;

use super::lookup::{Lookup, Reach, Target};
use super::refusal::Refusal;

/// How many requests wait, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Park {
    pub patience: Duration,
    /// For whichever sandboxes.
    pub most: usize,
}

impl Default for Park {
    /// Well below the 30 seconds after which the published clients give up.
    fn default() -> Self {
        Self { patience: Duration::from_secs(10), most: 1024 }
    }
}

/// Before the next attempt for a sandbox that was paused again in the meantime.
const PAUSED_AGAIN: Duration = Duration::from_millis(20);

/// Why a sandbox does not run now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotWoken {
    /// It is gone.
    Gone,
    /// It was tried, and failed.
    Failed,
    /// Nobody can say yet.
    Later,
}

/// A sandbox on its way up.
pub type Waking = BoxFuture<'static, Result<(), NotWoken>>;

/// See the module documentation.
pub(crate) struct Wakes {
    places: Semaphore,
    patience: Duration,
    /// The resumption that requests for a sandbox share. It ends with the last of them; what it has asked for goes on.
    under_way: Mutex<HashMap<String, WeakShared<Waking>>>,
}

impl Default for Wakes {
    fn default() -> Self {
        Self::new(Park::default())
    }
}

impl Wakes {
    pub(crate) fn new(Park { patience, most }: Park) -> Self {
        let places = Semaphore::new(most.min(Semaphore::MAX_PERMITS));
        Self { places, patience, under_way: Mutex::default() }
    }

    /// Waits until the sandbox runs, or until it is known that it will not.
    pub(crate) async fn awake(&self, lookup: &dyn Lookup, id: &str) -> Result<Target, Refusal> {
        let _place = self.places.try_acquire().map_err(|_| Refusal::WakeCrowded)?;
        let woken = async {
            loop {
                self.waking(lookup, id).await?;
                let target = lookup.target(id).ok_or(Refusal::NotFound)?;
                if !matches!(target.reach, Reach::Paused(_)) {
                    return Ok(target);
                }
                tokio::time::sleep(PAUSED_AGAIN).await;
            }
        };
        tokio::time::timeout(self.patience, woken).await.unwrap_or(Err(Refusal::WakeSlow))
    }

    fn waking(&self, lookup: &dyn Lookup, id: &str) -> Shared<Waking> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = under_way.get(id).and_then(WeakShared::upgrade)
            && shared.peek().is_none()
        {
            return shared;
        }
        under_way.retain(|_, other| other.upgrade().is_some());
        let shared = lookup.wake(id).shared();
        if let Some(weak) = shared.downgrade() {
            under_way.insert(id.to_owned(), weak);
        }
        shared
    }
}

impl From<NotWoken> for Refusal {
    fn from(why: NotWoken) -> Self {
        match why {
            NotWoken::Gone => Self::NotFound,
            NotWoken::Failed => Self::NotWoken,
            NotWoken::Later => Self::WakeSlow,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    const WAITING: usize = 1024;

    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// One sandbox: what it is after each resumption, and how long those take.
    struct Sleeper {
        takes: Duration,
        outcome: Result<(), NotWoken>,
        /// What look-ups find, one after the other; the last one stays.
        then: Mutex<Vec<Option<Reach>>>,
        resumed: Arc<AtomicUsize>,
    }

    impl Sleeper {
        fn new(takes: u64, outcome: Result<(), NotWoken>, then: &[Option<Reach>]) -> Self {
            let then = Mutex::new(then.iter().rev().copied().collect());
            Self { takes: Duration::from_secs(takes), outcome, then, resumed: Arc::default() }
        }
    }

    impl Lookup for Sleeper {
        fn target(&self, _: &str) -> Option<Target> {
            let mut then = self.then.lock().unwrap();
            let found = if then.len() > 1 { then.pop()? } else { *then.last()? };
            found.map(Target::at)
        }

        fn wake(&self, _: &str) -> Waking {
            let (takes, outcome, resumed) = (self.takes, self.outcome, self.resumed.clone());
            async move {
                resumed.fetch_add(1, Relaxed);
                tokio::time::sleep(takes).await;
                outcome
            }
            .boxed()
        }
    }

    const UP: Option<Reach> = Some(Reach::Addressable(HOME));
    const PAUSED: Option<Reach> = Some(Reach::Paused(HOME));

    #[tokio::test(start_paused = true)]
    async fn what_becomes_of_a_request() {
        use Refusal::{NotFound, NotWoken as Failed, WakeSlow};
        for (takes, outcome, then, expected, attempts) in [
            (1, Ok(()), &[UP][..], Ok(Reach::Addressable(HOME)), 1),
            (1, Ok(()), &[PAUSED, PAUSED, UP], Ok(Reach::Addressable(HOME)), 3),
            (3, Ok(()), &[PAUSED], Err(WakeSlow), 4),
            (11, Ok(()), &[UP], Err(WakeSlow), 1),
            (1, Ok(()), &[None], Err(NotFound), 1),
            (1, Ok(()), &[Some(Reach::Gone)], Ok(Reach::Gone), 1),
            (1, Err(NotWoken::Gone), &[UP], Err(NotFound), 1),
            (1, Err(NotWoken::Failed), &[UP], Err(Failed), 1),
            (1, Err(NotWoken::Later), &[UP], Err(WakeSlow), 1),
        ] {
            let sleeper = Sleeper::new(takes, outcome, then);
            let woken = Wakes::default().awake(&sleeper, "a").await.map(|target| target.reach);
            assert_eq!(woken, expected, "{takes} {outcome:?} {then:?}");
            assert_eq!(sleeper.resumed.load(Relaxed), attempts, "{takes} {outcome:?} {then:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_requests_resume_once_and_too_many_are_sent_away() {
        let sleeper = Arc::new(Sleeper::new(1, Ok(()), &[UP]));
        let wakes = Arc::<Wakes>::default();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..WAITING {
            let (sleeper, wakes) = (sleeper.clone(), wakes.clone());
            waiting.spawn(async move { wakes.awake(&*sleeper, "a").await.map(|target| target.reach) });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(wakes.awake(&*sleeper, "b").await.unwrap_err(), Refusal::WakeCrowded);
        while let Some(woken) = waiting.join_next().await {
            assert_eq!(woken.unwrap(), Ok(Reach::Addressable(HOME)));
        }
        assert_eq!(sleeper.resumed.load(Relaxed), 1);
        wakes.awake(&*sleeper, "b").await.unwrap();
        assert_eq!(wakes.under_way.lock().unwrap().len(), 1, "what is over is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_away_leaves_its_place_to_the_others() {
        let sleeper = Arc::new(Sleeper::new(2, Ok(()), &[UP]));
        let wakes = Arc::<Wakes>::default();
        let first = tokio::spawn({
            let (sleeper, wakes) = (sleeper.clone(), wakes.clone());
            async move { wakes.awake(&*sleeper, "a").await.map(|target| target.reach) }
        });
        tokio::time::sleep(Duration::from_millis(1)).await;
        let second = wakes.awake(&*sleeper, "a");
        first.abort();
        assert!(second.await.is_ok());
        assert!(sleeper.resumed.load(Relaxed) <= 2);
        assert_eq!(wakes.places.available_permits(), WAITING);
    }
}
