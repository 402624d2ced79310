"""Measurements at the edge of a run: time, memory, and the environment they were made in."""
