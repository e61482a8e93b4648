-- TierKV's side of a PostgreSQL database: one schema that the front makes when it starts.
-- It can be run by hand, any number of times, by a user who may create schemas here.
-- The relay (dbfront/postgres) writes every AI call of a statement as tierkv.ai_call(form, question).

CREATE SCHEMA IF NOT EXISTS tierkv;

DO $install$
BEGIN
  IF to_regtype('tierkv.ai_result') IS NULL THEN
    CREATE TYPE tierkv.ai_result AS (/*ai_result*/);
  END IF;
END
$install$;

-- Looks an answer up that the front has put into the session's own table. An unknown question is
-- told to the front by a message that only it reads, and answered NULL for now: the front learns
-- the answer and runs the statement again. Nothing is written, so the function is STABLE.
CREATE OR REPLACE FUNCTION tierkv.ai_call(form bigint, question text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED COST 100000 AS $ai_call$
DECLARE
  known text;
BEGIN
  IF question IS NULL THEN
    RETURN NULL;
  END IF;
  IF pg_catalog.current_setting('tierkv.round', true) OPERATOR(pg_catalog.=) 'collect' THEN
    SELECT m.answer INTO known FROM pg_temp.tierkv_memo m
      WHERE m.question OPERATOR(pg_catalog.=) ai_call.question
        AND m.form OPERATOR(pg_catalog.=) ai_call.form;
    IF NOT FOUND THEN
      RAISE INFO 'tierkv' USING ERRCODE = 'TKV01', DETAIL = pg_catalog.concat(
        form, ' ', pg_catalog.encode(pg_catalog.convert_to(question, 'UTF8'), 'hex'));
    END IF;
    RETURN known;
  END IF;
  -- Rows of a cursor come after its rounds; their answers are there until the transaction ends.
  BEGIN
    SELECT m.answer INTO known FROM pg_temp.tierkv_memo m
      WHERE m.question OPERATOR(pg_catalog.=) ai_call.question
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

-- Makes the session's table of answers ready for the statement whose forms are first to last.
CREATE OR REPLACE FUNCTION tierkv.begin_rounds(first bigint, last bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $begin_rounds$
BEGIN
  IF pg_catalog.to_regclass('pg_temp.tierkv_memo') IS NULL THEN
    CREATE TEMP TABLE tierkv_memo (form bigint, question text COLLATE "C", answer text)
      ON COMMIT DROP;
    CREATE INDEX tierkv_memo_question ON pg_temp.tierkv_memo USING hash (question);
    GRANT ALL ON pg_temp.tierkv_memo TO PUBLIC;
  ELSE
    DELETE FROM pg_temp.tierkv_memo m WHERE m.form BETWEEN first AND last;
  END IF;
  PERFORM pg_catalog.set_config('tierkv.round', 'collect', true);
  PERFORM pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true);
END
$begin_rounds$;

-- Admin views. The front fills the setting that a view unpacks just before a statement that names
-- the view; so a view costs nothing otherwise, and is empty without the front.
/*views*/
GRANT USAGE ON SCHEMA tierkv TO PUBLIC;
GRANT EXECUTE ON FUNCTION tierkv.ai_call(bigint, text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION tierkv.begin_rounds(bigint, bigint) TO PUBLIC;
GRANT SELECT ON ALL TABLES IN SCHEMA tierkv TO PUBLIC;
COMMENT ON SCHEMA tierkv IS 'TierKV /*version*/';
