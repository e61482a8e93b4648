-- PostgreSQL's system catalog over DuckDB's, for psql, drivers and BI tools.
--
-- dbfront/postgres_dialect/catalog/install.py runs this once per process inside the attached in-memory
-- database tierkv_pg, after making own_type_names (oid, typname, typarray, typlen, typcategory,
-- format_name), the macro own_type_oid(duckdb type), own_system_relations (oid, relname) and
-- own_ai_functions. What is called own_ is for these files alone. Catalogs of features DuckDB does not have are made from pg_catalog_shapes.txt,
-- empty. catalog/rewrite.py points queries here.
-- The session variable tierkv_pg_client holds the names the client connected with, and whether the
-- engine's schema main is known as public (catalog/naming.py).

-- Objects of the current database and of the session's temporary schema -----------------------

CREATE VIEW own_client AS
  SELECT coalesce(getvariable('tierkv_pg_client')['database'], current_database()) AS database_name,
         coalesce(getvariable('tierkv_pg_client')['user'], 'tierkv') AS user_name;

CREATE MACRO own_schema(any_schema) AS
  CASE WHEN any_schema = 'main' AND coalesce(getvariable('tierkv_pg_client')['public'], false)
       THEN 'public' ELSE any_schema END;

-- DuckDB 1.5 does not say which columns are generated; there they count as plain ones.
CREATE VIEW own_all_columns AS
  SELECT * FROM duckdb_columns()
  UNION ALL BY NAME SELECT false AS is_generated, NULL::VARCHAR AS generation_expression
  WHERE false;

CREATE VIEW own_user_columns AS
  SELECT * REPLACE (coalesce(is_generated, false) AS is_generated) FROM own_all_columns
  WHERE database_name IN (current_database(), 'temp') AND NOT internal;

-- Checks that keep the length of varchar(n) and char(n) (dbfront/postgres_dialect/rewriting/ddl.py).
CREATE MACRO own_is_length(expression) AS coalesce(regexp_matches(
  expression, '^\(\(length\(.+\) <= \d+\) OR \(''(char|varchar)\(\d+\)'' IS NULL\)\)$', 's'), false);
CREATE VIEW own_text_lengths AS
  SELECT table_oid, constraint_column_indexes[1] + 1 AS column_index,
         CASE WHEN contains(expression, 'OR (''varchar(') THEN 1043 ELSE 1042 END AS type_oid,
         regexp_extract(expression, '(\d+)\)'' IS NULL\)\)$', 1)::INTEGER + 4 AS modifier
  FROM duckdb_constraints()
  WHERE constraint_type = 'CHECK' AND len(constraint_column_indexes) = 1
    AND own_is_length(expression);

CREATE VIEW pg_namespace AS
  SELECT oid, CASE database_name WHEN 'temp' THEN 'pg_temp_1' ELSE own_schema(schema_name) END AS nspname,
         10::BIGINT AS nspowner, NULL::VARCHAR AS nspacl, 2615::BIGINT AS tableoid
  FROM duckdb_schemas() WHERE database_name IN (current_database(), 'temp')
    AND CASE database_name
        WHEN 'temp' THEN (SELECT count(*) FROM duckdb_tables() WHERE temporary) > 0
                      OR (SELECT count(*) FROM duckdb_views() WHERE temporary AND NOT internal) > 0
        ELSE schema_name NOT IN ('pg_catalog', 'information_schema') END
  UNION ALL VALUES (11, 'pg_catalog', 10, NULL, 2615), (13000, 'information_schema', 10, NULL, 2615);

CREATE VIEW own_constraint_indexes AS
  SELECT 1000000000000 + table_oid * 1000 + constraint_index AS oid,
         2000000000000 + table_oid * 1000 + constraint_index AS constraint_oid,
         constraint_name AS name, schema_oid, table_oid, table_name,
         constraint_type = 'PRIMARY KEY' AS is_primary,
         list_transform(constraint_column_indexes, lambda c: c + 1) AS keys,
         constraint_column_names AS key_names, constraint_text
  FROM duckdb_constraints()
  WHERE database_name IN (current_database(), 'temp')
    AND constraint_type IN ('PRIMARY KEY', 'UNIQUE');

