//! A PostgreSQL server that is away, hangs, is full, or refuses.

use std::{sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};

use super::*;

/// Stands between a store and the server, and can be closed or stopped.
struct Door {
    listener: Arc<TcpListener>,
    address: String,
    state: watch::Sender<State>,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Open,
    /// Connections end at once, also those that were made before.
    Closed,
    /// Bytes wait.
    Hanging,
}

impl Door {
    async fn to(config: &StoreConfig) -> Self {
        let options: sqlx::postgres::PgConnectOptions = dsn(config).parse().unwrap();
        let listener = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
        let port = listener.local_addr().unwrap().port();
        let name = options.get_database().unwrap();
        let address =
            format!("postgres://{}@127.0.0.1:{port}/{name}?sslmode=disable", options.get_username());
        let (state, states) = watch::channel(State::Open);
        let to = (options.get_host().to_owned(), options.get_port());
        let accepting = listener.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = accepting.accept().await {
                tokio::spawn(relay(client, to.clone(), states.clone()));
            }
        });
        Self { listener, address, state }
    }

    fn set(&self, state: State) {
        self.state.send_replace(state);
    }

    fn config(&self) -> StoreConfig {
        let mut config = postgres(self.address.clone());
        config.postgresql.connect_timeout = Duration::from_secs(3);
        config.postgresql.pool_timeout = Duration::from_secs(3);
        config
    }
}

async fn relay(mut client: TcpStream, to: (String, u16), mut states: watch::Receiver<State>) {
    let mut server = TcpStream::connect(to).await.unwrap();
    loop {
        let state = *states.borrow_and_update();
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut client, &mut server), if state == State::Open => return,
            changed = states.changed() => if changed.is_err() { return },
            () = std::future::ready(()), if state == State::Closed => return,
        }
    }
}

async fn eventually(store: &SqlStore) {
    for _ in 0..50 {
        if store.open_intents().await.is_ok() {
            return;
        }
    }
    panic!("the store did not recover");
}

#[tokio::test]
async fn a_server_that_goes_away_or_hangs_is_unavailable_until_it_is_back() {
    let Some(config) = database().await else { return };
    let door = Door::to(&config).await;
    let store = SqlStore::open(&door.config()).await.unwrap();
    let id = SandboxId::random();
    store.append(id, &[event("before")]).await.unwrap();
    for state in [State::Closed, State::Hanging] {
        door.set(state);
        for _ in 0..2 {
            let error = store.append(id, &[event("lost")]).await.unwrap_err();
            assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
            let error = store.history(id, 1).await.unwrap_err();
            assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        }
        let error = SqlStore::open(&door.config()).await.unwrap_err().to_string();
        assert!(error.contains(&door.listener.local_addr().unwrap().to_string()), "{error}");
        door.set(State::Open);
        eventually(&store).await;
    }
    store.append(id, &[event("after")]).await.unwrap();
    assert_eq!(store.history(id, 1).await.unwrap(), [event("after")]);
    store.shut().await;
    drop_database(&config).await;
}

#[tokio::test]
async fn a_server_that_ends_its_sessions_is_connected_to_again() {
    let Some(fixture) = Fixture::postgres().await else { return };
    let mut admin = PgConnection::connect(dsn(&fixture.config)).await.unwrap();
    for _ in 0..3 {
        eventually(&fixture.store).await;
        sqlx::raw_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        .execute(&mut admin)
        .await
        .unwrap();
    }
    eventually(&fixture.store).await;
    admin.close().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn a_server_without_free_connections_is_unavailable_until_one_is_free() {
    let Some(mut config) = database().await else { return };
    let role = format!("limited_{}", SandboxId::random().to_string().replace('-', ""));
    let mut admin = PgConnection::connect(dsn(&config)).await.unwrap();
    let name = dsn(&config).rsplit("dbname=").next().unwrap().to_owned();
    let make =
        format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT 1; GRANT CREATE ON DATABASE {name} TO {role}");
    sqlx::raw_sql(AssertSqlSafe(make)).execute(&mut admin).await.unwrap();
    let own = dsn(&config).to_owned();
    config.postgresql.dsn = Some(Secret::new(with(&own, &format!("user={role}"))));
    config.postgresql.pool_timeout = Duration::from_secs(3);
    config.postgresql.min_pool_size = 0;
    let store = SqlStore::open(&config).await.unwrap();
    eventually(&store).await;
    let error = SqlStore::open(&config).await.unwrap_err();
    assert!(error.to_string().contains("connection"), "{error}");
    let held = loop {
        // The pool may ask for a second connection while the first is on its way back.
        if let Ok(held) = store.database.reader().await {
            break held;
        }
    };
    let error = store.open_intents().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    drop(held);
    eventually(&store).await;
    store.shut().await;
    config.postgresql.dsn = Some(Secret::new(own));
    drop_database(&config).await;
    sqlx::raw_sql(AssertSqlSafe(format!("DROP ROLE {role}"))).execute(&mut admin).await.ok();
}

#[tokio::test]
async fn errors_name_the_server_and_not_the_password() {
    let Some(address) = server() else { return };
    let cases = [
        with(&address, "dbname=hunter&password=hunter2"),
        "postgres://me:hunter2@127.0.0.1:1/db".to_owned(),
        "postgres://me:hunter2@nowhere.invalid/db".to_owned(),
        "host=127.0.0.1 port=1 password=hunter2".to_owned(),
        "hunter2".to_owned(),
    ];
    for case in cases {
        let config = postgres(case.clone());
        let error = SqlStore::open(&config).await.unwrap_err();
        let text = format!("{error} {error:?} {config:?}");
        assert!(!text.contains("hunter2"), "{text}");
        if case.contains("127.0.0.1:1/") {
            assert!(text.contains("127.0.0.1:1"), "{text}");
        }
    }
    let error = SqlStore::open(&StoreConfig { kind: StoreKind::Postgresql, ..StoreConfig::default() }).await;
    assert!(error.unwrap_err().to_string().contains("OPENSANDBOX_STORE_POSTGRESQL_DSN"));
}
