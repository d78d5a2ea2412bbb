"""What a run keeps on the disk, so that a kill at any moment loses at most the round in progress."""
