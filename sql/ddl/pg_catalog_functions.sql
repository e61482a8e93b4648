-- PostgreSQL's catalog functions as macros; see pg_catalog.sql, which is run before this file.
-- Macros are not hygienic: inside their subqueries every column has a name nobody else uses.

CREATE MACRO pg_get_userbyid(role_oid) AS coalesce(
  (SELECT pu_n FROM (SELECT oid AS pu_o, rolname AS pu_n FROM own_role_names) WHERE pu_o = role_oid),
  'tierkv');
CREATE MACRO pg_encoding_to_char(encoding) AS 'UTF8';
CREATE MACRO pg_get_function_result(fn_oid) AS
  (SELECT pn_r FROM (SELECT oid AS pn_o, result AS pn_r FROM pg_proc) WHERE pn_o = fn_oid);
CREATE MACRO pg_get_function_arguments(fn_oid) AS
  (SELECT pn_r FROM (SELECT oid AS pn_o, arguments AS pn_r FROM pg_proc) WHERE pn_o = fn_oid);
CREATE MACRO pg_get_function_identity_arguments(fn_oid) AS (pg_get_function_arguments(fn_oid));
CREATE MACRO pg_table_is_visible(rel_oid) AS
  rel_oid IN (SELECT oid FROM own_relations WHERE relnamespace IN (
    SELECT pn_o FROM (SELECT oid AS pn_o, schema_name AS pn_s, database_name AS pn_d
                      FROM duckdb_schemas())
    WHERE pn_d = 'temp' OR (pn_d = current_database()
                            AND list_contains(current_schemas(true), pn_s))));
CREATE MACRO pg_type_is_visible(t_oid) AS true;
CREATE MACRO pg_function_is_visible(fn_oid) AS true;
CREATE MACRO format_type(t_oid, t_mod) AS
  CASE WHEN t_oid IS NULL THEN NULL WHEN t_oid = 1700 AND t_mod >= 4
       THEN 'numeric(' || ((t_mod - 4) >> 16) || ',' || ((t_mod - 4) & 65535) || ')'
       WHEN t_oid IN (1042, 1043) AND t_mod >= 4
       THEN CASE t_oid WHEN 1042 THEN 'character(' ELSE 'character varying(' END
            || (t_mod - 4) || ')'
       ELSE coalesce((SELECT tn_f FROM (SELECT oid AS tn_o, format_name AS tn_f FROM own_type_names)
                      WHERE tn_o = t_oid),
                     (SELECT te_n FROM (SELECT oid AS te_o, type_name AS te_n FROM own_enum_types)
                      WHERE te_o = t_oid), '???') END;
CREATE MACRO pg_get_expr(node, rel_oid) AS node::VARCHAR, (node, rel_oid, pretty) AS node::VARCHAR;
CREATE MACRO own_index_column(ix_oid, col) AS
  (SELECT pi_d FROM (SELECT attrelid AS pi_o, attnum AS pi_n, attname AS pi_d FROM pg_attribute)
   WHERE pi_o = ix_oid AND pi_n = col);
CREATE MACRO own_index_definition(ix_oid) AS coalesce(
  (SELECT pi_d FROM (SELECT index_oid AS pi_o,
     regexp_replace(rtrim(sql, ';'), ' ON ([^(]*)\(', ' ON \1 USING btree (') AS pi_d
   FROM duckdb_indexes()) WHERE pi_o = ix_oid),
  (SELECT pi_d FROM (SELECT oid AS pi_o, 'CREATE UNIQUE INDEX ' || name || ' ON ' || table_name ||
     ' USING btree (' || array_to_string(key_names, ', ') || ')' AS pi_d
   FROM own_constraint_indexes) WHERE pi_o = ix_oid));
CREATE MACRO pg_get_indexdef(ix_oid) AS (own_index_definition(ix_oid)),
  (ix_oid, col, pretty) AS
  (CASE WHEN col = 0 THEN own_index_definition(ix_oid) ELSE own_index_column(ix_oid, col) END);
