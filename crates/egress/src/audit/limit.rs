//! How often something may be done: a burst, then so many a second.

use std::time::Instant;

/// A bucket of tokens that fills with time.
#[derive(Debug)]
pub struct Budget {
    most: u32,
    per_second: u32,
    left: f64,
    filled: Instant,
}

impl Budget {
    pub fn new(most: u32, per_second: u32) -> Self {
        Self { most, per_second, left: f64::from(most), filled: Instant::now() }
    }

    /// Takes one if there is one.
    pub fn take(&mut self) -> bool {
        let now = Instant::now();
        let grown = now.duration_since(self.filled).as_secs_f64() * f64::from(self.per_second);
        self.left = (self.left + grown).min(f64::from(self.most));
        self.filled = now;
        let enough = self.left >= 1.0;
        if enough {
            self.left -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_burst_at_once() {
        let mut budget = Budget::new(3, 0);
        assert_eq!((0..10).filter(|_| budget.take()).count(), 3);
    }
}
