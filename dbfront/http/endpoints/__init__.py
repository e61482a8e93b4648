"""The endpoints of the REST server."""