CREATE MACRO own_constraint_definition(con_oid) AS
  (SELECT pk_d FROM (SELECT oid AS pk_o, condef AS pk_d FROM pg_constraint) WHERE pk_o = con_oid);
CREATE MACRO pg_get_constraintdef(con_oid) AS (own_constraint_definition(con_oid)),
  (con_oid, pretty) AS (own_constraint_definition(con_oid));
CREATE MACRO own_view_definition(rel_oid) AS
  (SELECT pv_d FROM (SELECT view_oid AS pv_o,
     regexp_replace(sql, '^CREATE[A-Z ]* VIEW .*? AS ', ' ') AS pv_d
   FROM duckdb_views()) WHERE pv_o = rel_oid);
CREATE MACRO pg_get_viewdef(rel_oid) AS (own_view_definition(rel_oid)),
  (rel_oid, pretty) AS (own_view_definition(rel_oid));
CREATE MACRO pg_get_statisticsobjdef_columns(stat_oid) AS NULL::VARCHAR;
CREATE MACRO pg_relation_is_publishable(rel_oid) AS true;
CREATE MACRO pg_get_partkeydef(rel_oid) AS NULL::VARCHAR;
CREATE MACRO pg_index_column_has_property(ix_oid, col, property) AS
  CASE WHEN col > coalesce((SELECT len(px_k) FROM (SELECT indexrelid AS px_o, indkey AS px_k
                            FROM pg_index) WHERE px_o = ix_oid), 0) THEN NULL
       ELSE lower(property) IN ('asc', 'nulls_last', 'orderable', 'returnable', 'search_array',
                                'search_nulls') END;
CREATE MACRO pg_table_size(rel_oid) AS coalesce(
  (SELECT pt_s FROM (SELECT oid AS pt_o, relnatts * reltuples::BIGINT * 8 AS pt_s FROM own_relations)
   WHERE pt_o = rel_oid), 0)::BIGINT;
CREATE MACRO pg_total_relation_size(rel_oid) AS (pg_table_size(rel_oid));
CREATE MACRO pg_relation_size(rel_oid) AS (pg_table_size(rel_oid));
CREATE MACRO pg_database_size(db) AS coalesce((SELECT min(ds_s) FROM (
  SELECT used_blocks * block_size AS ds_s, database_name AS ds_n FROM pragma_database_size())
  WHERE ds_n = current_database()), 0)::BIGINT;
CREATE MACRO pg_tablespace_location(ts_oid) AS '';
CREATE MACRO pg_is_in_recovery() AS false;
CREATE MACRO pg_advisory_unlock_all() AS NULL::VARCHAR;
CREATE MACRO pg_notify(channel, payload) AS error('LISTEN and NOTIFY are not supported');
CREATE MACRO pg_encoding_max_length(encoding) AS 4;
CREATE MACRO obj_description(obj) AS NULL::VARCHAR, (obj, cat) AS
  (SELECT pd_d FROM (SELECT objoid AS pd_o, objsubid AS pd_s, classoid AS pd_c,
                            description AS pd_d FROM pg_description)
   WHERE pd_o = obj AND pd_s = 0 AND pd_c = CASE cat WHEN 'pg_proc' THEN 1255 ELSE 1259 END);
CREATE MACRO col_description(rel_oid, col_number) AS
  (SELECT pc_d FROM (SELECT table_oid AS pc_o, column_index AS pc_n, comment AS pc_d
                     FROM own_user_columns) WHERE pc_o = rel_oid AND pc_n = col_number);
CREATE MACRO shobj_description(obj, cat) AS NULL::VARCHAR;
CREATE MACRO own_type_text(asked_type) AS
  replace(regexp_replace(asked_type, '^"?pg_catalog"?\.', ''), '"', '');
