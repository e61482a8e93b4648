-- tierkv.simulate('trace.jsonl.zst', nodes => 4, ...): the simulator as a table function, a row for
-- each number it found. The options are those of `tierkv simulate`, with underscores.

CREATE OR REPLACE MACRO tierkv.simulate(
    trace,
    policy := NULL,
    capacity_blocks := NULL,
    nodes := NULL,
    router := NULL,
    local_gb := NULL,
    pool_gb := NULL,
    pool_gbps := NULL,
    gate := NULL,
    closed_loop := NULL,
    speed := NULL,
    slo := NULL,
    reserve := NULL,
    model := NULL,
    block_tokens := NULL,
    cost := NULL,
    region := NULL,
    slo_share := NULL,
    seed := NULL
) AS TABLE
SELECT unnest(from_json(tierkv_simulate(
    getvariable('tierkv_session')::BIGINT,
    trace::VARCHAR,
    to_json({
        policy: policy,
        capacity_blocks: capacity_blocks,
        nodes: nodes,
        router: router,
        local_gb: local_gb,
        pool_gb: pool_gb,
        pool_gbps: pool_gbps,
        gate: gate,
        closed_loop: closed_loop,
        speed: speed,
        slo: slo,
        reserve: reserve,
        model: model,
        block_tokens: block_tokens,
        cost: cost,
        region: region,
        slo_share: slo_share,
        seed: seed
    })::VARCHAR
), '[{"metric":"VARCHAR","value":"DOUBLE"}]'), recursive := true);
