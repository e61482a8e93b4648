-- TierKV's side of a PostgreSQL database: one schema that the front makes when it starts.
-- It can be run by hand, any number of times, by a user who may create schemas here.
-- The relay (dbfront/postgres) writes every AI call of a statement as tierkv.ai_call(form, question).
-- What is run in users' sessions names everything by schema: a user's own function, type or operator
-- of the same name must not stand in. Text is compared as bytes, whatever collation it comes with.

CREATE SCHEMA IF NOT EXISTS tierkv;

DO $install$
BEGIN
  IF pg_catalog.to_regtype('tierkv.ai_result') IS NULL THEN
    CREATE TYPE tierkv.ai_result AS (/*ai_result*/);
  ELSIF NOT EXISTS (
    SELECT FROM pg_catalog.pg_attribute
    WHERE attrelid = 'tierkv.ai_result'::pg_catalog.regclass AND attname = 'cached'
  ) THEN
    -- The type is of an earlier release. Rows of tables that have it get NULL.
    ALTER TYPE tierkv.ai_result ADD ATTRIBUTE cached boolean CASCADE;
  END IF;
END
$install$;

-- Answers of a statement lie in a temporary table of the session (tierkv.round = collect), or,
-- where there can't be one, in 256 settings of the transaction, as JSON (tierkv.round = settings).
-- An entry of a setting is found by "form question" and is an array of one answer. A second element
-- says that it was an earlier execution's, for the rows of a cursor that is open still.
CREATE OR REPLACE FUNCTION tierkv.answers_setting(question text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT pg_catalog.concat('tierkv_answers.s',
  pg_catalog.hashtext(question COLLATE pg_catalog."C") OPERATOR(pg_catalog.&) 255) $$;

-- Looks an answer up that the front has left here. An unknown question is told to the front by a
-- message that only it reads, and answered NULL for now: the front learns the answer and runs the
-- statement again. Nothing is written, so the function is STABLE.
-- In a round with a number (tierkv.telling), 512 settings remember the last questions with their
-- answers, so that rows with equal questions look nothing up and tell nothing again. The first
-- unknown question is told at once, and others together when they fill tierkv.untold, whose rest
-- tierkv.tell_rest() tells. '!' means: none was told yet.
-- After as many unknown questions as tierkv.room has, it ends the round: a LIMIT may need no more.
-- Its cost puts it behind other conditions, and keeps small statements below jit_above_cost.
-- Settings are changed by assignments: PERFORM would take twice as long.
CREATE OR REPLACE FUNCTION tierkv.ai_call(form bigint, question text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED COST 1000 AS $ai_call$
DECLARE
  round pg_catalog.text := pg_catalog.current_setting('tierkv.round', true);
  telling pg_catalog.text;
  slot pg_catalog.text;
  asked pg_catalog.text;
  known pg_catalog.text;
  entry pg_catalog.jsonb;
  is_known pg_catalog.bool := false;
  untold pg_catalog.text;
  room pg_catalog.text;
  ignored pg_catalog.text;
BEGIN
  IF question IS NULL THEN
    RETURN NULL;
  END IF;
  telling := pg_catalog.current_setting('tierkv.telling', true);
  IF telling OPERATOR(pg_catalog.<>) ''
      AND pg_catalog.octet_length(question) OPERATOR(pg_catalog.<) 4000 THEN
    slot := pg_catalog.concat('tierkv_seen.s',
      pg_catalog.hashtext(question COLLATE pg_catalog."C") OPERATOR(pg_catalog.&) 511);
    asked := pg_catalog.concat(
      telling, ' ', form, ' ', pg_catalog.length(question), ' ', question);
    known := pg_catalog.current_setting(slot, true);
    IF pg_catalog.starts_with(known, asked COLLATE pg_catalog."C") THEN
      known := pg_catalog.substr(known, pg_catalog.length(asked) OPERATOR(pg_catalog.+) 1);
      RETURN CASE WHEN known OPERATOR(pg_catalog.<>) '' THEN pg_catalog.substr(known, 2) END;
    END IF;
  END IF;
  IF round OPERATOR(pg_catalog.=) 'collect' THEN
    SELECT m.answer INTO known FROM pg_temp.tierkv_memo m
      WHERE m.question OPERATOR(pg_catalog.=) (ai_call.question COLLATE pg_catalog."C")
        AND m.form OPERATOR(pg_catalog.=) ai_call.form;
    is_known := FOUND;
  ELSE
    known := pg_catalog.current_setting(tierkv.answers_setting(question), true);
    IF known OPERATOR(pg_catalog.<>) '' THEN
      entry := known::pg_catalog.jsonb
        OPERATOR(pg_catalog.->) pg_catalog.concat(form, ' ', question);
    END IF;
    known := entry OPERATOR(pg_catalog.->>) 0;
    is_known := COALESCE(pg_catalog.jsonb_array_length(entry) OPERATOR(pg_catalog.=) 1
        OR (entry IS NOT NULL AND COALESCE(round, '') OPERATOR(pg_catalog.<>) 'settings'), false);
  END IF;
  IF asked IS NOT NULL AND (NOT is_known OR known IS NULL
      OR pg_catalog.octet_length(known) OPERATOR(pg_catalog.<) 4000) THEN
    ignored := pg_catalog.set_config(slot, pg_catalog.concat(asked,
      CASE WHEN is_known AND known IS NOT NULL THEN pg_catalog.concat('=', known) END), true);
  END IF;
  IF is_known THEN
    RETURN known;
  END IF;
  IF round OPERATOR(pg_catalog.=) 'collect' OR round OPERATOR(pg_catalog.=) 'settings' THEN
    IF telling OPERATOR(pg_catalog.<>) '' THEN
      untold := pg_catalog.current_setting('tierkv.untold', true);
    END IF;
    room := pg_catalog.current_setting('tierkv.room', true);
    asked := pg_catalog.concat(NULLIF(untold, '!'), form, ' ',
      pg_catalog.encode(pg_catalog.convert_to(question, 'UTF8'), 'hex'));
    IF COALESCE(untold, '!') OPERATOR(pg_catalog.=) '!' OR room OPERATOR(pg_catalog.=) '1'
        OR pg_catalog.length(asked) OPERATOR(pg_catalog.>) 2000 THEN
      RAISE INFO 'tierkv' USING ERRCODE = 'TKV01', DETAIL = asked;
      untold := '';
    ELSE
      untold := pg_catalog.concat(asked, E'\n');
    END IF;
    IF telling OPERATOR(pg_catalog.<>) '' THEN
      ignored := pg_catalog.set_config('tierkv.untold', untold, true);
    END IF;
    IF room OPERATOR(pg_catalog.<>) '' THEN
      IF room::pg_catalog.int4 OPERATOR(pg_catalog.<=) 1 THEN
        RAISE EXCEPTION 'tierkv' USING ERRCODE = 'TKV03';
      END IF;
      ignored := pg_catalog.set_config('tierkv.room',
        (room::pg_catalog.int4 OPERATOR(pg_catalog.-) 1)::pg_catalog.text, true);
    END IF;
    RETURN NULL;
  END IF;
  -- Rows of a cursor come after its rounds; their answers are there until the transaction ends.
  BEGIN
    SELECT m.answer INTO known FROM pg_temp.tierkv_memo m
      WHERE m.question OPERATOR(pg_catalog.=) (ai_call.question COLLATE pg_catalog."C")
        AND m.form OPERATOR(pg_catalog.=) ai_call.form;
    IF FOUND THEN
      RETURN known;
    END IF;
  EXCEPTION WHEN undefined_table OR invalid_schema_name THEN
    NULL;
  END;
  RAISE EXCEPTION 'there is no answer to this AI call' USING ERRCODE = 'feature_not_supported',
    HINT = 'AI calls are answered in statements that come through the TierKV front. Views, '
      'functions and triggers can''t hold them, and a cursor sees only rows it saw when it was '
      'declared: use REPEATABLE READ.';
END
$ai_call$;

-- Tells the questions of a round that have not been told yet, and ends telling them together.
CREATE OR REPLACE FUNCTION tierkv.tell_rest() RETURNS void
LANGUAGE plpgsql VOLATILE AS $tell_rest$
DECLARE
  untold pg_catalog.text := pg_catalog.current_setting('tierkv.untold', true);
BEGIN
  IF untold OPERATOR(pg_catalog.<>) '' AND untold OPERATOR(pg_catalog.<>) '!' THEN
    RAISE INFO 'tierkv' USING ERRCODE = 'TKV01', DETAIL = untold;
  END IF;
  PERFORM pg_catalog.set_config('tierkv.telling', '', true);
END
$tell_rest$;

-- The same for a cursor that is fetched from while its calls are answered: each call sees what was
-- learnt since the cursor was opened. The name is as long as the other's.
CREATE OR REPLACE FUNCTION tierkv.ai_next(form bigint, question text) RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL RESTRICTED COST 1000 AS $ai_next$
BEGIN
  RETURN tierkv.ai_call(form, question);
END
$ai_next$;

-- Whether an answer is there; a rollback to a savepoint takes it away.
CREATE OR REPLACE FUNCTION tierkv.knows(form bigint, question bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $knows$
DECLARE
  asked pg_catalog.text := pg_catalog.convert_from(question, 'UTF8');
BEGIN
  IF pg_catalog.to_regclass('pg_temp.tierkv_memo') IS NOT NULL THEN
    RETURN EXISTS (SELECT FROM pg_temp.tierkv_memo m
      WHERE m.question OPERATOR(pg_catalog.=) (asked COLLATE pg_catalog."C")
        AND m.form OPERATOR(pg_catalog.=) knows.form);
  END IF;
  RETURN COALESCE((NULLIF(pg_catalog.current_setting(tierkv.answers_setting(asked), true), '')
    ::pg_catalog.jsonb OPERATOR(pg_catalog.->) pg_catalog.concat(form, ' ', asked)) IS NOT NULL,
    false);
END
$knows$;

-- Makes room for the answers of the statement whose forms are first to last.
CREATE OR REPLACE FUNCTION tierkv.begin_rounds(first bigint, last bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $begin_rounds$
DECLARE
  round pg_catalog.text := 'collect';
  again pg_catalog.bool;
  others pg_catalog.bool;
BEGIN
  -- All rounds must meet rows in one order: what a LIMIT or an array takes would ask anew in each.
  PERFORM pg_catalog.set_config('synchronize_seqscans', 'off', true);
  PERFORM pg_catalog.set_config('max_parallel_workers_per_gather', '0', true);
  PERFORM pg_catalog.set_config('cursor_tuple_fraction', '1', true);
  PERFORM pg_catalog.set_config('plan_cache_mode', 'force_custom_plan', true);
  PERFORM pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true);
  IF pg_catalog.to_regclass('pg_temp.tierkv_memo') IS NOT NULL THEN
    DELETE FROM pg_temp.tierkv_memo m WHERE m.form OPERATOR(pg_catalog.>=) first
      AND m.form OPERATOR(pg_catalog.<=) last;
  ELSE
    BEGIN
      CREATE TEMP TABLE tierkv_memo (form bigint,
        question pg_catalog.text COLLATE pg_catalog."C", answer pg_catalog.text) ON COMMIT DROP;
      CREATE INDEX tierkv_memo_question ON pg_temp.tierkv_memo USING hash (question);
      GRANT ALL ON pg_temp.tierkv_memo TO PUBLIC;
    EXCEPTION WHEN read_only_sql_transaction OR insufficient_privilege THEN
      round := 'settings';
      IF pg_catalog.current_setting('tierkv_answers.used', true) OPERATOR(pg_catalog.=) 'yes' THEN
        -- What no open cursor may need any more goes; this statement's own are asked anew.
        SELECT pg_catalog.bool_or(own), pg_catalog.bool_or(NOT own) INTO again, others FROM (
          SELECT pg_catalog.strpos(c.statement, pg_catalog.concat('(', first, ', '))
            OPERATOR(pg_catalog.>) 0 AS own
          FROM pg_catalog.pg_cursors c WHERE c.name OPERATOR(pg_catalog.<>) 'tierkv') o;
        PERFORM pg_catalog.set_config(s.name, COALESCE((
            SELECT pg_catalog.jsonb_object_agg(e.key, CASE WHEN e.own
                THEN pg_catalog.jsonb_build_array(e.value OPERATOR(pg_catalog.->) 0, true)
                ELSE e.value END)
            FROM (SELECT j.key, j.value, pg_catalog.split_part(j.key, ' ', 1)::pg_catalog.int8
                  OPERATOR(pg_catalog.>=) first AND
                  pg_catalog.split_part(j.key, ' ', 1)::pg_catalog.int8
                  OPERATOR(pg_catalog.<=) last AS own
                FROM pg_catalog.jsonb_each(s.answers) j) e
            WHERE CASE WHEN e.own THEN again ELSE others END)::pg_catalog.text, ''), true)
          FROM (SELECT n.name, pg_catalog.current_setting(n.name, true)::pg_catalog.jsonb AS answers
            FROM (SELECT pg_catalog.concat('tierkv_answers.s', i) AS name
              FROM pg_catalog.generate_series(0, 255) i) n
            WHERE pg_catalog.current_setting(n.name, true) OPERATOR(pg_catalog.<>) '') s;
      END IF;
    END;
  END IF;
  PERFORM pg_catalog.set_config('tierkv.round', round, true);
END
$begin_rounds$;

-- Keeps answers; text comes as UTF-8, whatever the client speaks.
CREATE OR REPLACE FUNCTION tierkv.learn(forms bigint[], questions bytea[], answers bytea[])
RETURNS void LANGUAGE plpgsql VOLATILE AS $learn$
DECLARE
  added record;
  kept pg_catalog.text;
BEGIN
  IF pg_catalog.current_setting('tierkv.round') OPERATOR(pg_catalog.=) 'collect' THEN
    INSERT INTO pg_temp.tierkv_memo
      SELECT f, pg_catalog.convert_from(q, 'UTF8'), pg_catalog.convert_from(a, 'UTF8')
      FROM ROWS FROM (pg_catalog.unnest(forms), pg_catalog.unnest(questions),
        pg_catalog.unnest(answers)) AS t (f, q, a);
    RETURN;
  END IF;
  FOR added IN
    SELECT tierkv.answers_setting(t.q) AS setting,
        pg_catalog.jsonb_object_agg(pg_catalog.concat(t.f, ' ', t.q),
          pg_catalog.jsonb_build_array(t.a)) AS entries
      FROM (SELECT f, pg_catalog.convert_from(q, 'UTF8') AS q,
            pg_catalog.convert_from(a, 'UTF8') AS a
          FROM ROWS FROM (pg_catalog.unnest(forms), pg_catalog.unnest(questions),
            pg_catalog.unnest(answers)) AS u (f, q, a)) t
      GROUP BY 1
  LOOP
    kept := pg_catalog.current_setting(added.setting, true);
    IF kept OPERATOR(pg_catalog.<>) '' THEN
      added.entries := kept::pg_catalog.jsonb OPERATOR(pg_catalog.||) added.entries;
    END IF;
    PERFORM pg_catalog.set_config(added.setting, added.entries::pg_catalog.text, true);
  END LOOP;
  PERFORM pg_catalog.set_config('tierkv_answers.used', 'yes', true);
END
$learn$;

-- Tells the front to reset what it counts; ``what`` is a group, NULL is all.
CREATE OR REPLACE FUNCTION tierkv.stat_reset(what text DEFAULT NULL) RETURNS timestamp
LANGUAGE plpgsql VOLATILE AS $stat_reset$
BEGIN
  IF (pg_catalog.current_setting('tierkv.view_stat_reset', true) OPERATOR(pg_catalog.=) '[]')
      IS NOT TRUE THEN
    RAISE EXCEPTION 'tierkv.stat_reset is for statements that come through the TierKV front';
  END IF;
  RAISE INFO 'tierkv' USING ERRCODE = 'TKV02', DETAIL = coalesce(what, ' ');
  RETURN pg_catalog.clock_timestamp() AT TIME ZONE 'UTC';
END
$stat_reset$;

-- Admin views. The front fills the setting that a view unpacks just before a statement that names
-- the view; so a view costs nothing otherwise, and is empty without the front.
/*views*/
-- Jobs, beside the rows that they write (sql/jobs/job_tables.py).
/*jobs*/
GRANT USAGE ON SCHEMA tierkv TO PUBLIC;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tierkv TO PUBLIC;
GRANT SELECT ON ALL TABLES IN SCHEMA tierkv TO PUBLIC;
COMMENT ON SCHEMA tierkv IS 'TierKV /*version*/';