CREATE MACRO to_regtype(asked_type) AS coalesce(
  (SELECT min(tn_o) FROM (SELECT oid AS tn_o, typname AS tn_n, format_name AS tn_f FROM own_type_names)
   WHERE tn_n = own_type_text(asked_type) OR tn_f = own_type_text(asked_type)),
  (SELECT min(te_o) FROM (SELECT oid AS te_o, type_name AS te_n FROM own_enum_types)
   WHERE te_n = regexp_replace(own_type_text(asked_type), '^(public|main)\.', '')),
  TRY_CAST(asked_type AS BIGINT));
-- Of a type's OID, or of its name, as a cast to regtype takes either.
CREATE MACRO own_regtype_name(type_or_oid) AS (format_type(to_regtype(type_or_oid::VARCHAR), NULL));
CREATE MACRO own_regtype_names(oids) AS
  (SELECT list(tn_f ORDER BY tn_p)
   FROM (SELECT unnest(oids) AS tn_x, generate_subscripts(oids, 1) AS tn_p)
   LEFT JOIN (SELECT oid AS tn_o, format_name AS tn_f FROM own_type_names) ON tn_o = tn_x);
-- Also without the database before the schema, and with main as it is known.
CREATE MACRO own_unquoted(rel_name) AS regexp_replace(regexp_replace(
  replace(regexp_replace(rel_name, '\s+\.\s+', '.', 'g'), '"', ''),
  '^[^.]+\.([^.]+\.[^.]+)$', '\1'), '^main\.', own_schema('main') || '.');
CREATE MACRO own_path() AS (list_transform(CASE WHEN len(current_schemas(false)) = 0 THEN ['main']
  ELSE current_schemas(false) END, lambda one: own_schema(one)));
CREATE MACRO own_current_schemas(implicit) AS
  (CASE WHEN implicit THEN ['pg_catalog'] ELSE [] END) || own_path();
CREATE MACRO own_current_schema() AS (own_schema(current_schema()));
CREATE MACRO own_search_path() AS CASE current_setting('search_path')
  WHEN '' THEN '"$user", ' || own_schema('main')
  ELSE array_to_string(own_path(), ', ') END;
-- An unqualified name is looked up along the search path, as in a FROM clause.
CREATE MACRO to_regclass(rel_name) AS coalesce(
  (SELECT min(pr_o ORDER BY pr_v DESC) FROM (
     SELECT c.oid AS pr_o, c.relname AS pr_n, n.nspname || '.' || c.relname AS pr_q,
            pg_table_is_visible(c.oid) AS pr_v
     FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace)
   WHERE (pr_n = own_unquoted(rel_name) AND pr_v) OR pr_q = own_unquoted(rel_name)),
  (SELECT min(sr_o) FROM (SELECT oid AS sr_o, relname AS sr_n FROM own_system_relations)
   WHERE sr_n = replace(own_unquoted(rel_name), 'pg_catalog.', '')),
  TRY_CAST(rel_name AS BIGINT));
-- The sequence that the column's default draws from, with its schema.
CREATE MACRO own_sequence(column_default) AS replace(regexp_extract(column_default,
  '^nextval\(''([^'']+)''\)$', 1), '"', '');
-- Asked per row it has no answer: tools that do so look for identity columns, and there are none.
CREATE MACRO pg_get_serial_sequence(rel_name, col_name) AS NULL::VARCHAR;
CREATE MACRO own_serial_sequence(rel_name, col_name) AS
  (SELECT min(pg_d) FROM (SELECT table_oid AS pg_o, column_name AS pg_c,
     CASE WHEN column_default NOT LIKE 'nextval(%' THEN NULL
          WHEN own_sequence(column_default) LIKE '%.%'
          THEN own_unquoted(own_sequence(column_default))
          ELSE own_schema(schema_name) || '.' || own_sequence(column_default) END AS pg_d
   FROM own_user_columns) WHERE pg_o = to_regclass(rel_name) AND pg_c = col_name);
