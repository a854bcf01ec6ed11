//! Pools of boxes that were started ahead: what a pool is, how many boxes it wants, and whether one of them fits a request.
//!
//! Pure. A warm box is an ordinary box of a runtime whose specification carries a [`Standby`]; what exists is the runtime's knowledge, so
//! the store holds pools and no boxes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    source::{BuildPolicy, FoundImage, RepositorySource},
    spec::{Entrypoint, Spec},
    time::Timestamp,
};

/// The mark of a box that waits for its sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Standby {
    /// The name of the pool that it belongs to.
    pub pool: String,
    /// [`Pool::revision`] when it was started.
    pub revision: String,
    /// What the image's reference stood for then, in the runtime's words; empty when the runtime does not tell.
    #[serde(default)]
    pub image: String,
}

/// How many boxes a pool keeps. *Available* ones wait for a sandbox, *allocated* ones are sandboxes that name the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// With fewer available ones the pool is filled up.
    pub buffer_min: u64,
    /// With more available ones the surplus is removed.
    pub buffer_max: u64,
    /// Available and allocated ones together are at least so many.
    pub pool_min: u64,
    /// Available and allocated ones together are no more than this, as far as the pool has a say: it removes no sandbox.
    pub pool_max: u64,
}

impl Capacity {
    /// How many boxes shall be available, with `available` of them now or on their way and `allocated` sandboxes. Within the buffer's bounds
    /// nothing is changed, unless it is being filled; out of them the middle is aimed at, so that a single sandbox does not start and stop
    /// boxes. The bounds of the pool win.
    pub fn wanted(&self, available: u64, allocated: u64, filling: bool) -> u64 {
        let middle = self.buffer_min + self.buffer_max.saturating_sub(self.buffer_min).div_ceil(2);
        let within = (self.buffer_min..=self.buffer_max).contains(&available);
        let buffer = if within && !(filling && available < middle) { available } else { middle };
        let least = self.pool_min.saturating_sub(allocated);
        let most = self.pool_max.saturating_sub(allocated);
        buffer.max(least).min(most)
    }
}

/// A pool as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Like a DNS name, at most 253 characters.
    pub name: String,
    pub capacity: Capacity,
    /// What its boxes are made as: an image, limits and a platform, or a repository; nothing that a request says of itself.
    pub template: Spec,
    /// Of a pool of a repository: `repository` of the request that made it. It may name secrets, and holds none. Null otherwise.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub repository: Value,
    pub created_at: Timestamp,
}

impl Pool {
    /// The repository that its boxes are made for.
    pub fn source(&self) -> Option<&RepositorySource> {
        self.template.source.as_deref()
    }

