-- Takes over, once, the snapshots that an OpenSandbox server keeps in this database. Its own table stays as it is.
-- A table of that name and another shape, or one that may not be read, is none of our business.
DO $$
BEGIN
    IF to_regnamespace('public') IS NULL OR NOT has_schema_privilege(to_regnamespace('public'), 'USAGE') THEN
        RETURN;
    END IF;
    IF to_regclass('public.snapshots') IS NULL
       OR NOT has_table_privilege(to_regclass('public.snapshots'), 'SELECT') THEN
        RETURN;
    END IF;
    IF (SELECT COUNT(*) FROM pg_attribute
            WHERE attrelid = to_regclass('public.snapshots') AND NOT attisdropped
              AND (attname, atttypid) IN (('id', 'text'::regtype), ('source_sandbox_id', 'text'::regtype),
                  ('namespace', 'text'::regtype), ('name', 'text'::regtype), ('description', 'text'::regtype),
                  ('restore_config', 'jsonb'::regtype), ('state', 'text'::regtype), ('reason', 'text'::regtype),
                  ('message', 'text'::regtype), ('last_transition_at', 'timestamptz'::regtype),
                  ('created_at', 'timestamptz'::regtype), ('updated_at', 'timestamptz'::regtype))) < 12
    THEN
        RETURN;
    END IF;
    INSERT INTO sandglass.snapshots (id, source_sandbox_id, namespace, name, description, restore_config, state, reason,
                           message, last_transition_at, created_at, updated_at)
    SELECT id, source_sandbox_id, namespace, name, description, restore_config::text, state, reason, message,
           to_char(last_transition_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
           to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
           to_char(updated_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
    FROM public.snapshots
    ON CONFLICT (id) DO NOTHING;
END
$$;
