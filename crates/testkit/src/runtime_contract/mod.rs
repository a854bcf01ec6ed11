//! What every runtime promises, as named cases. Run against the fake and against every real runtime: a new backend is
//! "make the contract pass".
//!
//! What a backend cannot do is a capability, its own or the [`Subject`]'s, and the cases that need it are printed as skipped.

mod ends;
mod life;
mod outside;
mod processes;
mod snapshots;
mod standby;
mod storage;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock,
    ports::{
        Runtime,
        runtime::{Observation, RuntimeError, StartPlan},
    },
    spec::{Entrypoint, Limits, MutableFacts, Secrets, Spec},
};
use tokio::time::timeout;

/// How long a change may take to be told.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What is under test.
#[derive(Clone)]
pub struct Subject {
    pub runtime: Arc<dyn Runtime>,
    /// An image that is present and has `sh`, `sleep`, `cat`, `env` and `echo`.
    pub image: String,
    /// Whether entrypoints really run.
    pub runs_processes: bool,
    /// A directory of this machine that boxes may have mounted.
    pub host_dir: Option<PathBuf>,
    /// Acts on boxes without the runtime knowing.
    pub hands: Option<Arc<dyn Hands>>,
    /// An image that has to be fetched first.
    pub pullable: Option<String>,
    /// Makes another runtime on the same state, as a restarted server does.
    pub restarted: Option<Restart>,
}

/// See [`Subject::restarted`].
pub type Restart = Arc<dyn Fn() -> BoxFuture<'static, Arc<dyn Runtime>> + Send + Sync>;

impl Subject {
    /// A subject with nothing but a runtime and an image.
    pub fn new(runtime: Arc<dyn Runtime>, image: impl Into<String>) -> Self {
        Self {
            runtime,
            image: image.into(),
            runs_processes: false,
            host_dir: None,
            hands: None,
            pullable: None,
            restarted: None,
        }
    }
}

/// What somebody with access to the backend can do behind the runtime's back.
#[async_trait]
pub trait Hands: Send + Sync {
    /// Ends the box's processes.
    async fn kill(&self, id: SandboxId);
    /// Freezes the box.
    async fn pause(&self, id: SandboxId);
    /// Removes the box.
    async fn remove(&self, id: SandboxId);
    /// Leaves what a server leaves that died in the middle of a start.
    async fn interrupt_a_start(&self, id: SandboxId, image: &str);
    /// Whether there is a volume of that name.
    async fn has_volume(&self, name: &str) -> bool;
    /// Removes a volume.
    async fn remove_volume(&self, name: &str);
}

/// Runs every case and says which.
///
/// # Panics
/// At the first promise that is not kept.
pub async fn run(subject: &Subject) {
    let can = subject.runtime.capabilities();
    let name = subject.runtime.name();
    let only: Option<String> = std::env::var("SANDGLASS_CONTRACT_CASE").ok();
    macro_rules! cases {
        ($module:ident, $needs:literal if $possible:expr; $($case:ident),* $(,)?) => {$(
            if only.as_deref().is_some_and(|only| only != stringify!($case)) {
                // Somebody looks at one case.
            } else if $possible {
                println!("contract on {name}: {}", stringify!($case));
                $module::$case(subject).await;
            } else {
                println!("contract on {name}: {} SKIPPED, needs {}", stringify!($case), $needs);
            }
        )*};
    }
    cases!(life, "nothing" if true;
        a_started_box_is_running_with_the_facts_it_was_given,
        starting_again_is_success_and_makes_no_second_box,
        removing_an_absent_box_is_success,
        a_removed_box_is_gone_from_everywhere,
        what_needs_a_box_says_not_found_without_one,
        changed_facts_are_what_the_list_shows,
        removing_twice_at_once_is_success,
        boxes_started_at_once_do_not_share_anything,
        twenty_boxes_start_at_once,
        removing_while_starting_leaves_one_truth,
        a_list_after_many_changes_is_exact,
        inspect_and_list_agree,
        later_observations_have_higher_revisions,
        changes_are_told,
        a_second_watch_supersedes_the_first,
        what_can_be_done_is_admitted_and_preparing_twice_is_cheap,
        a_description_holds_no_token,
    );
    cases!(life, "pause" if can.pause;
        pausing_and_resuming_are_idempotent,
        a_paused_box_can_be_changed_and_removed,
    );
    cases!(life, "a runtime that can be opened again" if subject.restarted.is_some();
        facts_survive_a_restart,
        what_was_removed_stays_removed_after_a_restart,
    );
    let processes = subject.runs_processes;
    cases!(processes, "processes" if processes;
        an_image_that_nobody_has_cannot_be_prepared,
        a_box_without_an_entrypoint_is_held_by_its_agent,
        the_environment_is_as_asked_for_and_holds_no_token,
        arguments_arrive_as_they_are,
        output_of_the_entrypoint_is_in_the_logs,
        only_the_last_lines_are_read,
        a_box_has_a_history,
        use_of_resources_is_told,
        processes_are_limited,
    );
    cases!(processes, "an image to fetch" if subject.pullable.is_some();
        fetching_an_image_tells_its_progress_and_happens_once,
    );
    cases!(ends, "processes" if processes;
        an_exit_is_told_with_its_code,
        an_exit_is_watched,
        an_entrypoint_that_does_not_exist_is_an_invalid_start_and_leaves_nothing,
        a_box_that_uses_too_much_memory_is_ended_for_that_reason,
        pausing_a_box_that_ended_tells_its_end,
        a_box_is_given_time_to_end,
    );
    cases!(outside, "somebody who acts on the backend" if subject.hands.is_some();
        a_box_killed_behind_our_back_is_told_as_ended,
        a_box_paused_behind_our_back_is_told_as_paused,
        a_box_removed_behind_our_back_is_told_as_gone,
        a_start_that_was_interrupted_is_made_anew,
    );
    cases!(standby, "boxes that wait" if can.standby;
        a_box_that_waits_keeps_its_mark_until_it_is_assigned,
        nothing_can_be_assigned_where_nothing_waits,
    );
    cases!(standby, "boxes that wait and a runtime that can be opened again" if can.standby && subject.restarted.is_some();
        an_assigned_box_is_so_after_a_restart,
    );
    cases!(standby, "boxes that wait and processes" if can.standby && processes;
        an_assigned_box_runs_what_was_asked_for,
    );
    cases!(snapshots, "snapshots" if can.snapshot;
        a_snapshot_can_be_taken_twice_and_is_there,
        a_snapshot_of_no_box_is_not_found,
        a_snapshot_in_use_cannot_be_removed,
        an_absent_snapshot_can_be_removed,
    );
    cases!(snapshots, "snapshots and processes" if can.snapshot && processes;
        a_box_restored_from_a_snapshot_has_its_files_and_nothing_else_of_it,
        a_snapshot_runs_what_its_source_ran_if_nothing_else_is_asked_for,
        a_snapshot_outlives_its_source,
        a_snapshot_is_taken_of_a_box_that_goes_on,
    );
    cases!(storage, "a directory of the host" if subject.host_dir.is_some() && processes;
        a_directory_of_the_host_is_mounted,
        what_the_server_delivers_is_shown_in_the_box,
        a_read_only_directory_cannot_be_written,
    );
    cases!(storage, "named volumes" if can.named_volumes && processes && subject.hands.is_some();
        a_volume_that_is_missing_and_not_to_be_made_is_refused,
        a_volume_made_for_a_box_goes_with_it_if_asked,
        a_volume_outlives_its_box_and_is_shared,
    );
    cases!(storage, "a runtime without named volumes" if !can.named_volumes;
        named_volumes_are_refused,
    );
    if only.is_none() {
        let left = subject.runtime.list().await.expect("list");
        assert!(left.is_empty(), "the cases left {} boxes", left.len());
    }
}

