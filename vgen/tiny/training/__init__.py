"""Trains the tiny LTX-2, stage by stage."""
