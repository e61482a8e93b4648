"""Values that cross rooms: ids, layout, block key, request, node, limits, clock, errors."""