pub(crate) fn plan(subject: &Subject, argv: &[&str]) -> StartPlan {
    let now = SystemClock.now();
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    StartPlan {
        spec: Spec {
            env: vec![("GREETING".into(), "hello".into())],
            limits: Limits {
                cpu_millis: Some(1000),
                memory_bytes: Some(128 << 20),
                pids: Some(64),
                ..Limits::default()
            },
            ..Spec::new(subject.image.clone(), Entrypoint::Command(argv))
        },
        facts: MutableFacts {
            expires_at: now.checked_add(Duration::from_secs(600)),
            metadata: BTreeMap::from([("a".into(), "b".into())]),
        },
        created_at: now,
        agent_token: "agent-token".into(),
        route_token: "route-token".into(),
        delivery: Vec::new(),
        root_agent: false,
    }
}

pub(crate) const IDLE: &[&str] = &["sleep", "1000"];

/// A shell that says something and stays.
pub(crate) fn says(script: &str) -> [String; 3] {
    ["sh".into(), "-c".into(), format!("{script}; sleep 1000")]
}

pub(crate) async fn try_start(
    subject: &Subject,
    id: SandboxId,
    plan: &StartPlan,
) -> Result<Observation, RuntimeError> {
    subject.runtime.start(id, plan, &Secrets::default()).await
}

pub(crate) async fn started_as(subject: &Subject, plan: &StartPlan) -> Observation {
    try_start(subject, SandboxId::random(), plan).await.expect("start")
}

pub(crate) async fn started(subject: &Subject, argv: &[&str]) -> Observation {
    started_as(subject, &plan(subject, argv)).await
}

pub(crate) async fn started_saying(subject: &Subject, script: &str) -> Observation {
    let argv = says(script);
    started(subject, &argv.each_ref().map(String::as_str)).await
}

pub(crate) async fn removed(subject: &Subject, id: SandboxId) {
    subject.runtime.remove(id, Duration::ZERO).await.expect("remove");
}

/// Looks until the box is as wanted.
pub(crate) async fn until(
    subject: &Subject,
    id: SandboxId,
    what: impl Fn(&Observation) -> bool,
) -> Observation {
    let look = async {
        loop {
            if let Some(seen) = subject.runtime.inspect(id).await.expect("inspect").filter(&what) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, look).await.expect("the expected condition did not come")
}

/// Reads the output until one of its lines, without time and stream, is `last`. Returns all lines so.
pub(crate) async fn said(subject: &Subject, id: SandboxId, last: &str) -> Vec<String> {
    let text = |line: &String| line.splitn(3, ' ').nth(2).unwrap_or_default().to_owned();
    let look = async {
        loop {
            let lines: Vec<String> =
                subject.runtime.logs(id, 1000).await.expect("logs").iter().map(text).collect();
            if lines.iter().any(|line| line == last) {
                return lines;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    match timeout(PATIENCE, look).await {
        Ok(lines) => lines,
        Err(_) => {
            let lines = subject.runtime.logs(id, 1000).await;
            panic!("{last:?} was not said, but {lines:?}")
        }
    }
}
