"""Queues: logs with consumer groups, in which AI jobs wait for the worker of any front."""
