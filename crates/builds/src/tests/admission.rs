use sandglass_sandbox::{ImageId, Timestamp};

use super::{states::queued, *};
use crate::{
    build::{Cancel, Cause, CauseKind},
    decide::admit::{Admission, Ask, Facts, admit},
    image::{Image, Lineage, Removal},
    key::ArtifactName,
    ports::Negative,
};

pub(super) fn image(recipe: u8, commit: u8, created: i64) -> Image {
    Image {
        id: ImageId::random(),
        version: 1,
        lineage: Lineage { namespace: None, runtime: "fake".to_owned(), recipe_key: recipe_key(recipe) },
        key: build_key(recipe, commit),
        repository_key: "github.com/acme/web".to_owned(),
        artifact: ArtifactName::new(&build_key(recipe, commit), 1),
        reference: "r".to_owned(),
        digest: None,
        size_bytes: 100,
        checkouts: vec![],
        agent_generation: 1,
        platform: "linux/amd64".to_owned(),
        state: ImageState::Ready,
        blocked: false,
        image_build_id: ImageBuildId::random(),
        holders: 0,
        tags: vec![],
        restore_failures: 0,
        increments: 0,
        removal: Removal::default(),
        created_at: Timestamp::clamped(created),
        last_used_at: Timestamp::clamped(created),
    }
}

fn word(admission: &Admission) -> String {
    match admission {
        Admission::Use { fit, refresh, .. } => format!("{fit:?}{}", if *refresh { "+refresh" } else { "" }),
        Admission::Join(_) => "Join".to_owned(),
        Admission::After(_) => "After".to_owned(),
        Admission::Start => "Start".to_owned(),
        Admission::WithoutImage => "WithoutImage".to_owned(),
        Admission::Refuse(crate::submission::Refusal::NotCached) => "NotCached".to_owned(),
        Admission::Refuse(_) => "FailedRecently".to_owned(),
    }
}

#[test]
fn the_table_of_admissions() {
    let now = Timestamp::clamped(1_000_000);
    let build = queued();
    let cancelled = ImageBuild { cancel: Some(Cancel::Requested), ..build.clone() };
    let negative = Negative {
        slot: build.slot.clone(),
        build: build.id,
        cause: Cause::new(CauseKind::UserFailure, "exit 1"),
        failures: 1,
        until: Timestamp::clamped(1_000_001),
    };
    let over = Negative { until: now, ..negative.clone() };
    let mut foreign = image(1, 1, 9);
    foreign.platform = "linux/arm64".to_owned();
    let blocked = Image { blocked: true, ..image(1, 1, 9) };
    let (exact, older, tagged) = (image(1, 1, 5), image(1, 2, 4), image(2, 1, 3));
    let facts = [
        ("nothing", Facts::default()),
        (
            "exact",
            Facts { lineage: vec![older.clone(), exact.clone(), foreign, blocked], ..Facts::default() },
        ),
        ("older", Facts { lineage: vec![older.clone()], ..Facts::default() }),
        (
            "older+flight",
            Facts { lineage: vec![older.clone()], in_flight: Some(build.clone()), ..Facts::default() },
        ),
        (
            "older+failed",
            Facts { lineage: vec![older.clone()], negative: Some(negative.clone()), ..Facts::default() },
        ),
        ("tagged", Facts { lineage: vec![exact], tagged: Some(tagged), ..Facts::default() }),
        ("flight", Facts { in_flight: Some(build), ..Facts::default() }),
        ("cancelling", Facts { in_flight: Some(cancelled), ..Facts::default() }),
        ("failed", Facts { negative: Some(negative), ..Facts::default() }),
        ("failed long ago", Facts { negative: Some(over), ..Facts::default() }),
    ];
    let key = build_key(1, 1);
    let base = Ask {
        policy: Policy::IfMissing,
        fit: Match::Compatible,
        force: false,
        key: &key,
        platform: "linux/amd64",
    };
    let asks = [
        ("compatible", base),
        ("exact", Ask { fit: Match::Exact, ..base }),
        ("force", Ask { force: true, ..base }),
        ("always", Ask { policy: Policy::Always, ..base }),
        ("never", Ask { policy: Policy::Never, ..base }),
        ("cached", Ask { policy: Policy::RequireCached, ..base }),
    ];
    let table: Vec<String> = facts
        .iter()
        .map(|(name, facts)| {
            let cells: Vec<_> =
                asks.iter().map(|(ask, a)| format!("{ask}={}", word(&admit(*a, facts, now)))).collect();
            format!("{name}: {}", cells.join(" "))
        })
        .collect();
    assert_eq!(
        table,
        [
            "nothing: compatible=Start exact=Start force=Start always=Start never=WithoutImage cached=NotCached",
            "exact: compatible=Exact exact=Exact force=Start always=Start never=Exact cached=Exact",
            "older: compatible=Compatible+refresh exact=Start force=Start always=Start never=Compatible cached=Compatible",
            "older+flight: compatible=Compatible exact=Join force=Join always=Join never=Compatible cached=Compatible",
            "older+failed: compatible=Compatible exact=FailedRecently force=Start always=FailedRecently never=Compatible cached=Compatible",
            "tagged: compatible=Tagged exact=Exact force=Start always=Start never=Tagged cached=Tagged",
            "flight: compatible=Join exact=Join force=Join always=Join never=WithoutImage cached=NotCached",
            "cancelling: compatible=After exact=After force=After always=After never=WithoutImage cached=NotCached",
            "failed: compatible=FailedRecently exact=FailedRecently force=Start always=FailedRecently never=WithoutImage cached=NotCached",
            "failed long ago: compatible=Start exact=Start force=Start always=Start never=WithoutImage cached=NotCached",
        ]
    );
}
