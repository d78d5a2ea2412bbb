"""A whole run: data and settings become a compiled round, rounds become a run folder."""
