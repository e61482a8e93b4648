-- PostgreSQL's system catalog over DuckDB's, for psql, drivers and BI tools.
--
-- dbfront/pgwire/catalog/install.py runs this once per process inside the attached in-memory
-- database tierkv_pg, after making type_names (oid, typname, typarray, typlen, typcategory,
-- format_name) and the macro type_oid(duckdb type). catalog/rewrite.py points queries here.
-- Macros are not hygienic: inside their subqueries every column has a name nobody else uses.

-- Objects of the current database and of the session's temporary schema -----------------------

CREATE VIEW pg_namespace AS
  SELECT oid, CASE database_name WHEN 'temp' THEN 'pg_temp_1' ELSE schema_name END AS nspname,
         10::BIGINT AS nspowner, NULL::VARCHAR AS nspacl
  FROM duckdb_schemas() WHERE database_name IN (current_database(), 'temp')
  UNION ALL VALUES (11, 'pg_catalog', 10, NULL), (13000, 'information_schema', 10, NULL);

CREATE VIEW constraint_indexes AS
  SELECT 1000000000000 + table_oid * 1000 + constraint_index AS oid,
         2000000000000 + table_oid * 1000 + constraint_index AS constraint_oid,
         constraint_name AS name, schema_oid, table_oid, table_name,
         constraint_type = 'PRIMARY KEY' AS is_primary,
         list_transform(constraint_column_indexes, lambda c: c + 1) AS keys,
         constraint_column_names AS key_names, constraint_text
  FROM duckdb_constraints()
  WHERE database_name IN (current_database(), 'temp')
    AND constraint_type IN ('PRIMARY KEY', 'UNIQUE');

CREATE VIEW relations AS
  SELECT t.table_oid AS oid, table_name AS relname, schema_oid AS relnamespace, 'r' AS relkind,
         column_count AS relnatts, check_constraint_count AS relchecks,
         index_count > 0 OR has_primary_key AS relhasindex,
         t.table_oid IN (SELECT k.table_oid FROM duckdb_constraints() k
                         WHERE k.constraint_type = 'FOREIGN KEY') AS relhastriggers,
         estimated_size::FLOAT AS reltuples, temporary
  FROM duckdb_tables() t WHERE database_name IN (current_database(), 'temp') AND NOT internal
  UNION ALL
  SELECT view_oid, view_name, schema_oid, 'v', column_count, 0, false, false, 0, temporary
  FROM duckdb_views() WHERE database_name IN (current_database(), 'temp') AND NOT internal
  UNION ALL
  SELECT sequence_oid, sequence_name, schema_oid, 'S', 3, 0, false, false, 1, temporary
  FROM duckdb_sequences() WHERE database_name IN (current_database(), 'temp')
  UNION ALL
  SELECT index_oid, index_name, schema_oid, 'i', 1, 0, false, false, 0, false
  FROM duckdb_indexes() WHERE database_name IN (current_database(), 'temp')
  UNION ALL
  SELECT oid, name, schema_oid, 'i', len(keys), 0, false, false, 0, false FROM constraint_indexes;

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
         false AS relhasoids
  FROM relations;

CREATE VIEW pg_attribute AS
  SELECT table_oid AS attrelid, column_name AS attname, type_oid(data_type) AS atttypid,
         -1 AS attstattarget, -1 AS attlen, column_index::SMALLINT AS attnum,
         CASE WHEN data_type LIKE '%]' THEN 1 ELSE 0 END AS attndims, -1 AS attcacheoff,
         type_modifier(data_type) AS atttypmod, false AS attbyval, 'p' AS attstorage,
         'i' AS attalign, NOT is_nullable AS attnotnull,
         column_default IS NOT NULL OR is_generated AS atthasdef, false AS atthasmissing,
         '' AS attidentity, CASE WHEN is_generated THEN 's' ELSE '' END AS attgenerated,
         false AS attisdropped, true AS attislocal, 0 AS attinhcount,
         0::BIGINT AS attcollation, '' AS attcompression, NULL::VARCHAR AS attacl,
         NULL::VARCHAR[] AS attoptions, NULL::VARCHAR[] AS attfdwoptions,
         NULL::VARCHAR AS attmissingval
  FROM duckdb_columns() WHERE database_name IN (current_database(), 'temp') AND NOT internal;

