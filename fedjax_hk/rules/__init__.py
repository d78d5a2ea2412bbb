"""The choices of the aggregation rules, a module each; the rules themselves are rows of names.

The rows load no jax; `settings.choices.implementation` finds the code behind a name.
"""

from fedjax_hk.settings.rules import CHOICES, NO_OPINIONS, RULES, Rule

__all__ = ["CHOICES", "NO_OPINIONS", "RULES", "Rule"]
