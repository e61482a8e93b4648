select count(*) from t
select count(n), max(id), sum(d) as total, min(x) from t
select upper(x), x || 'a', 1, 'a', null, true, id, t.x from t
select id::text, 1::int, 'a'::varchar(3), cast(x as text), x::int4, (1+2)::numeric(4,1), '2024-01-01'::date, nums::text[] from t
select case when b then 1 else 2 end, case when b then id else n end, case when b then 1 end from t
select coalesce(n, 1), nullif(n, 1), greatest(1, 2), least(n, 1) from t
select exists (select 1), array[1,2], array(select id from t), row(1, 2), (select max(id) from t), (select id as k from t limit 1)
select -id, not b, id + 1, id in (1, 2), x like 'a', x is null, id between 1 and 2 from t
select extract(year from ts), substring(x from 1 for 2), position('a' in x), trim(x), trim(leading 'a' from x), ts at time zone 'utc' from t
select current_date, current_timestamp, now(), interval '1 day', date '2024-01-01', timestamp '2024-01-01 00:00', true, false
select row_number() over (), sum(n) over (partition by b), count(*) filter (where b) from t group by id, n, b
select nums[1], (nums)[1], (id), (upper(x)) from t
select *, count(*) over () from t
select id, *, id + 1, upper(x) from t
select t.*, lower(x) from t
values (1, 'a')
select count(*) from t union all select 1
with a as (select count(*) from t) select count(*) from a
insert into t (id, x) values (901, 'q') returning id, upper(x), id + 1
update t set x = 'r' returning lower(x), id
delete from t where id = 901 returning *, length(x)
select distinct upper(x), id from t
select $1, $2::int, left($3, 1), $4 + 1
select max(id) from t having count(*) > 1
select x collate "C", lower(x) collate "C" from t
select j->'a', j->>'a' from t
select current_user, current_schema(), version()
select 1 as "A", upper(x) "Up" from t
select upper(x) u from t order by 1
select string_agg(x, ','), array_agg(id), bool_or(b), avg(id) from t
select generate_series(1, 2)
select unnest(nums) from t
