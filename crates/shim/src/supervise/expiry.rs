//! The backstop timer: an absolute point of the wall clock, also across changes of that clock.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

pub struct Expiry {
    timer: OwnedFd,
}

impl Expiry {
    pub fn new() -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { timer })
    }

    /// `None` switches it off. A time in the past fires at once.
    pub fn set(&self, at_ms: Option<i64>) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would mean "off", so the distant past becomes the first moment that counts.
        let it_value = at_ms.map_or(zero, |ms| Timespec {
            tv_sec: ms.max(1).div_euclid(1000),
            tv_nsec: ms.max(1).rem_euclid(1000) * 1_000_000,
        });
        let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        timerfd_settime(&self.timer, flags, &Itimerspec { it_interval: zero, it_value })?;
        Ok(())
    }

    /// True when the time has come; false when the clock was set and the timer must be set again.
    pub fn fired(&self) -> bool {
        rustix::io::read(&self.timer, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Expiry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
