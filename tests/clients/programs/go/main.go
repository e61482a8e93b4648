// pgx v4 and lib/pq: typed scans out of the binary format, batches, COPY, database/sql.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	_ "github.com/jackc/pgx/v4/stdlib"
	"github.com/lib/pq"
)

const ai = "SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE id <= $1 ORDER BY id"

func step(what string, call func() (interface{}, error)) {
	line := map[string]interface{}{"what": what}
	got, err := call()
	var pgx *pgconn.PgError
	var other *pq.Error
	switch {
	case err == nil:
		line["got"] = got
	case errors.As(err, &pgx):
		line["sqlstate"] = pgx.Code
	case errors.As(err, &other):
		line["sqlstate"] = string(other.Code)
	default:
		line["sqlstate"] = err.Error()
	}
	text, _ := json.Marshal(line)
	fmt.Println(string(text))
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func withPgx(ctx context.Context, name string, mode bool) {
	config, err := pgx.ParseConfig("")
	must(err)
	config.PreferSimpleProtocol = mode
	db, err := pgx.ConnectConfig(ctx, config)
	must(err)
	defer db.Close(ctx)
	rows := func(text string, values ...interface{}) (interface{}, error) {
		found, err := db.Query(ctx, text, values...)
		if err != nil {
			return nil, err
		}
		defer found.Close()
		all := []interface{}{}
		for found.Next() {
			row, err := found.Values()
			if err != nil {
				return nil, err
			}
			all = append(all, row)
		}
		kinds := []string{}
		for _, field := range found.FieldDescriptions() {
			kinds = append(kinds, fmt.Sprintf("%s %d", field.Name, field.DataTypeOID))
		}
		return []interface{}{kinds, all, found.CommandTag().String()}, found.Err()
	}
	step(name+" types", func() (interface{}, error) {
		return rows("SELECT 1::int2 a, 2 b, 3::int8 c, 1.25::float8 d, true e, 'x'::text f, ARRAY[1,2] g, DATE '2024-02-29' h")
	})
	step(name+" parameters", func() (interface{}, error) {
		return rows("SELECT body, price, tags FROM notes WHERE id = $1 AND body <> $2", 2, "x")
	})
	step(name+" any", func() (interface{}, error) {
		return rows("SELECT id FROM notes WHERE id = ANY($1::int[]) ORDER BY id", []int32{1, 3})
	})
	step(name+" limit", func() (interface{}, error) { return rows("SELECT id FROM notes ORDER BY id LIMIT $1", 2) })
	step(name+" insert", func() (interface{}, error) {
		return rows("INSERT INTO lines (note, a) VALUES ($1, $2) RETURNING note, a", 1, 60+len(name))
	})
	step(name+" error", func() (interface{}, error) { return rows("SELECT * FROM nowhere") })
	step(name+" ai", func() (interface{}, error) { return rows(ai, 3) })
	step(name+" filter", func() (interface{}, error) {
		return rows("SELECT id FROM notes WHERE ai_filter('Is it red?', body) ORDER BY id LIMIT $1", 2)
	})
	step(name+" batch", func() (interface{}, error) {
		batch := &pgx.Batch{}
		batch.Queue("SELECT body FROM notes WHERE id = $1", 1)
		batch.Queue("INSERT INTO lines (note, a) VALUES ($1, $2)", 2, 60+len(name))
		results := db.SendBatch(ctx, batch)
		defer results.Close()
		var body string
		if err := results.QueryRow().Scan(&body); err != nil {
			return nil, err
		}
		tag, err := results.Exec()
		return []string{body, tag.String()}, err
	})
	step(name+" copy", func() (interface{}, error) {
		return db.CopyFrom(ctx, pgx.Identifier{"lines"}, []string{"note", "a"},
			pgx.CopyFromRows([][]interface{}{{int32(2), int32(80 + len(name))}, {int32(3), int32(80 + len(name))}}))
	})
	step(name+" nested", func() (interface{}, error) {
		tx, err := db.Begin(ctx)
		if err != nil {
			return nil, err
		}
		defer tx.Rollback(ctx)
		inner, err := tx.Begin(ctx)
		if err != nil {
			return nil, err
		}
		_, failed := inner.Exec(ctx, "INSERT INTO notes (id) VALUES (1)")
		if err := inner.Rollback(ctx); err != nil {
			return nil, err
		}
		var count int64
		err = tx.QueryRow(ctx, "SELECT count(*) FROM notes").Scan(&count)
		return []interface{}{failed != nil, count}, err
	})
}

func withDatabaseSql(name string) {
	db, err := sql.Open(name, "sslmode=disable")
	must(err)
	defer db.Close()
	step(name+" sql", func() (interface{}, error) {
		found, err := db.Query(ai, 3)
		if err != nil {
			return nil, err
		}
		defer found.Close()
		kinds, err := found.ColumnTypes()
		if err != nil {
			return nil, err
		}
		all := []interface{}{kinds[0].DatabaseTypeName(), kinds[1].DatabaseTypeName()}
		for found.Next() {
			var id int
			var answer sql.NullString
			if err := found.Scan(&id, &answer); err != nil {
				return nil, err
			}
			all = append(all, id, answer.String)
		}
		return all, found.Err()
	})
	step(name+" transaction", func() (interface{}, error) {
		tx, err := db.Begin()
		if err != nil {
			return nil, err
		}
		done, err := tx.Exec("UPDATE notes SET price = $1 WHERE id = $2", "2.50", 1)
		if err != nil {
			return nil, err
		}
		count, err := done.RowsAffected()
		if err != nil {
			return nil, err
		}
		return count, tx.Rollback()
	})
}

func main() {
	ctx := context.Background()
	withPgx(ctx, "pgx", false)
	withPgx(ctx, "pgx simple", true)
	withDatabaseSql("pgx")
	withDatabaseSql("postgres")
}
