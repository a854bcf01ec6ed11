//! When a periodic hook is due, whatever happens to the clocks.
//!
//! Pure: the caller says what time it is. Invariant: however far the wall clock is set, a hook is due at most once because of it,
//! and its next time is one of the schedule's by the clock as it is now.

use std::time::Duration;

use sandglass_sandbox::Timestamp;
use sandglass_sandbox::schedule::Schedule;

/// How long a clock that was set may go unnoticed.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// Corrections below this are the ordinary life of a clock.
const STEP: Duration = Duration::from_secs(1);

/// What both clocks show.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub wall: Timestamp,
    /// Since some start; nobody sets this one.
    pub elapsed: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    Due,
    /// Nothing to do before this has passed.
    Wait(Duration),
}

/// See the module documentation.
pub(super) struct Timetable {
    schedule: Schedule,
    next: Next,
    seen: Moment,
}

enum Next {
    Wall(Timestamp),
    Elapsed(Duration),
    /// Beyond the calendar.
    Never,
}

impl Timetable {
    pub(super) fn new(schedule: Schedule, now: Moment) -> Self {
        let mut table = Timetable { schedule, next: Next::Never, seen: now };
        table.plan(now);
        table
    }

    /// Sets the next time; what has passed by then is left out.
    pub(super) fn plan(&mut self, now: Moment) {
        self.seen = now;
        self.next = match self.schedule.interval() {
            Some(interval) => {
                let mut next = match self.next {
                    Next::Elapsed(last) => last,
                    _ => now.elapsed,
                };
                if next <= now.elapsed {
                    let passed = (now.elapsed - next).as_secs() / interval.as_secs();
                    let steps = u32::try_from(passed + 1).unwrap_or(u32::MAX);
                    next = next.saturating_add(interval.saturating_mul(steps));
                }
                Next::Elapsed(next)
            }
            None => self.schedule.next_after(now.wall).map_or(Next::Never, Next::Wall),
        };
    }

    pub(super) fn look(&mut self, now: Moment) -> Look {
        let expected = self.seen.wall.checked_add(now.elapsed.saturating_sub(self.seen.elapsed));
        let set_back = expected.is_some_and(|expected| now.wall.until(expected) > STEP);
        if set_back && matches!(self.next, Next::Wall(_)) {
            self.plan(now);
        }
        self.seen = now;
        let left = match self.next {
            Next::Wall(at) => now.wall.until(at),
            Next::Elapsed(at) => at.saturating_sub(now.elapsed),
            Next::Never => LOOK_AGAIN,
        };
        if left.is_zero() { Look::Due } else { Look::Wait(left.min(LOOK_AGAIN)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two clocks that only move when told.
    struct Clocks(Moment);

    impl Clocks {
        fn start(at: &str) -> Self {
            let at: jiff::Timestamp = at.parse().unwrap();
            Clocks(Moment { wall: Timestamp::clamped(at.as_millisecond()), elapsed: Duration::from_secs(77) })
        }

        fn pass(&mut self, time: Duration) {
            self.0.elapsed += time;
            self.0.wall = self.0.wall.checked_add(time).unwrap();
        }

        fn set(&mut self, by_seconds: i64) {
            self.0.wall = Timestamp::clamped(self.0.wall.as_millis() + by_seconds * 1000);
        }

        /// Waits as a timer would, for that long at least; returns at which seconds something was due.
        fn run(&mut self, table: &mut Timetable, seconds: u64) -> Vec<u64> {
            let start = self.0.elapsed;
            let mut due = Vec::new();
            while self.0.elapsed < start + Duration::from_secs(seconds) {
                match table.look(self.0) {
                    Look::Due => {
                        due.push((self.0.elapsed - start).as_secs());
                        table.plan(self.0);
                    }
                    Look::Wait(wait) => self.pass(wait),
                }
            }
            due
        }
    }

    fn table(schedule: &str, clocks: &Clocks) -> Timetable {
        Timetable::new(schedule.parse().unwrap(), clocks.0)
    }

    #[test]
    fn times_come_and_go() {
        let mut clocks = Clocks::start("2026-01-01T00:00:10Z");
        let mut cron = table("*/2 * * * *", &clocks);
        assert_eq!(clocks.run(&mut cron, 300), [110, 230]);
        let mut every = table("@every 90s", &clocks);
        assert_eq!(clocks.run(&mut every, 300), [90, 180, 270]);
    }

    #[test]
    fn times_that_pass_while_it_runs_are_left_out() {
        for schedule in ["* * * * *", "@every 60s"] {
            let mut clocks = Clocks::start("2026-01-01T00:00:00Z");
            let mut table = table(schedule, &clocks);
            assert_eq!(clocks.run(&mut table, 60), Vec::<u64>::new());
            assert_eq!(table.look(clocks.0), Look::Due);
            clocks.pass(Duration::from_secs(130));
            table.plan(clocks.0);
            assert_eq!(clocks.run(&mut table, 120), [50, 110], "{schedule}");
        }
    }

    #[test]
    fn a_frozen_box_makes_up_for_one_time_only() {
        for schedule in ["* * * * *", "@every 60s"] {
            let mut clocks = Clocks::start("2026-01-01T00:00:00Z");
            let mut table = table(schedule, &clocks);
            clocks.pass(Duration::from_secs(3630));
            assert_eq!(clocks.run(&mut table, 60), [0, 30], "{schedule}");
        }
    }

    #[test]
    fn a_clock_that_is_set_forward_causes_one_run() {
        let mut clocks = Clocks::start("2026-01-01T00:00:00Z");
        let mut hourly = table("@hourly", &clocks);
        clocks.run(&mut hourly, 60);
        clocks.set(5 * 3600);
        let due = clocks.run(&mut hourly, 3600);
        assert_eq!(due, [0, 3540]);
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_silence_a_hook() {
        let mut clocks = Clocks::start("2026-01-01T12:00:30Z");
        let mut minutely = table("* * * * *", &clocks);
        clocks.run(&mut minutely, 60);
        clocks.set(-7200);
        assert_eq!(clocks.run(&mut minutely, 120).len(), 2);
    }

    #[test]
    fn intervals_do_not_care_about_the_wall_clock() {
        let mut clocks = Clocks::start("2026-01-01T12:00:00Z");
        let mut every = table("@every 10s", &clocks);
        assert_eq!(clocks.run(&mut every, 30), [10, 20]);
        for by in [86_400, -86_400 * 30, 3] {
            clocks.set(by);
            assert_eq!(clocks.run(&mut every, 30), [0, 10, 20]);
        }
    }
}
