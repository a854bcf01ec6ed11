//! A remote whose answer is set by the test.

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;

use crate::{
    ports::{ResolveError, ResolveErrorKind, Resolver},
    prebuild::Prebuild,
    submission::Resolved,
};

/// Answers the same to every prebuild, and counts the looks.
#[derive(Debug, Default)]
pub struct FakeResolver(Mutex<(Option<Resolved>, usize)>);

impl FakeResolver {
    /// What the remote is at from now on; `None`: it cannot be read.
    pub fn set(&self, resolved: Option<Resolved>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 = resolved;
    }

    /// How often the remote was looked at.
    pub fn looks(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1
    }
}

#[async_trait]
impl Resolver for FakeResolver {
    async fn resolve(&self, _: &Prebuild) -> Result<Resolved, ResolveError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.1 += 1;
        state
            .0
            .clone()
            .ok_or_else(|| ResolveError::new(ResolveErrorKind::Unreachable, "the remote cannot be reached"))
    }
}
