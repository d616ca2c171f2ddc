"""Sweeps: a plan of runs, an engine that runs them, a board that shows how they stand."""
