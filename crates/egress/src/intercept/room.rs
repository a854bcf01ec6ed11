//! The memory that connections may make this process hold, all together: taken before it can be used, given back when it cannot be any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Semaphores count in these.
const UNIT: usize = 1 << 10;

/// Room for connections whose requests are read, and for the requests on them.
#[derive(Clone, Debug)]
pub struct Room {
    pub(super) connections: Pool,
    pub(super) exchanges: Pool,
}

impl Room {
    /// So many bytes of each.
    #[must_use]
    pub fn of(connections: usize, exchanges: usize) -> Self {
        Self { connections: Pool::of(connections), exchanges: Pool::of(exchanges) }
    }
}

impl Default for Room {
    /// What an enforcer of the usual size has: some 380 connections with HTTP/1 or 40 with HTTP/2, and 128 requests at a time.
    fn default() -> Self {
        Self::of(48 << 20, 24 << 20)
    }
}

/// Bytes that are shared.
#[derive(Clone, Debug)]
pub(super) struct Pool(Arc<Semaphore>);

/// Bytes that are taken, until it is dropped.
#[derive(Debug)]
pub(super) struct Share(OwnedSemaphorePermit);

impl Pool {
    fn of(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes / UNIT)))
    }

    /// Takes so many bytes, those who came first before others; nothing if they are not free in time.
    pub(super) async fn take(&self, bytes: usize, wait: Duration) -> Option<Share> {
        let units = units(bytes);
        if wait.is_zero() {
            return Arc::clone(&self.0).try_acquire_many_owned(units).ok().map(Share);
        }
        let taken = tokio::time::timeout(wait, Arc::clone(&self.0).acquire_many_owned(units)).await;
        taken.ok().and_then(Result::ok).map(Share)
    }
}

impl Share {
    /// Gives back all but so many bytes.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let beyond = self.0.num_permits().saturating_sub(units(bytes) as usize);
        drop(self.0.split(beyond));
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_taken_comes_back() {
        let pool = Pool::of(10 << 10);
        let mut first = pool.take(8 << 10, Duration::ZERO).await.unwrap();
        assert!(pool.take(3 << 10, Duration::ZERO).await.is_none());
        assert!(pool.take(3 << 10, Duration::from_secs(5)).await.is_none());
        first.shrink(7 << 10);
        let second = pool.take(3 << 10, Duration::from_secs(5)).await.unwrap();
        assert!(pool.take(1, Duration::ZERO).await.is_none());
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { pool.take(9 << 10, Duration::from_secs(5)).await.is_some() }
        });
        tokio::task::yield_now().await;
        drop((first, second));
        assert!(waiting.await.unwrap());
        assert!(pool.take(11 << 10, Duration::from_secs(5)).await.is_none(), "there is never as much");
    }
}
