"""Errors, settings, units, clock, metric names, thread roots: the standard library only."""
