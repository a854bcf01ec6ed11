-- Builds of images from repositories. `in_flight` names what the build is for until it ended: at most one at a time.
CREATE TABLE image_builds (
    id TEXT PRIMARY KEY NOT NULL,
    version BIGINT NOT NULL,
    namespace TEXT NOT NULL,
    runtime TEXT NOT NULL,
    repository_key TEXT NOT NULL,
    state TEXT NOT NULL,
    in_flight TEXT UNIQUE,
    owes BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    finished_ms BIGINT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX image_builds_by_creation ON image_builds (namespace, created_ms, id);
CREATE INDEX image_builds_owing ON image_builds (runtime, owes);
-- Recent failures, by what the build was for.
CREATE TABLE image_build_failures (
    slot TEXT PRIMARY KEY NOT NULL,
    until_ms BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- Numbers in names of artifacts, never given twice. Rows stay when everything else of their key is gone.
CREATE TABLE image_ordinals (
    runtime TEXT NOT NULL,
    digits TEXT NOT NULL,
    given BIGINT NOT NULL,
    PRIMARY KEY (runtime, digits)
);
-- Images that builds made. What changes without the rest has columns of its own, which count before the body.
CREATE TABLE built_images (
    id TEXT PRIMARY KEY NOT NULL,
    version BIGINT NOT NULL,
    namespace TEXT NOT NULL,
    runtime TEXT NOT NULL,
    recipe_key TEXT NOT NULL,
    repository_key TEXT NOT NULL,
    state TEXT NOT NULL,
    blocked BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    last_used_ms BIGINT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX built_images_by_lineage ON built_images (runtime, namespace, recipe_key);
CREATE INDEX built_images_by_creation ON built_images (namespace, created_ms, id);
-- Who uses an image: sandboxes, and builds that start from it.
CREATE TABLE image_holders (
    image_id TEXT NOT NULL,
    holder TEXT NOT NULL,
    PRIMARY KEY (image_id, holder)
);
-- Movable names.
CREATE TABLE image_tags (
    namespace TEXT NOT NULL,
    repository_key TEXT NOT NULL,
    name TEXT NOT NULL,
    image_id TEXT NOT NULL,
    moved_ms BIGINT NOT NULL,
    PRIMARY KEY (namespace, repository_key, name)
);
CREATE INDEX image_tags_by_image ON image_tags (image_id);
-- Standing orders.
CREATE TABLE prebuilds (
    id TEXT PRIMARY KEY NOT NULL,
    version BIGINT NOT NULL,
    body TEXT NOT NULL
);
