"""The nouns every room shares: ids, layout, block key, request, node, limits, clock, errors."""
