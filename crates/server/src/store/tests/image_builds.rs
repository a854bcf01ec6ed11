//! The rows of image builds: one body for the store in memory and both engines.

use std::{collections::BTreeSet, sync::Arc};

use sandglass_builds::{
    build::{
        BuildState, Cause, CauseKind, Checkout, ImageBuild, Obligation, Origin, Plan, Priority, Recipe,
        RecipeKind, Slot,
    },
    image::{Image, ImageState, Tag},
    key::{ArtifactName, BuildKey, TagName},
    ports::{BuildFilter, BuildStore, Commit, ImageFilter, Inserted, Negative, NegativeChange, NewImage},
    prebuild::Prebuild,
    testing::{Faults, MemoryStore},
};
use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId};

use super::*;
use crate::store::migrate::{Moved, Place, migrate};

macro_rules! on_all {
    ($(async fn $name:ident($store:ident) $body:block)*) => {$(
        mod $name {
            use super::*;

            async fn check($store: &dyn BuildStore) $body

            #[tokio::test]
            async fn memory() {
                check(&MemoryStore::new(Arc::default(), Arc::<Faults>::default())).await;
            }

            #[tokio::test]
            async fn sqlite() {
                let fixture = Fixture::sqlite().await;
                check(&fixture.store).await;
                fixture.end().await;
            }

            #[tokio::test]
            async fn postgres() {
                let Some(fixture) = Fixture::postgres().await else { return };
                check(&fixture.store).await;
                fixture.end().await;
            }
        }
    )*};
}

fn key(digit: &str) -> BuildKey {
    digit.repeat(64).parse().unwrap()
}

fn slot(digit: &str, namespace: Option<&str>) -> Slot {
    Slot { namespace: namespace.map(str::to_owned), runtime: "fake".into(), key: key(digit) }
}

fn build(slot: &Slot, created: i64) -> ImageBuild {
    let checkout = Checkout {
        url: "https://github.com/acme/web.git".into(),
        reference: Some("main".into()),
        commit: "c".repeat(40),
        path: "/workspace/web".into(),
    };
    ImageBuild {
        id: ImageBuildId::random(),
        version: 1,
        slot: slot.clone(),
        recipe_key: "e".repeat(64).parse().unwrap(),
        plan: Plan {
            repository_key: "github.com/acme/web".into(),
            checkouts: vec![checkout],
            recipe: Recipe { kind: RecipeKind::Hooks, details: serde_json::json!({"base": "b\u{0}ase"}) },
            platform: "linux/amd64".into(),
            agent_generation: 2,
            confidential: false,
            incremental: true,
        },
        origin: Origin::Explicit,
        independent: true,
        priority: Priority::Interactive,
        tags: BTreeSet::new(),
        metadata: [("a".to_owned(), "b".to_owned())].into(),
        timeout_seconds: 60,
        state: BuildState::Queued,
        cause: None,
        last_transition_at: at(created),
        waiters: ["one".to_owned()].into(),
        cancel: None,
        attempt: 0,
        transient_failures: 0,
        interruptions: 0,
        not_before: None,
        lease: None,
        last_fence: 0,
        steps: Vec::new(),
        parent_image: None,
        artifact: None,
        image: None,
        obligations: Vec::new(),
        created_at: at(created),
        queued_at: at(created),
        started_at: None,
        finished_at: None,
        deadline_at: at(created + 1000),
    }
}

fn image(of: &ImageBuild, created: i64) -> Image {
    Image {
        id: ImageId::random(),
        version: 1,
        lineage: of.lineage(),
        key: of.slot.key.clone(),
        repository_key: of.plan.repository_key.clone(),
        artifact: ArtifactName::new(&of.slot.key, 1),
        reference: "img".into(),
        digest: Some("sha256:x".into()),
        size_bytes: 9,
        checkouts: of.plan.checkouts.clone(),
        agent_generation: 2,
        platform: "linux/amd64".into(),
        state: ImageState::Ready,
        blocked: false,
        image_build_id: of.id,
        holders: 0,
        tags: Vec::new(),
        restore_failures: 0,
        increments: 0,
        removal: Default::default(),
        created_at: at(created),
        last_used_at: at(created),
    }
}

