# DBD::Pg: placeholders, the catalogue functions of DBI, last_insert_id, COPY, savepoints, cursors.
use strict; use warnings; use DBI; use JSON::PP;

my $json = JSON::PP->new->canonical->allow_nonref;
my $db = DBI->connect("dbi:Pg:", $ENV{PGUSER}, $ENV{PGPASSWORD}, {RaiseError => 1, PrintError => 0});

sub step {
    my ($what, $code) = @_;
    my $got = eval { $code->() };
    my $line = $@ ? {what => $what, sqlstate => $db->state || "$@"} : {what => $what, got => $got};
    print $json->encode($line), "\n";
}
sub rows { my $s = shift; return $db->selectall_arrayref($s, undef, @_) }
my $ai = "SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE id <= ? ORDER BY id";

step('types', sub {
    my $s = $db->prepare("SELECT 1::int2 a, 2 b, 3::int8 c, 1.25::numeric(10,2) d, ARRAY[1,2] e, true f, 'x'::text g");
    $s->execute; [$s->{NAME}, $s->{pg_type}, $s->fetchall_arrayref] });
step('parameters', sub { rows('SELECT body FROM notes WHERE id = ? AND body <> ?', 2, 'x') });
step('any', sub { rows('SELECT id FROM notes WHERE id = ANY(?) ORDER BY id', [1, 2]) });
step('create', sub { $db->do('CREATE TABLE perl_rows (id SERIAL PRIMARY KEY, body TEXT)') });
step('insert', sub { $db->do('INSERT INTO perl_rows (body) VALUES (?)', undef, 'x') });
step('last_insert_id', sub { 0 + $db->last_insert_id(undef, undef, 'perl_rows', undef) });
step('by sequence', sub { 0 + $db->last_insert_id(undef, undef, undef, undef, {sequence => 'perl_rows_id_seq'}) });
step('primary_key', sub { [$db->primary_key(undef, 'public', 'lines')] });
step('foreign_key_info', sub {
    my $s = $db->foreign_key_info(undef, 'public', 'notes', undef, 'public', 'lines');
    [map { [@{$_}[2, 3, 6, 7]] } @{$s->fetchall_arrayref}] });
step('statistics_info', sub {
    [map { [@{$_}[2, 3, 7, 8]] } @{$db->statistics_info(undef, 'public', 'lines', 0, 0)->fetchall_arrayref}] });
step('column_info', sub {
    [map { [@{$_}[3, 5, 10]] } @{$db->column_info(undef, 'public', 'notes', undef)->fetchall_arrayref}] });
step('table_info', sub { [map { $_->[2] } @{$db->table_info('', 'public', 'notes', 'TABLE')->fetchall_arrayref}] });
step('copy in', sub { $db->do('COPY perl_rows (body) FROM STDIN'); $db->pg_putcopydata("c1\n"); $db->pg_putcopyend });
step('copy out', sub {
    $db->do('COPY (SELECT body FROM perl_rows ORDER BY id) TO STDOUT');
    my ($all, $line) = ('', ''); while ($db->pg_getcopydata($line) >= 0) { $all .= $line } $all });
step('error', sub { rows('SELECT * FROM nowhere') });
$db->begin_work;
step('savepoint', sub { $db->pg_savepoint('s'); $db->do("INSERT INTO perl_rows (body) VALUES ('gone')"); $db->pg_rollback_to('s') });
step('kept', sub { rows('SELECT count(*) FROM perl_rows') });
$db->commit;
step('ai', sub { rows($ai, 3) });
$db->disconnect;
