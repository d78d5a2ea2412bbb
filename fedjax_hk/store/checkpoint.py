"""Checkpoints of a run's state, written by Orbax while the run goes on."""

from __future__ import annotations

import logging
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_logger = logging.getLogger(__name__)

# What Orbax and tensorstore were seen to raise on files cut short, removed or altered.
_UNREADABLE = (ValueError, KeyError, TypeError, OSError)

State = Any  # a pytree of arrays and numbers


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the folder and the round."""


class Checkpoints:
    """The newest checkpoints of one run, each a folder named by its round.

    A checkpoint is written under another name and renamed when it is whole, and the old
    ones are removed after that: a kill at any moment leaves a whole one. The state is any
    pytree of JAX and NumPy arrays and Python numbers. Random keys are to be raw uint32
    arrays (`jax.random.key_data`).

    Args:
      folder: made if it is not there; best inside a locked run folder, as two processes
        must not write into the same one.
      keep: how many checkpoints stay. At least two, so that a torn one has another
        before it.
      log: takes lines about checkpoints that could not be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        keep: int = 2,
        log: Callable[[str], None] = _logger.warning,
    ):
        if keep < 2:
            raise ValueError(f"Expected keep of at least 2, got {keep}: a torn one needs another")
        self._ocp = _import_orbax()
        self._folder = pathlib.Path(folder).absolute()
        self._log = log
        _remove_leftovers(self._folder, keep)
        self._manager = self._ocp.CheckpointManager(
            self._folder,
            item_handlers=self._ocp.PyTreeCheckpointHandler(),
            options=self._ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def save(self, round_number: int, state: State) -> None:
        """Saves the state after `round_number` rounds; returns while it is being written.

        The state is copied before the call returns, so that its buffers may be donated or
        changed. A save still under way is waited for first; if it failed, its error is
        raised here or in `wait`.

        Raises:
          ValueError: this or a later round is saved already, or a leaf is no array.
        """
        newest = self.latest()
        if newest is not None and newest >= round_number:
            raise ValueError(
                f"Expected a round after {newest}, the newest saved, got {round_number}"
            )
        leaves = {name: _checked(name, leaf) for name, leaf in _named_leaves(state)}
        self._manager.save(
            round_number,
            # Orbax takes no empty arrays; their shape is in the layout.
            args=self._ocp.args.PyTreeSave({k: v for k, v in leaves.items() if v.size}),
            custom_metadata={"layout": {name: _layout(leaf) for name, leaf in leaves.items()}},
            force=True,
        )

    def latest(self) -> int | None:
        """Round of the newest checkpoint, one still being written included; None if none."""
        return self._manager.latest_step()

    def rounds(self) -> list[int]:
        """Rounds of all checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(self, round_number: int, like: State) -> State:
        """The state saved after `round_number` rounds, bit for bit.

        Args:
          round_number: one of `rounds()`.
          like: a state of the same structure; says for each leaf the type, and for JAX
            arrays (or `jax.ShapeDtypeStruct`) where they lie. The devices may be others
            than when it was saved.

        Raises:
          ValueError: structure, a shape or a dtype differs from `like`.
          CheckpointError: the checkpoint is missing or torn.
        """
        where, stored = self._stored(round_number)
        wanted = dict(_named_leaves(like))
        _compare(where, stored, {name: _layout(leaf) for name, leaf in wanted.items()})
        found = self._read(round_number, wanted)
        leaves = [_as(leaf, found.get(name)) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def restore_latest(self, like: State) -> tuple[int, State] | None:
        """The newest state that can be read, and its round; None if there is none.

        Newer ones that cannot be read are named in the log and removed, so that the run
        can save those rounds again.

        Raises:
          ValueError: as `restore`.
          CheckpointError: there are checkpoints, but none can be read; all are left.
        """
        return self._latest(lambda number: self.restore(number, like))

    def latest_leaves(
        self, like: State, names: Mapping[str, Sequence[str]]
    ) -> tuple[int, dict[str, Any]] | None:
        """Some leaves of the newest state, whatever else it holds; as `restore_latest`.

        Args:
          like: a state of which the leaves have the shapes and dtypes that are expected.
          names: leaves to read, by their path in `like` (those that it lacks are left out);
            and what earlier versions called them.
        """
        wanted = {name: leaf for name, leaf in _named_leaves(like) if name in names}

        def read(number: int) -> dict[str, Any]:
            where, stored = self._stored(number)
            spelled = {
                name: next((one for one in (name, *names[name]) if one in stored), name)
                for name in wanted
            }
            found = {name: stored[one] for name, one in spelled.items() if one in stored}
            _compare(where, found, {name: _layout(leaf) for name, leaf in wanted.items()})
            leaves = self._read(number, {spelled[name]: wanted[name] for name in wanted})
            return {name: _as(wanted[name], leaves.get(spelled[name])) for name in wanted}

        return self._latest(read)

    def _stored(self, round_number: int) -> tuple[pathlib.Path, dict[str, str]]:
        """Where a checkpoint is, and shape and dtype of its leaves."""
        self.wait()
        if round_number not in self._manager.all_steps():
            raise CheckpointError(
                f"{self._folder} has no checkpoint of round {round_number}; it has {self.rounds()}"
            )
        where = self._folder / str(round_number)
        try:
            return where, self._manager.metadata(round_number).custom_metadata["layout"]
        except _UNREADABLE as error:
            raise CheckpointError(f"{where} cannot be read: {error!r}") from error

    def _read(self, round_number: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves by their stored name; empty ones, which are not stored, are left out."""
        full = {name: leaf for name, leaf in wanted.items() if math.prod(np.shape(leaf))}
        try:
            return self._manager.restore(
                round_number,
                args=self._ocp.args.PyTreeRestore(
                    item=full,
                    restore_args={k: self._restore_args(v) for k, v in full.items()},
                    partial_restore=True,
                ),
            )
        except _UNREADABLE as error:
            where = self._folder / str(round_number)
            raise CheckpointError(f"{where} cannot be read: {error!r}") from error

    def _latest(self, read: Callable[[int], Any]) -> tuple[int, Any] | None:
        """The newest round that can be read, and what was read of it; None if there is none."""
        self.wait()
        torn: list[int] = []
        for round_number in reversed(self.rounds()):
            try:
                found = read(round_number)
            except CheckpointError as error:
                self._log(f"checkpoint of round {round_number} left out: {error}")
                torn.append(round_number)
                continue
            for later in torn:
                self._manager.delete(later)
            return round_number, found
        if torn:
            raise CheckpointError(f"{self._folder}: no checkpoint can be read, tried {torn}")
        return None

    def wait(self) -> None:
        """Returns when everything saved is on the disk; raises what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends Orbax's threads."""
        self._manager.close()

    def _restore_args(self, leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or not getattr(leaf, "committed", True):
            return self._ocp.RestoreArgs(restore_type=np.ndarray)
        return self._ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )


def _import_orbax():
    """Orbax, imported late (half a second), its progress notes kept off the terminal."""
    import orbax.checkpoint as ocp
    from absl import logging as absl_logging

    # A filter, not a level: absl's logger is shared with everybody who logs through it.
    absl_logging.get_absl_logger().addFilter(_no_orbax_notes)
    return ocp


def _remove_leftovers(folder: pathlib.Path, keep: int) -> None:
    """Removes old checkpoints whose removal a kill cut short; Orbax would warn of each."""
    old = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=_round)[:-keep]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def _round(path: pathlib.Path) -> int:
    return int(path.name)


