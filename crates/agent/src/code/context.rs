//! One context: a kernel and the turns that runs take on it.
//!
//! A task owns the kernel and does one thing at a time; requests reach it as messages. Memory: [`PENDING`] bytes of
//! events wait for a slow client, and one message more; then the kernel is not read, and what it does with its output
//! is up to it. A client that went away costs nothing: its run goes on unheard.
//! Invariant: every run that was begun ends with exactly one terminal event, whatever becomes of the kernel.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};
use tokio::time::{Instant as Clock, MissedTickBehavior, interval_at, sleep_until, timeout};

use super::frames;
use super::kernel::{Kernel, News, StartError};
use super::run::Run;
use crate::events::{self, Stamp};
use crate::http::body::ChunkSender;
use crate::http::router::Agent;

const PENDING: usize = 4 << 20;
const PING_EVERY: Duration = Duration::from_secs(3);
/// Between a kernel's answer and the end of its output, when that end does not come.
const LOST_IDLE: Duration = Duration::from_secs(2);
/// How long an interrupt waits for code to begin that the kernel has not told of yet.
const NOT_BEGUN: Duration = Duration::from_millis(500);
/// How long a client that reads nothing keeps its context after the code has ended.
const GIVE_UP: Duration = Duration::from_secs(60);

/// Where a context is on its way to its first kernel.
#[derive(Debug, Clone)]
pub(super) enum Readiness {
    Starting,
    Ready,
    Failed(String),
}

enum Ask {
    Run(Job),
    Interrupt(oneshot::Sender<()>),
    End(oneshot::Sender<()>),
}

/// Code to run, and who wants to hear of it.
pub(super) struct Job {
    pub agent: Arc<Agent>,
    pub code: String,
    pub events: ChunkSender,
    pub turn: Turn,
}

/// What requests know of a context.
pub(super) struct Context {
    pub id: String,
    pub language: String,
    /// As it was asked for.
    pub cwd: Option<String>,
    asks: mpsc::Sender<Ask>,
    readiness: watch::Receiver<Readiness>,
    busy: Arc<AtomicBool>,
}

