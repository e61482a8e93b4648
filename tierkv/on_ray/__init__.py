"""A cluster whose processes Ray places and watches (``tierkv up --ray``)."""
