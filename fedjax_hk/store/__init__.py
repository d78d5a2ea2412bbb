"""What a run keeps on the disk, so that a kill at any moment loses only the rounds in progress."""
