"""The compute nodes in the scheduler's view: load, speed, health."""
