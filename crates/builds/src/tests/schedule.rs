use proptest::prelude::*;
use sandglass_sandbox::Timestamp;

use super::{states::queued, *};
use crate::{
    build::Priority,
    decide::{Rules, schedule::turns},
};

fn at(s: i64) -> Timestamp {
    Timestamp::clamped(1_900_000_000_000 + s * 1000)
}

fn waiting(base: &ImageBuild, tenant: &str, priority: Priority, queued_at: i64) -> ImageBuild {
    let mut row = base.clone();
    row.id = ImageBuildId::random();
    row.slot.namespace = Some(tenant.to_owned());
    row.priority = priority;
    row.queued_at = at(queued_at);
    row.created_at = at(queued_at);
    row.deadline_at = at(10_000);
    row
}

#[test]
fn first_come_first_served_within_a_priority_and_nobody_waits_for_a_tenant_that_has_its_share() {
    let base = queued();
    let rows = [
        waiting(&base, "a", Priority::Prebuild, 1),
        waiting(&base, "a", Priority::Interactive, 4),
        waiting(&base, "a", Priority::Interactive, 3),
        waiting(&base, "a", Priority::Interactive, 2),
        waiting(&base, "b", Priority::Prebuild, 5),
    ];
    let rules = Rules { per_host: 4, per_tenant: 2, ..Rules::default() };
    let turns = turns(&rows, 0, &rules, at(100));
    assert_eq!(turns.start, [rows[3].id, rows[2].id, rows[4].id]);
    assert_eq!(turns.next_at, Some(at(10_000)));
}

#[test]
fn a_build_that_pauses_or_is_overdue_does_not_begin() {
    let base = queued();
    let mut rows =
        [waiting(&base, "a", Priority::Interactive, 1), waiting(&base, "a", Priority::Interactive, 2)];
    rows[0].not_before = Some(at(150));
    rows[1].deadline_at = at(100);
    let turns = turns(&rows, 0, &Rules::default(), at(100));
    assert_eq!((turns.start, turns.overdue, turns.next_at), (vec![], vec![rows[1].id], Some(at(150))));
}

proptest! {
    #[test]
    fn bounds_hold_and_no_room_is_left_unused(
        spec in prop::collection::vec((0_u8..3, any::<bool>(), 0_i64..50, any::<bool>()), 0..20),
        busy in 0_usize..4, per_host in 1_usize..5, per_tenant in 1_usize..4,
    ) {
        thread_local!(static QUEUED: ImageBuild = queued());
        let base = QUEUED.with(Clone::clone);
        let rows: Vec<ImageBuild> = spec.iter().map(|(tenant, interactive, queued_at, running)| {
            let priority = if *interactive { Priority::Interactive } else { Priority::Prebuild };
            let mut row = waiting(&base, &tenant.to_string(), priority, *queued_at);
            if *running {
                row.state = BuildState::Running;
            }
            row
        }).collect();
        let rules = Rules { per_host, per_tenant, ..Rules::default() };
        let turns = turns(&rows, busy, &rules, at(100));
        prop_assert!(turns.start.is_empty() || busy + turns.start.len() <= per_host);
        let of = |tenant: &Option<String>| rows.iter().filter(|r| {
            r.slot.namespace == *tenant && (r.state == BuildState::Running || turns.start.contains(&r.id))
        }).count();
        for row in rows.iter().filter(|r| r.state == BuildState::Queued) {
            let begun = turns.start.contains(&row.id);
            prop_assert!(!begun || of(&row.slot.namespace) <= per_tenant);
            let room = busy + turns.start.len() < per_host && of(&row.slot.namespace) < per_tenant;
            prop_assert!(begun || !room, "somebody waits although there is room");
        }
    }
}
