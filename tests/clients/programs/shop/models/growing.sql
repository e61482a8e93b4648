{{ config(materialized='incremental', unique_key='id') }}
select id, ai_generate('Shape of ' || name) as shape from {{ ref('people_upper') }}
{% if is_incremental() %} where id >= (select max(id) from {{ this }}) {% endif %}
