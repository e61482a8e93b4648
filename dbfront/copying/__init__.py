"""COPY: the statement, and its rows in text, CSV and binary format."""
