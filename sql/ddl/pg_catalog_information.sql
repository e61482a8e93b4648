-- PostgreSQL's information_schema over our pg_catalog, with PostgreSQL's names of types and the
-- database's name as the client knows it. Run after pg_catalog.sql and pg_catalog_functions.sql;
-- the schema is called information here, since DuckDB keeps the other name for itself. What is
-- not here is empty (pg_catalog_shapes.txt).

CREATE VIEW information.information_schema_catalog_name AS
  SELECT database_name AS catalog_name FROM own_client;

CREATE VIEW information.schemata AS
  SELECT own_client.database_name AS catalog_name, nspname AS schema_name,
         'tierkv' AS schema_owner, NULL::VARCHAR AS default_character_set_catalog,
         NULL::VARCHAR AS default_character_set_schema,
         NULL::VARCHAR AS default_character_set_name, NULL::VARCHAR AS sql_path
  FROM pg_namespace, own_client;

CREATE VIEW information.tables AS
  SELECT own_client.database_name AS table_catalog, nspname AS table_schema, relname AS table_name,
         CASE WHEN relkind = 'v' THEN 'VIEW' WHEN relpersistence = 't' THEN 'LOCAL TEMPORARY'
              ELSE 'BASE TABLE' END AS table_type,
         NULL::VARCHAR AS self_referencing_column_name, NULL::VARCHAR AS reference_generation,
         NULL::VARCHAR AS user_defined_type_catalog, NULL::VARCHAR AS user_defined_type_schema,
         NULL::VARCHAR AS user_defined_type_name,
         CASE WHEN relkind = 'r' THEN 'YES' ELSE 'NO' END AS is_insertable_into,
         'NO' AS is_typed, NULL::VARCHAR AS commit_action
  FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace, own_client
  WHERE relkind IN ('r', 'v');

CREATE VIEW information.views AS
  SELECT own_client.database_name AS table_catalog, nspname AS table_schema, relname AS table_name,
         pg_get_viewdef(c.oid) AS view_definition, 'NONE' AS check_option,
         'NO' AS is_updatable, 'NO' AS is_insertable_into, 'NO' AS is_trigger_updatable,
         'NO' AS is_trigger_deletable, 'NO' AS is_trigger_insertable_into
  FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace, own_client
  WHERE relkind = 'v';

CREATE VIEW information.columns AS
  SELECT own_client.database_name AS table_catalog, nspname AS table_schema, relname AS table_name,
         attname AS column_name, attnum::INTEGER AS ordinal_position,
         CASE WHEN attgenerated = '' THEN adbin END AS column_default,
         CASE WHEN attnotnull THEN 'NO' ELSE 'YES' END AS is_nullable,
         CASE WHEN typcategory = 'A' THEN 'ARRAY' ELSE format_type(atttypid, NULL) END
         AS data_type,
         CASE WHEN atttypid IN (1042, 1043) AND atttypmod > 4 THEN atttypmod - 4 END::INTEGER
         AS character_maximum_length,
         CASE WHEN atttypid IN (1042, 1043) AND atttypmod > 4 THEN 4 * (atttypmod - 4)
              WHEN atttypid = 25 THEN 1073741824 END AS character_octet_length,
         CASE atttypid WHEN 21 THEN 16 WHEN 23 THEN 32 WHEN 20 THEN 64 WHEN 700 THEN 24
              WHEN 701 THEN 53 WHEN 1700 THEN CASE WHEN atttypmod > 4 THEN (atttypmod - 4) >> 16 END
         END AS numeric_precision,
         CASE WHEN atttypid IN (20, 21, 23, 700, 701) THEN 2 WHEN atttypid = 1700 THEN 10 END
         AS numeric_precision_radix,
         CASE WHEN atttypid IN (20, 21, 23) THEN 0
              WHEN atttypid = 1700 AND atttypmod > 4 THEN (atttypmod - 4) & 65535 END
         AS numeric_scale,
         CASE WHEN typcategory IN ('D', 'T') THEN CASE WHEN typname = 'date' THEN 0 ELSE 6 END END
         AS datetime_precision,
         NULL::VARCHAR AS interval_type, NULL::INTEGER AS interval_precision,
         NULL::VARCHAR AS character_set_catalog, NULL::VARCHAR AS character_set_schema,
         NULL::VARCHAR AS character_set_name, NULL::VARCHAR AS collation_catalog,
         NULL::VARCHAR AS collation_schema, NULL::VARCHAR AS collation_name,
         NULL::VARCHAR AS domain_catalog, NULL::VARCHAR AS domain_schema,
         NULL::VARCHAR AS domain_name, own_client.database_name AS udt_catalog,
         'pg_catalog' AS udt_schema, typname AS udt_name, NULL::VARCHAR AS scope_catalog,
         NULL::VARCHAR AS scope_schema, NULL::VARCHAR AS scope_name,
         NULL::INTEGER AS maximum_cardinality, attnum::VARCHAR AS dtd_identifier,
         'NO' AS is_self_referencing, 'NO' AS is_identity,
         NULL::VARCHAR AS identity_generation, NULL::VARCHAR AS identity_start,
         NULL::VARCHAR AS identity_increment, NULL::VARCHAR AS identity_maximum,
         NULL::VARCHAR AS identity_minimum, 'NO' AS identity_cycle,
         CASE WHEN attgenerated = '' THEN 'NEVER' ELSE 'ALWAYS' END AS is_generated,
         CASE WHEN attgenerated <> '' THEN adbin END AS generation_expression,
         CASE WHEN relkind = 'r' THEN 'YES' ELSE 'NO' END AS is_updatable
  FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid AND relkind IN ('r', 'v')
  JOIN pg_namespace n ON n.oid = relnamespace JOIN pg_type t ON t.oid = atttypid
  LEFT JOIN pg_attrdef d ON adrelid = attrelid AND adnum = attnum, own_client;

