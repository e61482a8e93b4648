"""One SQL statement, from its text to its rows: rounds, transactions, streams, errors."""
