"""``tierkv demo``: what the cache saves, shown on the shipped model."""
