"""polars and pandas: frames from SQLAlchemy, psycopg2 and ADBC, and back."""

from __future__ import annotations

import pandas as pd
import polars as pl
import sqlalchemy as sa
from steps import AI_SQL, URL, step

engine = sa.create_engine(URL.replace("postgresql:", "postgresql+psycopg2:"))
ai = AI_SQL.format(where="id < 9")
with_parameter = sa.text(AI_SQL.format(where="id < :n"))
polars_frame = pl.DataFrame({"i": [1, 2], "t": ["a", None]})
pandas_frame = pd.DataFrame({"i": [1, 2], "t": ["a", None]})


def polars(sql: str) -> object:
    """Read through ADBC."""
    return pl.read_database_uri(sql, URL, engine="adbc").to_dicts()


def pandas(sql: object, **settings: object) -> object:
    """Read through SQLAlchemy."""
    return pd.read_sql(sql, engine, **settings).to_dict("records")


def write(if_exists: str) -> object:
    """Write through ADBC."""
    return polars_frame.write_database("polars_rows", URL, engine="adbc", if_table_exists=if_exists)


step("polars adbc", lambda: polars("SELECT * FROM notes ORDER BY id"))
step("polars ai", lambda: polars(ai))
step("polars over sqlalchemy", lambda: pl.read_database(ai, engine.connect()).to_dicts())
step("polars write", lambda: write("fail"))
step("polars append", lambda: write("append"))
step("polars read", lambda: polars("SELECT * FROM polars_rows ORDER BY i"))
step("pandas", lambda: pandas("SELECT * FROM notes ORDER BY id"))
step("pandas table", lambda: pandas("lines"))
step("pandas ai", lambda: pandas(with_parameter, params={"n": 9}))
step("pandas write", lambda: pandas_frame.to_sql("pandas_rows", engine, index=False))
step("pandas replace", lambda: pandas_frame.to_sql("pandas_rows", engine, if_exists="replace"))
step("pandas read", lambda: pandas("pandas_rows"))