    /// Changes whenever boxes that were started before are of no use any more: another template, a pool made anew under the same name, or
    /// another generation of the agent.
    pub fn revision(&self) -> String {
        let text = serde_json::to_string(&self.template).unwrap_or_default();
        // No secret and no adversary: whoever may make pools may make any.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let generation = crate::agent::GENERATION.to_string();
        for byte in text.bytes().chain(self.created_at.as_millis().to_le_bytes()).chain(generation.bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        format!("{hash:016x}")
    }

    /// What a warm box is started as. `image` is what the image's reference stands for.
    pub fn standby(&self, image: String) -> Spec {
        let standby = Standby { pool: self.name.clone(), revision: self.revision(), image };
        Spec { standby: Some(standby), entrypoint: Entrypoint::AgentOnly, ..self.template.clone() }
    }

    /// What a warm box of a pool of a repository is started as: of the image that was found for it, which the box carries along, so that
    /// whoever finds it knows what is held for it.
    pub fn standby_of(&self, found: FoundImage, identity: String) -> Spec {
        let mut spec = self.standby(identity);
        spec.image.clone_from(&found.reference);
        if let Some(source) = &mut spec.source {
            source.found = Some(found);
        }
        spec
    }

    /// Whether a box of this pool can become what `wanted` asks for.
    ///
    /// # Errors
    /// Why not, as the end of a sentence about the request.
    pub fn fits(&self, wanted: &Spec) -> Result<(), String> {
        let have = &self.template;
        match (&have.source, &wanted.source) {
            (None, None) if have.image != wanted.image => {
                return Err(format!("it asks for image {}, and the pool has {}", wanted.image, have.image));
            }
            (None, None) => {}
            (Some(have), Some(wanted)) => same_work(have, wanted)?,
            (Some(_), None) => return Err("it names no repository, and the pool is of one".to_owned()),
            (None, Some(_)) => return Err("it names a repository, and the pool is of an image".to_owned()),
        }
        if have.limits != wanted.limits {
            return Err("it asks for other resources than the pool has".to_owned());
        }
        if let Some(platform) = &wanted.platform
            && have.platform.as_ref() != Some(platform)
        {
            return Err("it asks for another platform than the pool has".to_owned());
        }
        for (asked, what) in [
            (!wanted.volumes.is_empty(), "volumes"),
            (wanted.egress.is_some(), "a network policy"),
            (wanted.snapshot.is_some(), "a snapshot"),
            // Its ports are published elsewhere.
            (wanted.secure_access, "secure access"),
            (wanted.extensions.contains_key(ISOLATION), "isolated sessions"),
        ] {
            if asked {
                return Err(format!("it asks for {what}, which a box gets only when it is made"));
            }
        }
        told_late(wanted)
    }
}

/// Whether the environment can still be told to an agent that runs.
///
/// # Errors
/// The first variable that cannot, in the end of a sentence about the request.
pub fn told_late(wanted: &Spec) -> Result<(), String> {
    match wanted.env.iter().find(|(name, _)| read_at_start(name)) {
        Some((name, _)) => Err(format!("it sets {name}, which an agent reads only when it starts")),
        None => Ok(()),
    }
}

/// Whether images of one repository serve the other. Refs may differ: a box syncs from its image's commit to the one that is asked for.
fn same_work(have: &RepositorySource, wanted: &RepositorySource) -> Result<(), String> {
    let places = |source: &RepositorySource| -> Vec<(String, String)> {
        source.repositories.iter().map(|one| (one.url.clone(), one.path.clone())).collect()
    };
    let differs = [
        (
            have.namespace != wanted.namespace,
            "its images are its tenant's own, and the pool has the server's",
        ),
        (places(have) != places(wanted), "it asks for other repositories or paths than the pool has"),
        (
            (have.depth, have.submodules, have.lfs) != (wanted.depth, wanted.submodules, wanted.lfs),
            "it asks for another depth, submodules or lfs than the pool has",
        ),
        (
            have.image_build.recipe != wanted.image_build.recipe,
            "it asks for another recipe than the pool has",
        ),
        (wanted.image_build.policy == BuildPolicy::Always, "it asks for a build of its own"),
    ];
    match differs.iter().find(|(differs, _)| *differs) {
        Some((_, why)) => Err((*why).to_owned()),
        None => Ok(()),
    }
}

/// The extension that asks for isolated sessions.
const ISOLATION: &str = "bootstrap.execd.isolation";

/// Variables that an agent acts on before it is anybody's.
fn read_at_start(name: &str) -> bool {
    const PREFIXES: [&str; 6] = ["EXECD_", "BOOTSTRAP_", "JUPYTER_", "OTEL_", "OPENSANDBOX_", "SANDGLASS_"];
    name == "HOME" || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Where the box of a sandbox that names a pool comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Origin {
    /// A box that waited in the pool.
    Warm { pool: String },
    /// A new one, and why.
    Cold { pool: String, why: String },
}

/// How long a pool waits after `failures` starts in a row that failed: 1 s, doubling to a minute.
pub fn pause_after(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.saturating_sub(1).min(6)).min(Duration::from_secs(60))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Limits, Platform};

    fn capacity(buffer: (u64, u64), pool: (u64, u64)) -> Capacity {
        Capacity { buffer_min: buffer.0, buffer_max: buffer.1, pool_min: pool.0, pool_max: pool.1 }
    }

    fn pool() -> Pool {
        Pool {
            name: "p".into(),
            capacity: capacity((1, 3), (0, 10)),
            template: Spec::new("img", Entrypoint::AgentOnly),
            repository: Value::Null,
            created_at: Timestamp::clamped(1_000),
        }
    }

    fn source() -> RepositorySource {
        let lease = crate::source::Lease::default();
        serde_json::from_value(serde_json::json!({
            "repositories": [{"url": "https://g/a/b", "ref": "main", "path": "/workspace/b"}],
            "imageBuild": {"policy": "ifMissing", "match": "compatible"},
            "lease": lease,
        }))
        .unwrap()
    }

