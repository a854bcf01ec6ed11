-- Operations in flight. One open intent a sandbox; closed ones are deleted.
CREATE TABLE intents (
    sandbox_id TEXT PRIMARY KEY NOT NULL,
    generation BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- History, append-only and bounded by age. Outlives the sandbox.
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    sandbox_id TEXT NOT NULL,
    at_ms BIGINT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);
CREATE INDEX events_by_age ON events (at_ms);
-- Requests that must not happen twice.
CREATE TABLE idempotency_keys (
    key TEXT PRIMARY KEY NOT NULL,
    fingerprint TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    at_ms BIGINT NOT NULL
);
CREATE INDEX idempotency_by_age ON idempotency_keys (at_ms);
