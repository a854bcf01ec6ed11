//! Counters that a rule asks, and what one sandbox may have.

use super::attributes::*;
use crate::message::Message;

/// Counts what gets as far as it, once for the rule or once for each element of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meter {
    /// So many packets in a second, after a first burst.
    Rate { each_second: u32, burst: u32 },
    /// Connections that are open at a time; closed ones do not count.
    Connections(u32),
}

impl Meter {
    /// New connections of one sandbox, and those that it has open: together with what closed ones leave behind for two minutes it
    /// fills less than half of a table of 262,144, the kernel's default from 4 GB of memory on. The rate is also what keeps the list
    /// of [`Meter::Connections`] short: it is tidied by nine entries in a tick of the kernel's clock.
    pub const OF_ONE_SANDBOX: [Self; 2] =
        [Self::Rate { each_second: 800, burst: 4096 }, Self::Connections(16_384)];

    /// The expression that is met by what is over.
    pub(super) fn over(self, element: Message) -> Message {
        const INVERTED: u32 = 1;
        match self {
            Self::Rate { each_second, burst } => {
                rate(element, each_second, burst, |data| data.network(LIMIT_FLAGS, INVERTED))
            }
            Self::Connections(most) => element.string(EXPR_NAME, "connlimit").nest(EXPR_DATA, |data| {
                data.network(CONNLIMIT_COUNT, most).network(CONNLIMIT_FLAGS, INVERTED)
            }),
        }
    }
}

pub(super) fn rate(
    element: Message,
    each_second: u32,
    burst: u32,
    more: impl FnOnce(Message) -> Message,
) -> Message {
    element.string(EXPR_NAME, "limit").nest(EXPR_DATA, |data| {
        more(
            data.attribute(LIMIT_RATE, &u64::from(each_second).to_be_bytes())
                .attribute(LIMIT_UNIT, &1_u64.to_be_bytes())
                .network(LIMIT_BURST, burst),
        )
    })
}
