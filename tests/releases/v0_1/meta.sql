CREATE SCHEMA tierkv_meta;
CREATE TABLE tierkv_meta.schema_version (version int NOT NULL);

    CREATE TABLE tierkv_meta.cluster (name text PRIMARY KEY, value bytea NOT NULL);
    CREATE TABLE tierkv_meta.namespaces (
        name text PRIMARY KEY, tenants text NOT NULL, cache_enabled boolean NOT NULL,
        policy text NOT NULL
    );
    CREATE TABLE tierkv_meta.changes (number bigint NOT NULL);
    INSERT INTO tierkv_meta.changes VALUES (0);
    INSERT INTO tierkv_meta.schema_version VALUES (1);
INSERT INTO tierkv_meta.namespaces (name, tenants, cache_enabled, policy) VALUES ('team', '["ann", "bob"]', true, '{}');
