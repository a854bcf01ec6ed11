-- What is known of the use of sandboxes that have policies, and of the action that was begun.
CREATE TABLE usages (
    sandbox_id TEXT PRIMARY KEY,
    body TEXT NOT NULL
) WITHOUT ROWID;

-- Kinds of sandboxes that did not become ready of late.
CREATE TABLE breakers (
    key TEXT PRIMARY KEY,
    version BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    body TEXT NOT NULL
) WITHOUT ROWID;
