//! Pools on a fake runtime, a store in memory and a manual clock.

use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};

use sandglass_sandbox::{
    Clock, SandboxId,
    lifecycle::{
        intent::{Create, Intent, Operation, Progress},
        state::State,
    },
    pool::{Capacity, Origin, Pool},
    ports::{Runtime, Store, runtime::StartPlan},
    spec::{Entrypoint, Limits, MutableFacts, Spec},
};
use sandglass_server::engine::{
    Engine, Settings,
    commit::{EngineError, NewSandbox},
    pools::PoolError,
};
use sandglass_testkit::{FakeRuntime, Fault, ManualClock, MemoryStore};

struct Stack {
    runtime: Arc<FakeRuntime>,
    store: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    engine: Arc<Engine>,
}

const PATIENCE: Duration = Duration::from_secs(60);

impl Stack {
    async fn new() -> Self {
        Self::with(Settings::default()).await
    }

    async fn with(settings: Settings) -> Self {
        let (runtime, store, clock) =
            (Arc::<FakeRuntime>::default(), Arc::<MemoryStore>::default(), Arc::<ManualClock>::default());
        let engine = Engine::new(runtime.clone(), store.clone(), clock.clone(), settings);
        engine.recover().await.unwrap();
        Self { runtime, store, clock, engine }
    }

    /// Another server on the same runtime and store, as after a crash.
    async fn restart(&mut self) {
        self.engine.stop().await;
        self.engine =
            Engine::new(self.runtime.clone(), self.store.clone(), self.clock.clone(), Settings::default());
        self.engine.recover().await.unwrap();
    }

    async fn pool(&self, buffer: (u64, u64), pool: (u64, u64)) {
        let capacity =
            Capacity { buffer_min: buffer.0, buffer_max: buffer.1, pool_min: pool.0, pool_max: pool.1 };
        let template = Spec::new("img", Entrypoint::AgentOnly);
        let pool = Pool {
            name: "p".into(),
            capacity,
            template,
            repository: serde_json::Value::Null,
            created_at: self.clock.now(),
        };
        self.engine.create_pool(pool).await.unwrap();
    }

    fn asked(&self, pool: Option<&str>) -> NewSandbox {
        let mut spec = Spec::new("img", Entrypoint::Command(vec!["sleep".into(), "1d".into()]));
        spec.env.push(("A".into(), "b".into()));
        if let Some(pool) = pool {
            spec.extensions.insert("poolRef".into(), pool.into());
        }
        NewSandbox {
            spec,
            facts: MutableFacts { expires_at: None, metadata: BTreeMap::from([("k".into(), "v".into())]) },
            secrets: Default::default(),
            key: None,
            pool: pool.map(str::to_owned),
            confidential: Default::default(),
        }
    }

    async fn create(&self) -> SandboxId {
        self.engine.create(self.asked(Some("p")), self.clock.now()).await.unwrap().id
    }

    /// Waits until so many boxes wait and can be taken, and nothing is on its way.
    async fn settled(&self, available: u64) {
        let settled = || {
            let view = self.engine.pool("p").unwrap();
            (view.available, view.starting) == (available, 0)
                && self.runtime.waiting().len() as u64 == available
        };
        until(settled, || format!("{available} boxes, not {:?}", self.engine.pool("p"))).await;
    }

    fn state(&self, id: SandboxId) -> Option<State> {
        self.engine.find(&id.to_string()).ok().and_then(|e| e.status()).map(|s| s.state)
    }

    async fn kinds(&self, id: SandboxId) -> Vec<String> {
        let lines = self.store.history(id, 100).await.unwrap().into_iter().map(|line| line.kind);
        // The runtime tells of images as it likes.
        lines.filter(|kind| kind != "image_pull").collect()
    }

