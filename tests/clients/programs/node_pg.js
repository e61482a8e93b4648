// node-postgres: typed and named statements, arrays, a cursor with row limits, errors, a pool.
const { Client, Pool } = require('pg');
const Cursor = require('pg-cursor');
const { step, AI } = require('./steps.js');

(async () => {
  const client = new Client();
  await client.connect();
  const rows = async (text, values) => {
    const found = await client.query({ text, values });
    return [found.fields.map((f) => [f.name, f.dataTypeID]), found.rows, found.command, found.rowCount];
  };
  await step('types', () => rows("SELECT 1::int2 a, 2 b, 3::int8 c, 1.25::numeric(10,2) d, ARRAY[1,2] e, '{\"a\":1}'::json f, DATE '2024-02-29' g"));
  await step('parameters', () => rows('SELECT body FROM notes WHERE id = $1 AND body <> $2', [2, 'x']));
  await step('any', () => rows('SELECT id FROM notes WHERE id = ANY($1) ORDER BY id', [[1, 3]]));
  await step('limit', () => rows('SELECT id FROM notes ORDER BY id LIMIT $1 OFFSET $2', [1, 1]));
  await step('insert', () => rows('INSERT INTO notes (id, body, price, tags, made) VALUES ($1, $2, $3, $4, $5) RETURNING *', [90, "it's", 1.5, ['a', 'b'], new Date('2024-02-29T12:00:00Z')]));
  await step('jsonb', () => rows('SELECT $1::jsonb AS j', [{ a: [1, null] }]));
  await step('named', async () => {
    const named = (id) => client.query({ name: 'one', text: 'SELECT body FROM notes WHERE id = $1', values: [id] });
    return [(await named(1)).rows, (await named(2)).rows];
  });
  await step('error', () => rows('SELECT * FROM nowhere'));
  await step('after it', () => rows('SELECT 1 AS one'));
  await step('several', async () => (await client.query('BEGIN; SELECT 1 AS a; SELECT 2 AS b; COMMIT')).map((r) => [r.command, r.rows]));
  await step('cursor', async () => {
    const cursor = client.query(new Cursor('SELECT id, body FROM notes WHERE id < $1 ORDER BY id', [50]));
    const read = [await cursor.read(2), await cursor.read(2), await cursor.read(2)];
    await cursor.close();
    return read;
  });
  await step('ai cursor', async () => {
    const cursor = client.query(new Cursor(AI('id < $1'), [50]));
    const read = [await cursor.read(2)];
    await cursor.close();
    return read;
  });
  await step('ai', () => rows(AI('id <= $1'), [3]));
  await client.end();
  const pool = new Pool({ max: 3 });
  await step('pool', async () => (await Promise.all([1, 2, 3].map((id) => pool.query(AI('id = $1'), [id])))).map((r) => r.rows));
  await pool.end();
})();
