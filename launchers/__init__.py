"""Starts, watches and ends the rank processes of one job; imports no torch."""
