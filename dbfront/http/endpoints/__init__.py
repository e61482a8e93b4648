"""The endpoints of the REST door."""
