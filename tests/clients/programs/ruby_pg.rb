# Ruby's pg: type maps from the catalogue, parameters, prepared statements, COPY, a single-row mode.
require 'json'
require 'pg'

def step(what)
  line = begin
    { what: what, got: yield }
  rescue PG::Error => error
    { what: what, sqlstate: error.result&.error_field(PG::Result::PG_DIAG_SQLSTATE) || error.message }
  end
  puts JSON.generate(line)
end

AI = "SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE id <= $1 ORDER BY id"
c = PG.connect
c.type_map_for_results = PG::BasicTypeMapForResults.new(c)
c.type_map_for_queries = PG::BasicTypeMapForQueries.new(c)
step('types') { c.exec("SELECT 1 AS a, true AS b, 1.5::float8 AS c, ARRAY[1,2] AS d, DATE '2024-02-29' AS e, 1.25::numeric(10,2) AS f").to_a }
step('parameters') { c.exec_params('SELECT $1::int + 1 AS a, $2::text AS b', [41, 'x']).to_a }
step('array') { c.exec_params('SELECT id FROM notes WHERE id = ANY($1::int[]) ORDER BY id', [[1, 3]]).to_a }
step('create') { c.exec('CREATE TABLE ruby_rows (id SERIAL PRIMARY KEY, a TEXT)').cmd_status }
step('insert') { c.exec("INSERT INTO ruby_rows (a) VALUES ('x') RETURNING id").to_a }
step('lastval') { c.exec("SELECT lastval() AS l, currval('ruby_rows_id_seq') AS c").to_a }
step('prepared') { c.prepare('p', 'SELECT body FROM notes WHERE id = $1'); [1, 2].map { |id| c.exec_prepared('p', [id]).values } }
step('describe') { d = c.describe_prepared('p'); [d.nparams, d.paramtype(0), d.fname(0), d.ftype(0)] }
step('copy in') { c.copy_data('COPY ruby_rows (a) FROM STDIN') { c.put_copy_data("c1\nc2\n") }.cmd_status }
step('copy out') { out = +''; c.copy_data('COPY (SELECT a FROM ruby_rows ORDER BY id) TO STDOUT') { while (row = c.get_copy_data) do out << row end }; out }
step('error') { c.exec('SELECT * FROM nowhere') }
step('transaction') { c.transaction { |t| t.exec("INSERT INTO ruby_rows (a) VALUES ('kept')").cmd_tuples } }
step('single rows') do
  c.send_query_params(AI, [3])
  c.set_single_row_mode
  c.get_result.stream_each.to_a
end
step('ai') { c.exec_params(AI, [3]).to_a }
c.close
