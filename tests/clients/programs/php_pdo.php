<?php // PDO and the pgsql extension: prepared statements, lastInsertId, meta data, insert, COPY.
function step($what, $code) {
  try { $line = ['what' => $what, 'got' => $code()]; }
  catch (PDOException $e) { $line = ['what' => $what, 'sqlstate' => $e->errorInfo[0] ?? $e->getMessage()]; }
  catch (Throwable $e) { $line = ['what' => $what, 'sqlstate' => $e->getMessage()]; }
  echo json_encode($line), "\n";
}
set_error_handler(function ($number, $message) { throw new ErrorException($message); });
$ai = "SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE id <= ? ORDER BY id";
$env = fn($name) => getenv("PG$name");
$dsn = "host={$env('HOST')} port={$env('PORT')} dbname={$env('DATABASE')}";
$p = new PDO("pgsql:$dsn", $env('USER'), $env('PASSWORD'), [PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION]);
$rows = function ($sql, ...$values) use ($p) { $s = $p->prepare($sql); $s->execute($values); return $s->fetchAll(PDO::FETCH_ASSOC); };
step('types', fn() => $rows("SELECT 1::int2 a, 2 b, 3::int8 c, 1.25::numeric(10,2) d, true e, 'x'::text f"));
step('parameters', fn() => $rows('SELECT body FROM notes WHERE id = ? AND body <> ?', 2, 'x'));
step('create', fn() => $p->exec('CREATE TABLE php_rows (id SERIAL PRIMARY KEY, a TEXT, n NUMERIC(10,2), v VARCHAR(20))'));
step('insert', fn() => $rows('INSERT INTO php_rows (a, n) VALUES (?, ?) RETURNING id', 'x', '1.5'));
step('lastInsertId', fn() => $p->lastInsertId());
step('by sequence', fn() => $p->lastInsertId('php_rows_id_seq'));
step('emulated', function () use ($p) {
  $p->setAttribute(PDO::ATTR_EMULATE_PREPARES, true);
  $s = $p->prepare('SELECT body FROM notes WHERE id = :i'); $s->execute(['i' => 1]);
  $p->setAttribute(PDO::ATTR_EMULATE_PREPARES, false);
  return $s->fetchAll(PDO::FETCH_NUM); });
step('error', fn() => $rows('SELECT * FROM nowhere'));
step('transaction', function () use ($p, $rows) { $p->beginTransaction(); $p->exec("INSERT INTO php_rows (a) VALUES ('gone')"); $p->rollBack(); return $rows('SELECT count(*) FROM php_rows'); });
step('ai', fn() => $rows($ai, 3));
$c = pg_connect("$dsn user={$env('USER')} password='{$env('PASSWORD')}'");
step('pg_meta_data', fn() => array_map(fn($column) => [$column['type'], $column['not null'], $column['has default']], pg_meta_data($c, 'php_rows')));
step('pg_insert', fn() => (bool) pg_insert($c, 'php_rows', ['id' => 7, 'a' => 'y', 'n' => '2.5']));
step('pg_select', fn() => pg_select($c, 'php_rows', ['id' => 7]));
step('pg_update', fn() => pg_update($c, 'php_rows', ['a' => 'z'], ['id' => 7]));
step('pg_delete', fn() => pg_delete($c, 'php_rows', ['id' => 7]));
step('pg_query_params', fn() => pg_fetch_all(pg_query_params($c, str_replace('?', '$1', $ai), [3])));
step('pg_field_table', fn() => pg_field_table(pg_query($c, 'SELECT id FROM php_rows'), 0));
step('pg_copy_from', fn() => pg_copy_from($c, 'php_rows', ["8\tq\t1\tw"]));
step('pg_copy_to', fn() => pg_copy_to($c, 'php_rows'));
