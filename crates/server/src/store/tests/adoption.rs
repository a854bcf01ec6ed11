//! Databases that another server began.

use sqlx::{SqlitePool, sqlite::SqliteConnectOptions};

use super::*;

const ID: &str = "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3";
const SOURCE: &str = "9b2c8f1e-4d3a-4c5b-8e7f-1a2b3c4d5e6f";

/// A file as the OpenSandbox server leaves it; `namespace` is what that column was in its time.
async fn upstream_file(path: &std::path::Path, namespace: &str) -> SqlitePool {
    let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    let table = format!(
        "CREATE TABLE snapshots (id TEXT PRIMARY KEY, source_sandbox_id TEXT NOT NULL, {namespace} name TEXT, \
         description TEXT, restore_config TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, message TEXT, \
         last_transition_at TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL); \
         CREATE INDEX idx_snapshots_state ON snapshots(state); \
         CREATE INDEX idx_snapshots_created_at ON snapshots(created_at DESC);"
    );
    sqlx::raw_sql(AssertSqlSafe(table)).execute(&pool).await.unwrap();
    sqlx::query(
        "INSERT INTO snapshots (id, source_sandbox_id, name, restore_config, state, reason, message, \
         last_transition_at, created_at, updated_at) VALUES ($1, $2, 'theirs', \
         '{\"backend\": null, \"image\": \"opensandbox-snapshots:x\"}', 'Ready', NULL, NULL, \
         '2026-03-04T05:06:08+00:00', '2026-03-04T05:06:07.123456+00:00', '2026-03-04T05:06:08+00:00')",
    )
    .bind(ID)
    .bind(SOURCE)
    .execute(&pool)
    .await
    .unwrap();
    pool
}

#[tokio::test]
async fn a_file_of_the_other_server_is_used_in_place() {
    let forms = ["namespace TEXT DEFAULT NULL,", "", "namespace TEXT NOT NULL DEFAULT '',"];
    for namespace in forms {
        let dir = tempfile::tempdir().unwrap();
        let config = file(dir.path().join("opensandbox.db"));
        let theirs = upstream_file(&config.path, namespace).await;
        let store = SqlStore::open(&config).await.unwrap();
        let (found, total) = store.snapshots(&SnapshotFilter::default(), 0, 10).await.unwrap();
        assert_eq!((found.len(), total), (1, 1), "{namespace}");
        let mut record = found.into_iter().next().unwrap();
        assert_eq!(record.created_at.to_string(), "2026-03-04T05:06:07.123000Z");
        assert_eq!(record.last_transition_at.to_string(), "2026-03-04T05:06:08Z");
        let restore = RestoreConfig { backend: "docker".into(), image: "opensandbox-snapshots:x".into() };
        assert_eq!((record.restore.as_ref(), record.reason.as_str()), (Some(&restore), ""));
        record.state = SnapshotState::Deleting;
        record.reason = "snapshot_delete_requested".into();
        assert_eq!(store.advance_snapshot(SnapshotState::Ready, &record).await.unwrap(), Advance::Written);
        let row: (String, String, Option<String>, String, String) = sqlx::query_as(
            "SELECT state, reason, namespace, created_at, last_transition_at FROM snapshots WHERE id = $1",
        )
        .bind(ID)
        .fetch_one(&theirs)
        .await
        .unwrap();
        assert_eq!(row.0, "Deleting");
        assert_eq!((row.1.as_str(), row.2), ("snapshot_delete_requested", None));
        assert_eq!(row.3, "2026-03-04T05:06:07.123456+00:00", "what does not change is not written again");
        assert_eq!(row.4, "2026-03-04T05:06:08.000000+00:00");
        theirs.close().await;
        store.shut().await;
    }
}

#[tokio::test]
async fn a_file_of_another_program_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = file(dir.path().join("x.db"));
    let options = SqliteConnectOptions::new().filename(&config.path).create_if_missing(true);
    let pool = SqlitePool::connect_with(options).await.unwrap();
    sqlx::raw_sql("CREATE TABLE snapshots (id INTEGER, picture BLOB)").execute(&pool).await.unwrap();
    pool.close().await;
    let error = SqlStore::open(&config).await.unwrap_err();
    assert!(error.to_string().contains("another program"), "{error}");
    std::fs::write(&config.path, "no database at all, but long enough to be looked at as one").unwrap();
    assert!(SqlStore::open(&config).await.is_err());
}

