"""Trains the tiny models, stage by stage."""
