//! Moving the rows of agents, policies, image builds, webhooks and pools. Like all others they are only read in the source, and rows that
//! the target has are skipped.

use std::collections::HashSet;

use sandglass_sandbox::ports::StoreError;

use super::{
    database::{Session, Value, values},
    migrate::{MigrateError, Moved},
};

/// One table: how its rows are read, whether one is there, and how one is put there. The first values of a row are its key.
struct Table {
    name: &'static str,
    key: usize,
    known: &'static str,
    insert: &'static str,
}

const BUILDS: Table = Table {
    name: "image_builds",
    key: 1,
    known: "SELECT id FROM image_builds WHERE id = $1",
    insert: "INSERT INTO image_builds (id, version, namespace, runtime, repository_key, state, in_flight, owes, created_ms, \
             finished_ms, body) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
};
const FAILURES: Table = Table {
    name: "image_build_failures",
    key: 1,
    known: "SELECT slot FROM image_build_failures WHERE slot = $1",
    insert: "INSERT INTO image_build_failures (slot, until_ms, body) VALUES ($1, $2, $3)",
};
const ORDINALS: Table = Table {
    name: "image_ordinals",
    key: 2,
    known: "SELECT digits FROM image_ordinals WHERE runtime = $1 AND digits = $2",
    insert: "INSERT INTO image_ordinals (runtime, digits, given) VALUES ($1, $2, $3)",
};
const IMAGES: Table = Table {
    name: "built_images",
    key: 1,
    known: "SELECT id FROM built_images WHERE id = $1",
    insert: "INSERT INTO built_images (id, version, namespace, runtime, recipe_key, repository_key, state, blocked, created_ms, \
             last_used_ms, body) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
};
const HOLDERS: Table = Table {
    name: "image_holders",
    key: 2,
    known: "SELECT holder FROM image_holders WHERE image_id = $1 AND holder = $2",
    insert: "INSERT INTO image_holders (image_id, holder) VALUES ($1, $2)",
};
const TAGS: Table = Table {
    name: "image_tags",
    key: 3,
    known: "SELECT name FROM image_tags WHERE namespace = $1 AND repository_key = $2 AND name = $3",
    insert: "INSERT INTO image_tags (namespace, repository_key, name, image_id, moved_ms) VALUES ($1, $2, $3, $4, $5)",
};
const PREBUILDS: Table = Table {
    name: "prebuilds",
    key: 1,
    known: "SELECT id FROM prebuilds WHERE id = $1",
    insert: "INSERT INTO prebuilds (id, version, body) VALUES ($1, $2, $3)",
};

const WEBHOOKS: Table = Table {
    name: "webhooks",
    key: 1,
    known: "SELECT id FROM webhooks WHERE id = $1",
    insert: "INSERT INTO webhooks (id, version, read_to, lease_owner, lease_until_ms, health, created_ms, body) \
             VALUES ($1, $2, $3, '', 0, $4, $5, $6)",
};
const DELIVERIES: Table = Table {
    name: "webhook_deliveries",
    key: 2,
    known: "SELECT webhook_id FROM webhook_deliveries WHERE webhook_id = $1 AND seq = $2",
    insert: "INSERT INTO webhook_deliveries (webhook_id, seq, state, finished_ms, body) VALUES ($1, $2, $3, $4, $5)",
};

const POOLS: Table = Table {
    name: "pools",
    key: 1,
    known: "SELECT name FROM pools WHERE name = $1",
    insert: "INSERT INTO pools (name, body) VALUES ($1, $2)",
};

const AGENTS: Table = Table {
    name: "agents",
    key: 1,
    known: "SELECT sandbox_id FROM agents WHERE sandbox_id = $1",
    insert: "INSERT INTO agents (sandbox_id, body) VALUES ($1, $2)",
};
const USAGES: Table = Table {
    name: "usages",
    key: 1,
    known: "SELECT sandbox_id FROM usages WHERE sandbox_id = $1",
    insert: "INSERT INTO usages (sandbox_id, body) VALUES ($1, $2)",
};
const BREAKERS: Table = Table {
    name: "breakers",
    key: 1,
    known: "SELECT key FROM breakers WHERE key = $1",
    insert: "INSERT INTO breakers (key, version, at_ms, body) VALUES ($1, $2, $3, $4)",
};

/// All of them, in the order in which they are moved.
const ALL: [&Table; 13] = [
    &BUILDS,
    &FAILURES,
    &ORDINALS,
    &IMAGES,
    &HOLDERS,
    &TAGS,
    &PREBUILDS,
    &WEBHOOKS,
    &DELIVERIES,
    &POOLS,
    &AGENTS,
    &USAGES,
    &BREAKERS,
];

pub(super) fn is_known(name: &str) -> bool {
    ALL.iter().any(|table| table.name == name)
}

/// One end of a move, as far as these tables need it.
pub(super) struct End<'a> {
    pub(super) session: &'a mut Session,
    /// Which tables there are.
    pub(super) tables: &'a HashSet<String>,
}

/// Whether rows came in that say how far history was told.
pub(super) fn brings_places(moved: &[Moved]) -> bool {
    moved.iter().any(|table| table.table == WEBHOOKS.name && table.migrated > 0)
}