    /// What was asked for is what there is.
    fn is_as_asked(&self, id: SandboxId) {
        let entry = self.engine.find(&id.to_string()).unwrap();
        assert_eq!(entry.status().unwrap().state, State::Running);
        let observed = entry.observed.unwrap();
        assert!(observed.spec.standby.is_none());
        assert_eq!(observed.entrypoint, ["sleep", "1d"]);
        assert_eq!(observed.spec.env, [("A".to_owned(), "b".to_owned())]);
        assert_eq!(observed.facts.metadata["k"], "v");
    }
}

/// Time is paused: this sleeps as long as nothing else can happen.
async fn until(mut done: impl FnMut() -> bool, what: impl Fn() -> String) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "waited for {}", what());
}

async fn at_rest(stack: &Stack) {
    let open = || async { stack.store.open_intents().await.unwrap().is_empty() };
    within(async {
        while !open().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_pool_is_filled_and_its_boxes_are_no_sandboxes() {
    let stack = Stack::new().await;
    stack.pool((2, 4), (0, 10)).await;
    stack.settled(3).await;
    assert!(stack.engine.index().is_empty());
    for id in stack.runtime.waiting() {
        assert!(matches!(stack.engine.find(&id.to_string()), Err(EngineError::NotFound(_))));
    }
    assert!(stack.store.open_intents().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_create_takes_a_box_under_its_id_and_the_pool_is_filled_up() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    let waiting = stack.runtime.waiting();
    let id = stack.create().await;
    assert_eq!(waiting, [id]);
    stack.is_as_asked(id);
    assert_eq!(stack.runtime.starts(id), 1, "the box was not made again");
    at_rest(&stack).await;
    let kinds = stack.kinds(id).await;
    assert_eq!(kinds, ["accepted", "pool.taken", "running"]);
    stack.settled(1).await;
    assert_eq!(stack.engine.pool("p").unwrap().allocated, 1);
    stack.engine.delete(&id.to_string()).await.unwrap();
    assert!(!stack.runtime.boxes().contains(&id));
    assert_eq!(stack.engine.pool("p").unwrap().allocated, 0);
}

#[tokio::test(start_paused = true)]
async fn many_creates_at_once_share_no_box() {
    let stack = Stack::new().await;
    stack.pool((2, 2), (0, 100)).await;
    stack.settled(2).await;
    let warm = stack.runtime.waiting();
    let creates = (0..10).map(|_| stack.create());
    let mut ids = futures_util::future::join_all(creates).await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 10);
    assert!(warm.iter().all(|id| ids.contains(id)));
    for id in &ids {
        stack.is_as_asked(*id);
    }
    let cold = ids.iter().find(|id| !warm.contains(id)).unwrap();
    at_rest(&stack).await;
    assert_eq!(stack.kinds(*cold).await, ["accepted", "pool.missed", "running"]);
    stack.settled(2).await;
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_starts_cold_and_says_why() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    let mut asked = stack.asked(Some("p"));
    asked.spec.limits = Limits { memory_bytes: Some(1 << 30), ..Limits::default() };
    let id = stack.engine.create(asked, stack.clock.now()).await.unwrap().id;
    assert!(!stack.runtime.waiting().contains(&id));
    at_rest(&stack).await;
    let lines = stack.store.history(id, 10).await.unwrap();
    assert!(lines[1].kind == "pool.missed" && lines[1].message.contains("resources"), "{lines:?}");
    let unknown = stack.engine.create(stack.asked(Some("q")), stack.clock.now()).await;
    assert!(matches!(unknown, Err(EngineError::Pool(PoolError::NotFound(_)))));
}

#[tokio::test(start_paused = true)]
async fn a_box_that_cannot_be_assigned_is_replaced_under_the_same_id() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    for fault in [Fault::Refuse, Fault::DoneButFailed] {
        stack.settled(1).await;
        stack.runtime.inject("assign", fault);
        let id = stack.create().await;
        stack.is_as_asked(id);
        assert_eq!(stack.runtime.starts(id), 2, "{fault:?}");
        at_rest(&stack).await;
        assert_eq!(stack.kinds(id).await, ["accepted", "pool.taken", "pool.missed", "running"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_box_that_vanished_meanwhile_is_made_anew() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    let id = stack.runtime.waiting()[0];
    stack.runtime.vanishes(id);
    assert_eq!(stack.create().await, id);
    stack.is_as_asked(id);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_server_adopts_what_waits() {
    let mut stack = Stack::new().await;
    stack.pool((2, 2), (0, 10)).await;
    stack.settled(2).await;
    let mut before = stack.runtime.waiting();
    stack.restart().await;
    stack.settled(2).await;
    let mut after = stack.runtime.waiting();
    before.sort_unstable();
    after.sort_unstable();
    assert_eq!(before, after);
    let id = stack.create().await;
    assert!(before.contains(&id));
    stack.is_as_asked(id);
}

/// The server dies after the create was written down, before or after its box was told.
#[tokio::test(start_paused = true)]
async fn an_assignment_that_a_crash_cut_short_is_carried_on() {
    for told in [false, true] {
        let mut stack = Stack::new().await;
        stack.pool((1, 1), (0, 10)).await;
        stack.settled(1).await;
        let id = stack.runtime.waiting()[0];
        stack.engine.stop().await;
        // What is left of the dead server: its create, and a box that was told or not.
        let asked = stack.asked(Some("p"));
        let create = Create {
            spec: asked.spec,
            facts: asked.facts,
            agent_token: "agent".into(),
            route_token: "route".into(),
            had_credentials: false,
            progress: Progress::Accepted,
            origin: Some(Origin::Warm { pool: "p".into() }),
        };
        let plan = StartPlan {
            spec: create.spec.clone(),
            facts: create.facts.clone(),
            created_at: stack.clock.now(),
            agent_token: create.agent_token.clone(),
            route_token: create.route_token.clone(),
            delivery: Vec::new(),
            root_agent: false,
        };
        let intent = Intent {
            sandbox_id: id,
            generation: 1,
            operation: Operation::Create(Box::new(create)),
            accepted_at: plan.created_at,
            deadline: plan.created_at.checked_add(Duration::from_secs(900)).unwrap(),
        };
        stack.store.insert_create(&intent, None).await.unwrap();
        if told {
            stack.runtime.assign(id, &plan).await.unwrap();
        }
        stack.restart().await;
        until(|| stack.state(id) == Some(State::Running), || "the sandbox".into()).await;
        stack.is_as_asked(id);
        assert_eq!(stack.runtime.starts(id), 1, "told: {told}");
        at_rest(&stack).await;
        stack.settled(1).await;
        assert_eq!(stack.runtime.boxes().len(), 2, "neither lost nor doubled");
    }
}

#[tokio::test(start_paused = true)]
async fn a_create_that_is_not_written_down_leaves_its_box_in_the_pool() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    let waiting = stack.runtime.waiting();
    stack.store.refuse_writes(1);
    let refused = stack.engine.create(stack.asked(Some("p")), stack.clock.now()).await;
    assert!(matches!(refused, Err(EngineError::Store(_))));
    assert_eq!(stack.engine.pool("p").unwrap().available, 1);
    assert_eq!(waiting, [stack.create().await]);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_pool_is_drained_and_its_sandboxes_stay() {
    let mut stack = Stack::new().await;
    stack.pool((2, 2), (0, 10)).await;
    stack.settled(2).await;
    let id = stack.create().await;
    stack.settled(2).await;
    stack.engine.delete_pool("p").await.unwrap();
    assert!(matches!(stack.engine.pool("p"), Err(PoolError::NotFound(_))));
    until(|| stack.runtime.boxes() == [id], || format!("one box: {:?}", stack.runtime.boxes())).await;
    stack.is_as_asked(id);
    // Also what a server did not get to.
    stack.pool((2, 2), (0, 10)).await;
    stack.settled(2).await;
    stack.runtime.inject("remove", Fault::Refuse);
    stack.store.delete_pool("p").await.unwrap();
    stack.restart().await;
    until(|| stack.runtime.boxes() == [id], || format!("one box: {:?}", stack.runtime.boxes())).await;
}

#[tokio::test(start_paused = true)]
async fn a_resized_pool_grows_and_shrinks() {
    let stack = Stack::new().await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    let resize = |buffer: (u64, u64), most| {
        let capacity = Capacity { buffer_min: buffer.0, buffer_max: buffer.1, pool_min: 0, pool_max: most };
        stack.engine.resize_pool("p", capacity)
    };
    resize((4, 4), 10).await.unwrap();
    stack.settled(4).await;
    resize((0, 2), 10).await.unwrap();
    stack.settled(1).await;
    stack.create().await;
    resize((5, 5), 3).await.unwrap();
    stack.settled(2).await;
}

#[tokio::test(start_paused = true)]
async fn stale_and_broken_boxes_are_replaced() {
    let stack = Stack::new().await;
    stack.pool((2, 2), (0, 10)).await;
    stack.settled(2).await;
    let first = stack.runtime.waiting();
    stack.runtime.moves_image("img", "newer");
    until(
        || stack.runtime.waiting().iter().all(|id| !first.contains(id)),
        || "boxes of the newer image".into(),
    )
    .await;
    stack.settled(2).await;
    let second = stack.runtime.waiting();
    stack.runtime.exits(second[0], 1, stack.clock.now());
    stack.runtime.is_frozen(second[1], true);
    until(
        || stack.runtime.boxes().iter().all(|id| !second.contains(id)),
        || "other boxes than those that ended or froze".into(),
    )
    .await;
    stack.settled(2).await;
}

#[tokio::test(start_paused = true)]
async fn failures_are_told_and_tried_again_less_and_less_often() {
    let stack = Stack::new().await;
    for _ in 0..3 {
        stack.runtime.inject("start", Fault::Refuse);
    }
    stack.pool((1, 1), (0, 10)).await;
    let failures = || stack.engine.pool("p").unwrap().failure.map_or(0, |failure| failure.count);
    until(|| failures() == 1, || "a failure".into()).await;
    let told = stack.engine.pool("p").unwrap().failure.unwrap();
    assert!(told.message.contains("injected"), "{told:?}");
    for count in [2, 3] {
        until(|| failures() == count, || format!("failure {count}")).await;
    }
    stack.settled(1).await;
    assert!(stack.engine.pool("p").unwrap().failure.is_none());
}

#[tokio::test(start_paused = true)]
async fn boxes_that_wait_count_among_the_most_that_there_may_be() {
    let stack = Stack::with(Settings { max_sandboxes: 3, ..Settings::default() }).await;
    stack.pool((2, 2), (0, 10)).await;
    stack.settled(2).await;
    stack.engine.create(stack.asked(None), stack.clock.now()).await.unwrap();
    let refused = stack.engine.create(stack.asked(None), stack.clock.now()).await;
    assert!(matches!(refused, Err(EngineError::TooMany(3))));
    // One that waits is none more.
    stack.create().await;
    stack.create().await;
    let refused = stack.engine.create(stack.asked(Some("p")), stack.clock.now()).await;
    assert!(matches!(refused, Err(EngineError::TooMany(3))));
    stack.settled(0).await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_removed_while_it_is_assigned_leaves_nothing() {
    let stack = Stack::with(Settings { create_grace: Duration::from_millis(1), ..Settings::default() }).await;
    stack.pool((1, 1), (0, 10)).await;
    stack.settled(1).await;
    stack.runtime.inject("assign", Fault::Slow(Duration::from_secs(5)));
    let id = stack.create().await;
    within(stack.engine.delete(&id.to_string())).await.unwrap();
    assert!(!stack.runtime.boxes().contains(&id));
    at_rest(&stack).await;
    stack.settled(1).await;
}
