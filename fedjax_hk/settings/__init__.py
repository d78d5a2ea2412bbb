"""What a user may choose: every setting, which ones go together, and a rule in plain words.

Nothing here loads jax or numpy, so that `--help` and refusals take no time.
"""