-- Keys are column numbers, 0 for an expression; DuckDB lists them as text.
CREATE VIEW own_index_keys AS
  WITH parts AS (
    SELECT index_oid, table_oid, schema_oid, index_name, is_unique, expressions,
           unnest(expressions::VARCHAR[]) AS part,
           generate_subscripts(expressions::VARCHAR[], 1) AS place
    FROM duckdb_indexes() WHERE database_name IN (current_database(), 'temp'))
  SELECT index_oid, p.table_oid, p.schema_oid, index_name, is_unique,
         list(coalesce(column_index, 0) ORDER BY place) AS keys,
         list(part ORDER BY place) AS parts,
         CASE WHEN count(*) > count(column_index) THEN expressions END AS expressions
  FROM parts p LEFT JOIN own_user_columns c
    ON c.table_oid = p.table_oid AND c.column_name = trim(part, '"')
  GROUP BY index_oid, p.table_oid, p.schema_oid, index_name, is_unique, expressions;

CREATE VIEW own_relations AS
  SELECT t.table_oid AS oid, table_name AS relname, schema_oid AS relnamespace, 'r' AS relkind,
         column_count AS relnatts,
         check_constraint_count - (SELECT count(*) FROM own_text_lengths l
                                   WHERE l.table_oid = t.table_oid) AS relchecks,
         index_count > 0 OR has_primary_key AS relhasindex,
         t.table_oid IN (SELECT k.table_oid FROM duckdb_constraints() k
                         WHERE k.constraint_type = 'FOREIGN KEY')
           OR table_name IN (SELECT k.referenced_table FROM duckdb_constraints() k
                             WHERE k.referenced_table IS NOT NULL) AS relhastriggers,
         estimated_size::FLOAT AS reltuples, temporary
  FROM duckdb_tables() t WHERE database_name IN (current_database(), 'temp') AND NOT internal
  UNION ALL
  SELECT view_oid, view_name, schema_oid, 'v', column_count, 0, false, false, 0, temporary
  FROM duckdb_views() WHERE database_name IN (current_database(), 'temp') AND NOT internal
  UNION ALL
  SELECT sequence_oid, sequence_name, schema_oid, 'S', 3, 0, false, false, 1, temporary
  FROM duckdb_sequences() WHERE database_name IN (current_database(), 'temp')
  UNION ALL
  SELECT index_oid, index_name, schema_oid, 'i', len(keys), 0, false, false, 0, false
  FROM own_index_keys
  UNION ALL
  SELECT oid, name, schema_oid, 'i', len(keys), 0, false, false, 0, false FROM own_constraint_indexes;

CREATE VIEW pg_class AS
  SELECT oid, relname, relnamespace, 0::BIGINT AS reltype, 0::BIGINT AS reloftype,
         10::BIGINT AS relowner, CASE WHEN relkind = 'r' THEN 2 WHEN relkind = 'i' THEN 403
         ELSE 0 END::BIGINT AS relam, oid AS relfilenode, 0::BIGINT AS reltablespace,
         0 AS relpages, reltuples, 0 AS relallvisible, 0::BIGINT AS reltoastrelid, relhasindex,
         false AS relisshared, CASE WHEN temporary THEN 't' ELSE 'p' END AS relpersistence,
         relkind, relnatts, relchecks, false AS relhasrules, relhastriggers,
         false AS relhassubclass, false AS relrowsecurity, false AS relforcerowsecurity,
         true AS relispopulated, 'd' AS relreplident, false AS relispartition,
         0::BIGINT AS relrewrite, 0::BIGINT AS relfrozenxid, 0::BIGINT AS relminmxid,
         NULL::VARCHAR AS relacl, NULL::VARCHAR[] AS reloptions, NULL::VARCHAR AS relpartbound,
         0 AS relallfrozen, false AS relhasoids, 1259::BIGINT AS tableoid
  FROM own_relations;