/// The right to run code, until it is dropped.
pub(super) struct Turn(Arc<AtomicBool>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Context {
    /// Makes a context and starts its kernel.
    pub(super) fn open(
        agent: &Arc<Agent>,
        language: &str,
        (cwd, folder): (Option<String>, PathBuf),
        slot: OwnedSemaphorePermit,
    ) -> Arc<Self> {
        let (asks, inbox) = mpsc::channel(16);
        let (tell, readiness) = watch::channel(Readiness::Starting);
        let context = Context {
            id: uuid::Uuid::new_v4().to_string(),
            language: language.to_owned(),
            cwd,
            asks,
            readiness,
            busy: Arc::default(),
        };
        let keeper = Keeper {
            id: context.id.clone(),
            language: language.to_owned(),
            folder,
            inbox,
            kernel: None,
            ended: None,
            next: None,
            _slot: slot,
        };
        tokio::spawn(keeper.live(Arc::clone(agent), tell));
        Arc::new(context)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(*self.readiness.borrow(), Readiness::Failed(_))
    }

    /// Waits for the first kernel.
    pub(super) async fn ready(&self) -> Result<(), String> {
        let mut readiness = self.readiness.clone();
        let state = readiness.wait_for(|state| !matches!(state, Readiness::Starting)).await;
        match state.as_deref() {
            Ok(Readiness::Ready) => Ok(()),
            Ok(Readiness::Failed(why)) => Err(why.clone()),
            Ok(Readiness::Starting) | Err(_) => Err("the context was deleted".to_owned()),
        }
    }

    /// The turn, unless somebody else has it.
    pub(super) fn turn(&self) -> Option<Turn> {
        (!self.busy.swap(true, Ordering::AcqRel)).then(|| Turn(Arc::clone(&self.busy)))
    }

    /// Hands code over; false when the context is gone.
    pub(super) async fn run(&self, job: Job) -> bool {
        self.asks.send(Ask::Run(job)).await.is_ok()
    }

    /// Interrupts what runs; returns when it has ended, or after `limit`.
    pub(super) async fn interrupt(&self, limit: Duration) {
        let (done, ended) = oneshot::channel();
        if self.asks.send(Ask::Interrupt(done)).await.is_ok() {
            let _ = timeout(limit, ended).await;
        }
    }

    /// Ends the kernel and whatever it runs; returns when both have ended.
    pub(super) async fn end(&self) {
        let (done, ended) = oneshot::channel();
        if self.asks.send(Ask::End(done)).await.is_ok() {
            let _ = ended.await;
        }
    }
}

/// The task behind a context.
struct Keeper {
    id: String,
    language: String,
    folder: PathBuf,
    inbox: mpsc::Receiver<Ask>,
    kernel: Option<Kernel>,
    /// Why the last kernel is no more.
    ended: Option<String>,
    /// Came while the previous run's client was still reading.
    next: Option<Job>,
    _slot: OwnedSemaphorePermit,
}

/// Someone to tell that the context has ended. Told by being dropped with the keeper.
type Farewell = Option<oneshot::Sender<()>>;

/// The context goes on, or is to end.
type Flow = std::ops::ControlFlow<Farewell>;

impl Keeper {
    async fn live(mut self, agent: Arc<Agent>, tell: watch::Sender<Readiness>) {
        let farewell = match self.start(&agent).await {
            Ok(Ok(())) => {
                drop(agent);
                let _ = tell.send(Readiness::Ready);
                self.serve().await
            }
            Ok(Err(error)) => {
                let _ = tell.send(Readiness::Failed(error.to_string()));
                None
            }
            Err(farewell) => farewell,
        };
        if let Some(kernel) = self.kernel.take() {
            kernel.end().await;
        }
        drop(farewell);
    }

    /// Starts a kernel unless the context is ended meanwhile.
    async fn start(&mut self, agent: &Arc<Agent>) -> Result<Result<(), StartError>, Farewell> {
        let (language, folder) = (self.language.clone(), self.folder.clone());
        let mut start = std::pin::pin!(Kernel::start(agent, &language, &folder));
        loop {
            tokio::select! {
                started = &mut start => {
                    return Ok(started.map(|kernel| self.kernel = Some(kernel)));
                }
                ask = self.inbox.recv() => match ask {
                    // Nothing runs yet that could be interrupted.
                    Some(Ask::Interrupt(_)) => {}
                    Some(Ask::Run(job)) => self.next = Some(job),
                    Some(Ask::End(done)) => return Err(Some(done)),
                    None => return Err(None),
                },
            }
        }
    }

    /// Until the context is ended.
    async fn serve(&mut self) -> Farewell {
        loop {
            let ask = match self.next.take() {
                Some(job) => Some(Ask::Run(job)),
                None => self.idle().await,
            };
            match ask {
                Some(Ask::Run(job)) => {
                    if let Flow::Break(farewell) = self.run(job).await {
                        return farewell;
                    }
                }
                Some(Ask::Interrupt(_)) => {}
                Some(Ask::End(done)) => return Some(done),
                None => return None,
            }
        }
    }

    /// Waits for something to do; what the kernel says meanwhile belongs to no run.
    async fn idle(&mut self) -> Option<Ask> {
        loop {
            let Some(kernel) = &mut self.kernel else { return self.inbox.recv().await };
            tokio::select! {
                ask = self.inbox.recv() => return ask,
                news = kernel.next() => if let News::Ended(why) = news {
                    self.kernel = None;
                    self.ended = Some(why);
                },
            }
        }
    }

    async fn run(&mut self, job: Job) -> Flow {
        let Job { agent, code, events, turn } = job;
        let mut client = Client::new(events);
        let (started, stamp) = (Instant::now(), Stamp::now());
        events::init(&mut client.pending, &self.id, &stamp);
        events::ping(&mut client.pending, &stamp);
        let mut flow = Flow::Continue(());
        self.let_it_leave().await;
        if self.kernel.is_none() {
            flow = self.restart(&agent, &mut client).await;
        }
        let _in_use = agent.runs.hold();
        drop(agent);
        let (run, waiting) = match &mut self.kernel {
            Some(kernel) => {
                let run = Run::new(kernel.execute(&code), started);
                drop(code);
                let mut pump = Pump { run, client: &mut client, interrupts: Vec::new(), interrupt_at: None };
                flow = pump.until_over(self).await;
                (pump.run, pump.interrupts)
            }
            None => (Run::new(String::new(), started), Vec::new()),
        };
        let ends_kernel = run.ends_kernel();
        let flow = self.finish(run, client, (turn, waiting), flow).await;
        if ends_kernel && flow.is_continue() {
            self.part().await;
        }
        flow
    }

    /// Lets go of a kernel whose code has ended it: the next code gets a new one.
    async fn part(&mut self) {
        if let Some(kernel) = self.kernel.take() {
            kernel.end().await;
            self.ended = Some("its code ended it".to_owned());
        }
    }

    /// Tells the outcome, then waits for the client to take it.
    async fn finish(
        &mut self,
        mut run: Run,
        mut client: Client,
        held: (Turn, Vec<oneshot::Sender<()>>),
        flow: Flow,
    ) -> Flow {
        if flow.is_break() {
            run.cut("ContextDeleted", "the context was deleted while its code was running");
        } else if let (None, Some(why)) = (&self.kernel, &self.ended) {
            run.cut("KernelDied", &format!("the kernel ended: {why}"));
        }
        run.finish(&mut client.pending);
        // Before the last event goes out: whoever has read it may run the next code.
        drop(held);
        if flow.is_break() {
            // Whoever deletes does not wait for whoever reads.
            client.offer();
            return flow;
        }
        let deadline = Clock::now() + GIVE_UP;
        while client.has_something() {
            tokio::select! {
                place = client.place() => client.hand(place),
                () = sleep_until(deadline) => break,
                ask = self.inbox.recv() => match ask {
                    Some(Ask::Run(job)) => self.next = Some(job),
                    Some(Ask::Interrupt(_)) => {}
                    Some(Ask::End(done)) => return Flow::Break(Some(done)),
                    None => return Flow::Break(None),
                },
            }
        }
        Flow::Continue(())
    }

    /// Code that is handed to a kernel on its way out would be lost.
    async fn let_it_leave(&mut self) {
        while let Some(kernel) = self.kernel.as_mut().filter(|kernel| kernel.is_leaving()) {
            if let News::Ended(why) = kernel.next().await {
                self.kernel = None;
                self.ended = Some(why);
            }
        }
    }

    async fn restart(&mut self, agent: &Arc<Agent>, client: &mut Client) -> Flow {
        let before = self.ended.take().unwrap_or_default();
        match self.start(agent).await {
            Ok(Ok(())) => {
                let note = format!(
                    "[the kernel had ended ({before}); this is a new one, without the variables of the old one]\n"
                );
                frames::text(&mut client.pending, "stderr", &note, &Stamp::now());
            }
            Ok(Err(error)) => self.ended = Some(format!("{before}; a new one did not start: {error}")),
            Err(farewell) => return Flow::Break(farewell),
        }
        Flow::Continue(())
    }
}

/// Moves a run's output to its client.
struct Pump<'a> {
    run: Run,
    client: &'a mut Client,
    /// Whoever waits for the run to end because of an interrupt.
    interrupts: Vec<oneshot::Sender<()>>,
    /// When to interrupt code that has not been seen to begin.
    interrupt_at: Option<Clock>,
}