    #[test]
    fn what_is_wanted_stays_within_every_bound() {
        let usual = capacity((2, 4), (0, 10));
        for (available, allocated, wanted) in [
            (0, 0, 3),
            (1, 0, 3),
            // Within the buffer nothing moves.
            (2, 0, 2),
            (4, 6, 4),
            (9, 0, 3),
            // The pool is full, or nearly.
            (0, 8, 2),
            (3, 9, 1),
            (3, 12, 0),
        ] {
            assert_eq!(usual.wanted(available, allocated, false), wanted, "{available} {allocated}");
        }
        assert_eq!((usual.wanted(2, 0, true), usual.wanted(3, 0, true), usual.wanted(4, 0, true)), (3, 3, 4));
        assert_eq!(capacity((0, 0), (3, 5)).wanted(0, 0, false), 3);
        assert_eq!(capacity((0, 0), (3, 5)).wanted(0, 2, false), 1);
        assert_eq!(capacity((0, 0), (0, 5)).wanted(0, 0, false), 0);
        assert_eq!(capacity((1, 1), (0, 5)).wanted(0, 0, false), 1);
        // Bounds that contradict each other: the upper one of the pool wins, and nothing overflows.
        assert_eq!(capacity((5, 1), (9, 2)).wanted(0, 0, false), 2);
        assert_eq!(capacity((0, u64::MAX), (0, u64::MAX)).wanted(7, u64::MAX, false), 0);
    }

    #[test]
    fn a_box_fits_what_can_still_be_delivered() {
        let pool = pool();
        let asked = |change: &dyn Fn(&mut Spec)| {
            let mut spec = Spec::new("img", Entrypoint::Command(vec!["x".into()]));
            spec.env.push(("A".into(), "b".into()));
            change(&mut spec);
            pool.fits(&spec)
        };
        assert_eq!(asked(&|_| {}), Ok(()));
        let limits = Limits { memory_bytes: Some(1), ..Limits::default() };
        let platform = Platform { os: "linux".into(), arch: "arm64".into() };
        assert!(asked(&|s| s.image = "other".into()).unwrap_err().contains("image other"));
        assert!(asked(&|s| s.limits = limits).unwrap_err().contains("resources"));
        assert!(asked(&|s| s.platform = Some(platform.clone())).unwrap_err().contains("platform"));
        assert!(
            asked(&|s| s.egress = Some(crate::spec::Egress {
                policy: Default::default(),
                credential_proxy: false,
                env: Vec::new(),
            }))
            .unwrap_err()
            .contains("network policy")
        );
        assert!(asked(&|s| s.env.push(("EXECD_X".into(), String::new()))).unwrap_err().contains("EXECD_X"));
        assert!(asked(&|s| s.env.push(("HOME".into(), "/x".into()))).is_err());
    }

    #[test]
    fn a_box_of_a_repository_fits_what_its_image_serves() {
        let mut pool = pool();
        pool.template.image.clear();
        pool.template.source = Some(Box::new(source()));
        let asked = |change: &dyn Fn(&mut RepositorySource)| {
            let mut spec = Spec::new("", Entrypoint::AgentOnly);
            let mut wanted = source();
            change(&mut wanted);
            spec.source = Some(Box::new(wanted));
            pool.fits(&spec)
        };
        assert_eq!(asked(&|_| {}), Ok(()));
        assert_eq!(asked(&|s| s.repositories[0].reference = Some("other".into())), Ok(()));
        assert!(asked(&|s| s.repositories[0].url.push('x')).unwrap_err().contains("other repositories"));
        assert!(asked(&|s| s.repositories[0].path.push('x')).unwrap_err().contains("other repositories"));
        assert!(asked(&|s| s.depth = Some(1)).unwrap_err().contains("depth"));
        assert!(asked(&|s| s.namespace = Some("t".into())).unwrap_err().contains("tenant"));
        assert!(asked(&|s| s.image_build.recipe = "x".into()).unwrap_err().contains("recipe"));
        assert!(asked(&|s| s.image_build.policy = BuildPolicy::Always).unwrap_err().contains("build"));
        assert!(pool.fits(&Spec::new("img", Entrypoint::AgentOnly)).unwrap_err().contains("no repository"));
        let mut of_image = super::tests::pool();
        of_image.template.image.clear();
        let mut spec = Spec::new("", Entrypoint::AgentOnly);
        spec.source = Some(Box::new(source()));
        assert!(of_image.fits(&spec).unwrap_err().contains("of an image"));
    }

    #[test]
    fn the_revision_follows_everything_that_makes_boxes_stale() {
        let first = pool().revision();
        assert_eq!(first, pool().revision());
        let mut other = pool();
        other.template.image = "img:2".into();
        assert_ne!(first, other.revision());
        let mut again = pool();
        again.created_at = Timestamp::clamped(2_000);
        assert_ne!(first, again.revision());
        let mut resized = pool();
        resized.capacity.buffer_max = 9;
        assert_eq!(first, resized.revision());
    }

    #[test]
    fn failures_are_answered_with_longer_pauses() {
        let pauses: Vec<u64> = [1, 2, 3, 6, 7, 40].map(|n| pause_after(n).as_secs()).to_vec();
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60]);
    }
}
