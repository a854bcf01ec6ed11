-- Subscriptions to events, what is to be sent to their receivers, and who does it.
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    version BIGINT NOT NULL,
    read_to BIGINT NOT NULL,
    lease_owner TEXT NOT NULL,
    lease_until_ms BIGINT NOT NULL,
    health TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    body TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE webhook_deliveries (
    webhook_id TEXT NOT NULL,
    seq BIGINT NOT NULL,
    state TEXT NOT NULL,
    finished_ms BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (webhook_id, seq)
);
CREATE INDEX webhook_deliveries_pending ON webhook_deliveries (webhook_id, seq) WHERE state = 'Pending';
-- How sandboxes ended is asked for by when they did.
CREATE INDEX events_ends ON events (at_ms) WHERE kind = 'removed';
