-- The admin views. Each unpacks a session variable of JSON rows that the front fills before a
-- statement that names the view (sql/views.py). Counters are cumulative since a node started; times
-- are milliseconds, sizes bytes, ratios 0.0 to 1.0.

CREATE SCHEMA IF NOT EXISTS tierkv;

CREATE OR REPLACE VIEW tierkv.kvcache_blocks AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_kvcache_blocks'), '[]'), '[{
    "block_hash":"VARCHAR",
    "parent_hash":"VARCHAR",
    "model_name":"VARCHAR",
    "cache_scope":"VARCHAR",
    "tier":"VARCHAR",
    "node_id":"VARCHAR",
    "tokens":"BIGINT",
    "bytes":"BIGINT",
    "created_at":"TIMESTAMP",
    "last_access_at":"TIMESTAMP",
    "hits":"BIGINT",
    "session_id":"VARCHAR",
    "heat":"DOUBLE",
    "leases":"BIGINT"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.directory AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_directory'), '[]'), '[{
    "name":"VARCHAR",
    "value":"BIGINT"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.models AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_models'), '[]'), '[{
    "model_name":"VARCHAR",
    "revision":"VARCHAR",
    "architecture":"VARCHAR",
    "parameters":"BIGINT",
    "context_tokens":"BIGINT",
    "block_tokens":"BIGINT",
    "block_bytes":"BIGINT",
    "kv_codec":"VARCHAR",
    "stored_block_bytes":"BIGINT",
    "folder":"VARCHAR",
    "blend_refusal":"VARCHAR"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.namespaces AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_namespaces'), '[]'), '[{
    "name":"VARCHAR",
    "tenants":"VARCHAR",
    "cache_enabled":"BOOLEAN",
    "kv_codec":"VARCHAR",
    "blend":"BOOLEAN",
    "recompute_ratio":"DOUBLE",
    "selector":"VARCHAR",
    "gradual":"BOOLEAN"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.nodes AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_nodes'), '[]'), '[{
    "node_id":"VARCHAR",
    "incarnation":"BIGINT",
    "role":"VARCHAR",
    "host":"VARCHAR",
    "address":"VARCHAR",
    "data_address":"VARCHAR",
    "state":"VARCHAR",
    "heartbeat_age_s":"DOUBLE",
    "capacity_bytes":"BIGINT",
    "models":"VARCHAR",
    "paths":"VARCHAR"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.queue AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_queue'), '[]'), '[{
    "request_id":"VARCHAR",
    "tenant":"VARCHAR",
    "model_name":"VARCHAR",
    "priority":"BIGINT",
    "waited_s":"DOUBLE",
    "predicted_ttft_s":"DOUBLE",
    "node_id":"VARCHAR"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.settings AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_settings'), '[]'), '[{
    "name":"VARCHAR",
    "setting":"VARCHAR",
    "source":"VARCHAR",
    "description":"VARCHAR"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.stat_activity AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_stat_activity'), '[]'), '[{
    "pid":"BIGINT",
    "usename":"VARCHAR",
    "application_name":"VARCHAR",
    "state":"VARCHAR",
    "phase":"VARCHAR",
    "round":"BIGINT",
    "calls_done":"BIGINT",
    "calls_total":"BIGINT",
    "errors":"BIGINT",
    "prompt_tokens":"BIGINT",
    "cached_tokens":"BIGINT",
    "blended_tokens":"BIGINT",
    "recomputed_tokens":"BIGINT",
    "completion_tokens":"BIGINT",
    "query_start":"TIMESTAMP",
    "query":"VARCHAR"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.stat_kvcache AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_stat_kvcache'), '[]'), '[{
    "tier":"VARCHAR",
    "medium":"VARCHAR",
    "model_name":"VARCHAR",
    "capacity_bytes":"BIGINT",
    "used_bytes":"BIGINT",
    "blocks_total":"BIGINT",
    "blocks_used":"BIGINT",
    "query_tokens":"BIGINT",
    "hit_tokens":"BIGINT",
    "hit_ratio":"DOUBLE",
    "stored_tokens":"BIGINT",
    "evicted_blocks":"BIGINT",
    "promoted_blocks":"BIGINT",
    "demoted_blocks":"BIGINT",
    "read_bytes":"BIGINT",
    "write_bytes":"BIGINT",
    "read_time":"DOUBLE",
    "write_time":"DOUBLE",
    "alloc_failures":"BIGINT"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.stat_kvcache_node AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_stat_kvcache_node'), '[]'), '[{
    "node_id":"VARCHAR",
    "role":"VARCHAR",
    "address":"VARCHAR",
    "heartbeat_age_s":"DOUBLE",
    "kv_cache_usage":"DOUBLE",
    "requests_running":"BIGINT",
    "requests_waiting":"BIGINT",
    "transfer_bytes_in":"BIGINT",
    "transfer_bytes_out":"BIGINT",
    "transfer_errors":"BIGINT",
    "cache_errors":"BIGINT",
    "tier":"VARCHAR",
    "medium":"VARCHAR",
    "model_name":"VARCHAR",
    "capacity_bytes":"BIGINT",
    "used_bytes":"BIGINT",
    "blocks_total":"BIGINT",
    "blocks_used":"BIGINT",
    "query_tokens":"BIGINT",
    "hit_tokens":"BIGINT",
    "hit_ratio":"DOUBLE",
    "stored_tokens":"BIGINT",
    "evicted_blocks":"BIGINT",
    "promoted_blocks":"BIGINT",
    "demoted_blocks":"BIGINT",
    "read_bytes":"BIGINT",
    "write_bytes":"BIGINT",
    "read_time":"DOUBLE",
    "write_time":"DOUBLE",
    "alloc_failures":"BIGINT"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.load_decisions AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_load_decisions'), '[]'), '[{
    "node_id":"VARCHAR",
    "choice":"VARCHAR",
    "decisions":"BIGINT",
    "measured":"BIGINT",
    "mean_predicted_s":"DOUBLE",
    "mean_actual_s":"DOUBLE",
    "mean_abs_error_s":"DOUBLE"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.routing_log AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_routing_log'), '[]'), '[{
    "request_id":"VARCHAR",
    "attempt":"BIGINT",
    "stage":"VARCHAR",
    "decided_at":"TIMESTAMP",
    "model_name":"VARCHAR",
    "prompt_tokens":"BIGINT",
    "node_id":"VARCHAR",
    "candidates":"VARCHAR",
    "predicted_ttft_s":"DOUBLE",
    "actual_ttft_s":"DOUBLE",
    "error_s":"DOUBLE"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.routing_errors AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_routing_errors'), '[]'), '[{
    "node_id":"VARCHAR",
    "model_name":"VARCHAR",
    "stage":"VARCHAR",
    "answers":"BIGINT",
    "mean_predicted_s":"DOUBLE",
    "mean_actual_s":"DOUBLE",
    "mean_abs_error_s":"DOUBLE",
    "p50_abs_error_s":"DOUBLE",
    "p90_abs_error_s":"DOUBLE",
    "p99_abs_error_s":"DOUBLE",
    "mean_ratio":"DOUBLE",
    "p50_ratio":"DOUBLE",
    "p90_ratio":"DOUBLE",
    "p99_ratio":"DOUBLE"
  }]'), recursive := true);

CREATE OR REPLACE VIEW tierkv.node_costs AS
SELECT unnest(from_json(coalesce(getvariable('tierkv_node_costs'), '[]'), '[{
    "node_id":"VARCHAR",
    "models":"VARCHAR",
    "state":"VARCHAR",
    "requests":"BIGINT",
    "waiting_tokens":"BIGINT",
    "prefill_step_s":"DOUBLE",
    "prefill_token_s":"DOUBLE",
    "prefill_pair_s":"DOUBLE",
    "l2_bytes_per_s":"DOUBLE",
    "l3_bytes_per_s":"DOUBLE",
    "l4_bytes_per_s":"DOUBLE",
    "l2_latency_s":"DOUBLE",
    "l3_latency_s":"DOUBLE",
    "l4_latency_s":"DOUBLE",
    "l2_queued_bytes":"BIGINT",
    "l3_queued_bytes":"BIGINT",
    "l4_queued_bytes":"BIGINT",
    "decodes_running":"BIGINT",
    "decode_step_s":"DOUBLE",
    "overhead_s":"DOUBLE",
    "factor":"DOUBLE"
  }]'), recursive := true);
