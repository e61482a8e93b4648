-- both
SELECT id, ai_generate(body) FROM docs ORDER BY id
SELECT id, upper(ai_generate('x ' || body)) || '!' FROM docs ORDER BY id
SELECT id, ai_generate(body) a, ai_generate('b' || body) b FROM docs ORDER BY 1
SELECT ai_generate('hello') AS a
SELECT id, ai_generate('hello') AS a FROM docs ORDER BY id
SELECT ai_generate('hello') AS a FROM docs WHERE id < 0
SELECT id, ai_generate(CAST(id AS VARCHAR)) AS a FROM docs ORDER BY id
SELECT id FROM docs WHERE ai_generate(body) < 'a5' ORDER BY id
SELECT id FROM docs WHERE NOT (ai_generate(body) LIKE 'a1%') ORDER BY id
SELECT id FROM docs WHERE ai_generate(body) IS NULL ORDER BY id
SELECT id FROM docs WHERE ai_generate(body) < 'a7' OR ai_generate('z' || body) > 'ab' ORDER BY id
SELECT id FROM docs WHERE topic = 1 AND ai_generate(body) > 'a3' ORDER BY id
SELECT id, ai_generate('s' || body) a FROM docs WHERE ai_generate(body) < 'a7' ORDER BY id
SELECT id FROM docs WHERE ai_generate(body) IN ('a1', 'a2', 'a3', 'a4') ORDER BY id
SELECT d.id, ai_generate(d.body || t.name) a FROM docs d JOIN topics t ON d.topic = t.id ORDER BY
 d.id
SELECT d.id, t.id FROM docs d JOIN topics t ON d.topic = t.id AND ai_generate(d.body) < 'a5' ORDER
 BY 1, 2
SELECT d.id, t.id FROM docs d JOIN topics t ON ai_generate(d.body || t.name) < 'a5' ORDER BY 1, 2
SELECT d.id, t.name FROM docs d LEFT JOIN topics t ON d.topic = t.id AND ai_generate(d.body) <
 'a5' ORDER BY 1, 2
SELECT d.id, t.id, ai_generate(t.name) a FROM docs d FULL JOIN topics t ON d.topic = t.id ORDER BY
 1, 2
SELECT a.id, b.id FROM docs a JOIN docs b ON ai_generate(a.body) = ai_generate(b.body) AND a.id <
 b.id ORDER BY 1, 2
SELECT ai_generate(body) AS a, count(*) FROM docs GROUP BY ai_generate(body) ORDER BY 1 NULLS LAST
SELECT ai_generate(d.body || 'x') AS a, count(*) FROM docs d GROUP BY ai_generate(("body") ||
 E'x') ORDER BY 1 NULLS LAST
SELECT ai_generate(body) AS a, count(*) c FROM docs GROUP BY a ORDER BY a
SELECT ai_generate(body) a, sum(id) s FROM docs GROUP BY 1 ORDER BY 1
SELECT topic, count(*) c FROM docs GROUP BY topic HAVING ai_generate(min(body)) > 'a6' ORDER BY
 topic
SELECT topic, max(ai_generate(body)) m FROM docs GROUP BY topic ORDER BY topic
SELECT topic, ai_generate(string_agg(body, ',' ORDER BY id)) a FROM docs GROUP BY topic ORDER BY
 topic
SELECT topic, count(*) FILTER (WHERE ai_generate(body) < 'a5') c FROM docs GROUP BY topic ORDER BY
 topic
SELECT id FROM docs ORDER BY ai_generate(body), id
SELECT id, ai_generate(body) a FROM docs ORDER BY ai_generate(body), id LIMIT 5
SELECT id, ai_generate(body) a FROM docs ORDER BY id DESC LIMIT 3
SELECT DISTINCT ai_generate(body) a FROM docs ORDER BY a
SELECT DISTINCT ON (ai_generate(body)) ai_generate(body) a, id FROM docs ORDER BY
 ai_generate(body), id
SELECT id, row_number() OVER (PARTITION BY ai_generate(body) ORDER BY id) r FROM docs ORDER BY id
SELECT id, rank() OVER (ORDER BY ai_generate(body)) r FROM docs ORDER BY id
SELECT id, lag(ai_generate(body)) OVER (ORDER BY id) l FROM docs ORDER BY id
WITH l AS (SELECT id, ai_generate(body) AS a FROM docs) SELECT a, count(*) c FROM l GROUP BY a
 ORDER BY a
WITH l AS (SELECT id, ai_generate(body) AS a FROM docs) SELECT x.id, y.id FROM l x JOIN l y ON x.a
 = y.a AND x.id < y.id ORDER BY 1, 2