CREATE VIEW pg_attrdef AS
  SELECT table_oid * 1000 + column_index AS oid, table_oid AS adrelid,
         column_index::SMALLINT AS adnum, coalesce(column_default, generation_expression) AS adbin
  FROM duckdb_columns()
  WHERE database_name IN (current_database(), 'temp') AND NOT internal
    AND coalesce(column_default, generation_expression) IS NOT NULL;

CREATE VIEW pg_index AS
  SELECT oid AS indexrelid, table_oid AS indrelid, len(keys)::SMALLINT AS indnatts,
         len(keys)::SMALLINT AS indnkeyatts, true AS indisunique, is_primary AS indisprimary,
         false AS indisexclusion, true AS indimmediate, false AS indisclustered,
         true AS indisvalid, false AS indcheckxmin, true AS indisready, true AS indislive,
         false AS indisreplident, keys AS indkey, NULL::VARCHAR AS indexprs,
         NULL::VARCHAR AS indpred, NULL::INTEGER[] AS indoption, NULL::BIGINT[] AS indclass,
         NULL::BIGINT[] AS indcollation, false AS indnullsnotdistinct
  FROM constraint_indexes
  UNION ALL
  SELECT index_oid, table_oid, 1, 1, is_unique, is_primary, false, true, false, true, false, true,
         true, false, NULL, expressions, NULL, NULL, NULL, NULL, false
  FROM duckdb_indexes() WHERE database_name IN (current_database(), 'temp');

CREATE VIEW pg_constraint AS
  SELECT 2000000000000 + k.table_oid * 1000 + constraint_index AS oid, constraint_name AS conname,
         k.schema_oid AS connamespace,
         CASE constraint_type WHEN 'PRIMARY KEY' THEN 'p' WHEN 'UNIQUE' THEN 'u'
                              WHEN 'FOREIGN KEY' THEN 'f' ELSE 'c' END AS contype,
         false AS condeferrable, false AS condeferred, true AS convalidated,
         k.table_oid AS conrelid, 0::BIGINT AS contypid,
         CASE WHEN constraint_type IN ('PRIMARY KEY', 'UNIQUE')
              THEN 1000000000000 + k.table_oid * 1000 + constraint_index ELSE 0 END AS conindid,
         0::BIGINT AS conparentid, coalesce(r.table_oid, 0) AS confrelid,
         'a' AS confupdtype, 'a' AS confdeltype, 's' AS confmatchtype, true AS conislocal,
         0 AS coninhcount, true AS connoinherit,
         list_transform(constraint_column_indexes, lambda c: c + 1) AS conkey,
         (SELECT list(rc.column_index ORDER BY list_position(k.referenced_column_names,
                                                             rc.column_name))
          FROM duckdb_columns() rc WHERE rc.table_oid = r.table_oid
            AND list_contains(k.referenced_column_names, rc.column_name)) AS confkey,
         constraint_text AS condef
  FROM duckdb_constraints() k
  LEFT JOIN duckdb_tables() r ON r.database_name = k.database_name
    AND r.schema_name = k.schema_name AND r.table_name = k.referenced_table
  WHERE k.database_name IN (current_database(), 'temp') AND constraint_type <> 'NOT NULL';