CREATE VIEW pg_attribute AS
  SELECT c.table_oid AS attrelid, column_name AS attname,
         coalesce(l.type_oid, own_type_oid(data_type)) AS atttypid,
         -1 AS attstattarget, own_type_length(data_type) AS attlen, c.column_index::SMALLINT AS attnum,
         CASE WHEN data_type LIKE '%]' THEN 1 ELSE 0 END AS attndims, -1 AS attcacheoff,
         coalesce(l.modifier, own_type_modifier(data_type)) AS atttypmod, false AS attbyval, 'p' AS attstorage,
         'i' AS attalign, NOT is_nullable AS attnotnull,
         column_default IS NOT NULL OR is_generated AS atthasdef, false AS atthasmissing,
         '' AS attidentity, CASE WHEN is_generated THEN 's' ELSE '' END AS attgenerated,
         false AS attisdropped, true AS attislocal, 0 AS attinhcount,
         CASE own_type_oid(data_type) WHEN 25 THEN 100 ELSE 0 END::BIGINT AS attcollation,
         '' AS attcompression, NULL::VARCHAR[] AS attacl,
         NULL::VARCHAR[] AS attoptions, NULL::VARCHAR[] AS attfdwoptions,
         NULL::VARCHAR[] AS attmissingval, 1249::BIGINT AS tableoid
  FROM own_user_columns c LEFT JOIN own_text_lengths l
    ON l.table_oid = c.table_oid AND l.column_index = c.column_index
  UNION ALL
  SELECT index_oid, part, coalesce(own_type_oid(data_type), 25), -1, -1, place, 0, -1,
         coalesce(own_type_modifier(data_type), -1), false, 'p', 'i', false, false, false, '',
         '', false, true, 0, 0, '', NULL, NULL, NULL, NULL, 1249
  FROM (SELECT index_oid, table_oid, unnest(parts) AS part,
               generate_subscripts(parts, 1) AS place
        FROM own_index_keys
        UNION ALL SELECT oid, table_oid, unnest(key_names), generate_subscripts(key_names, 1)
        FROM own_constraint_indexes) i
  LEFT JOIN own_user_columns c ON c.table_oid = i.table_oid AND c.column_name = trim(part, '"');

-- A sequence in a default as PostgreSQL shows it: without needless quotes and schema.
CREATE MACRO own_default(default_text) AS regexp_replace(
  regexp_replace(default_text, '^nextval\(''(?:"?main"?\.)?"?([a-z_][a-z0-9_]*)"?''\)$',
                 'nextval(''\1''::regclass)'),
  '^nextval\((''[^'']*'')\)$', 'nextval(\1::regclass)');

CREATE VIEW pg_attrdef AS
  SELECT table_oid * 1000 + column_index AS oid, table_oid AS adrelid,
         column_index::SMALLINT AS adnum,
         coalesce(own_default(column_default), generation_expression) AS adbin,
         2604::BIGINT AS tableoid
  FROM own_user_columns WHERE coalesce(column_default, generation_expression) IS NOT NULL;

CREATE VIEW pg_index AS
  WITH found AS (
    SELECT oid, table_oid, true AS is_unique, is_primary, keys, NULL::VARCHAR AS expressions
    FROM own_constraint_indexes
    UNION ALL SELECT index_oid, table_oid, is_unique, false, keys, expressions FROM own_index_keys)
  SELECT oid AS indexrelid, table_oid AS indrelid, len(keys)::SMALLINT AS indnatts,
         len(keys)::SMALLINT AS indnkeyatts, is_unique AS indisunique,
         is_primary AS indisprimary, false AS indisexclusion, true AS indimmediate,
         false AS indisclustered, true AS indisvalid, false AS indcheckxmin, true AS indisready,
         true AS indislive, false AS indisreplident, keys::SMALLINT[] AS indkey, expressions AS indexprs,
         NULL::VARCHAR AS indpred, list_transform(keys, lambda key: 0::SMALLINT) AS indoption,
         list_transform(keys, lambda key: 0::UINTEGER) AS indclass,
         list_transform(keys, lambda key: 0::UINTEGER) AS indcollation,
         false AS indnullsnotdistinct, 2610::BIGINT AS tableoid
  FROM found;

