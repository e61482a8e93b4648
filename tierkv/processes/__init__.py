"""Processes of a cluster on one machine: started, watched, stopped."""
