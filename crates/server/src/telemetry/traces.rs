//! Traces: one span for each request, and one for each phase of the create that it began.
//!
//! Off unless configured; then a request costs a comparison. A span that has ended goes into a bounded queue; when that is
//! full it is dropped and counted, so a slow collector is nobody's problem but its own.
//!
//! The current span travels with the task, not with the thread: [`scoped`] sets it for a future, [`inherit`] carries it into a task
//! that is spawned.

use std::{borrow::Cow, future::Future, sync::Arc, time::SystemTime};

use futures_util::future::Either;
use http::HeaderMap;
use tokio::sync::mpsc;

use super::metrics::{Export, Metrics, Signal};

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    Text(Cow<'static, str>),
    Int(i64),
}

/// Where a span stands, as in the header `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub sampled: bool,
}

impl SpanContext {
    /// The W3C trace flags.
    pub fn flags(&self) -> u8 {
        u8::from(self.sampled)
    }

    /// Reads `00-<trace>-<span>-<flags>`. Versions to come may append fields.
    pub fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let [version] = hex::<1>(version)?;
        let [flags] = hex::<1>(flags)?;
        let context = Self { trace_id: hex(trace)?, span_id: hex(span)?, sampled: flags & 1 == 1 };
        let wrong = version == 0xff
            || (version == 0 && parts.next().is_some())
            || context.trace_id == [0; 16]
            || context.span_id == [0; 8];
        (!wrong).then_some(context)
    }
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != N * 2 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; N];
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[place * 2..place * 2 + 2], 16).ok()?;
    }
    Some(bytes)
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&super::ids::random()[..N]);
    bytes
}

/// Which requests are traced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Whether the caller's own decision counts.
    pub follow_parent: bool,
    /// The share of the others, from 0 to 1.
    pub ratio: f64,
}

impl Sampler {
    fn samples(&self, parent: Option<&SpanContext>, trace_id: [u8; 16]) -> bool {
        if let (true, Some(parent)) = (self.follow_parent, parent) {
            return parent.sampled;
        }
        // The last eight bytes decide, so that every service that sees the trace decides alike.
        let mut low = [0; 8];
        low.copy_from_slice(&trace_id[8..]);
        let place = (u64::from_be_bytes(low) >> 1) as f64;
        self.ratio >= 1.0 || place < self.ratio * (u64::MAX >> 1) as f64
    }
}

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Internal = 1,
    Server = 2,
}

/// A span that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    pub context: SpanContext,
    pub parent: Option<[u8; 8]>,
    pub name: Cow<'static, str>,
    pub kind: Kind,
    pub started: SystemTime,
    pub ended: SystemTime,
    pub attributes: Vec<(&'static str, Attribute)>,
    pub failure: Option<String>,
}

struct Sink {
    queue: mpsc::Sender<Ended>,
    sampler: Sampler,
    metrics: Arc<Metrics>,
}

/// Makes spans, or nothing when tracing is off. Clones share it.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<Sink>>);

impl std::fmt::Debug for Tracer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracer").field("on", &self.0.is_some()).finish()
    }
}

impl Tracer {
    /// A tracer that makes nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// A tracer whose ended spans go into `queue`.
    pub fn new(queue: mpsc::Sender<Ended>, sampler: Sampler, metrics: Arc<Metrics>) -> Self {
        Self(Some(Arc::new(Sink { queue, sampler, metrics })))
    }

    /// Begins the span of a request; `None` when tracing is off.
    pub fn request(&self, headers: &HeaderMap, name: impl FnOnce() -> String) -> Option<Span> {
        let sink = self.0.as_ref()?;
        let parent = headers.get("traceparent").and_then(|v| v.to_str().ok()).and_then(SpanContext::parse);
        let trace_id = parent.map_or_else(random, |parent| parent.trace_id);
        let sampled = sink.sampler.samples(parent.as_ref(), trace_id);
        let context = SpanContext { trace_id, span_id: random(), sampled };
        Some(Span::new(sink, context, parent.map(|p| p.span_id), name().into(), Kind::Server))
    }
}

#[derive(Clone)]
struct Current {
    sink: Arc<Sink>,
    context: SpanContext,
}

tokio::task_local! {
    static CURRENT: Current;
}

/// Begins a span below the current one; `None` when there is none.
pub fn child(name: &'static str) -> Option<Span> {
    let current = CURRENT.try_with(Current::clone).ok()?;
    let context = SpanContext { span_id: random(), ..current.context };
    Some(Span::new(&current.sink, context, Some(current.context.span_id), name.into(), Kind::Internal))
}

/// Runs the future with `span` as the current one.
pub fn scoped<F: Future>(span: Option<&Span>, future: F) -> impl Future<Output = F::Output> {
    match span {
        Some(span) => {
            let current = Current { sink: span.sink.clone(), context: span.ended.context };
            Either::Left(CURRENT.scope(current, future))
        }
        None => Either::Right(future),
    }
}

/// The future with the span that is current now, for a task that is about to be spawned.
pub fn inherit<F: Future>(future: F) -> impl Future<Output = F::Output> {
    match CURRENT.try_with(Current::clone) {
        Ok(current) => Either::Left(CURRENT.scope(current, future)),
        Err(_) => Either::Right(future),
    }
}

/// A span that lasts until it is dropped.
pub struct Span {
    sink: Arc<Sink>,
    ended: Ended,
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.ended.fmt(f)
    }
}

