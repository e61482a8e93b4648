{{ config(materialized='view') }}
select id, colour from {{ ref('answered') }} where id > 1