WITH l AS MATERIALIZED (SELECT id, ai_generate(body) AS a FROM docs) SELECT id FROM l WHERE a <
 'a5' ORDER BY id
WITH RECURSIVE r AS (SELECT 1 AS n, ai_generate('start') AS a UNION ALL SELECT n + 1,
 ai_generate(a || n) FROM r WHERE n < 5) SELECT * FROM r ORDER BY n
SELECT a FROM (SELECT id, ai_generate(body) a FROM docs) s WHERE a > 'a3' ORDER BY id
SELECT s.ai_generate FROM (SELECT id, ai_generate(body) AS ai_generate FROM docs) s ORDER BY s.id
SELECT (SELECT ai_generate(name) FROM topics WHERE id = 0) a
SELECT id, (SELECT ai_generate(t.name || d.body) FROM topics t WHERE t.id = d.topic) a FROM docs d
 ORDER BY id
SELECT t.id, (SELECT max(ai_generate(d.body)) FROM docs d WHERE d.topic = t.id) a FROM topics t
 ORDER BY 1
SELECT t.id FROM topics t WHERE EXISTS (SELECT 1 FROM docs d WHERE d.topic = t.id AND
 ai_generate(d.body) < 'a5') ORDER BY 1
SELECT t.id FROM topics t WHERE NOT EXISTS (SELECT 1 FROM docs d WHERE d.topic = t.id AND
 ai_generate(d.body) < 'a2') ORDER BY 1
SELECT id FROM topics WHERE id IN (SELECT topic FROM docs WHERE ai_generate(body) < 'a5') ORDER BY
 1
SELECT id, 'music' IN (SELECT name FROM topics t WHERE t.id = d.topic AND ai_generate('b' || t.id)
 IS NOT NULL) i FROM docs d ORDER BY id
SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t WHERE t.id = d.topic AND
 ai_generate('b' || t.id) IS NOT NULL) ORDER BY id
SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t WHERE t.id = d.topic AND
 ai_generate('b') IS NOT NULL) ORDER BY id
SELECT id FROM docs d WHERE 'a1' NOT IN (SELECT ai_generate(name) FROM topics t WHERE t.id =
 d.topic) ORDER BY id
SELECT id FROM docs d WHERE 'x' NOT IN (SELECT t.name FROM topics t JOIN topics s ON s.id = t.id
 AND ai_generate('b' || s.id) <> '' WHERE t.id = d.topic) ORDER BY id
SELECT id FROM docs d WHERE 'x' NOT IN (SELECT name FROM topics t WHERE t.id = d.topic AND EXISTS
 (SELECT 1 FROM topics s WHERE s.id = t.id AND ai_generate('b' || s.id) <> '')) ORDER BY id
SELECT d.id, l.n FROM docs d, LATERAL (SELECT count(*) n FROM topics t WHERE 'x' NOT IN (SELECT
 name FROM topics s WHERE s.id = d.topic AND ai_generate('b' || s.id) <> '')) l ORDER BY 1
SELECT id, 'music' = ANY (SELECT name FROM topics t WHERE t.id = d.topic AND ai_generate('b' ||
 t.id) <> '') a FROM docs d ORDER BY id
SELECT id, 'x' <> ALL (SELECT name FROM topics t WHERE t.id = d.topic AND ai_generate('b' || t.id)
 <> '') a FROM docs d ORDER BY id
SELECT d.id, l.n FROM docs d LEFT JOIN LATERAL (SELECT max(name) n FROM topics t WHERE t.id =
 d.topic AND EXISTS (SELECT 1 FROM topics s WHERE s.id = t.id AND ai_generate(s.name) > 'a3')) l
 ON true ORDER BY 1
SELECT t.id, l.a FROM topics t, LATERAL (SELECT ai_generate(t.name) AS a) l ORDER BY 1
SELECT ai_generate(body) a FROM docs UNION SELECT ai_generate(name) FROM topics ORDER BY a
SELECT id, ai_generate(body) a FROM docs UNION ALL SELECT id, ai_generate(name) FROM topics ORDER
 BY 1, 2
SELECT ai_generate(body) a FROM docs EXCEPT SELECT ai_generate(name) FROM topics ORDER BY a
SELECT id, CASE WHEN ai_generate(body) < 'a5' THEN ai_generate('t' || body) WHEN topic = 2 THEN
 'two' ELSE ai_generate('e' || body) END a FROM docs ORDER BY id
SELECT id, coalesce(ai_generate(body), ai_generate('no body'), '?') a FROM docs ORDER BY id
SELECT id, nullif(ai_generate(body), 'a2') a FROM docs ORDER BY id
SELECT id, CAST(coalesce(length(ai_generate(body))::VARCHAR, '0') AS INTEGER) a FROM docs ORDER BY
 id
