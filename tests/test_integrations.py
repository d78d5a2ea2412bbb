"""Event files for TensorBoard, read back."""

import math

import pytest

from fedjax_hk.integrations.tensorboard import TensorBoard

pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")


def scalars(folder):
    """`(tag, step) -> value`, later events over earlier ones; steps that were purged are gone."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.iterdir()):  # as TensorBoard reads them
        content = path.read_bytes()
        while content:  # length, its checksum, an event, its checksum
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_numbers_of_a_round_become_scalars(tmp_path):
    rows = [
        {"round": 1, "mae": 0.5, "clients": 3, "margin": math.inf, "left_out": ""},
        {"round": 2, "mae": 0.25, "clients": 4, "margin": 0.5, "left_out": "a"},
    ]
    with TensorBoard(tmp_path / "board") as board:
        for row in rows:
            board.on_round_end(row["round"], row)
    assert scalars(tmp_path / "board") == {
        ("mae", 1): 0.5,
        ("clients", 1): 3.0,
        ("mae", 2): 0.25,
        ("clients", 2): 4.0,
        ("margin", 2): 0.5,
    }


def test_rounds_that_are_done_again_replace_those_of_before(tmp_path):
    with TensorBoard(tmp_path) as killed, TensorBoard(tmp_path) as resumed:
        for round_number in (1, 2, 3):
            killed.on_round_end(round_number, {"mae": 1.0})
        resumed.on_round_end(2, {"mae": 2.0})
        on_disk = scalars(tmp_path)  # before a file is closed, as a kill leaves them
    assert on_disk == {("mae", 1): 1.0, ("mae", 2): 2.0}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'fedjax-hk\[tensorboard\]'"):
        TensorBoard("anywhere")