fn tag(name: &str, image: &Image) -> Tag {
    Tag {
        namespace: image.lineage.namespace.clone(),
        repository_key: image.repository_key.clone(),
        name: name.parse().unwrap(),
        image: image.id,
        moved_at: at(7),
    }
}

/// The row in further states, as its owner writes them.
async fn become_all(store: &dyn BuildStore, row: &ImageBuild, states: &[BuildState]) -> ImageBuild {
    let mut row = row.clone();
    for state in states {
        let next = row.becoming(*state, at(100)).unwrap();
        let next = ImageBuild { version: row.version + 1, ..next };
        assert_eq!(commit(store, &row, &next, None, None).await, Advance::Written);
        row = next;
    }
    row
}

async fn commit(
    store: &dyn BuildStore,
    before: &ImageBuild,
    next: &ImageBuild,
    image: Option<&NewImage>,
    negative: Option<&NegativeChange>,
) -> Advance {
    store.commit(Commit { expected: before.version, build: next, image, negative }).await.unwrap()
}

/// An image that a build made.
async fn made(store: &dyn BuildStore, slot: &Slot, new: impl FnOnce(Image) -> NewImage) -> Image {
    let row = build(slot, 10);
    assert_eq!(store.insert_build(&row).await.unwrap(), Inserted::Written);
    let row = become_all(store, &row, &[BuildState::Running, BuildState::Finalizing]).await;
    let new = new(image(&row, 10));
    let next = ImageBuild {
        version: row.version + 1,
        image: Some(new.image.id),
        ..row.becoming(BuildState::Succeeded, at(200)).unwrap()
    };
    assert_eq!(commit(store, &row, &next, Some(&new), None).await, Advance::Written);
    store.image(new.image.id).await.unwrap().unwrap()
}

fn plain(image: Image) -> NewImage {
    NewImage { image, holders: Vec::new(), tags: Vec::new(), supersedes: Vec::new() }
}