def _no_orbax_notes(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def _named_leaves(state: State) -> list[tuple[str, Any]]:
    """Leaves by their path, such as ['params']['Dense_0']['kernel'] or .momentum[0].

    A flat dict of them is what is stored: tuples, named tuples, empty nodes and None then
    need nothing from the library that writes.
    """
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def _checked(name: str, leaf: Any) -> Any:
    """The leaf as an array that may be stored; NumPy's are copied, as they can change."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"Expected raw uint32 keys at {name}, got {leaf.dtype}; "
                "store jax.random.key_data(key) and wrap it again after restore"
            )
        return leaf
    array = np.array(leaf)
    if array.dtype.kind in "OUSMm":
        raise ValueError(f"Expected arrays and numbers, got {type(leaf).__name__} at {name}")
    return array


def _layout(leaf: Any) -> str:
    """Shape and dtype as text, such as float32[75,12]."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def _compare(where: pathlib.Path, stored: dict[str, str], wanted: dict[str, str]) -> None:
    lines = [
        f"{name}: expected {wanted.get(name, 'nothing')}, got {stored.get(name, 'nothing')}"
        for name in dict.fromkeys([*wanted, *stored])
        if wanted.get(name) != stored.get(name)
    ]
    if lines:
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise ValueError(
            f"{where} is of another state: {'; '.join(lines[:5])}{more}. Use the flags and the "
            "version of the run that wrote it, or start a new run"
        )


def _as(like: Any, value: Any) -> Any:
    """The value as the type of `like`; None stands for an empty array."""
    if value is None:
        value = np.zeros(like.shape, like.dtype)
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if isinstance(like, (bool, int, float, complex)):
        return np.asarray(value).item()
    if isinstance(like, np.ndarray) or isinstance(value, jax.Array):
        return value
    # Not bound to a device before, so not now: it may meet arrays on any mesh.
    return jax.numpy.array(value, dtype=like.dtype)
