//! Opening a PostgreSQL database. Our tables live in a schema of their own, so that another server may share the database.

use std::time::Duration;

use sandglass_sandbox::ports::StoreError;
use sqlx::{
    Connection, PgConnection, PgPool, SqlSafeStr,
    migrate::{Migration, MigrationType, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};

use super::{database::failed, dsn};
use crate::config::PostgresConfig;

/// By this name others see in `pg_stat_activity` that a server uses the database.
pub(super) const SERVER: &str = "sandglass server";
/// The name of a session that only moves rows.
pub(super) const MOVER: &str = "sandglass store migrate";

/// How long the tables may take to be brought up to date, also by another server that has begun with it.
const PREPARE: Duration = Duration::from_secs(120);

/// What every session of ours asks for. A transaction or statement that its client has given up must not hold locks for ever.
const SESSION: [(&str, &str); 3] = [
    ("search_path", "sandglass"),
    ("idle_in_transaction_session_timeout", "60s"),
    ("statement_timeout", "120s"),
];

/// Reads the connection string. The options print no password.
pub(super) fn options(config: &PostgresConfig, application: &str) -> Result<PgConnectOptions, StoreError> {
    let dsn = config.dsn.as_ref().ok_or_else(|| {
        StoreError::Unavailable(
            "no connection string; set OPENSANDBOX_STORE_POSTGRESQL_DSN or store.postgresql.dsn".into(),
        )
    })?;
    let options = dsn::parse(dsn.expose()).map_err(|e| StoreError::Unavailable(e.to_string()))?;
    Ok(options.application_name(application).options(SESSION))
}

/// One connection, with an error that says where it was to go and why it did not.
pub(super) async fn connect(options: &PgConnectOptions, limit: Duration) -> Result<PgConnection, StoreError> {
    let place = format!(
        "PostgreSQL at {}:{}, database {:?}",
        options.get_socket().map_or_else(|| options.get_host().to_owned(), |path| path.display().to_string()),
        options.get_port(),
        options.get_database().unwrap_or(options.get_username()),
    );
    match tokio::time::timeout(limit, PgConnection::connect_with(options)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(StoreError::Unavailable(format!("{place}: {error}"))),
        Err(_) => Err(StoreError::Unavailable(format!("{place}: no answer within {limit:?}"))),
    }
}

/// Connects and brings the tables up to date.
pub(super) async fn open(config: &PostgresConfig, application: &str) -> Result<PgPool, StoreError> {
    let options = options(config, application)?;
    // A first connection by hand: the pool would only say that it waited long enough.
    let mut connection = connect(&options, config.connect_timeout).await?;
    if application == SERVER && others(&mut connection).await? > 0 {
        tracing::warn!(
            "another server uses this database: operations have no leases yet, so that two servers act on the same ones"
        );
    }
    tokio::time::timeout(PREPARE, prepare(&mut connection))
        .await
        .unwrap_or_else(|_| Err(StoreError::Unavailable("preparing the tables takes too long".into())))?;
    // The lock of the migrations goes with the session.
    let _ = connection.close().await;
    Ok(PgPoolOptions::new()
        .min_connections(config.min_pool_size.min(config.max_pool_size))
        .max_connections(config.max_pool_size)
        .acquire_timeout(config.pool_timeout)
        .connect_lazy_with(options))
}

/// How many sessions of servers there are beside this one.
pub(super) async fn others(connection: &mut PgConnection) -> Result<i64, StoreError> {
    let (servers,): (i64,) = sqlx::query_as(
        "SELECT COUNT(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name = $1 AND pid <> pg_backend_pid()",
    )
    .bind(SERVER)
    .fetch_one(connection)
    .await
    .map_err(failed)?;
    Ok(servers)
}

async fn prepare(connection: &mut PgConnection) -> Result<(), StoreError> {
    let (encoding, exists): (String, bool) =
        sqlx::query_as("SELECT current_setting('server_encoding'), to_regnamespace('sandglass') IS NOT NULL")
            .fetch_one(&mut *connection)
            .await
            .map_err(failed)?;
    if encoding != "UTF8" {
        return Err(StoreError::Unavailable(format!(
            "the database's encoding is {encoding}; it must be UTF8"
        )));
    }
    let mut migrator = Migrator::with_migrations(migrations());
    if !exists {
        // Only then: creating it needs a privilege that using it does not.
        migrator.create_schema("sandglass");
    }
    migrator
        .run_direct(None, connection, false)
        .await
        .map_err(|e| StoreError::Unavailable(format!("cannot prepare the tables in schema `sandglass`: {e}")))
}

fn migrations() -> Vec<Migration> {
    [
        (1, "spine", include_str!("migrations/postgres/0001_spine.sql")),
        (2, "adopt", include_str!("migrations/postgres/0002_adopt.sql")),
        (3, "image builds", include_str!("migrations/postgres/0003_image_builds.sql")),
        (4, "agents", include_str!("migrations/postgres/0004_agents.sql")),
        (5, "webhooks", include_str!("migrations/postgres/0005_webhooks.sql")),
        (6, "policies", include_str!("migrations/postgres/0006_policies.sql")),
        (7, "pools", include_str!("migrations/postgres/0007_pools.sql")),
    ]
    .map(|(version, name, sql)| {
        Migration::new(version, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
    })
    .into()
}