CREATE VIEW pg_constraint AS
  SELECT 2000000000000 + k.table_oid * 1000 + constraint_index AS oid, constraint_name AS conname,
         k.schema_oid AS connamespace,
         CASE constraint_type WHEN 'PRIMARY KEY' THEN 'p' WHEN 'UNIQUE' THEN 'u'
                              WHEN 'FOREIGN KEY' THEN 'f' ELSE 'c' END AS contype,
         false AS condeferrable, false AS condeferred, true AS convalidated,
         k.table_oid AS conrelid, 0::BIGINT AS contypid,
         CASE WHEN constraint_type IN ('PRIMARY KEY', 'UNIQUE')
              THEN 1000000000000 + k.table_oid * 1000 + constraint_index
              ELSE coalesce((SELECT min(i.oid) FROM own_constraint_indexes i
                             WHERE i.table_oid = r.table_oid
                               AND i.key_names = k.referenced_column_names), 0) END AS conindid,
         0::BIGINT AS conparentid, coalesce(r.table_oid, 0) AS confrelid,
         'a' AS confupdtype, 'a' AS confdeltype, 's' AS confmatchtype, true AS conislocal,
         0 AS coninhcount, true AS connoinherit,
         list_transform(constraint_column_indexes, lambda c: c + 1) AS conkey,
         (SELECT list(rc.column_index ORDER BY list_position(k.referenced_column_names,
                                                             rc.column_name))
          FROM own_user_columns rc WHERE rc.table_oid = r.table_oid
            AND list_contains(k.referenced_column_names, rc.column_name)) AS confkey,
         NULL::BIGINT[] AS conpfeqop, NULL::BIGINT[] AS conppeqop, NULL::BIGINT[] AS conffeqop,
         NULL::INTEGER[] AS confdelsetcols, NULL::BIGINT[] AS conexclop, expression AS conbin,
         true AS conenforced, false AS conperiod, regexp_replace(constraint_text, '^CHECK\(', 'CHECK (') AS condef,
         2606::BIGINT AS tableoid
  FROM duckdb_constraints() k
  LEFT JOIN duckdb_tables() r ON r.database_name = k.database_name
    AND r.schema_name = k.schema_name AND r.table_name = k.referenced_table
  WHERE k.database_name IN (current_database(), 'temp') AND constraint_type <> 'NOT NULL'
    AND NOT own_is_length(expression);

-- A foreign key needs the index of what it refers to, such an index its constraint, and a sequence
-- the column whose default draws from it.
CREATE VIEW pg_depend AS
  SELECT 2606::BIGINT AS classid, oid AS objid, 0 AS objsubid, 1259::BIGINT AS refclassid,
         conindid AS refobjid, 0 AS refobjsubid, 'n' AS deptype, 2608::BIGINT AS tableoid
  FROM pg_constraint WHERE contype = 'f' AND conindid <> 0
  UNION ALL SELECT 1259, oid, 0, 2606, constraint_oid, 0, 'i', 2608 FROM own_constraint_indexes
  UNION ALL SELECT 1259, sequence_oid, 0, 1259, table_oid, column_index, 'a', 2608
  FROM duckdb_sequences() q JOIN own_user_columns c ON c.schema_oid = q.schema_oid
    AND c.column_default LIKE 'nextval(%'
    AND replace(regexp_extract(c.column_default, '([^.'']+)''\)$', 1), '"', '') = sequence_name
  WHERE q.database_name IN (current_database(), 'temp');

-- The client sees the name it connected with, whatever the database file is called.
CREATE VIEW pg_database AS
  SELECT database_oid AS oid, CASE WHEN d.database_name = current_database()
         THEN own_client.database_name ELSE d.database_name END AS datname,
         10::BIGINT AS datdba, 6 AS encoding,
         'c' AS datlocprovider, false AS datistemplate, true AS datallowconn,
         -1 AS datconnlimit, 1663::BIGINT AS dattablespace, 'C.UTF-8' AS datcollate,
         'C.UTF-8' AS datctype, NULL::VARCHAR AS daticulocale, NULL::VARCHAR AS datlocale,
         NULL::VARCHAR AS daticurules, NULL::VARCHAR AS datcollversion, NULL::VARCHAR[] AS datacl,
         0::BIGINT AS datfrozenxid, 0::BIGINT AS datminmxid, false AS dathasloginevt,
         1262::BIGINT AS tableoid
  FROM duckdb_databases() d, own_client
  WHERE NOT internal AND d.database_name <> 'tierkv_pg';