impl Pump<'_> {
    async fn until_over(&mut self, keeper: &mut Keeper) -> Flow {
        let mut pings = interval_at(Clock::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut lost_idle = None;
        while !self.run.is_over() {
            let Some(kernel) = &mut keeper.kernel else { break };
            if self.run.has_begun() && self.interrupt_at.take().is_some() {
                kernel.interrupt();
            }
            let reading = self.client.pending.len() < PENDING;
            tokio::select! {
                news = kernel.next(), if reading => match news {
                    News::Message(message) => {
                        self.run.take(&message, &mut self.client.pending);
                        self.client.forget_if_gone();
                        lost_idle = self.run.has_reply().then(|| Clock::now() + LOST_IDLE);
                    }
                    News::Ended(why) => {
                        keeper.kernel = None;
                        keeper.ended = Some(why);
                    }
                },
                place = self.client.place(), if self.client.has_something() => {
                    self.client.hand(place);
                    // What comes next has had no chance to be read before.
                    lost_idle = lost_idle.map(|_| Clock::now() + LOST_IDLE);
                }
                () = at(lost_idle), if reading => break,
                () = at(self.interrupt_at) => {
                    self.interrupt_at = None;
                    kernel.interrupt();
                }
                _ = pings.tick() => self.client.ping(),
                ask = keeper.inbox.recv() => match ask {
                    Some(Ask::Interrupt(done)) => self.interrupt(done, kernel),
                    Some(Ask::Run(job)) => keeper.next = Some(job),
                    Some(Ask::End(done)) => return Flow::Break(Some(done)),
                    None => return Flow::Break(None),
                },
            }
        }
        Flow::Continue(())
    }

    fn interrupt(&mut self, done: oneshot::Sender<()>, kernel: &mut Kernel) {
        if self.interrupts.len() < 64 {
            self.interrupts.push(done);
        }
        if self.client.pending.len() >= PENDING {
            // The run may only be waiting for a client that does not read.
            self.client.leave();
        }
        if self.run.has_begun() {
            kernel.interrupt();
        } else {
            // A kernel ignores what reaches it between two runs, and this one's code may still be on its way.
            self.interrupt_at.get_or_insert_with(|| Clock::now() + NOT_BEGUN);
        }
    }
}

