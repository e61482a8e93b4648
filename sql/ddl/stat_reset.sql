-- tierkv.stat_reset() forgets what all counters of the front counted, tierkv.stat_reset('functions')
-- those of one group; both answer with the time from which they count again.

CREATE OR REPLACE MACRO tierkv.stat_reset() AS tierkv_stat_reset(getvariable('tierkv_session')::BIGINT, NULL::VARCHAR)::TIMESTAMP,
(what) AS tierkv_stat_reset(getvariable('tierkv_session')::BIGINT, what::VARCHAR)::TIMESTAMP;
