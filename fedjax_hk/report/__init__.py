"""What a run found, from its folder alone: numbers, sentences, pictures, one page."""