CREATE VIEW pg_database AS
  SELECT database_oid AS oid, database_name AS datname, 10::BIGINT AS datdba, 6 AS encoding,
         'c' AS datlocprovider, false AS datistemplate, true AS datallowconn,
         -1 AS datconnlimit, 1663::BIGINT AS dattablespace, 'C.UTF-8' AS datcollate,
         'C.UTF-8' AS datctype, NULL::VARCHAR AS daticulocale, NULL::VARCHAR AS datlocale,
         NULL::VARCHAR AS daticurules, NULL::VARCHAR AS datcollversion, NULL::VARCHAR[] AS datacl,
         0::BIGINT AS datfrozenxid
  FROM duckdb_databases() WHERE NOT internal AND database_name <> 'tierkv_pg';

CREATE VIEW pg_type AS
  SELECT oid, typname, 11::BIGINT AS typnamespace, 10::BIGINT AS typowner, typlen,
         typlen BETWEEN 1 AND 8 AS typbyval, 'b' AS typtype, typcategory,
         false AS typispreferred, true AS typisdefined, ',' AS typdelim, 0::BIGINT AS typrelid,
         typelem, typarray, '' AS typinput, 0::BIGINT AS typbasetype, -1 AS typtypmod,
         0::BIGINT AS typcollation, false AS typnotnull, 0 AS typndims,
         NULL::VARCHAR AS typdefault, 0::BIGINT AS typsubscript
  FROM type_names;

CREATE VIEW pg_proc AS
  SELECT min(function_oid) AS oid, function_name AS proname, min(s.oid) AS pronamespace,
         10::BIGINT AS proowner, 'f' AS prokind, false AS proretset, false AS prosecdef,
         'v' AS provolatile, len(any_value(parameters))::SMALLINT AS pronargs,
         NULL::BIGINT AS prorettype, NULL::BIGINT[] AS proargtypes,
         any_value(parameters) AS proargnames, any_value(macro_definition) AS prosrc,
         NULL::VARCHAR AS proacl, any_value(return_type) AS result,
         array_to_string(any_value(parameters), ', ') AS arguments
  FROM duckdb_functions() f
  JOIN duckdb_schemas() s ON s.database_name = f.database_name AND s.schema_name = f.schema_name
  WHERE NOT f.internal AND f.database_name = current_database()
  GROUP BY function_name, f.schema_name;

CREATE VIEW pg_roles AS
  SELECT 10::BIGINT AS oid, 'tierkv' AS rolname, true AS rolsuper, true AS rolinherit,
         true AS rolcreaterole, true AS rolcreatedb, true AS rolcanlogin, false AS rolreplication,
         -1 AS rolconnlimit, NULL::TIMESTAMP AS rolvaliduntil, true AS rolbypassrls,
         NULL::VARCHAR AS rolpassword, NULL::VARCHAR[] AS rolconfig;
CREATE VIEW pg_user AS
  SELECT rolname AS usename, oid AS usesysid, true AS usecreatedb, true AS usesuper FROM pg_roles;
CREATE VIEW pg_authid AS SELECT * FROM pg_roles;

CREATE VIEW pg_am AS
  SELECT * FROM (VALUES (2::BIGINT, 'heap', 't'), (403, 'btree', 'i')) v(oid, amname, amtype);
CREATE VIEW pg_tablespace AS
  SELECT 1663::BIGINT AS oid, 'pg_default' AS spcname, 10::BIGINT AS spcowner,
         NULL::VARCHAR AS spcacl, NULL::VARCHAR[] AS spcoptions;
CREATE VIEW pg_tables AS
  SELECT n.nspname AS schemaname, c.relname AS tablename, 'tierkv' AS tableowner,
         NULL::VARCHAR AS tablespace, c.relhasindex AS hasindexes, false AS hasrules,
         false AS hastriggers, false AS rowsecurity
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r';
CREATE VIEW pg_views AS
  SELECT schema_name AS schemaname, view_name AS viewname, 'tierkv' AS viewowner,
         sql AS definition
  FROM duckdb_views() WHERE database_name IN (current_database(), 'temp') AND NOT internal;
CREATE VIEW pg_description AS
  SELECT table_oid AS objoid, 1259::BIGINT AS classoid, 0 AS objsubid, comment AS description
  FROM duckdb_tables() WHERE comment IS NOT NULL AND database_name = current_database();

