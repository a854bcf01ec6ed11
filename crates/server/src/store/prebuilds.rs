//! Rows of prebuilds.

use sandglass_builds::{ports::StoreError, prebuild::Prebuild};
use sandglass_sandbox::PrebuildId;

use super::{
    database::{Session, values},
    image_builds::{body, read, readable},
};

pub(super) async fn insert(on: &mut Session, prebuild: &Prebuild) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO prebuilds (id, version, body) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        values![prebuild.id.to_string(), prebuild.version, body(prebuild)],
    )
    .await?;
    Ok(())
}

pub(super) async fn replace(
    on: &mut Session,
    expected: u64,
    prebuild: &Prebuild,
) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "UPDATE prebuilds SET version = $1, body = $2 WHERE id = $3 AND version = $4",
            values![prebuild.version, body(prebuild), prebuild.id.to_string(), expected],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn delete(on: &mut Session, id: PrebuildId, expected: u64) -> Result<bool, StoreError> {
    let gone = on
        .execute("DELETE FROM prebuilds WHERE id = $1 AND version = $2", values![id.to_string(), expected])
        .await?;
    Ok(gone == 1)
}

pub(super) async fn find(on: &mut Session, id: PrebuildId) -> Result<Option<Prebuild>, StoreError> {
    let row: Option<(String,)> =
        on.row("SELECT body FROM prebuilds WHERE id = $1", values![id.to_string()]).await?;
    row.map(|(body,)| read("a prebuild", &body)).transpose()
}

pub(super) async fn all(on: &mut Session) -> Result<Vec<Prebuild>, StoreError> {
    Ok(readable("a prebuild", on.rows("SELECT body FROM prebuilds ORDER BY id", values![]).await?))
}