async fn at(time: Option<Clock>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Room for one more chunk.
type Place = Option<mpsc::OwnedPermit<io::Result<Bytes>>>;

/// The reader of a run's events, for as long as there is one.
struct Client {
    events: Option<ChunkSender>,
    pending: Vec<u8>,
}

impl Client {
    fn new(events: ChunkSender) -> Self {
        Client { events: Some(events), pending: Vec::with_capacity(512) }
    }

    fn has_something(&self) -> bool {
        !self.pending.is_empty() && self.events.is_some()
    }

    fn leave(&mut self) {
        self.events = None;
        self.pending = Vec::new();
    }

    fn forget_if_gone(&mut self) {
        if self.events.as_ref().is_none_or(|events| events.is_closed()) {
            self.leave();
        }
    }

    /// Waits until the client takes more; `None` when it has gone.
    async fn place(&self) -> Place {
        match &self.events {
            Some(events) => events.clone().reserve_owned().await.ok(),
            None => None,
        }
    }

    /// Hands over all that is pending.
    fn hand(&mut self, place: Place) {
        match place {
            Some(place) => drop(place.send(Ok(Bytes::from(std::mem::take(&mut self.pending))))),
            None => self.leave(),
        }
    }

    /// Hands over what the client takes right now.
    fn offer(&mut self) {
        if let Some(events) = &self.events {
            let _ = events.try_send(Ok(Bytes::from(std::mem::take(&mut self.pending))));
        }
    }

    /// Keeps a quiet stream alive.
    fn ping(&mut self) {
        if self.pending.is_empty() && self.events.is_some() {
            events::ping(&mut self.pending, &Stamp::now());
        }
    }
}
