select id, ai_generate('Colour of ' || name) as colour from {{ ref('people_upper') }}