CREATE VIEW own_enum_types AS
  SELECT type_oid + 3000000000 AS oid, type_name, schema_oid, labels FROM duckdb_types()
  WHERE logical_type = 'ENUM' AND NOT internal AND type_oid IS NOT NULL
    AND database_name IN (current_database(), 'temp');

-- Functions are numbers of a type that nothing else here has: queries.py knows them by it.
CREATE VIEW pg_type AS
  WITH found AS (
    SELECT oid, typname, 11::BIGINT AS namespace, typlen,
           CASE WHEN typcategory IN ('P', 'X') THEN 'p' ELSE 'b' END AS typtype, typcategory,
           typelem, typarray, functions FROM own_type_names
    UNION ALL SELECT oid, type_name, schema_oid, 4, 'e', 'E', 0, 0, own_enum_functions()
    FROM own_enum_types)
  SELECT oid, typname, namespace AS typnamespace, 10::BIGINT AS typowner, typlen::SMALLINT AS typlen,
         typlen BETWEEN 1 AND 8 AS typbyval, typtype, typcategory,
         false AS typispreferred, true AS typisdefined, ',' AS typdelim, 0::BIGINT AS typrelid,
         typelem, typarray, functions[1] AS typinput, functions[2] AS typoutput,
         functions[3] AS typreceive, functions[4] AS typsend, 0::UINTEGER AS typmodin,
         0::UINTEGER AS typmodout, 0::UINTEGER AS typanalyze, 'i' AS typalign, 'x' AS typstorage,
         false AS typnotnull, 0::BIGINT AS typbasetype, -1 AS typtypmod, 0 AS typndims,
         0::BIGINT AS typcollation, NULL::VARCHAR AS typdefaultbin, NULL::VARCHAR AS typdefault,
         NULL::VARCHAR[] AS typacl, 0::UINTEGER AS typsubscript, 1247::BIGINT AS tableoid
  FROM found;

CREATE VIEW pg_enum AS
  SELECT oid * 1000 + place AS oid, oid AS enumtypid, place::FLOAT AS enumsortorder,
         label AS enumlabel, 3501::BIGINT AS tableoid
  FROM (SELECT oid, unnest(labels) AS label, generate_subscripts(labels, 1) AS place
        FROM own_enum_types);

CREATE VIEW own_macros AS
  SELECT min(function_oid) AS oid, function_name AS proname, min(s.oid) AS pronamespace,
         any_value(parameters) AS names, any_value(macro_definition) AS body,
         bool_or(function_type = 'table_macro') AS proretset
  FROM duckdb_functions() f
  JOIN duckdb_schemas() s ON s.database_name = f.database_name AND s.schema_name = f.schema_name
  WHERE NOT f.internal AND f.database_name = current_database()
  GROUP BY function_name, f.schema_name;