CREATE MACRO to_regproc(fn_name) AS
  (SELECT min(pf_o) FROM (SELECT p.oid AS pf_o, p.proname AS pf_n, n.nspname || '.' || p.proname
     AS pf_q FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace)
   WHERE pf_n = own_unquoted(fn_name) OR pf_q = own_unquoted(fn_name)
     OR pf_o = TRY_CAST(fn_name AS BIGINT));
CREATE MACRO to_regnamespace(ns_name) AS
  (SELECT min(pn_o) FROM (SELECT oid AS pn_o, nspname AS pn_n FROM pg_namespace)
   WHERE pn_n = own_schema(replace(ns_name, '"', '')));
CREATE MACRO to_regrole(role_name) AS
  (SELECT min(pu_o) FROM (SELECT oid AS pu_o, rolname AS pu_n FROM own_role_names)
   WHERE pu_n = own_unquoted(role_name));
-- Of an object's OID, or of its name, as a cast to regclass takes either.
CREATE MACRO own_regclass_name(rel) AS
  (SELECT min(pr_n) FROM (SELECT oid AS pr_o, relname AS pr_n FROM own_relations
                          UNION ALL SELECT oid, relname FROM own_system_relations)
   WHERE pr_o = to_regclass(rel::VARCHAR));
CREATE MACRO own_regproc_name(fn_oid) AS
  coalesce((SELECT pf_n FROM (SELECT oid AS pf_o, proname AS pf_n FROM pg_proc)
            WHERE pf_o = TRY_CAST(fn_oid AS BIGINT)), fn_oid::VARCHAR);
CREATE MACRO own_regrole_name(role_oid) AS
  (SELECT pu_n FROM (SELECT oid AS pu_o, rolname AS pu_n FROM own_role_names)
   WHERE pu_o = TRY_CAST(role_oid AS BIGINT));
CREATE MACRO own_regnamespace_name(ns_oid) AS
  (SELECT pr_n FROM (SELECT oid AS pr_o, nspname AS pr_n FROM pg_namespace) WHERE pr_o = ns_oid);
CREATE MACRO array_upper(list_value, dimension) AS len(list_value);
CREATE MACRO array_lower(list_value, dimension) AS
  CASE WHEN len(list_value) > 0 THEN 1 END;
CREATE MACRO quote_ident(name_text) AS
  CASE WHEN regexp_full_match(name_text, '[a-z_][a-z0-9_$]*') THEN name_text
       ELSE '"' || replace(name_text, '"', '""') || '"' END;
CREATE MACRO quote_literal(any_text) AS '''' || replace(any_text::VARCHAR, '''', '''''') || '''';
CREATE MACRO parse_ident(name_text) AS list_transform(
  regexp_extract_all(name_text, '"(?:[^"]|"")*"|[^.]+'),
  lambda part: CASE WHEN part[1] = '"' THEN replace(part[2:-2], '""', '"') ELSE lower(part) END);
