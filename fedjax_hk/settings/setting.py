"""What is known of a setting: the record behind a field of `Config`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

KINDS = {
    "traced": "a number of the compiled program, in `HParams`",
    "compiled": "fixed when the program is compiled",
    "data": "what is read, learned from and judged on",
    "loop": "from which seed and for how long a compiled program runs",
    "run": "how a run is carried out and reported; its results stay the same",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is known of a setting.

    Attributes:
      name, type: of the field of `Config`; the type without None.
      default: None or empty for "as the choices have it", "off" or "all".
      group: heading in `--help`.
      help: half a sentence.
      kind: a key of `KINDS`.
      choices: names that may be given; empty if it is no name.
      unset: what None stands for, unless an active choice has another number.
      low, high, above, below: bounds; low and high belong to the range.
      noun: what a number between two bounds is called, such as "share".
      fix: what is wrong with a text and what helps; empty if nothing is.
      in_cohort: it counts clients of a round, of which there must be so many.
      switches: None is "off", and giving a number chooses another program.
      shapes_program: of kind "run", yet another program.
      resumable: of kind "run", whether a resumed run may change it.
    """

    default: Any
    group: str
    help: str
    kind: str
    choices: tuple[str, ...] = ()
    unset: Any = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    noun: str = ""
    fix: Callable[[str], str] | None = None
    in_cohort: bool = False
    switches: bool = False
    shapes_program: bool = False
    resumable: bool = True
    name: str = ""
    type: str = ""


def setting(default: Any, group: str, text: str, *, kind: str, **more: Any) -> Any:
    """A field of `Config`; see `Setting`. Names of its table in `choices` are its choices."""
    known = Setting(default, group, text, kind, **more)
    return dataclasses.field(default=default, metadata={"setting": known})


def pattern_fix(value: str) -> str:
    """For a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        return f"no regular expression ({error}); mend it."
    return ""


def shape_fix(value: str) -> str:
    """For the shape of an image."""
    if not value or re.fullmatch(r"[1-9]\d*(,[1-9]\d*){1,2}", value):
        return ""
    return "give height,width or height,width,channels, such as 28,28."


def problem(known: Setting, value: Any) -> str:
    """What is wrong with a value by itself, and what helps; empty if nothing is."""
    if value is None:
        return ""
    if known.choices and value not in known.choices:
        return f"not known; choose one of {', '.join(known.choices)}."
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number."
    if known.fix is not None:
        return known.fix(value)
    return _bound(known, value)


def _bound(known: Setting, value: Any) -> str:
    """The bound that is broken, or the whole range where its numbers have a name."""
    broken = {
        f"give {known.low} or more.": known.low is not None and value < known.low,
        f"give a number above {known.above}.": known.above is not None and value <= known.above,
        f"give at most {known.high}.": known.high is not None and value > known.high,
        f"give a number below {known.below}.": known.below is not None and value >= known.below,
    }
    found = next((text for text, is_so in broken.items() if is_so), "")
    if not found or not known.noun:
        return found
    if known.above is not None:
        return f"give a {known.noun} between {known.above} and {known.below}."
    upto = f"{known.high}" if known.below is None else f"below {known.below}"
    return f"give a {known.noun} from {known.low} to {upto}."