-- Catalogs of features DuckDB does not have: empty, with the columns that are asked for --------

CREATE VIEW pg_auth_members AS
  SELECT 0::BIGINT AS roleid, 0::BIGINT AS member, 0::BIGINT AS grantor, false AS admin_option
  WHERE false;
CREATE VIEW pg_collation AS
  SELECT 0::BIGINT AS oid, '' AS collname, 0::BIGINT AS collnamespace WHERE false;
CREATE VIEW pg_policy AS
  SELECT 0::BIGINT AS oid, '' AS polname, false AS polpermissive, [0::BIGINT] AS polroles,
         '' AS polqual, '' AS polwithcheck, '' AS polcmd, 0::BIGINT AS polrelid WHERE false;
CREATE VIEW pg_statistic_ext AS
  SELECT 0::BIGINT AS oid, 0::BIGINT AS stxrelid, 0::BIGINT AS stxnamespace, '' AS stxname,
         [''] AS stxkind, 0 AS stxstattarget, [0] AS stxkeys WHERE false;
CREATE VIEW pg_publication AS
  SELECT 0::BIGINT AS oid, '' AS pubname, false AS puballtables WHERE false;
CREATE VIEW pg_publication_rel AS
  SELECT 0::BIGINT AS oid, 0::BIGINT AS prpubid, 0::BIGINT AS prrelid, '' AS prqual,
         [0] AS prattrs WHERE false;
CREATE VIEW pg_publication_namespace AS
  SELECT 0::BIGINT AS oid, 0::BIGINT AS pnpubid, 0::BIGINT AS pnnspid WHERE false;
CREATE VIEW pg_inherits AS
  SELECT 0::BIGINT AS inhrelid, 0::BIGINT AS inhparent, 0 AS inhseqno, false AS inhdetachpending
  WHERE false;
CREATE VIEW pg_trigger AS
  SELECT 0::BIGINT AS oid, 0::BIGINT AS tgrelid, '' AS tgname, 'O' AS tgenabled,
         false AS tgisinternal, 0::BIGINT AS tgparentid, 0::BIGINT AS tgconstraint,
         0::BIGINT AS tgfoid, 0 AS tgtype WHERE false;
CREATE VIEW pg_rewrite AS
  SELECT 0::BIGINT AS oid, '' AS rulename, 0::BIGINT AS ev_class, 'O' AS ev_enabled,
         '1' AS ev_type WHERE false;
CREATE VIEW pg_depend AS
  SELECT 0::BIGINT AS classid, 0::BIGINT AS objid, 0 AS objsubid, 0::BIGINT AS refclassid,
         0::BIGINT AS refobjid, 0 AS refobjsubid, 'n' AS deptype WHERE false;
CREATE VIEW pg_enum AS
  SELECT 0::BIGINT AS oid, 0::BIGINT AS enumtypid, 0::FLOAT AS enumsortorder, '' AS enumlabel
  WHERE false;
CREATE VIEW pg_range AS
  SELECT 0::BIGINT AS rngtypid, 0::BIGINT AS rngsubtype, 0::BIGINT AS rngmultitypid WHERE false;
CREATE VIEW pg_extension AS
  SELECT 0::BIGINT AS oid, '' AS extname, 0::BIGINT AS extnamespace, '' AS extversion WHERE false;
CREATE VIEW pg_foreign_server AS SELECT 0::BIGINT AS oid, '' AS srvname WHERE false;
CREATE VIEW pg_foreign_table AS
  SELECT 0::BIGINT AS ftrelid, 0::BIGINT AS ftserver, [''] AS ftoptions WHERE false;
CREATE VIEW pg_partitioned_table AS
  SELECT 0::BIGINT AS partrelid, 'r' AS partstrat WHERE false;
CREATE VIEW pg_matviews AS SELECT '' AS schemaname, '' AS matviewname WHERE false;
CREATE VIEW pg_shdescription AS
  SELECT 0::BIGINT AS objoid, 0::BIGINT AS classoid, '' AS description WHERE false;
