//! Rows of images that builds made, of who uses them, and of their names.
//!
//! What changes without the rest (version, state, last use) has columns of its own, which count before the body.

use std::collections::HashMap;

use sandglass_builds::{
    image::{Image, ImageState, Lineage, Tag},
    key::TagName,
    ports::{ImageFilter, NewImage, StoreError},
};
use sandglass_sandbox::{ImageId, Timestamp};

use super::{
    database::{Session, values},
    image_builds::{body, namespace_text, read},
};

/// Body, version, state, last use, holders.
type Row = (String, i64, String, i64, i64);

macro_rules! select {
    () => {
        "SELECT body, version, state, last_used_ms, \
         (SELECT COUNT(*) FROM image_holders WHERE image_id = built_images.id) FROM built_images "
    };
}

fn image((body, version, state, used, holders): Row) -> Result<Image, StoreError> {
    let kept: Image = read("an image", &body)?;
    let unreadable = || StoreError::Corrupt(format!("the row of image {} is unreadable", kept.id));
    Ok(Image {
        version: u64::try_from(version).map_err(|_| unreadable())?,
        state: ImageState::of_word(&state).ok_or_else(unreadable)?,
        last_used_at: Timestamp::clamped(used),
        holders: u64::try_from(holders).unwrap_or(0),
        ..kept
    })
}

async fn images(on: &mut Session, rows: Vec<Row>) -> Result<Vec<Image>, StoreError> {
    let kept = |row| image(row).inspect_err(|error| tracing::warn!(%error, "an image is left out")).ok();
    let mut images: Vec<Image> = rows.into_iter().filter_map(kept).collect();
    if images.is_empty() {
        return Ok(images);
    }
    let mut names: HashMap<String, Vec<TagName>> = HashMap::new();
    let tags: Vec<(String, String)> = match &images[..] {
        [one] => {
            let id = one.id.to_string();
            on.rows("SELECT image_id, name FROM image_tags WHERE image_id = $1 ORDER BY name", values![id])
                .await?
        }
        _ => on.rows("SELECT image_id, name FROM image_tags ORDER BY name", values![]).await?,
    };
    for (id, name) in tags {
        if let Ok(name) = name.parse() {
            names.entry(id).or_default().push(name);
        }
    }
    for image in &mut images {
        image.tags = names.remove(&image.id.to_string()).unwrap_or_default();
        image.tags.sort();
    }
    Ok(images)
}

pub(super) async fn find(on: &mut Session, id: ImageId) -> Result<Option<Image>, StoreError> {
    let row: Option<Row> = on.row(concat!(select!(), "WHERE id = $1"), values![id.to_string()]).await?;
    let Some(row) = row else { return Ok(None) };
    // One that cannot be read is an error here, not an absence.
    image(row.clone())?;
    Ok(images(on, vec![row]).await?.pop())
}

pub(super) async fn of_lineage(on: &mut Session, lineage: &Lineage) -> Result<Vec<Image>, StoreError> {
    let rows = on
        .rows(
            concat!(
                select!(),
                "WHERE runtime = $1 AND namespace = $2 AND recipe_key = $3 AND state <> 'Deleted'"
            ),
            values![
                lineage.runtime.as_str(),
                namespace_text(lineage.namespace.as_deref()),
                lineage.recipe_key.as_str()
            ],
        )
        .await?;
    images(on, rows).await
}

pub(super) async fn of_runtime(on: &mut Session, runtime: &str) -> Result<Vec<Image>, StoreError> {
    let rows = on.rows(concat!(select!(), "WHERE runtime = $1"), values![runtime]).await?;
    images(on, rows).await
}

macro_rules! matching {
    () => {
        "WHERE namespace = $1 AND ($2 IS NULL OR repository_key = $2) AND state IN ($3, $4, $5, $6, $7) "
    };
}

pub(super) async fn page(
    on: &mut Session,
    filter: &ImageFilter,
    offset: u64,
    limit: u64,
) -> Result<(Vec<Image>, u64), StoreError> {
    let narrowed = || {
        let mut values =
            values![namespace_text(filter.namespace.as_deref()), filter.repository_key.as_deref()];
        for state in ImageState::ALL {
            let kept = match &filter.states[..] {
                [] => state != ImageState::Deleted,
                states => states.contains(&state),
            };
            values.push(if kept { state.word() } else { "" }.into());
        }
        values
    };
    let count: Option<(i64,)> =
        on.row(concat!("SELECT COUNT(*) FROM built_images ", matching!()), narrowed()).await?;
    let mut paged = narrowed();
    paged.extend(values![limit, offset]);
    let rows = on
        .rows(concat!(select!(), matching!(), "ORDER BY created_ms DESC, id DESC LIMIT $8 OFFSET $9"), paged)
        .await?;
    let total = count.map_or(0, |(count,)| u64::try_from(count).unwrap_or(0));
    Ok((images(on, rows).await?, total))
}

/// Inserts an accepted image with its holders and tags, and supersedes older ones.
pub(super) async fn insert(on: &mut Session, new: &NewImage) -> Result<(), StoreError> {
    let image = &new.image;
    on.execute(
        "INSERT INTO built_images (id, version, namespace, runtime, recipe_key, repository_key, state, blocked, \
         created_ms, last_used_ms, body) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        values![
            image.id.to_string(),
            image.version,
            namespace_text(image.lineage.namespace.as_deref()),
            image.lineage.runtime.as_str(),
            image.lineage.recipe_key.as_str(),
            image.repository_key.as_str(),
            image.state.word(),
            i64::from(image.blocked),
            image.created_at.as_millis(),
            image.last_used_at.as_millis(),
            body(image),
        ],
    )
    .await?;
    for holder in &new.holders {
        hold(on, image.id, holder).await?;
    }
    for tag in &new.tags {
        put_tag(on, tag).await?;
    }
    for old in &new.supersedes {
        on.execute(
            "UPDATE built_images SET state = 'Superseded', version = version + 1 WHERE id = $1 AND state = 'Ready'",
            values![old.to_string()],
        )
        .await?;
    }
    Ok(())
}

