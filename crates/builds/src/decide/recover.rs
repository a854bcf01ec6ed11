//! What to do about builds whose owner is gone, and about what ended builds left.

use sandglass_sandbox::{ImageId, Timestamp};

use crate::{
    build::{BuildState, ImageBuild, Obligation},
    key::ArtifactName,
};

/// Whether leases of others are honoured until they run out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takeover {
    /// This is the only server on the store: whoever held a lease is gone.
    AtOnce,
    WhenExpired,
}

/// What a build without an owner needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// Somebody works on it, or it waits for its turn, or it ended.
    Nothing,
    /// Its attempt is over; begin another or end it.
    Interrupted,
    /// Nobody knows whether its artifact was captured: own it and look by name.
    FindArtifact(ArtifactName),
}

/// Decides for one row. `mine` says whether the lease's owner is a worker of this process that is still at it.
pub fn recovery(row: &ImageBuild, mine: bool, takeover: Takeover, now: Timestamp) -> Recovery {
    let held = row.lease.as_ref().is_some_and(|lease| now < lease.until);
    if mine || (held && takeover == Takeover::WhenExpired) {
        return Recovery::Nothing;
    }
    match (row.state, &row.artifact) {
        (BuildState::Running, _) => Recovery::Interrupted,
        (BuildState::Finalizing, Some(name)) => Recovery::FindArtifact(name.clone()),
        // Without a name nothing was captured.
        (BuildState::Finalizing, None) => Recovery::Interrupted,
        _ => Recovery::Nothing,
    }
}

/// Something to be undone now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Due {
    Discard {
        attempt: u32,
    },
    /// Remove what is there; the obligation ends if nothing is left and nothing can come any more.
    RemoveArtifact {
        name: ArtifactName,
        settled: bool,
    },
    Release {
        image: ImageId,
    },
    ForgetSecrets,
}

/// What of a row's obligations can be carried out now: nothing that a running attempt still needs.
pub fn due(row: &ImageBuild, now: Timestamp) -> Vec<Due> {
    let active = matches!(row.state, BuildState::Running | BuildState::Finalizing);
    let due = |owed: &Obligation| match owed {
        Obligation::Workspace { attempt } => {
            (!active || *attempt < row.attempt).then_some(Due::Discard { attempt: *attempt })
        }
        Obligation::Artifact { name, until } => {
            let settled = until.is_none_or(|until| until <= now);
            (!active || row.artifact.as_ref() != Some(name))
                .then(|| Due::RemoveArtifact { name: name.clone(), settled })
        }
        Obligation::Parent { image } => row.state.terminal().then_some(Due::Release { image: *image }),
        Obligation::Secrets => row.state.terminal().then_some(Due::ForgetSecrets),
    };
    row.obligations.iter().filter_map(due).collect()
}

/// The row without what was undone.
pub fn done(row: &ImageBuild, done: &[Due]) -> ImageBuild {
    let over = |owed: &Obligation| {
        done.iter().any(|due| match (due, owed) {
            (Due::Discard { attempt }, Obligation::Workspace { attempt: owed }) => attempt == owed,
            (Due::RemoveArtifact { name, .. }, Obligation::Artifact { name: owed, .. }) => name == owed,
            (Due::Release { image }, Obligation::Parent { image: owed }) => image == owed,
            (Due::ForgetSecrets, Obligation::Secrets) => true,
            _ => false,
        })
    };
    let mut next = row.clone();
    next.obligations.retain(|owed| !over(owed));
    next
}
