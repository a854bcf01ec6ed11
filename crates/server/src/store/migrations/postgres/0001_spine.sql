-- Operations in flight. One open intent a sandbox; closed ones are deleted.
CREATE TABLE intents (
    sandbox_id TEXT PRIMARY KEY,
    generation BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- History, append-only and bounded by age. Outlives the sandbox.
CREATE SEQUENCE events_seq;
CREATE TABLE events (
    seq BIGINT PRIMARY KEY,
    sandbox_id TEXT NOT NULL,
    at_ms BIGINT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);
CREATE INDEX events_by_age ON events (at_ms);
-- A line gets its number while it holds the lock of its sandbox, and keeps it until the commit. So a reader that has seen
-- a number has seen every smaller one of that sandbox. Lines that bring their number push the counter on.
CREATE FUNCTION number_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('sandglass events ' || NEW.sandbox_id, 0));
    IF NEW.seq IS NULL THEN
        NEW.seq := nextval('sandglass.events_seq');
    ELSE
        PERFORM setval('sandglass.events_seq',
                       GREATEST(NEW.seq, (SELECT last_value FROM sandglass.events_seq)));
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER number_event BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION number_event();
-- Requests that must not happen twice.
CREATE TABLE idempotency_keys (
    key TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    at_ms BIGINT NOT NULL
);
CREATE INDEX idempotency_by_age ON idempotency_keys (at_ms);
-- Snapshots, in the same text as on SQLite. Compared byte by byte: that is the order of time.
CREATE TABLE snapshots (
    id TEXT COLLATE "C" PRIMARY KEY,
    source_sandbox_id TEXT NOT NULL,
    namespace TEXT DEFAULT NULL,
    name TEXT,
    description TEXT,
    restore_config TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    message TEXT,
    last_transition_at TEXT,
    created_at TEXT COLLATE "C" NOT NULL,
    updated_at TEXT NOT NULL
);
-- No index on the name: an index takes no long text.
CREATE INDEX snapshots_by_source ON snapshots (source_sandbox_id);
CREATE INDEX snapshots_by_state ON snapshots (state);
CREATE INDEX snapshots_by_creation ON snapshots (created_at DESC, id DESC);