-- The AI functions stand in the schema that unqualified names are looked up in.
CREATE VIEW pg_proc AS
  WITH home AS (
    SELECT min(oid) AS home_oid FROM duckdb_schemas()
    WHERE database_name = current_database() AND schema_name = 'main'),
  found AS (
    SELECT oid, proname, pronamespace, 'f' AS prokind, proretset, 'v' AS provolatile,
           0 AS defaults, names, list_transform(names, lambda one: 25::BIGINT) AS types,
           25::BIGINT AS result_type, body, 'any' AS result,
           array_to_string(list_transform(names, lambda one: one || ' any'), ', ') AS arguments
    FROM own_macros
    UNION ALL
    SELECT oid, name, home_oid, kind, false, 's', defaults, names, types, result_type,
           'built into TierKV', result, arguments
    FROM own_ai_functions, home
    UNION ALL
    SELECT oid, proname, 11, 'f', false, 'i', 0, ['value'], [2281::BIGINT], 2281::BIGINT,
           proname, 'internal', 'internal'
    FROM own_type_functions)
  SELECT oid, proname, pronamespace, 10::BIGINT AS proowner, 14::BIGINT AS prolang,
         1::FLOAT AS procost, 0::FLOAT AS prorows, 0::BIGINT AS provariadic, '-' AS prosupport,
         prokind, false AS prosecdef, false AS proleakproof, false AS proisstrict, proretset,
         provolatile, 'u' AS proparallel, len(names)::SMALLINT AS pronargs,
         defaults::SMALLINT AS pronargdefaults, result_type AS prorettype, types::UINTEGER[] AS proargtypes,
         NULL::BIGINT[] AS proallargtypes, NULL::VARCHAR[] AS proargmodes, names AS proargnames,
         NULL::VARCHAR AS proargdefaults, NULL::BIGINT[] AS protrftypes, body AS prosrc,
         NULL::VARCHAR AS probin, NULL::VARCHAR AS prosqlbody, NULL::VARCHAR[] AS proconfig,
         NULL::VARCHAR[] AS proacl, result, arguments, 1255::BIGINT AS tableoid
  FROM found;

CREATE VIEW own_role_names AS
  SELECT 10::BIGINT AS oid, 'tierkv' AS rolname
  UNION ALL SELECT 16384, user_name FROM own_client WHERE user_name <> 'tierkv';
CREATE VIEW pg_roles AS
  SELECT oid, rolname, true AS rolsuper, true AS rolinherit,
         true AS rolcreaterole, true AS rolcreatedb, true AS rolcanlogin, false AS rolreplication,
         -1 AS rolconnlimit, NULL::VARCHAR AS rolpassword, NULL::TIMESTAMPTZ AS rolvaliduntil,
         true AS rolbypassrls, NULL::VARCHAR[] AS rolconfig
  FROM own_role_names;
CREATE VIEW pg_user AS
  SELECT rolname AS usename, oid AS usesysid, true AS usecreatedb, true AS usesuper,
         false AS userepl, true AS usebypassrls, NULL::VARCHAR AS passwd,
         NULL::TIMESTAMPTZ AS valuntil, NULL::VARCHAR[] AS useconfig
  FROM own_role_names;
CREATE VIEW pg_authid AS SELECT *, 1260::BIGINT AS tableoid FROM pg_roles;

CREATE VIEW pg_am AS
  SELECT *, 2601::BIGINT AS tableoid
  FROM (VALUES (2::BIGINT, 'heap', '-', 't'), (403, 'btree', '-', 'i'))
  v(oid, amname, amhandler, amtype);
CREATE VIEW pg_language AS
  SELECT 14::BIGINT AS oid, 'sql' AS lanname, 10::BIGINT AS lanowner, false AS lanispl,
         true AS lanpltrusted, 0::BIGINT AS lanplcallfoid, 0::BIGINT AS laninline,
         0::BIGINT AS lanvalidator, NULL::VARCHAR[] AS lanacl, 2612::BIGINT AS tableoid;
CREATE VIEW pg_tablespace AS
  SELECT 1663::BIGINT AS oid, 'pg_default' AS spcname, 10::BIGINT AS spcowner,
         NULL::VARCHAR[] AS spcacl, NULL::VARCHAR[] AS spcoptions, 1213::BIGINT AS tableoid;
CREATE VIEW pg_tables AS
  SELECT n.nspname AS schemaname, c.relname AS tablename, 'tierkv' AS tableowner,
         NULL::VARCHAR AS tablespace, c.relhasindex AS hasindexes, false AS hasrules,
         false AS hastriggers, false AS rowsecurity
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r';
CREATE VIEW pg_views AS
  SELECT own_schema(schema_name) AS schemaname, view_name AS viewname, 'tierkv' AS viewowner,
         sql AS definition
  FROM duckdb_views() WHERE database_name IN (current_database(), 'temp') AND NOT internal;
