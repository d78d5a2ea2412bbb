"""The records that travel through a run, and the legend of axes.

N clients in the fleet   S clients this round   W windows per client (padded)
L look-back steps        F input features       B batch
D flattened parameters   K coalitions (padded to S)   R rounds
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from fedjax_hk.settings import derived
from fedjax_hk.settings.config import Config

if TYPE_CHECKING:  # readers of data do without jax
    from typing import Self

    import jax

Array: TypeAlias = "jax.Array"  # traced or on devices; on the host it is `np.ndarray`
AnyArray: TypeAlias = "jax.Array | np.ndarray"  # where either will do
A = TypeVar("A")  # the arrays of a record that is on devices and, later or before, on the host
Params: TypeAlias = Any  # a pytree of arrays: its type is its structure, which differs by model


class Samples(NamedTuple, Generic[A]):
    """Supervised windows of every client, padded to one length.

    A window is used only where `mask` is True; padding and windows with a missing
    input or target are False there and hold zeros elsewhere. A forecast is turned
    into units by `forecast * scale + shift`. Where classes are told apart, a window is
    one sample, such as an image.

    Attributes:
      inputs: `[N, W, L, F]` float32, scaled; of classes `[N, W, ...]` uint8 or float32.
      targets: `[N, W]` float32, scaled; of classes int32, the class.
      mask: `[N, W]` bool.
      scale: `[N, W]` float32, units per scaled unit; of classes ().
      shift: `[N, W]` float32, units at scaled zero; of classes ().
    """

    inputs: A
    targets: A
    mask: A
    scale: A | tuple[()] = ()
    shift: A | tuple[()] = ()


class Excluded(NamedTuple):
    """A client that was left out, and why (numbers included)."""

    client: str
    reason: str


class Fleet(NamedTuple):
    """All clients' data, ready for training; arrays are NumPy and stay on the host.

    Attributes:
      client_ids: N names.
      unit: label of the readings' unit, such as "L".
      train: windows whose targets lie in the first part of each series.
      test: windows whose targets lie in the last part; inputs may reach back.
      test_times: `[N, W_test]` datetime64, the time of each test target (NaT: padding, or
        a sample without a time).
      naive: forecasts that need no model, name to `[N, W_test]` in units (of classes, the
        class); NaN where the forecast cannot be made.
      excluded: clients that were left out.
      planted: `[N]` int32 planted group of each client, -1 for a planted outlier;
        None where no truth is known.
      source: what was read, in words.
      fingerprint: hexadecimal digest of the content that was read.
      shift_n, scale_n: `[N]` in units, of which the windows' shift and scale are made.
      task: what is learned, an entry of `tasks.TASKS`.
      classes: names of the classes; empty for forecasts.
      owners: client of each training and of each test sample of the source, `[M]` and
        `[M_test]` int32, where its samples were dealt out to clients; else None.
    """

    client_ids: tuple[str, ...]
    unit: str
    train: Samples[np.ndarray]
    test: Samples[np.ndarray]
    test_times: np.ndarray
    naive: dict[str, np.ndarray]
    excluded: tuple[Excluded, ...]
    planted: np.ndarray | None
    source: str
    fingerprint: str
    shift_n: np.ndarray | tuple[()] = ()
    scale_n: np.ndarray | tuple[()] = ()
    task: str = "forecast"
    classes: tuple[str, ...] = ()
    owners: tuple[np.ndarray, np.ndarray] | None = None


def _record(name: str, defaults: Mapping[str, Any]) -> type:
    """A named tuple whose fields all have a default."""
    return collections.namedtuple(name, defaults, defaults=defaults.values(), module=__name__)


if TYPE_CHECKING:

    class _Numbers(tuple[Array, ...]):
        """What a type checker sees: any setting's name is a field."""

        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, *values: Any, **named: Any) -> Self: ...
        def __getattr__(self, name: str) -> Any: ...
        def _replace(self, **named: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...

    class HParams(_Numbers): ...

    class Settings(_Numbers): ...

else:
    HParams = _record("HParams", derived.traced_values(Config()))
    Settings = _record("Settings", derived.compiled_values(Config()))

HParams.__doc__ = """Numbers that may be traced, and so batched; each is `[]`.

A named tuple with a field for every setting of kind "traced" (see `settings.config`), such as
`hparams.tau`, and its default.
"""
Settings.__doc__ = """Choices that are fixed when a round is compiled and that rules' code reads.

A named tuple with a field for every setting of kind "compiled" that belongs to a rule (see
`settings.config`), such as `settings.tau_mode`, and `use_epsilon`: whether `epsilon` is given.
"""
