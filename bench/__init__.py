"""Benchmarks: ratios measured side by side in a single run, with the facts of the machine."""
