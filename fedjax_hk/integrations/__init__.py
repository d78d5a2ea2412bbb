"""What a run tells to other programs; each needs a package of its own, imported where used."""