on_all! {
    async fn one_build_of_a_slot_is_under_way(store) {
        let (here, there) = (slot("a", None), slot("a", Some("ns")));
        let (row, other) = (build(&here, 1), build(&here, 2));
        assert_eq!(store.insert_build(&row).await.unwrap(), Inserted::Written);
        assert_eq!(store.insert_build(&other).await.unwrap(), Inserted::InFlight(row.id));
        assert_eq!(store.insert_build(&row).await.unwrap(), Inserted::InFlight(row.id));
        assert_eq!(store.insert_build(&build(&there, 3)).await.unwrap(), Inserted::Written);
        assert_eq!(store.in_flight(&here).await.unwrap().as_ref(), Some(&row));
        assert_eq!(store.build(row.id).await.unwrap().as_ref(), Some(&row), "as it was written");
        assert_eq!(store.build(other.id).await.unwrap(), None);
        let row = become_all(store, &row, &[BuildState::Running, BuildState::Failed]).await;
        assert_eq!(store.in_flight(&here).await.unwrap(), None);
        assert_eq!(store.insert_build(&other).await.unwrap(), Inserted::Written);
        assert_eq!(store.build(row.id).await.unwrap(), Some(row));
    }

    async fn a_lost_race_changes_nothing(store) {
        let row = build(&slot("a", None), 1);
        store.insert_build(&row).await.unwrap();
        let next = ImageBuild { version: 2, ..row.becoming(BuildState::Running, at(2)).unwrap() };
        assert_eq!(commit(store, &row, &next, None, None).await, Advance::Written);
        let late = ImageBuild { version: 2, ..row.becoming(BuildState::Cancelled, at(3)).unwrap() };
        let image = plain(image(&row, 1));
        assert_eq!(commit(store, &row, &late, Some(&image), None).await, Advance::Lost);
        assert_eq!(store.build(row.id).await.unwrap(), Some(next.clone()));
        assert_eq!(store.image(image.image.id).await.unwrap(), None);
        assert_eq!(store.delete_build(row.id, 1).await.unwrap(), Advance::Lost);
        assert_eq!(store.delete_build(row.id, 2).await.unwrap(), Advance::Written);
        assert_eq!(store.build(row.id).await.unwrap(), None);
    }

    async fn what_is_open_and_what_is_over(store) {
        let (a, b, c) = (build(&slot("a", None), 1), build(&slot("b", None), 2), build(&slot("c", None), 3));
        for row in [&a, &b, &c] {
            store.insert_build(row).await.unwrap();
        }
        let b = become_all(store, &b, &[BuildState::Running]).await;
        let owing = ImageBuild {
            version: b.version + 1,
            obligations: vec![Obligation::Workspace { attempt: 1 }],
            ..b.becoming(BuildState::Failed, at(50)).unwrap()
        };
        assert_eq!(commit(store, &b, &owing, None, None).await, Advance::Written);
        let c = become_all(store, &c, &[BuildState::Cancelled]).await;
        let ids = |rows: Vec<ImageBuild>| rows.into_iter().map(|row| row.id).collect::<BTreeSet<_>>();
        assert_eq!(ids(store.open_builds("fake").await.unwrap()), [a.id, b.id].into());
        assert_eq!(ids(store.open_builds("other").await.unwrap()), BTreeSet::new());
        assert_eq!(ids(store.ended_builds("fake", at(101)).await.unwrap()), [c.id].into());
        assert_eq!(ids(store.ended_builds("fake", at(100)).await.unwrap()), BTreeSet::new());
    }

    async fn lists_are_narrowed_and_paged(store) {
        for (created, digit) in [(1, "a"), (3, "b"), (2, "c")] {
            store.insert_build(&build(&slot(digit, None), created)).await.unwrap();
        }
        store.insert_build(&build(&slot("a", Some("ns")), 9)).await.unwrap();
        let page = |filter: BuildFilter, offset| async move {
            let (rows, total) = store.builds(&filter, offset, 2).await.unwrap();
            (rows.into_iter().map(|row| row.created_at.as_millis()).collect::<Vec<_>>(), total)
        };
        assert_eq!(page(BuildFilter::default(), 0).await, (vec![3, 2], 3));
        assert_eq!(page(BuildFilter::default(), 2).await, (vec![1], 3));
        let of = BuildFilter { namespace: Some("ns".into()), ..BuildFilter::default() };
        assert_eq!(page(of, 0).await, (vec![9], 1));
        let none = BuildFilter { states: vec![BuildState::Failed], ..BuildFilter::default() };
        assert_eq!(page(none, 0).await, (vec![], 0));
        let other = BuildFilter { repository_key: Some("x".into()), ..BuildFilter::default() };
        assert_eq!(page(other, 0).await, (vec![], 0));
    }

    async fn numbers_are_given_once(store) {
        let near: BuildKey = format!("{}{}", "a".repeat(12), "b".repeat(52)).parse().unwrap();
        assert_eq!(store.reserve_ordinal("fake", &key("a")).await.unwrap(), 1);
        assert_eq!(store.reserve_ordinal("fake", &near).await.unwrap(), 2, "the same first digits");
        assert_eq!(store.reserve_ordinal("other", &key("a")).await.unwrap(), 1);
        assert_eq!(store.reserve_ordinal("fake", &key("b")).await.unwrap(), 1);
    }

    async fn failures_are_remembered_until_they_are_over(store) {
        let row = build(&slot("a", None), 1);
        store.insert_build(&row).await.unwrap();
        let negative = Negative {
            slot: row.slot.clone(),
            build: row.id,
            cause: Cause::new(CauseKind::UserFailure, "no"),
            failures: 2,
            until: at(500),
        };
        let next = ImageBuild { version: 2, ..row.becoming(BuildState::Failed, at(2)).unwrap() };
        let change = NegativeChange::Remember(negative.clone());
        assert_eq!(commit(store, &row, &next, None, Some(&change)).await, Advance::Written);
        assert_eq!(store.negative(&row.slot).await.unwrap(), Some(negative));
        assert_eq!(store.negative(&slot("a", Some("ns"))).await.unwrap(), None);
        assert_eq!(store.prune_negatives(at(500)).await.unwrap(), 0);
        assert_eq!(store.prune_negatives(at(501)).await.unwrap(), 1);
        store.forget_negative(&row.slot).await.unwrap();
        assert_eq!(store.negative(&row.slot).await.unwrap(), None);
    }

    async fn an_accepted_image_has_its_holders_tags_and_predecessors(store) {
        let old = made(store, &slot("a", None), plain).await;
        let new = made(store, &slot("b", None), |image| NewImage {
            holders: vec!["one".into(), "two".into()],
            tags: vec![tag("latest", &image)],
            supersedes: vec![old.id],
            image,
        })
        .await;
        assert_eq!((new.holders, new.tags.clone()), (2, vec!["latest".parse::<TagName>().unwrap()]));
        let old = store.image(old.id).await.unwrap().unwrap();
        assert_eq!((old.state, old.version), (ImageState::Superseded, 2));
        assert_eq!(store.images_of(&new.lineage).await.unwrap().len(), 2);
        assert_eq!(store.holders("fake").await.unwrap().len(), 2);
        let (rows, total) = store.images(&ImageFilter::default(), 0, 1).await.unwrap();
        assert_eq!((rows.len(), total), (1, 2));
        let ready = ImageFilter { states: vec![ImageState::Ready], ..ImageFilter::default() };
        let (rows, total) = store.images(&ready, 0, 9).await.unwrap();
        assert_eq!((rows[0].id, rows[0].tags.len(), total), (new.id, 1, 1));
    }

    async fn use_is_counted_and_stamped(store) {
        let image = made(store, &slot("a", None), plain).await;
        assert_eq!(store.acquire(image.id, "one", at(900)).await.unwrap(), Advance::Written);
        assert_eq!(store.acquire(image.id, "one", at(800)).await.unwrap(), Advance::Written);
        let held = store.image(image.id).await.unwrap().unwrap();
        assert_eq!((held.holders, held.last_used_at, held.version), (1, at(900), image.version + 2));
        // Who has not seen it in use does not remove it.
        let unseen = Image { version: image.version + 1, ..image.becoming(ImageState::Deleting).unwrap() };
        assert_eq!(store.advance_image(image.version, &unseen).await.unwrap(), Advance::Lost);
        store.release(image.id, "one", at(1000)).await.unwrap();
        store.release(image.id, "one", at(2000)).await.unwrap();
        let free = store.image(image.id).await.unwrap().unwrap();
        assert_eq!((free.holders, free.last_used_at), (0, at(1000)));
        let blocked = Image { version: free.version + 1, blocked: true, ..free.clone() };
        assert_eq!(store.advance_image(free.version, &blocked).await.unwrap(), Advance::Written);
        assert_eq!(store.acquire(image.id, "two", at(3000)).await.unwrap(), Advance::Lost);
        assert_eq!(store.acquire(ImageId::random(), "two", at(3000)).await.unwrap(), Advance::Lost);
    }

    async fn names_move_and_go_with_their_image(store) {
        let one = made(store, &slot("a", None), plain).await;
        let two = made(store, &slot("b", None), plain).await;
        for image in [&one, &two] {
            assert_eq!(store.move_tag(&tag("latest", image)).await.unwrap(), Advance::Written);
        }
        let name: TagName = "latest".parse().unwrap();
        let found = store.tag(None, &two.repository_key, &name).await.unwrap();
        assert_eq!(found, Some(tag("latest", &two)));
        assert_eq!(store.tag(Some("ns"), &two.repository_key, &name).await.unwrap(), None);
        assert_eq!(store.image(one.id).await.unwrap().unwrap().tags, []);
        let two = store.image(two.id).await.unwrap().unwrap();
        assert_eq!(two.tags, std::slice::from_ref(&name));
        let going = Image { version: two.version + 1, ..two.becoming(ImageState::Deleting).unwrap() };
        assert_eq!(store.advance_image(two.version, &going).await.unwrap(), Advance::Written);
        assert_eq!(store.tag(None, &two.repository_key, &name).await.unwrap(), None);
        assert_eq!(store.move_tag(&tag("latest", &two)).await.unwrap(), Advance::Lost);
        let gone = Image { version: going.version + 1, ..going.becoming(ImageState::Deleted).unwrap() };
        assert_eq!(store.advance_image(going.version, &gone).await.unwrap(), Advance::Written);
        assert_eq!(store.images_of(&one.lineage).await.unwrap().len(), 1);
        assert_eq!(store.all_images("fake").await.unwrap().len(), 2);
        assert_eq!(store.delete_image(two.id, going.version).await.unwrap(), Advance::Lost);
        assert_eq!(store.delete_image(two.id, gone.version).await.unwrap(), Advance::Written);
        assert_eq!(store.image(two.id).await.unwrap(), None);
    }

    async fn prebuilds_are_replaced_by_version(store) {
        let prebuild = Prebuild {
            id: PrebuildId::random(),
            version: 1,
            namespace: Some("ns".into()),
            source: serde_json::json!({"repository": {"url": "x"}}),
            poll_seconds: Some(60),
            enabled: true,
            keep: None,
            tag: None,
            timeout_seconds: 60,
            schedule: Default::default(),
            seen: None,
            last_error: None,
            created_at: at(1),
        };
        store.insert_prebuild(&prebuild).await.unwrap();
        let next = Prebuild { version: 2, enabled: false, ..prebuild.clone() };
        assert_eq!(store.advance_prebuild(1, &next).await.unwrap(), Advance::Written);
        assert_eq!(store.advance_prebuild(1, &prebuild).await.unwrap(), Advance::Lost);
        assert_eq!(store.prebuild(prebuild.id).await.unwrap(), Some(next.clone()));
        assert_eq!(store.prebuilds().await.unwrap(), [next]);
        assert_eq!(store.delete_prebuild(prebuild.id, 1).await.unwrap(), Advance::Lost);
        assert_eq!(store.delete_prebuild(prebuild.id, 2).await.unwrap(), Advance::Written);
        assert_eq!(store.prebuild(prebuild.id).await.unwrap(), None);
    }
}