CREATE VIEW pg_language AS SELECT 14::BIGINT AS oid, 'sql' AS lanname;

-- Functions -----------------------------------------------------------------------------------

CREATE MACRO pg_get_userbyid(role_oid) AS 'tierkv';
CREATE MACRO pg_encoding_to_char(encoding) AS 'UTF8';
CREATE MACRO pg_get_function_result(fn_oid) AS
  (SELECT pn_r FROM (SELECT oid AS pn_o, result AS pn_r FROM pg_proc) WHERE pn_o = fn_oid);
CREATE MACRO pg_get_function_arguments(fn_oid) AS
  (SELECT pn_r FROM (SELECT oid AS pn_o, arguments AS pn_r FROM pg_proc) WHERE pn_o = fn_oid);
CREATE MACRO pg_get_function_identity_arguments(fn_oid) AS (pg_get_function_arguments(fn_oid));
CREATE MACRO pg_table_is_visible(rel_oid) AS
  rel_oid IN (SELECT oid FROM relations WHERE relnamespace IN (
    SELECT pn_o FROM (SELECT oid AS pn_o, schema_name AS pn_s, database_name AS pn_d
                      FROM duckdb_schemas())
    WHERE pn_d = 'temp' OR (pn_d = current_database()
                            AND list_contains(current_schemas(true), pn_s))));
CREATE MACRO pg_type_is_visible(t_oid) AS true;
CREATE MACRO pg_function_is_visible(fn_oid) AS true;
CREATE MACRO format_type(t_oid, t_mod) AS
  CASE WHEN t_oid = 1700 AND t_mod >= 4
       THEN 'numeric(' || ((t_mod - 4) >> 16) || ',' || ((t_mod - 4) & 65535) || ')'
       ELSE coalesce((SELECT tn_f FROM (SELECT oid AS tn_o, format_name AS tn_f FROM type_names)
                      WHERE tn_o = t_oid), '???') END;
CREATE MACRO pg_get_expr(node, rel_oid) AS node::VARCHAR, (node, rel_oid, pretty) AS node::VARCHAR;
CREATE MACRO index_definition(ix_oid) AS coalesce(
  (SELECT pi_d FROM (SELECT index_oid AS pi_o,
     regexp_replace(rtrim(sql, ';'), ' ON ([^(]*)\(', ' ON \1 USING btree (') AS pi_d
   FROM duckdb_indexes()) WHERE pi_o = ix_oid),
  (SELECT pi_d FROM (SELECT oid AS pi_o, 'CREATE UNIQUE INDEX ' || name || ' ON ' || table_name ||
     ' USING btree (' || array_to_string(key_names, ', ') || ')' AS pi_d
   FROM constraint_indexes) WHERE pi_o = ix_oid));
CREATE MACRO pg_get_indexdef(ix_oid) AS (index_definition(ix_oid)),
  (ix_oid, col, pretty) AS (index_definition(ix_oid));
CREATE MACRO constraint_definition(con_oid) AS
  (SELECT pk_d FROM (SELECT oid AS pk_o, condef AS pk_d FROM pg_constraint) WHERE pk_o = con_oid);
CREATE MACRO pg_get_constraintdef(con_oid) AS (constraint_definition(con_oid)),
  (con_oid, pretty) AS (constraint_definition(con_oid));
CREATE MACRO view_definition(rel_oid) AS
  (SELECT pv_d FROM (SELECT view_oid AS pv_o,
     regexp_replace(sql, '^CREATE[A-Z ]* VIEW .*? AS ', ' ') AS pv_d
   FROM duckdb_views()) WHERE pv_o = rel_oid);
CREATE MACRO pg_get_viewdef(rel_oid) AS (view_definition(rel_oid)),
  (rel_oid, pretty) AS (view_definition(rel_oid));
