-- Numbers of history lines are never given twice, so that a reader can go on after the last one it has seen.
CREATE TABLE numbered (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    sandbox_id TEXT NOT NULL,
    at_ms BIGINT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL
);
INSERT INTO numbered (seq, sandbox_id, at_ms, kind, message)
    SELECT seq, sandbox_id, at_ms, kind, message FROM events ORDER BY seq;
DROP TABLE events;
ALTER TABLE numbered RENAME TO events;
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);
CREATE INDEX events_by_age ON events (at_ms);
-- Snapshots. The OpenSandbox server keeps its own in a table of this name and form: it may be here already.
CREATE TABLE IF NOT EXISTS snapshots (
    id TEXT PRIMARY KEY,
    source_sandbox_id TEXT NOT NULL,
    namespace TEXT DEFAULT NULL,
    name TEXT,
    description TEXT,
    restore_config TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    message TEXT,
    last_transition_at TEXT,
    created_at TEXT NOT NULL,
    updated_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS idx_snapshots_source_sandbox_id ON snapshots (source_sandbox_id);
CREATE INDEX IF NOT EXISTS idx_snapshots_state ON snapshots (state);
CREATE INDEX IF NOT EXISTS idx_snapshots_created_at ON snapshots (created_at DESC);
