import java.io.StringReader;
import java.math.BigDecimal;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DatabaseMetaData;
import java.sql.Date;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.sql.Timestamp;
import java.time.LocalTime;
import java.time.OffsetDateTime;
import java.util.Arrays;
import java.util.UUID;
import org.postgresql.PGConnection;

/** What a JDBC tool does with a connection; prints what it saw, one line each. */
public class Probe {
    /** Prints the named columns of each row. */
    static void rows(String what, ResultSet rs, String... columns) throws SQLException {
        while (rs.next()) {
            StringBuilder line = new StringBuilder(what);
            for (String column : columns) {
                line.append(' ').append(rs.getString(column));
            }
            System.out.println(line);
        }
    }

    static void metadata(DatabaseMetaData meta) throws SQLException {
        rows("catalog", meta.getCatalogs(), "TABLE_CAT");
        rows("schema", meta.getSchemas("shop", "%a%s"), "TABLE_SCHEM");
        String[] kinds = {"TABLE", "VIEW"};
        rows("table", meta.getTables("shop", "main", "%", kinds), "TABLE_NAME", "TABLE_TYPE", "REMARKS");
        rows("column", meta.getColumns(null, "main", "docs", "%"),
            "COLUMN_NAME", "TYPE_NAME", "COLUMN_SIZE", "DECIMAL_DIGITS", "IS_NULLABLE", "COLUMN_DEF", "REMARKS");
        rows("primary", meta.getPrimaryKeys(null, "main", "lines"), "COLUMN_NAME", "KEY_SEQ", "PK_NAME");
        rows("imported", meta.getImportedKeys(null, "main", "lines"),
            "FKCOLUMN_NAME", "PKTABLE_NAME", "PKCOLUMN_NAME", "PK_NAME");
        rows("exported", meta.getExportedKeys(null, "main", "docs"), "FKTABLE_NAME", "FKCOLUMN_NAME");
        rows("index", meta.getIndexInfo(null, "main", "docs", false, false),
            "INDEX_NAME", "NON_UNIQUE", "ORDINAL_POSITION", "COLUMN_NAME");
        rows("best", meta.getBestRowIdentifier(null, "main", "docs", 0, true), "COLUMN_NAME");
        rows("function", meta.getFunctions(null, null, "ai\\_cl%"), "FUNCTION_SCHEM", "FUNCTION_NAME");
        rows("argument", meta.getFunctionColumns(null, null, "ai_similarity", "%"), "COLUMN_NAME", "TYPE_NAME");
        rows("privilege", meta.getTablePrivileges(null, "main", "docs"), "PRIVILEGE");
        int types = 0;
        for (ResultSet rs = meta.getTypeInfo(); rs.next(); ) {
            types++;
        }
        System.out.println("types " + (types > 30) + " keywords " + (meta.getSQLKeywords().length() > 100));
        System.out.println("names " + meta.getMaxColumnNameLength() + " user " + meta.getUserName());
    }

    static void values(Connection conn) throws SQLException {
        conn.createStatement().execute("CREATE TABLE kinds (id SERIAL PRIMARY KEY, name VARCHAR(20), "
            + "n NUMERIC(10,2), ts TIMESTAMP, tz TIMESTAMPTZ, d DATE, b BYTEA, u UUID, a INTEGER[], j JSONB, "
            + "f DOUBLE PRECISION, t TIME, flag BOOLEAN, big BIGINT)");
        PreparedStatement insert = conn.prepareStatement(
            "INSERT INTO kinds (name, n, ts, tz, d, b, u, a, j, f, t, flag, big) "
                + "VALUES (?,?,?,?,?,?,?,?,?::jsonb,?,?,?,?)", Statement.RETURN_GENERATED_KEYS);
        PreparedStatement select = conn.prepareStatement("SELECT * FROM kinds WHERE id = ?");
        for (int round = 1; round <= 7; round++) { // from the fifth on, prepared and binary
            insert.setString(1, "n" + round);
            insert.setBigDecimal(2, new BigDecimal("12.34"));
            insert.setTimestamp(3, Timestamp.valueOf("2024-02-29 01:02:03.456"));
            insert.setObject(4, OffsetDateTime.parse("2024-02-29T01:02:03+02:00"));
            insert.setDate(5, Date.valueOf("1999-12-31"));
            insert.setBytes(6, new byte[] {0, 1, (byte) 255});
            insert.setObject(7, UUID.fromString("00000000-0000-0000-0000-000000000007"));
            insert.setArray(8, conn.createArrayOf("int4", new Object[] {1, 2, null}));
            insert.setString(9, "{\"a\": 1}");
            insert.setDouble(10, 1.5);
            insert.setObject(11, LocalTime.parse("23:59:58"));
            insert.setBoolean(12, true);
            insert.setLong(13, 1L << 40);
            insert.executeUpdate();
            ResultSet keys = insert.getGeneratedKeys();
            keys.next();
            select.setInt(1, keys.getInt(1));
            ResultSet row = select.executeQuery();
            row.next();
            Array array = row.getArray(9);
            System.out.println("row " + row.getInt(1) + " " + row.getString(2) + " " + row.getBigDecimal(3) + " "
                + row.getTimestamp(4) + " " + row.getObject(5, OffsetDateTime.class).toInstant() + " "
                + row.getDate(6) + " " + Arrays.toString(row.getBytes(7)) + " " + row.getObject(8) + " "
                + Arrays.toString((Object[]) array.getArray()) + " " + row.getString(10) + " " + row.getDouble(11)
                + " " + row.getTime(12) + " " + row.getBoolean(13) + " " + row.getLong(14));
        }
    }

    static void statements(Connection conn) throws Exception {
        PreparedStatement batch = conn.prepareStatement("INSERT INTO kinds (name) VALUES (?)");
        for (int at = 0; at < 50; at++) {
            batch.setString(1, "b" + at);
            batch.addBatch();
        }
        System.out.println("batch " + batch.executeBatch().length);
        conn.setAutoCommit(false);
        Statement fetching = conn.createStatement();
        fetching.setFetchSize(7);
        long sum = 0;
        for (ResultSet rs = fetching.executeQuery("SELECT * FROM range(100)"); rs.next(); ) {
            sum += rs.getLong(1);
        }
        System.out.println("fetched " + sum);
        conn.commit();
        Savepoint before = conn.setSavepoint("before");
        try {
            fetching.execute("SELECT * FROM nowhere");
        } catch (SQLException error) {
            System.out.println("refused " + error.getSQLState());
        }
        conn.rollback(before);
        fetching.execute("SELECT 1");
        conn.commit();
        conn.setAutoCommit(true);
        long copied = ((PGConnection) conn).getCopyAPI()
            .copyIn("COPY kinds (name) FROM STDIN", new StringReader("x\ny\n"));
        System.out.println("copied " + copied);
        System.out.println("valid " + conn.isValid(5) + " " + conn.getCatalog() + " " + conn.getSchema());
    }

    public static void main(String[] arguments) throws Exception {
        try (Connection conn = DriverManager.getConnection(arguments[0])) {
            metadata(conn.getMetaData());
            values(conn);
            statements(conn);
        }
    }
}
