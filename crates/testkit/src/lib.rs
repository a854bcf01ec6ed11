//! Test harness: a runtime and a store in memory that fail on command, and a clock that follows tokio's.

mod fake_runtime;
mod manual_clock;
mod memory_store;
pub mod runtime_contract;

pub use fake_runtime::{FakeRuntime, Fault};
pub use manual_clock::ManualClock;
pub use memory_store::MemoryStore;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    #[tokio::test]
    async fn the_fake_keeps_the_runtime_contract() {
        let subject = super::runtime_contract::Subject {
            runtime: Arc::new(super::FakeRuntime::default()),
            image: "any".into(),
            runs_processes: false,
        };
        super::runtime_contract::run(&subject).await;
    }
}