#[tokio::test]
async fn of_many_at_once_one_begins() {
    let fixture = Fixture::sqlite().await;
    let slot = slot("a", None);
    let tasks = (0..16).map(|n| {
        let (store, row) = (fixture.store.clone(), build(&slot, n));
        tokio::spawn(async move { store.insert_build(&row).await.unwrap() })
    });
    let mut written = 0;
    for task in tasks.collect::<Vec<_>>() {
        written += usize::from(task.await.unwrap() == Inserted::Written);
    }
    assert_eq!(written, 1);
    fixture.end().await;
}

#[tokio::test]
async fn everything_about_builds_is_moved_once() {
    let (first, second) = (Fixture::sqlite().await, Fixture::sqlite().await);
    let store = &first.store;
    let made = made(store, &slot("a", Some("ns")), |image| NewImage {
        holders: vec!["one".into()],
        tags: vec![tag("latest", &image)],
        supersedes: Vec::new(),
        image,
    })
    .await;
    store.reserve_ordinal("fake", &key("a")).await.unwrap();
    let (from, to) = (place(&first), place(&second));
    first.store.shut().await;
    second.store.shut().await;
    let totals = |moved: Vec<Moved>| moved[4..11].iter().map(|m| (m.total, m.migrated)).collect::<Vec<_>>();
    // Without prebuilds and what is not of builds.
    let expected = [(1, 1), (0, 0), (1, 1), (1, 1), (1, 1), (1, 1), (0, 0)];
    assert_eq!(totals(migrate(&from, &to, false).await.unwrap()), expected);
    let again = expected.map(|(total, _)| (total, 0));
    assert_eq!(totals(migrate(&from, &to, true).await.unwrap()), again);
    let store = second.another().await;
    assert_eq!(store.image(made.id).await.unwrap(), Some(made));
    assert_eq!(store.reserve_ordinal("fake", &key("a")).await.unwrap(), 2);
    store.shut().await;
}

fn place(fixture: &Fixture) -> Place {
    Place::Sqlite(fixture.config.path.clone())
}
