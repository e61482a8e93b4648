"""``tierkv demo``: the cache's savings, shown on the shipped model."""