async fn hold(on: &mut Session, id: ImageId, holder: &str) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO image_holders (image_id, holder) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        values![id.to_string(), holder],
    )
    .await?;
    Ok(())
}

async fn put_tag(on: &mut Session, tag: &Tag) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO image_tags (namespace, repository_key, name, image_id, moved_ms) VALUES ($1, $2, $3, $4, $5) \
         ON CONFLICT (namespace, repository_key, name) \
         DO UPDATE SET image_id = excluded.image_id, moved_ms = excluded.moved_ms",
        values![
            namespace_text(tag.namespace.as_deref()),
            tag.repository_key.as_str(),
            tag.name.as_str(),
            tag.image.to_string(),
            tag.moved_at.as_millis()
        ],
    )
    .await?;
    Ok(())
}

pub(super) async fn replace(on: &mut Session, expected: u64, image: &Image) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "UPDATE built_images SET version = $1, state = $2, blocked = $3, last_used_ms = $4, body = $5 \
             WHERE id = $6 AND version = $7",
            values![
                image.version,
                image.state.word(),
                i64::from(image.blocked),
                image.last_used_at.as_millis(),
                body(image),
                image.id.to_string(),
                expected
            ],
        )
        .await?;
    if written == 1 && image.state == ImageState::Deleting {
        on.execute("DELETE FROM image_tags WHERE image_id = $1", values![image.id.to_string()]).await?;
    }
    Ok(written == 1)
}

pub(super) async fn delete(on: &mut Session, id: ImageId, expected: u64) -> Result<bool, StoreError> {
    let gone = on
        .execute("DELETE FROM built_images WHERE id = $1 AND version = $2", values![id.to_string(), expected])
        .await?;
    if gone == 1 {
        on.execute("DELETE FROM image_holders WHERE image_id = $1", values![id.to_string()]).await?;
        on.execute("DELETE FROM image_tags WHERE image_id = $1", values![id.to_string()]).await?;
    }
    Ok(gone == 1)
}

/// Stamps a use, of a usable image only.
async fn touch(on: &mut Session, id: ImageId, at: Timestamp) -> Result<bool, StoreError> {
    let touched = on
        .execute(
            "UPDATE built_images SET version = version + 1, \
             last_used_ms = CASE WHEN last_used_ms < $1 THEN $1 ELSE last_used_ms END \
             WHERE id = $2 AND blocked = 0 AND state IN ('Ready', 'Superseded')",
            values![at.as_millis(), id.to_string()],
        )
        .await?;
    Ok(touched == 1)
}

pub(super) async fn acquire(
    on: &mut Session,
    id: ImageId,
    holder: &str,
    at: Timestamp,
) -> Result<bool, StoreError> {
    // First the image, which locks it: what would remove it sees the holder or comes before.
    if !touch(on, id, at).await? {
        return Ok(false);
    }
    hold(on, id, holder).await?;
    Ok(true)
}

pub(super) async fn release(
    on: &mut Session,
    id: ImageId,
    holder: &str,
    at: Timestamp,
) -> Result<(), StoreError> {
    let gone = on
        .execute(
            "DELETE FROM image_holders WHERE image_id = $1 AND holder = $2",
            values![id.to_string(), holder],
        )
        .await?;
    if gone == 1 {
        on.execute(
            "UPDATE built_images SET version = version + 1, \
             last_used_ms = CASE WHEN last_used_ms < $1 THEN $1 ELSE last_used_ms END WHERE id = $2",
            values![at.as_millis(), id.to_string()],
        )
        .await?;
    }
    Ok(())
}

pub(super) async fn holders(on: &mut Session, runtime: &str) -> Result<Vec<(ImageId, String)>, StoreError> {
    let rows: Vec<(String, String)> = on
        .rows(
            "SELECT h.image_id, h.holder FROM image_holders h JOIN built_images i ON i.id = h.image_id \
             WHERE i.runtime = $1 ORDER BY h.image_id, h.holder",
            values![runtime],
        )
        .await?;
    Ok(rows.into_iter().filter_map(|(id, holder)| Some((id.parse().ok()?, holder))).collect())
}

pub(super) async fn tag(
    on: &mut Session,
    namespace: Option<&str>,
    repository_key: &str,
    name: &TagName,
) -> Result<Option<Tag>, StoreError> {
    let row: Option<(String, i64)> = on
        .row(
            "SELECT image_id, moved_ms FROM image_tags WHERE namespace = $1 AND repository_key = $2 AND name = $3",
            values![namespace_text(namespace), repository_key, name.as_str()],
        )
        .await?;
    let Some((image, moved)) = row else { return Ok(None) };
    Ok(Some(Tag {
        namespace: namespace.map(str::to_owned),
        repository_key: repository_key.to_owned(),
        name: name.clone(),
        image: image.parse().map_err(|_| StoreError::Corrupt("a tag's image is unreadable".into()))?,
        moved_at: Timestamp::clamped(moved),
    }))
}

pub(super) async fn move_tag(on: &mut Session, tag: &Tag) -> Result<bool, StoreError> {
    let usable = on
        .execute(
            "UPDATE built_images SET version = version + 1 \
             WHERE id = $1 AND blocked = 0 AND state IN ('Ready', 'Superseded')",
            values![tag.image.to_string()],
        )
        .await?;
    if usable == 1 {
        put_tag(on, tag).await?;
    }
    Ok(usable == 1)
}
