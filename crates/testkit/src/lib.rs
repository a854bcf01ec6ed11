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

    use async_trait::async_trait;
    use sandglass_sandbox::{Clock, SandboxId, SystemClock, ports::Runtime};

    use super::{
        FakeRuntime,
        runtime_contract::{self, Hands, Subject},
    };

    /// The fake has no back to act behind; it plays these parts itself.
    struct Pretending(Arc<FakeRuntime>);

    #[async_trait]
    impl Hands for Pretending {
        async fn kill(&self, id: SandboxId) {
            self.0.exits(id, 137, SystemClock.now());
        }

        async fn pause(&self, id: SandboxId) {
            self.0.pause(id).await.expect("pause");
        }

        async fn remove(&self, id: SandboxId) {
            self.0.remove(id, std::time::Duration::ZERO).await.expect("remove");
        }

        async fn interrupt_a_start(&self, _id: SandboxId, _image: &str) {}

        async fn has_volume(&self, _name: &str) -> bool {
            false
        }

        async fn remove_volume(&self, _name: &str) {}
    }

    #[tokio::test]
    async fn the_fake_keeps_the_runtime_contract() {
        let fake = Arc::new(FakeRuntime::default());
        let again = fake.clone();
        let subject = Subject {
            hands: Some(Arc::new(Pretending(fake.clone()))),
            restarted: Some(Arc::new(move || {
                let again: Arc<dyn Runtime> = again.clone();
                Box::pin(async move { again })
            })),
            ..Subject::new(fake, "any")
        };
        runtime_contract::run(&subject).await;
    }
}
