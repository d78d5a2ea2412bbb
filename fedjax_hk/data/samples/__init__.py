"""Labelled samples, and how they are partitioned among clients."""
