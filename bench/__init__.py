"""Measurements: ratios taken side by side in one run, with the facts of the machine."""
