// postgres.js: everything prepared, types asked from the server, cursors, COPY streams, transactions.
const postgres = require('postgres');
const { step, AI } = require('./steps.js');

(async () => {
  const sql = postgres({ max: 2, onnotice: () => {} });
  await step('parameters', () => sql`SELECT id, body, price, tags FROM notes WHERE id = ${2} AND body <> ${'x'}`);
  await step('any', () => sql`SELECT id FROM notes WHERE id = ANY(${[1, 3]}) ORDER BY id`);
  await step('in', () => sql`SELECT id FROM notes WHERE id IN ${sql([1, 2])} ORDER BY id`);
  await step('insert', () => sql`INSERT INTO notes ${sql([{ id: 90, body: 'x' }, { id: 91, body: null }])} RETURNING *`);
  await step('json', () => sql`SELECT ${sql.json({ a: [1] })}::jsonb AS j`);
  await step('cursor', async () => {
    const read = [];
    await sql`SELECT id FROM notes WHERE id < 50 ORDER BY id`.cursor(2, (rows) => { read.push(rows.map((r) => r.id)); });
    return read;
  });
  await step('savepoint', () => sql.begin(async (outer) => {
    await outer`INSERT INTO notes (id) VALUES (92)`;
    await outer.savepoint((inner) => inner`INSERT INTO notes (id) VALUES (92)`).catch((e) => e.code);
    return outer`SELECT count(*) FROM notes WHERE id = 92`;
  }));
  await step('copy', async () => {
    let read = '';
    for await (const piece of await sql`COPY (SELECT id, body FROM notes WHERE id < 4 ORDER BY id) TO STDOUT`.readable()) read += piece;
    return read;
  });
  await step('error', () => sql`SELECT * FROM nowhere`);
  await step('ai', () => sql.unsafe(AI('id <= $1'), [3]));
  await sql.end();
})();
