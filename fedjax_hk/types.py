"""The records that travel through a run, and the legend of axes.

N clients in the fleet   S clients this round   W windows per client (padded)
L look-back steps        F input features       B batch
D flattened parameters   K coalitions (padded to S)   R rounds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:  # readers of data do without jax
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


class HParams(NamedTuple):
    """Numbers that may be traced, and so batched; each is `[]`.

    Attributes:
      learning_rate: of the clients' Adam.
      mu: pull of FedProx to the round's start.
      alpha: step size of Per-FedAvg's inner step, and of the adaptation before judging.
      quantile: level of the quantile loss.
      tau, epsilon, eps_lower, eps_upper: thresholds of the grouping.
      server_lr: learning rate of the server step.
      beta: how much a distant model weighs more (FedCW).
      select_decay, min_clients: how fast fewer clients are asked, and how many at least.
      trim: share of the clients that robust averages do not trust.
      drop_rate, straggler_rate: probability that a client does not answer, or is slow.
      attack_share, attack_scale: share of clients that attack, and by how much.
    """

    learning_rate: Array = 1e-3
    mu: Array = 0.01
    alpha: Array = 0.01
    quantile: Array = 0.5
    tau: Array = 0.9
    epsilon: Array = 1.0
    eps_lower: Array = 0.5
    eps_upper: Array = 1.0
    server_lr: Array = 1.0
    beta: Array = 0.1
    select_decay: Array = 0.05
    min_clients: Array = 0.0
    trim: Array = 0.2
    drop_rate: Array = 0.0
    straggler_rate: Array = 0.0
    attack_share: Array = 0.2
    attack_scale: Array = 10.0