/// `beyond` is what is added to the numbers of history that come in.
pub(super) async fn copy(
    from: &mut End<'_>,
    to: &mut End<'_>,
    beyond: i64,
    dry_run: bool,
) -> Result<Vec<Moved>, MigrateError> {
    let mut all = Vec::new();
    for table in ALL {
        let mut moved = Moved::new(table.name);
        if from.tables.contains(table.name) {
            for row in table.rows(from.session, beyond).await.map_err(MigrateError::Source)? {
                let put = table.put(to, row, dry_run).await;
                moved.count(put.map_err(MigrateError::Target)?);
            }
        }
        all.push(moved);
    }
    Ok(all)
}

type Text = String;
type BuildRow = (Text, i64, Text, Text, Text, Text, Option<Text>, i64, i64, i64, Text);
type ImageRow = (Text, i64, Text, Text, Text, Text, Text, i64, i64, i64, Text);

impl Table {
    async fn rows(&self, on: &mut Session, beyond: i64) -> Result<Vec<Vec<Value>>, StoreError> {
        Ok(match self.name {
            "image_builds" => {
                let sql = "SELECT id, version, namespace, runtime, repository_key, state, in_flight, owes, created_ms, \
                           finished_ms, body FROM image_builds ORDER BY id";
                let rows: Vec<BuildRow> = on.rows(sql, values![]).await?;
                rows.into_iter()
                    .map(|(a, b, c, d, e, f, g, h, i, j, k)| {
                        values![a, b, c, d, e, f, g.as_deref(), h, i, j, k]
                    })
                    .collect()
            }
            "image_build_failures" => {
                let sql = "SELECT slot, until_ms, body FROM image_build_failures ORDER BY slot";
                let rows: Vec<(Text, i64, Text)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b, c)| values![a, b, c]).collect()
            }
            "image_ordinals" => {
                let sql = "SELECT runtime, digits, given FROM image_ordinals ORDER BY runtime, digits";
                let rows: Vec<(Text, Text, i64)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b, c)| values![a, b, c]).collect()
            }
            "built_images" => {
                let sql = "SELECT id, version, namespace, runtime, recipe_key, repository_key, state, blocked, created_ms, \
                           last_used_ms, body FROM built_images ORDER BY id";
                let rows: Vec<ImageRow> = on.rows(sql, values![]).await?;
                rows.into_iter()
                    .map(|(a, b, c, d, e, f, g, h, i, j, k)| values![a, b, c, d, e, f, g, h, i, j, k])
                    .collect()
            }
            "image_holders" => {
                let sql = "SELECT image_id, holder FROM image_holders ORDER BY image_id, holder";
                let rows: Vec<(Text, Text)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b)| values![a, b]).collect()
            }
            "image_tags" => {
                let sql = "SELECT namespace, repository_key, name, image_id, moved_ms FROM image_tags \
                           ORDER BY namespace, repository_key, name";
                let rows: Vec<(Text, Text, Text, Text, i64)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b, c, d, e)| values![a, b, c, d, e]).collect()
            }
            "webhooks" => {
                let sql = "SELECT id, version, read_to, health, created_ms, body FROM webhooks ORDER BY id";
                let rows: Vec<(Text, i64, i64, Text, i64, Text)> = on.rows(sql, values![]).await?;
                // What waits to be sent keeps its own number: it is in the message, and receivers know it by that.
                rows.into_iter()
                    .map(|(a, b, c, d, e, f)| values![a, b, c.saturating_add(beyond), d, e, f])
                    .collect()
            }
            "webhook_deliveries" => {
                let sql = "SELECT webhook_id, seq, state, finished_ms, body FROM webhook_deliveries \
                           ORDER BY webhook_id, seq";
                let rows: Vec<(Text, i64, Text, i64, Text)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b, c, d, e)| values![a, b, c, d, e]).collect()
            }
            "pools" | "agents" | "usages" => {
                let sql = match self.name {
                    "pools" => "SELECT name, body FROM pools ORDER BY name",
                    "agents" => "SELECT sandbox_id, body FROM agents ORDER BY sandbox_id",
                    _ => "SELECT sandbox_id, body FROM usages ORDER BY sandbox_id",
                };
                let rows: Vec<(Text, Text)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b)| values![a, b]).collect()
            }
            "breakers" => {
                let sql = "SELECT key, version, at_ms, body FROM breakers ORDER BY key";
                let rows: Vec<(Text, i64, i64, Text)> = on.rows(sql, values![]).await?;
                rows.into_iter().map(|(a, b, c, d)| values![a, b, c, d]).collect()
            }
            _ => {
                let rows: Vec<(Text, i64, Text)> =
                    on.rows("SELECT id, version, body FROM prebuilds ORDER BY id", values![]).await?;
                rows.into_iter().map(|(a, b, c)| values![a, b, c]).collect()
            }
        })
    }

    /// Whether the row was not there yet.
    async fn put(&self, to: &mut End<'_>, row: Vec<Value>, dry_run: bool) -> Result<bool, StoreError> {
        if to.tables.contains(self.name) {
            let key: Vec<Value> = row[..self.key].iter().map(Value::again).collect();
            let found: Option<(String,)> = to.session.row(self.known, key).await?;
            if found.is_some() {
                return Ok(false);
            }
        }
        if !dry_run {
            to.session.execute(self.insert, row).await?;
        }
        Ok(true)
    }
}
