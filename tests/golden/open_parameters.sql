select left(x,$1) from t
select right($1,$2)
select substr(x,$1,$2) from t
select substring(x from $1 for $2) from t
select repeat($1,$2)
select length(x) > $1 from t
select round(d,$1) from t
select coalesce($1,5)
select coalesce(n,$1) from t
select coalesce(x,$1) from t
select * from generate_series(1,$1) g(i) where i > $2
select case when $1 then 1 else 2 end
select case when b then $1 else 5 end from t
select case when b then $1 else x end from t
select $1 + 1
select 1 + $1
select $1 + 1.5
select n + $1 from t
select f * $1 from t
select d / $1 from t
select s + $1 from t
select r * $1 from t
values ($1),(9)
values ($1,'a'),(9.5,$2)
select id from t where id = any($1)
select id from t where n = any($1)
select id from t where x = any($1)
select id from t where x <> all($1)
select id from t where u = any($1)
select id from t where day = any($1)
select id from t where $1 = any(tags)
select id from t where $1 = any(nums)
select id from t where id in ($1,$2)
select id from t where n in ($1,2)
select id from t where x in ($1)
select id from t where id not in ($1,$2)
select id from t where id between $1 and $2
select id from t where ts between $1 and $2
select id from t where d > $1
select id from t where f <= $1
select id from t where day = $1
select id from t where ts < $1
select id from t where z < $1
select id from t where u = $1
select id from t where b = $1
select id from t where $1
select id from t where not $1
select id from t where b and $1
select id from t where x like $1
select id from t where x ilike $1
select id from t where x ~ $1
select id from t where x || $1 = $2
select id from t limit $1
select id from t limit $1 offset $2
select id from t order by id offset $1
select ts + $1 from t
select ts - $1 from t
select day - $1 from t
select interval '1 day' * $1
select now() - interval '1 day' * $1
select iv + $1 from t
select $1::int
select $1::text
select $1::varchar
select $1::varchar(10)
select cast($1 as bigint)
select cast($1 as numeric(10,2))
select $1::timestamptz
select $1::date
select $1::bool
select $1::uuid
select $1::json
select $1::jsonb
select $1::int[]
select $1::text[]
select $1::float8
select $1::interval
select $1
select $1, $2
select $1 as a union select 1
select 1 union all select $1
select 'a' union all select $1
select (select $1)
select * from (select $1 as a) s where a = $2
with a as (select $1 as x) select x from a
with a(y) as (select n from t) select * from a where y = $1
insert into t (id,x) values ($1,$2)
insert into t (id,x,f,d,b,day,ts,z,tags,nums,j,u,s,r,iv) values ($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13,$14,$15)
insert into t (id,x) values ($1,$2),($3,$4)
insert into t (id,x) select $1,$2
insert into t (id, n) select id, $1 from t
insert into t (id,x) values ($1,$2) on conflict (id) do update set x = $3, n = t.n + $4
insert into t (id,x) values ($1,upper($2)) returning id, n + $3
insert into t (id) values ($1 + 1)
update t set x = $1 where id = $2
update t set n = n + $1, d = $2, b = $3 where u = $4
update t set (x, n) = ($1, $2)
delete from t where id = $1
delete from t where day < $1 or tags = $2
select count(*) from t where n % $1 = $2
select sum(n) filter (where b = $1) from t
select count(*) from t group by b having count(*) > $1
select max(n) from t having max(n) > $1
select upper($1), lower($2)
select concat(x, $1::text) from t
select $1 || x from t
select x || $1 from t
select nullif(n, $1) from t
select greatest(n, $1), least($2, f) from t
select array[$1, 2]
select array[$1, $2]
select nums[$1] from t
select array_append(nums, $1) from t
select array_position(tags, $1) from t
select id from t where tags @> $1
select id from t where tags && $1
select id from t where (id, x) = ($1, $2)
select id from t where (id, x) in (($1, $2), ($3, $4))
select id from t where exists (select 1 from t s where s.n = t.n and s.x = $1)
select id from t where id in (select id from t where d = $1)
select id from t where n = (select max(n) from t where b = $1)
select t.id from t join t s on s.id = t.id and s.x = $1
select a.id from t a, t b where a.ts = $1 and b.day = $2
select date_trunc($1, ts) from t
select date_part($1, ts) from t
select extract(year from ts) = $1 from t
select lpad(x, $1, $2) from t
select replace(x, $1, $2) from t
select split_part(x, $1, $2) from t
select strpos(x, $1) from t
select position($1 in x) from t
select trim(both $1 from x) from t
select abs($1), sqrt($2)
select power($1, 2)
select mod($1, 3)
select chr($1), ascii($2)
select md5($1)
select id from t where x is distinct from $1
select id from t where $1 is true
select lag(n, $1) over (order by id) from t
select ntile($1) over (order by id) from t
select string_agg(x, $1) from t
select ts at time zone $1 from t
select age($1, ts) from t
select current_date - $1
select * from unnest($1::int[]) u(a) where a = $2
select id from t where $1 = id
select id from t where id = $1 + 1
select id from t where n = $1 * 2
select id from t where x in (select unnest($1::text[]))
select j->$1, j->>$2 from t
select row_number() over (partition by x order by $1) from t
select id from t where v = $1
select id from t fetch first $1 rows only
explain select left(x,$1) from t
select bool_and($1), count($2::int)
select v || $1, length(v) = $2 from t
select id from t where x = $1::text and n > $2
select * from (values ($1, 1), ('b', $2)) v(a, b)