CREATE MACRO pg_get_statisticsobjdef_columns(stat_oid) AS NULL::VARCHAR;
CREATE MACRO pg_relation_is_publishable(rel_oid) AS true;
CREATE MACRO pg_get_partkeydef(rel_oid) AS NULL::VARCHAR;
CREATE MACRO pg_get_serial_sequence(rel_name, col_name) AS NULL::VARCHAR;
CREATE MACRO pg_table_size(rel_oid) AS coalesce(
  (SELECT pt_s FROM (SELECT oid AS pt_o, relnatts * reltuples::BIGINT * 8 AS pt_s FROM relations)
   WHERE pt_o = rel_oid), 0)::BIGINT;
CREATE MACRO pg_total_relation_size(rel_oid) AS (pg_table_size(rel_oid));
CREATE MACRO pg_relation_size(rel_oid) AS (pg_table_size(rel_oid));
CREATE MACRO pg_database_size(db) AS 0::BIGINT;
CREATE MACRO pg_tablespace_location(ts_oid) AS '';
CREATE MACRO pg_is_in_recovery() AS false;
CREATE MACRO pg_advisory_unlock_all() AS NULL::VARCHAR;
CREATE MACRO pg_notify(channel, payload) AS NULL::VARCHAR;
CREATE MACRO pg_encoding_max_length(encoding) AS 4;
CREATE MACRO obj_description(obj) AS NULL::VARCHAR, (obj, cat) AS
  (SELECT pd_d FROM (SELECT objoid AS pd_o, description AS pd_d FROM pg_description)
   WHERE pd_o = obj);
CREATE MACRO col_description(rel_oid, col_number) AS
  (SELECT pc_d FROM (SELECT table_oid AS pc_o, column_index AS pc_n, comment AS pc_d
                     FROM duckdb_columns()) WHERE pc_o = rel_oid AND pc_n = col_number);
CREATE MACRO shobj_description(obj, cat) AS NULL::VARCHAR;
CREATE MACRO to_regtype(type_name) AS
  (SELECT min(tn_o) FROM (SELECT oid AS tn_o, typname AS tn_n, format_name AS tn_f FROM type_names)
   WHERE tn_n = type_name OR tn_f = type_name);
CREATE MACRO to_regclass(rel_name) AS
  (SELECT min(pr_o) FROM (SELECT c.oid AS pr_o, c.relname AS pr_n, n.nspname || '.' || c.relname
     AS pr_q FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace)
   WHERE pr_n = replace(rel_name, '"', '') OR pr_q = replace(rel_name, '"', ''));
CREATE MACRO regclass_name(rel_oid) AS
  (SELECT pr_n FROM (SELECT oid AS pr_o, relname AS pr_n FROM relations) WHERE pr_o = rel_oid);
CREATE MACRO regnamespace_name(ns_oid) AS
  (SELECT pr_n FROM (SELECT oid AS pr_o, nspname AS pr_n FROM pg_namespace) WHERE pr_o = ns_oid);
CREATE MACRO array_upper(list_value, dimension) AS len(list_value);
CREATE MACRO array_lower(list_value, dimension) AS
  CASE WHEN len(list_value) > 0 THEN 1 END;
CREATE MACRO quote_ident(name_text) AS
  CASE WHEN regexp_full_match(name_text, '[a-z_][a-z0-9_$]*') THEN name_text
       ELSE '"' || replace(name_text, '"', '""') || '"' END;
CREATE MACRO has_schema_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_table_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_database_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO pg_has_role(a, b) AS true, (a, b, c) AS true;

CREATE VIEW pg_indexes AS
  SELECT n.nspname AS schemaname, t.relname AS tablename, c.relname AS indexname,
         NULL::VARCHAR AS tablespace, pg_get_indexdef(i.indexrelid) AS indexdef
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace;
-- session.py carries out a set_config that stands alone; inside larger queries it only answers.
CREATE MACRO set_config(setting, new_value, is_local) AS new_value;
