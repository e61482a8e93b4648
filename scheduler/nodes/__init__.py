"""The compute nodes as the scheduler knows them: load, speed, health."""