SELECT id, CAST(CASE WHEN ai_generate(body) IS NULL AND body IS NOT NULL THEN 'not a number' ELSE
 '7' END AS INTEGER) a FROM docs ORDER BY id
SELECT id, ai_generate(ai_generate(body)) a FROM docs ORDER BY id
SELECT ai_generate('a' || ai_generate('b' || ai_generate(name))) a FROM topics ORDER BY id
VALUES (1, ai_generate('a')), (2, ai_generate('b'))
SELECT id, ai_generate(body) a FROM docs ORDER BY id LIMIT 4 OFFSET 3
SELECT /* ai_generate( */ id, ai_generate($$it's $$ || body) AS a, 'ai_generate_(' AS t FROM docs
 ORDER BY id
SELECT ai_generate(E'tab\t' || name) AS a FROM topics ORDER BY id
(SELECT ai_generate(name) AS a FROM topics WHERE id = 1)
SELECT i, ai_generate(p) FROM t UNION SELECT k, ai_generate(name) FROM u
SELECT ai_generate(p) FROM t INTERSECT ALL SELECT ai_generate(name) FROM u
(SELECT i, ai_generate(p) FROM t ORDER BY 2, 1 LIMIT 5) UNION ALL SELECT k, name FROM u
SELECT t.i, u.name FROM t LEFT JOIN u ON t.g = u.k AND ai_filter('q', u.name)
SELECT t.i, u.name FROM t FULL JOIN u ON t.g = u.k WHERE ai_filter('q', u.name) IS NOT TRUE
SELECT t.i, u.name FROM t LEFT JOIN u ON ai_generate(t.p) = ai_generate(u.name)
SELECT i, (SELECT count(*) FROM u WHERE u.k = t.g AND ai_filter('q', u.name || t.i)) FROM t
SELECT i FROM t WHERE NOT EXISTS (SELECT 1 FROM u WHERE u.k = t.g AND ai_filter('q', u.name))
SELECT i FROM t WHERE ai_generate(p) NOT IN (SELECT ai_generate(name) FROM u WHERE k < 2)
SELECT i FROM t WHERE ai_generate(p) >= ALL (SELECT ai_generate(name) FROM u WHERE k < 2)
SELECT DISTINCT ON (g) g, i, ai_generate(p) FROM t ORDER BY g, ai_generate(p) NULLS LAST, i
SELECT ai_generate(p), g, count(*) FROM t GROUP BY GROUPING SETS ((ai_generate(p)), (g), ())
SELECT ai_generate(p), g, grouping(ai_generate(p)) FROM t GROUP BY ROLLUP (ai_generate(p), g)
SELECT i AS tablesample, CAST(ai_generate(p) AS char(5)) FROM t WHERE ai_filter('q', p)
SELECT ai_generate(t.p || 'x'), count(*) FROM t GROUP BY ai_generate(("p") || E'x')
SELECT DISTINCT ai_generate(p) FROM t ORDER BY ai_generate(t.p)
SELECT DISTINCT ON (ai_generate(p)) i FROM t ORDER BY ai_generate(t.p), i
SELECT g, ai_generate(min(p)) FROM t GROUP BY g HAVING ai_filter('h', max(p))
SELECT g, count(*) FILTER (WHERE ai_filter('h', p)), count(DISTINCT ai_generate(p)) FROM t GROUP
 BY g
SELECT i, row_number() OVER (PARTITION BY ai_generate(p) ORDER BY i) FROM t
SELECT i, ai_generate(lag(p) OVER (ORDER BY i)), lag(ai_generate(p)) OVER (ORDER BY i) FROM t
WITH c AS (SELECT i, g, ai_generate(p) AS a FROM t) SELECT x.i, y.i FROM c x JOIN c y USING (a, g)
WITH RECURSIVE r(n, s) AS (SELECT 1, text 'x' UNION ALL SELECT n + 1, ai_generate(s || n) || n
 FROM r WHERE n < 9 AND ai_filter('go', s || n) IS NOT NULL) SELECT * FROM r
SELECT i, a FROM t LEFT JOIN LATERAL (SELECT ai_generate(t.p || u.name) AS a FROM u WHERE k = g) l
 ON true
SELECT i, CASE WHEN b THEN ai_generate(p) WHEN b IS NULL THEN ai_generate('n' || p) ELSE 'k' END
 FROM t
SELECT i, coalesce(ai_generate(p), ai_generate('none' || i)), nullif(ai_generate(p), 'a1') FROM t
SELECT i FROM t WHERE ai_filter('a', p) IS UNKNOWN OR ai_filter('b', p) IS DISTINCT FROM b
SELECT i FROM t WHERE CASE WHEN g <> 2 THEN i / (g - 2) > 3 END AND ai_filter('a', p)
SELECT i, ai_generate(f::text), ai_generate(d::text), ai_generate(ts::text), ai_generate(b::text)
 FROM t
SELECT i, ai_generate(p || 'q') FROM t ORDER BY ai_generate(p) DESC NULLS LAST, i LIMIT 7 OFFSET
 10
SELECT count(*) FROM (SELECT i FROM t WHERE ai_filter('a', p) ORDER BY i LIMIT 10) s
SELECT (SELECT max(ai_generate(x.p || t.g)) FROM t x WHERE x.g = t.g) FROM t WHERE i < 9
SELECT g, string_agg(ai_generate(p), ',' ORDER BY ai_generate(p), i) FROM t GROUP BY g
SELECT ai_generate(ai_generate(ai_generate(p))) FROM t
SELECT i, generate_series(1, 2), ai_generate(p) FROM t WHERE ai_filter('a', p)

-- both, and may ask more
SELECT t.i FROM t RIGHT JOIN u ON t.g=u.k WHERE ai_generate(t.p) IS NULL AND ai_filter('b',
 u.name)
SELECT i FROM t WHERE (ai_filter('a', p) OR b) AND NOT (ai_filter('b', p) AND g > 2)
SELECT x.i FROM (t JOIN u ON t.g = u.k) x(i) WHERE ai_filter('a', x.name) AND ai_filter('b', x.p)

-- duckdb
SELECT ai_generate(body) a, sum(id) s FROM docs GROUP BY ALL ORDER BY a
SELECT list(id ORDER BY ai_generate(body), id) l FROM docs
SELECT id FROM docs QUALIFY row_number() OVER (PARTITION BY ai_generate(body) ORDER BY id) = 1
 ORDER BY id
SELECT d.id FROM docs d ANTI JOIN topics t ON t.id = d.topic AND ai_generate(t.name) > 'a3' ORDER
 BY 1
FROM docs SELECT id, ai_generate(body) AS a ORDER BY id
SELECT id, [ai_generate(body), ai_generate('q')] l FROM docs ORDER BY id
SELECT {'a': ai_generate(name), 'b': id} s FROM topics ORDER BY id

-- postgres
SELECT ai_generate('g' || g), count(*) FROM t GROUP BY ai_generate('g' || g::int)
SELECT ai_generate(p) AS p, i FROM t WHERE p > 'p 3' ORDER BY p NULLS LAST, i FETCH FIRST 9 ROWS
 WITH TIES
SELECT * FROM ai_generate('x')
SELECT t.i, a.x FROM t LEFT JOIN LATERAL ai_generate(p) AS a(x) ON x > 'a5' AND ai_filter('q', x)
SELECT i, ai_generate FROM t, ai_generate(p) WHERE i IN (SELECT g FROM t) AND ai_generate > 'a2'
SELECT i FROM t WHERE (g, p) = (1, ai_generate(text 'x')) OR ai_filter('a', p) FOR UPDATE

-- writes
UPDATE w SET v = ai_generate(v), n = n + 1 WHERE ai_filter('q', v) RETURNING id, v, n
UPDATE w AS x SET v = ai_generate(x.v || u.name) FROM u WHERE u.k = x.id AND k <> 3 RETURNING *
UPDATE w SET v = ai_generate(v) WHERE id IN (SELECT id FROM w ORDER BY ai_generate(v), id LIMIT 4)
DELETE FROM w WHERE NOT ai_filter('q', v) AND ai_filter('z', id::text) RETURNING id,
 ai_generate(v)
DELETE FROM w USING u WHERE u.k = w.id AND ai_filter('f', u.name) RETURNING w.id
INSERT INTO w (id, v) SELECT i + 100, ai_generate(p) FROM t WHERE ai_filter('q', p) RETURNING *,
 ai_generate(v)
INSERT INTO w (id, v) VALUES (1, 'q'), (60, 'z') ON CONFLICT (id) DO UPDATE SET v =
 ai_generate(excluded.v || w.v)
INSERT INTO w (id, v) VALUES (1, 'q') ON CONFLICT (id) DO UPDATE SET v = 'up' WHERE ai_filter('q',
 excluded.v)
WITH gone AS (DELETE FROM w WHERE ai_filter('q', v) RETURNING *) SELECT max(ai_generate(v)) FROM
 gone

-- writes postgres
UPDATE w SET (v, n) = (SELECT ai_generate(p), i FROM t WHERE t.i = w.id)
INSERT INTO w VALUES (1, ai_generate(text 'taken'))
MERGE INTO w USING u ON k = id AND k <> 3 WHEN MATCHED AND ai_filter('q', name) THEN UPDATE SET v
 = ai_generate(name)
