-- Pools of warm boxes. Their boxes are the knowledge of the runtime.
CREATE TABLE pools (
    name TEXT PRIMARY KEY,
    body TEXT NOT NULL
);
