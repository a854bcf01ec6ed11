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
);
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
-- Every writer of a line shares one more lock until it commits. Who takes it alone knows that no line with a smaller number than
-- those there are can still appear, of any sandbox.
CREATE OR REPLACE FUNCTION number_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('sandglass events', 0));
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
