"""COPY: its statement, and its rows in text, CSV and binary."""
