"""Virtual time: traces replayed through the cores that production runs."""
