-- What is kept of the agents of sandboxes that are made from repositories.
CREATE TABLE agents (
    sandbox_id TEXT PRIMARY KEY,
    body TEXT NOT NULL
) WITHOUT ROWID;