CREATE VIEW own_keys AS
  SELECT k.oid, conname, contype, nspname, relname, conrelid, confrelid, conkey, confkey, condef
  FROM pg_constraint k JOIN pg_class c ON c.oid = conrelid
  JOIN pg_namespace n ON n.oid = relnamespace;

CREATE VIEW information.table_constraints AS
  SELECT own_client.database_name AS constraint_catalog, nspname AS constraint_schema,
         conname AS constraint_name, own_client.database_name AS table_catalog,
         nspname AS table_schema, relname AS table_name,
         CASE contype WHEN 'p' THEN 'PRIMARY KEY' WHEN 'u' THEN 'UNIQUE'
              WHEN 'f' THEN 'FOREIGN KEY' ELSE 'CHECK' END AS constraint_type,
         'NO' AS is_deferrable, 'NO' AS initially_deferred, 'YES' AS enforced,
         CASE WHEN contype = 'u' THEN 'YES' END AS nulls_distinct
  FROM own_keys, own_client;

CREATE VIEW information.key_column_usage AS
  SELECT own_client.database_name AS constraint_catalog, nspname AS constraint_schema,
         conname AS constraint_name, own_client.database_name AS table_catalog,
         nspname AS table_schema, relname AS table_name, attname AS column_name,
         place::INTEGER AS ordinal_position,
         CASE WHEN contype = 'f' THEN place::INTEGER END AS position_in_unique_constraint
  FROM (SELECT *, unnest(conkey) AS number, generate_subscripts(conkey, 1) AS place
        FROM own_keys WHERE contype IN ('p', 'u', 'f'))
  JOIN pg_attribute ON attrelid = conrelid AND attnum = number, own_client;

CREATE VIEW information.constraint_column_usage AS
  SELECT own_client.database_name AS table_catalog, n.nspname AS table_schema,
         c.relname AS table_name, attname AS column_name,
         own_client.database_name AS constraint_catalog, u.nspname AS constraint_schema,
         conname AS constraint_name
  FROM (SELECT nspname, conname, CASE contype WHEN 'f' THEN confrelid ELSE conrelid END AS target,
               unnest(CASE contype WHEN 'f' THEN confkey ELSE conkey END) AS number FROM own_keys) u
  JOIN pg_attribute ON attrelid = target AND attnum = number
  JOIN pg_class c ON c.oid = target JOIN pg_namespace n ON n.oid = c.relnamespace, own_client;

CREATE VIEW information.constraint_table_usage AS
  SELECT DISTINCT table_catalog, table_schema, table_name, constraint_catalog, constraint_schema,
         constraint_name
  FROM information.constraint_column_usage;

CREATE VIEW information.referential_constraints AS
  SELECT own_client.database_name AS constraint_catalog, k.nspname AS constraint_schema,
         k.conname AS constraint_name, own_client.database_name AS unique_constraint_catalog,
         r.nspname AS unique_constraint_schema, r.conname AS unique_constraint_name,
         'NONE' AS match_option, 'NO ACTION' AS update_rule, 'NO ACTION' AS delete_rule
  FROM own_keys k LEFT JOIN own_keys r
    ON r.conrelid = k.confrelid AND r.contype IN ('p', 'u') AND r.conkey = k.confkey, own_client
  WHERE k.contype = 'f';

CREATE VIEW information.check_constraints AS
  SELECT own_client.database_name AS constraint_catalog, nspname AS constraint_schema,
         conname AS constraint_name,
         regexp_replace(condef, '^CHECK\s*\((.*)\)$', '\1', 's') AS check_clause
  FROM own_keys, own_client WHERE contype = 'c';

CREATE VIEW information.sequences AS
  SELECT own_client.database_name AS sequence_catalog, schemaname AS sequence_schema,
         sequencename AS sequence_name, data_type, 64 AS numeric_precision,
         2 AS numeric_precision_radix, 0 AS numeric_scale, start_value::VARCHAR AS start_value,
         min_value::VARCHAR AS minimum_value, max_value::VARCHAR AS maximum_value,
         increment_by::VARCHAR AS increment, CASE WHEN cycle THEN 'YES' ELSE 'NO' END
         AS cycle_option
  FROM pg_sequences, own_client;

CREATE VIEW information.enabled_roles AS SELECT rolname AS role_name FROM pg_roles;
CREATE VIEW information.applicable_roles AS
  SELECT user_name AS grantee, 'tierkv' AS role_name, 'NO' AS is_grantable FROM own_client;

CREATE VIEW information.table_privileges AS
  SELECT 'tierkv' AS grantor, own_client.user_name AS grantee, table_catalog, table_schema,
         table_name, privilege_type, 'YES' AS is_grantable,
         CASE WHEN privilege_type = 'SELECT' THEN 'YES' ELSE 'NO' END AS with_hierarchy
  FROM information.tables, own_client,
       (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE'), ('TRUNCATE')) p(privilege_type);
CREATE VIEW information.role_table_grants AS SELECT * FROM information.table_privileges;