CREATE MACRO own_format_step(pattern, value) AS CASE regexp_extract(pattern, '%([sIL])', 1)
  WHEN 'I' THEN regexp_replace(pattern, '%I', replace(quote_ident(value::VARCHAR), '\', '\\'))
  WHEN 'L' THEN regexp_replace(pattern, '%L', replace(quote_literal(value), '\', '\\'))
  ELSE regexp_replace(pattern, '%s', replace(coalesce(value::VARCHAR, ''), '\', '\\')) END;
CREATE MACRO own_format(pattern, a) AS (own_format_step(pattern, a)),
  (pattern, a, b) AS (own_format_step(own_format_step(pattern, a), b)),
  (pattern, a, b, c) AS (own_format_step(own_format_step(own_format_step(pattern, a), b), c));
CREATE MACRO array_remove(list_value, gone) AS
  list_filter(list_value, lambda one: one IS DISTINCT FROM gone);
CREATE MACRO own_expandarray(list_value) AS
  unnest(list_transform(list_value, lambda one, place: {'x': one, 'n': place}));
CREATE MACRO pg_get_functiondef(fn_oid) AS
  (SELECT pn_r FROM (SELECT oid AS pn_o, 'CREATE FUNCTION ' || proname || '(' || arguments ||
     ') RETURNS ' || result || ' AS ' || prosrc AS pn_r FROM pg_proc) WHERE pn_o = fn_oid);
CREATE MACRO pg_get_ruledef(rule_oid) AS NULL::VARCHAR, (rule_oid, pretty) AS NULL::VARCHAR;
CREATE MACRO pg_get_triggerdef(trigger_oid) AS NULL::VARCHAR,
  (trigger_oid, pretty) AS NULL::VARCHAR;
CREATE MACRO pg_partition_ancestors(rel) AS (to_regclass(rel::VARCHAR));
CREATE MACRO pg_get_partition_constraintdef(rel_oid) AS NULL::VARCHAR;
CREATE MACRO pg_get_function_sqlbody(fn_oid) AS NULL::VARCHAR;
CREATE MACRO pg_get_function_arg_default(fn_oid, arg) AS NULL::VARCHAR;
CREATE MACRO pg_char_to_encoding(encoding_name) AS 6;
CREATE MACRO pg_is_other_temp_schema(ns_oid) AS false;
CREATE MACRO pg_my_temp_schema() AS 0::BIGINT;
CREATE MACRO pg_statistics_obj_is_visible(stat_oid) AS true;
CREATE MACRO pg_operator_is_visible(op_oid) AS true;
CREATE MACRO pg_opclass_is_visible(op_oid) AS true;
CREATE MACRO pg_collation_is_visible(coll_oid) AS true;
CREATE MACRO pg_conversion_is_visible(con_oid) AS true;
CREATE MACRO pg_ts_config_is_visible(ts_oid) AS true;
CREATE MACRO pg_ts_dict_is_visible(ts_oid) AS true;
CREATE MACRO pg_ts_parser_is_visible(ts_oid) AS true;
CREATE MACRO pg_ts_template_is_visible(ts_oid) AS true;
CREATE MACRO pg_indexes_size(rel_oid) AS 0::BIGINT;
CREATE MACRO pg_tablespace_size(ts_oid) AS 0::BIGINT;
CREATE MACRO pg_relation_filenode(rel_oid) AS rel_oid;
CREATE MACRO pg_relation_is_updatable(rel_oid, triggers) AS 28;
CREATE MACRO pg_column_is_updatable(rel_oid, col, triggers) AS true;
CREATE MACRO pg_describe_object(class_oid, obj_oid, sub_id) AS obj_oid::VARCHAR;
CREATE MACRO pg_stat_get_numscans(rel_oid) AS 0::BIGINT;
CREATE MACRO pg_stat_get_live_tuples(rel_oid) AS 0::BIGINT;
CREATE MACRO pg_stat_get_dead_tuples(rel_oid) AS 0::BIGINT;
CREATE MACRO pg_postmaster_start_time() AS now();
CREATE MACRO inet_server_addr() AS NULL::VARCHAR;
CREATE MACRO inet_server_port() AS NULL::INTEGER;
CREATE MACRO inet_client_addr() AS NULL::VARCHAR;
CREATE MACRO has_function_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_any_column_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_column_privilege(a, b, c) AS true, (a, b, c, d) AS true;
CREATE MACRO has_sequence_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_tablespace_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_type_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO has_language_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO pg_get_keywords() AS TABLE
  SELECT keyword_name AS word, upper(keyword_category[1]) AS catcode, true AS barelabel,
         keyword_category AS catdesc, 'can be bare label' AS baredesc FROM duckdb_keywords();
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
CREATE MACRO own_setting(setting_name) AS
  (SELECT ps_v FROM (SELECT name AS ps_n, setting AS ps_v FROM pg_settings)
   WHERE lower(ps_n) = lower(setting_name)),
  (setting_name, missing_ok) AS
  (SELECT ps_v FROM (SELECT name AS ps_n, setting AS ps_v FROM pg_settings)
   WHERE lower(ps_n) = lower(setting_name));