#[tokio::test]
async fn a_file_of_the_first_version_keeps_its_history_and_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let config = file(dir.path().join("s.db"));
    let store = SqlStore::open(&config).await.unwrap();
    let id = SandboxId::random();
    let mut tx = store.database.begin().await.unwrap();
    for statement in [
        "DROP TABLE events",
        "DROP TABLE snapshots",
        "DROP TABLE image_builds",
        "DROP TABLE image_build_failures",
        "DROP TABLE image_ordinals",
        "DROP TABLE built_images",
        "DROP TABLE image_holders",
        "DROP TABLE image_tags",
        "DROP TABLE prebuilds",
        "DROP TABLE agents",
        "DROP TABLE webhooks",
        "DROP TABLE webhook_deliveries",
        "DROP TABLE usages",
        "DROP TABLE breakers",
        "DROP TABLE pools",
        "DELETE FROM _sqlx_migrations WHERE version > 1",
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, sandbox_id TEXT NOT NULL, at_ms BIGINT NOT NULL, \
         kind TEXT NOT NULL, message TEXT NOT NULL)",
        "CREATE INDEX events_by_sandbox ON events (sandbox_id, seq)",
        "CREATE INDEX events_by_age ON events (at_ms)",
    ] {
        tx.execute(statement, values![]).await.unwrap();
    }
    tx.execute("INSERT INTO events VALUES (41, $1, 5, 'old', 'm')", values![id.to_string()]).await.unwrap();
    tx.commit().await.unwrap();
    store.shut().await;
    let store = SqlStore::open(&config).await.unwrap();
    store.append(id, &[event("new")]).await.unwrap();
    let lines = store.history_after(id, 0, 10).await.unwrap();
    let lines: Vec<_> = lines.iter().map(|line| (line.seq, line.event.kind.as_str())).collect();
    assert_eq!(lines, [(41, "old"), (42, "new")]);
    store.shut().await;
}

/// The table that the OpenSandbox server keeps in PostgreSQL.
const UPSTREAM_TABLE: &str = "CREATE TABLE public.snapshots (id TEXT PRIMARY KEY, source_sandbox_id TEXT NOT NULL, \
     namespace TEXT DEFAULT NULL, name TEXT, description TEXT, restore_config JSONB NOT NULL, state TEXT NOT NULL, \
     reason TEXT, message TEXT, last_transition_at TIMESTAMPTZ, created_at TIMESTAMPTZ NOT NULL, \
     updated_at TIMESTAMPTZ NOT NULL)";

async fn upstream_row(on: &mut PgConnection, id: &str) {
    sqlx::query(
        "INSERT INTO public.snapshots VALUES ($1, $2, NULL, 'theirs', NULL, \
         '{\"image\": \"opensandbox-snapshots:x\", \"backend\": null}', 'Ready', 'snapshot_runtime_ready', NULL, \
         NULL, '2026-03-04 07:06:07.123456+02', '2026-03-04 07:06:08+02')",
    )
    .bind(id)
    .bind(SOURCE)
    .execute(on)
    .await
    .unwrap();
}

#[tokio::test]
async fn rows_of_the_other_server_are_taken_over_once() {
    let Some(config) = database().await else { return };
    let mut theirs = PgConnection::connect(dsn(&config)).await.unwrap();
    sqlx::raw_sql(UPSTREAM_TABLE).execute(&mut theirs).await.unwrap();
    upstream_row(&mut theirs, ID).await;
    let store = SqlStore::open(&config).await.unwrap();
    let record = store.snapshot(ID.parse().unwrap()).await.unwrap().unwrap();
    assert_eq!(record.created_at.to_string(), "2026-03-04T05:06:07.123000Z");
    assert_eq!(record.last_transition_at, record.created_at);
    assert_eq!(record.restore.unwrap().image, "opensandbox-snapshots:x");
    assert_eq!(store.delete_snapshot(record.id, SnapshotState::Ready).await.unwrap(), Advance::Written);
    store.shut().await;
    let later = SnapshotId::random();
    upstream_row(&mut theirs, &later.to_string()).await;
    let store = SqlStore::open(&config).await.unwrap();
    assert_eq!(store.snapshot(record.id).await.unwrap(), None, "deleted here, and it stays so");
    assert_eq!(store.snapshot(later).await.unwrap(), None);
    let (rows,): (i64,) =
        sqlx::query_as("SELECT COUNT(*) FROM public.snapshots").fetch_one(&mut theirs).await.unwrap();
    assert_eq!(rows, 2, "their table is as it was");
    store.shut().await;
    theirs.close().await.unwrap();
    drop_database(&config).await;
}

#[tokio::test]
async fn tables_of_other_programs_in_the_same_database_are_left_alone() {
    let Some(config) = database().await else { return };
    let mut theirs = PgConnection::connect(dsn(&config)).await.unwrap();
    sqlx::raw_sql("CREATE TABLE public.snapshots (id INT, events TEXT); CREATE TABLE public.events (x INT)")
        .execute(&mut theirs)
        .await
        .unwrap();
    let store = SqlStore::open(&config).await.unwrap();
    assert_eq!(store.snapshots(&SnapshotFilter::default(), 0, 1).await.unwrap(), (vec![], 0));
    store.append(SandboxId::random(), &[event("a")]).await.unwrap();
    store.shut().await;
    theirs.close().await.unwrap();
    drop_database(&config).await;
}

#[tokio::test]
async fn many_servers_may_open_a_new_database_at_once() {
    let Some(config) = database().await else { return };
    let mut opening = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let config = config.clone();
        opening.spawn(async move { SqlStore::open(&config).await });
    }
    for store in opening.join_all().await {
        store.unwrap().shut().await;
    }
    drop_database(&config).await;
}
