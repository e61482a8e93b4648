// TypeORM: synchronize twice, save, find, relations, a transaction.
require('reflect-metadata');
const { DataSource, EntitySchema, In, MoreThan } = require('typeorm');
const { step, AI } = require('./steps.js');

const Author = new EntitySchema({
  name: 'Author', tableName: 'typeorm_authors',
  columns: { id: { type: Number, primary: true, generated: true }, name: { type: 'text', unique: true } },
  relations: { books: { type: 'one-to-many', target: 'Book', inverseSide: 'author' } },
});
const Book = new EntitySchema({
  name: 'Book', tableName: 'typeorm_books',
  columns: {
    id: { type: Number, primary: true, generated: true }, title: { type: 'text' }, price: { type: 'numeric', precision: 8, scale: 2, nullable: true },
    made: { type: 'timestamp with time zone', nullable: true }, tags: { type: 'text', array: true, nullable: true }, extra: { type: 'json', nullable: true },
  },
  relations: { author: { type: 'many-to-one', target: 'Author', inverseSide: 'books', joinColumn: true, createForeignKeyConstraints: false } },
});

(async () => {
  const source = new DataSource({
    type: 'postgres', host: process.env.PGHOST, port: +process.env.PGPORT, username: process.env.PGUSER, password: process.env.PGPASSWORD,
    database: process.env.PGDATABASE, entities: [Author, Book], installExtensions: false,
  });
  await step('initialize', async () => (await source.initialize()).isInitialized);
  await step('synchronize', () => source.synchronize());
  const [authors, books] = [source.getRepository('Author'), source.getRepository('Book')];
  await step('save', async () => {
    const author = await authors.save({ name: 'Ann' });
    return books.save([{ title: 'One', author, price: 1.5, tags: ['a'], extra: { a: 1 }, made: new Date('2024-02-29T12:00:00Z') }, { title: 'Two', author }]);
  });
  await step('find', () => books.find({ where: { id: In([1, 2]), author: { name: 'Ann' } }, relations: { author: true }, order: { id: 'ASC' } }));
  await step('count', () => books.countBy({ id: MoreThan(1) }));
  await step('page', () => books.findAndCount({ order: { id: 'DESC' }, take: 1, skip: 1 }));
  await step('builder', () => books.createQueryBuilder('b').leftJoinAndSelect('b.author', 'a').where('b.title = :t', { t: 'Two' }).getMany());
  await step('unique', () => authors.insert({ name: 'Ann' }));
  await step('transaction', () => source.transaction(async (m) => { await m.getRepository('Author').save({ name: 'Bob' }); return m.getRepository('Author').count(); }));
  await step('synchronize again', async () => { await source.synchronize(); return books.count(); });
  await step('ai', () => source.query(AI('id <= $1'), [3]));
  await source.destroy();
})();
