"""One round: clients train, what they send travels, the server makes the next model of it."""