CREATE VIEW pg_sequence AS
  SELECT sequence_oid AS seqrelid, 20::BIGINT AS seqtypid, start_value AS seqstart,
         increment_by AS seqincrement, max_value AS seqmax, min_value AS seqmin,
         1::BIGINT AS seqcache, cycle AS seqcycle, 2224::BIGINT AS tableoid
  FROM duckdb_sequences() WHERE database_name IN (current_database(), 'temp');
CREATE VIEW pg_sequences AS
  SELECT own_schema(schema_name) AS schemaname, sequence_name AS sequencename, 'tierkv' AS sequenceowner,
         'bigint' AS data_type, start_value, min_value, max_value, increment_by, cycle,
         1::BIGINT AS cache_size, last_value
  FROM duckdb_sequences() WHERE database_name IN (current_database(), 'temp');
CREATE VIEW pg_description AS
  SELECT table_oid AS objoid, 1259::BIGINT AS classoid, 0 AS objsubid, comment AS description,
         2609::BIGINT AS tableoid
  FROM duckdb_tables()
  WHERE comment IS NOT NULL AND database_name IN (current_database(), 'temp')
  UNION ALL SELECT view_oid, 1259, 0, comment, 2609 FROM duckdb_views()
  WHERE comment IS NOT NULL AND database_name IN (current_database(), 'temp')
  UNION ALL SELECT table_oid, 1259, column_index, comment, 2609 FROM own_user_columns
  WHERE comment IS NOT NULL
  UNION ALL SELECT oid, 1255, 0, description, 2609 FROM own_ai_functions WHERE description <> '';
CREATE VIEW pg_stat_user_tables AS
  SELECT table_oid AS relid, own_schema(schema_name) AS schemaname, table_name AS relname,
         0::BIGINT AS seq_scan, 0::BIGINT AS seq_tup_read, 0::BIGINT AS idx_scan,
         0::BIGINT AS idx_tup_fetch, 0::BIGINT AS n_tup_ins, 0::BIGINT AS n_tup_upd,
         0::BIGINT AS n_tup_del, 0::BIGINT AS n_tup_hot_upd,
         estimated_size::BIGINT AS n_live_tup, 0::BIGINT AS n_dead_tup,
         0::BIGINT AS n_mod_since_analyze, 0::BIGINT AS n_ins_since_vacuum,
         NULL::TIMESTAMPTZ AS last_vacuum, NULL::TIMESTAMPTZ AS last_autovacuum,
         NULL::TIMESTAMPTZ AS last_analyze, NULL::TIMESTAMPTZ AS last_autoanalyze,
         0::BIGINT AS vacuum_count, 0::BIGINT AS autovacuum_count, 0::BIGINT AS analyze_count,
         0::BIGINT AS autoanalyze_count
  FROM duckdb_tables() WHERE database_name = current_database() AND NOT internal;
CREATE VIEW pg_stat_all_tables AS SELECT * FROM pg_stat_user_tables;
-- The session's own values come with the statement, in a session variable of JSON rows.
CREATE VIEW pg_settings AS
  SELECT row['name'] AS name, row['setting'] AS setting, NULL::VARCHAR AS unit,
         CASE WHEN row['name'] LIKE 'tierkv.%' THEN 'Customized Options' ELSE 'TierKV' END
           AS category, row['description'] AS short_desc, NULL::VARCHAR AS extra_desc,
         'user' AS context, 'string' AS vartype,
         CASE WHEN row['source'] IS NOT NULL THEN row['source']
              WHEN row['setting'] = row['default'] THEN 'default' ELSE 'session' END AS source,
         NULL::VARCHAR AS min_val, NULL::VARCHAR AS max_val, NULL::VARCHAR[] AS enumvals,
         row['default'] AS boot_val,
         CASE WHEN row['source'] IS NULL THEN row['default']
              WHEN row['source'] <> 'session' THEN row['setting'] END AS reset_val,
         NULL::VARCHAR AS sourcefile,
         NULL::INTEGER AS sourceline, false AS pending_restart
  FROM (SELECT unnest(from_json(coalesce(getvariable('tierkv_pg_settings'), '[]'),
    '[{"name":"VARCHAR","setting":"VARCHAR","default":"VARCHAR","description":"VARCHAR",
       "source":"VARCHAR"}]')) AS row);