impl Span {
    fn new(
        sink: &Arc<Sink>,
        context: SpanContext,
        parent: Option<[u8; 8]>,
        name: Cow<'static, str>,
        kind: Kind,
    ) -> Self {
        let started = SystemTime::now();
        let ended =
            Ended { context, parent, name, kind, started, ended: started, attributes: vec![], failure: None };
        Self { sink: sink.clone(), ended }
    }

    /// Adds an attribute.
    pub fn text(&mut self, name: &'static str, value: impl Into<Cow<'static, str>>) {
        if self.ended.context.sampled {
            self.ended.attributes.push((name, Attribute::Text(value.into())));
        }
    }

    /// Adds an attribute.
    pub fn number(&mut self, name: &'static str, value: i64) {
        self.ended.attributes.push((name, Attribute::Int(value)));
    }

    /// Marks the span as failed.
    pub fn fail(&mut self, why: impl Into<String>) {
        self.ended.failure = Some(why.into());
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if !self.ended.context.sampled {
            return;
        }
        self.ended.ended = SystemTime::now();
        let ended = Ended { attributes: std::mem::take(&mut self.ended.attributes), ..self.ended.clone() };
        if self.sink.queue.try_send(ended).is_err() {
            self.sink.metrics.count_export(Signal::Traces, Export::Dropped, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sampler = Sampler { follow_parent: true, ratio: 1.0 };
    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn tracer(room: usize, sampler: Sampler) -> (Tracer, mpsc::Receiver<Ended>, Arc<Metrics>) {
        let (queue, ended) = mpsc::channel(room);
        let metrics = Arc::new(Metrics::default());
        (Tracer::new(queue, sampler, metrics.clone()), ended, metrics)
    }

    fn from(parent: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static("traceparent"), parent.parse().unwrap())])
    }

    #[test]
    fn the_callers_context_is_read_strictly() {
        let context = SpanContext::parse(PARENT).unwrap();
        assert_eq!((context.trace_id[0], context.span_id[7], context.sampled), (0x0a, 0x31, true));
        assert!(SpanContext::parse(&PARENT.replace("00-0", "01-0")).is_some());
        assert!(SpanContext::parse(&format!("01{}-what", &PARENT[2..])).is_some());
        for wrong in [
            "",
            "00",
            &PARENT[..54],
            &PARENT.to_uppercase(),
            &format!("{PARENT}-x"),
            &PARENT.replace("00-0", "ff-0"),
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c8031é-b7ad6b7169203331-01",
        ] {
            assert_eq!(SpanContext::parse(wrong), None, "{wrong}");
        }
    }

    #[tokio::test]
    async fn children_belong_to_the_request_also_in_other_tasks() {
        let (tracer, mut ended, _) = tracer(8, ALL);
        let mut span = tracer.request(&from(PARENT), || "GET /x".to_owned()).unwrap();
        span.fail("no");
        let inner = async {
            drop(child("here"));
            tokio::spawn(inherit(async { drop(child("there")) })).await.unwrap();
        };
        scoped(Some(&span), inner).await;
        drop(span);
        let spans: Vec<Ended> = std::iter::from_fn(|| ended.try_recv().ok()).collect();
        let names: Vec<_> = spans.iter().map(|s| &*s.name).collect();
        assert_eq!(names, ["here", "there", "GET /x"]);
        let parent = SpanContext::parse(PARENT).unwrap();
        assert!(spans.iter().all(|s| s.context.trace_id == parent.trace_id));
        assert_eq!(spans[2].parent, Some(parent.span_id));
        assert_eq!(spans[2].failure.as_deref(), Some("no"));
        assert!(spans[..2].iter().all(|s| s.parent == Some(spans[2].context.span_id)));
    }

    #[tokio::test]
    async fn without_a_tracer_there_is_nothing() {
        assert!(Tracer::off().request(&from(PARENT), || unreachable!()).is_none());
        assert!(child("x").is_none());
        assert!(scoped(None, inherit(async { child("x").is_none() })).await);
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (tracer, mut ended, metrics) = tracer(1, ALL);
        for _ in 0..3 {
            tracer.request(&HeaderMap::new(), || "x".to_owned());
        }
        assert_eq!(metrics.exports(Signal::Traces, Export::Dropped), 2);
        assert!(ended.try_recv().is_ok() && ended.try_recv().is_err());
    }

    #[test]
    fn the_sampler_follows_the_parent_or_the_ratio() {
        let sampled = |sampler: Sampler, parent: Option<&str>| {
            let (tracer, mut ended, _) = tracer(1, sampler);
            let headers = parent.map(from).unwrap_or_default();
            drop(tracer.request(&headers, || "x".to_owned()));
            ended.try_recv().is_ok()
        };
        let off = PARENT.replace("-01", "-00");
        assert!(!sampled(ALL, Some(&off)));
        assert!(sampled(Sampler { follow_parent: false, ..ALL }, Some(&off)));
        let never = Sampler { follow_parent: true, ratio: 0.0 };
        assert!(sampled(never, Some(PARENT)));
        assert!(!sampled(never, None));
        let half = Sampler { follow_parent: false, ratio: 0.5 };
        let low = |byte: u8| std::array::from_fn(|place| if place == 8 { byte } else { 0 });
        assert!(half.samples(None, low(0x10)) && !half.samples(None, low(0xf0)));
    }
}
