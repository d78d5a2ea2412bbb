"""Run folders: nobody shares one, tables survive kills, numbers read back bit-equal."""

import math
import os
import pathlib
import struct
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest

from fedjax_hk.store import run_folder
from fedjax_hk.store.run_folder import RunFolderError

# pandas reads floats to the last bit by itself from 3.1 on, where the option is deprecated.
EXACT = {} if pd.__version__ >= "3.1" else {"float_precision": "round_trip"}


def start_process(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder(tmp_path):
    with run_folder.create_folder(tmp_path / "run") as opened:
        yield opened


def bits(values):
    return [struct.pack("d", value) for value in values]


# Making and opening a folder.


def test_runs_of_the_same_second_in_many_processes_get_their_own_folder(tmp_path):
    code = """
        import sys
        from fedjax_hk.store import run_folder
        print("ready", flush=True)
        sys.stdin.readline()
        print(*[run_folder.create_folder(base=sys.argv[1], name="hk").path for _ in range(20)])
    """
    processes = [start_process(code, tmp_path) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    paths = [path for process in processes for path in process.communicate()[0].split()]
    assert len(paths) == len(set(paths)) == 40
    names = {pathlib.Path(path).name for path in paths}
    assert all(name[15:].startswith("-hk") for name in names)
    assert any(name.endswith("-hk-2") for name in names)


def test_of_two_processes_given_the_same_empty_folder_one_gets_it(tmp_path):
    code = """
        import sys
        from fedjax_hk.store import run_folder
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            held = run_folder.create_folder(sys.argv[1])
            print("mine")
        except run_folder.RunFolderError:
            print("refused")
    """
    processes = [start_process(code, tmp_path / "run") for _ in range(2)]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate()[0].strip() for process in processes)
    assert said == ["mine", "refused"]


def test_name_is_made_fit_for_a_folder(tmp_path):
    with run_folder.create_folder(base=tmp_path, name="../hk cosine/tau=0.9") as made:
        assert made.path.parent == tmp_path
        assert made.path.name[15:] == "-.._hk_cosine_tau=0.9"


def test_a_folder_that_is_there_and_empty_is_taken(tmp_path):
    with run_folder.create_folder(tmp_path) as made:
        assert made.path == tmp_path


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(RunFolderError, match=r"--output.*not empty.*thesis.txt.*new or empty"):
        run_folder.create_folder(tmp_path)


@pytest.mark.parametrize("keyword", ["path", "base"])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, keyword):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"--output: .*file is a file; give"):
        run_folder.create_folder(**{keyword: tmp_path / "file"})


@pytest.mark.parametrize("keyword", ["path", "base"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, keyword):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"--output: cannot write .*file/sub.*give --output"):
        run_folder.create_folder(**{keyword: tmp_path / "file" / "sub"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(RunFolderError, match="--output: cannot write"):
        run_folder.create_folder(tmp_path / "run")


def test_opening_says_what_was_found(tmp_path):
    with pytest.raises(RunFolderError, match=r"--resume: .*none does not exist"):
        run_folder.open_folder(tmp_path / "none")
    (tmp_path / "notes").write_text("")
    with pytest.raises(RunFolderError, match=r"--resume: .*notes is a file"):
        run_folder.open_folder(tmp_path / "notes")
    with pytest.raises(RunFolderError, match=r"no config.json \(found: notes\)"):
        run_folder.open_folder(tmp_path)


def test_a_running_run_cannot_be_opened_by_another_process_and_jax_is_not_imported(folder):
    folder.write_config({"tau": 0.9})
    code = """
        import sys
        from fedjax_hk.store import run_folder
        with run_folder.open_folder(sys.argv[1], lock=False) as look:
            print(look.read_config())
        try:
            run_folder.open_folder(sys.argv[1])
        except run_folder.RunFolderError as error:
            print(error)
        print("jax", "jax" in sys.modules)
    """
    said = start_process(code, folder.path).communicate()[0]
    assert "{'tau': 0.9}" in said
    assert f"--resume: process {os.getpid()} is running in {folder.path}" in said
    assert "jax False" in said


def test_the_lock_ends_with_a_killed_process(tmp_path):
    code = """
        import sys, time
        from fedjax_hk.store import run_folder
        held = run_folder.create_folder(sys.argv[1])
        held.write_config({})
        (held.path / ".config.json.tmp").write_text("half")
        print("ready", flush=True)
        time.sleep(60)
    """
    process = start_process(code, tmp_path / "run")
    process.stdout.readline()
    with pytest.raises(RunFolderError, match=f"process {process.pid} is running"):
        run_folder.open_folder(tmp_path / "run")
    process.kill()
    process.communicate()
    with run_folder.open_folder(tmp_path / "run") as opened:
        assert not list(opened.path.glob(".*.tmp"))
    with run_folder.open_folder(tmp_path / "run"):  # closed, so free again
        pass


# Whole files.


def test_json_reads_back(folder):
    written = {"a": np.float32(0.1), "b": np.arange(2), "c": pathlib.Path("x"), "d": math.inf}
    folder.write_config({"old": 1})
    folder.write_config(written)
    assert folder.read_config() == {
        "a": float(np.float32(0.1)),
        "b": [0, 1],
        "c": "x",
        "d": math.inf,
    }
    folder.write_json("summary.json", {"mae": math.nan})
    assert math.isnan(folder.read_json("summary.json")["mae"])
    folder.write_text("report.md", "# é\n")
    assert (folder.path / "report.md").read_text(encoding="utf-8") == "# é\n"
    assert not list(folder.path.glob(".*"))


def test_json_that_fails_leaves_the_old_file(folder):
    folder.write_json("a.json", 1)
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        folder.write_json("a.json", object())
    assert folder.read_json("a.json") == 1


def test_json_that_is_missing_or_broken_is_named(folder):
    with pytest.raises(RunFolderError, match=r"holds no x.json"):
        folder.read_json("x.json")
    folder.write_text("x.json", "{")
    with pytest.raises(RunFolderError, match=r"x.json is not JSON"):
        folder.read_json("x.json")


def test_log_stamps_every_line(folder):
    folder.log("first\nsecond")
    folder.log("")
    lines = (folder.path / "log.txt").read_text().split("\n")
    assert [line[25:] for line in lines] == [" first", " second", " ", ""]
    pd.Timestamp(lines[0][:25])


# Tables.


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(st.lists(st.floats(width=64), min_size=1))
def test_floats_read_back_bit_equal(tmp_path_factory, values):
    values = [math.nan if math.isnan(value) else value for value in values]  # one kind of NaN
    with run_folder.create_folder(tmp_path_factory.mktemp("runs")) as opened:
        opened.append_rows("rounds", [{"round": i, "mae": v} for i, v in enumerate(values)])
        assert bits(opened.read_table("rounds")["mae"]) == bits(values)
        plain = pd.read_csv(opened.path / "rounds.csv", **EXACT)
        assert bits(plain["mae"]) == bits(values)
        opened.write_table("again", pd.DataFrame({"mae": values}))
        assert bits(opened.read_table("again")["mae"]) == bits(values)


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))))
def test_text_reads_back(tmp_path_factory, values):
    values = ["x", *values]
    with run_folder.create_folder(tmp_path_factory.mktemp("runs")) as opened:
        opened.append_rows("clients", [{"round": 1, "client": value} for value in values])
        read = opened.read_table("clients", text=["client"])["client"].tolist()
        assert read == [value or None for value in values]
        content = (opened.path / "clients.csv").read_bytes()
        assert opened.truncate_after("clients", "round", 1) == 0
        assert (opened.path / "clients.csv").read_bytes() == content
        assert opened.truncate_after("clients", "round", 0) == len(values)


def test_each_column_keeps_its_type(folder):
    rows = [
        {
            "n": 1,
            "f": np.float32(0.1),
            "ok": True,
            "who": "007",
            "gap": None,
            "x": 2,
            "y": np.True_,
        },
        {"n": np.int64(-3), "f": 1.0, "ok": False, "who": "NA", "gap": None, "x": None, "y": None},
    ]
    folder.append_rows("t", rows)
    text = (folder.path / "t.csv").read_text()
    assert text == (
        "n,f,ok,who,gap,x,y\n1,0.10000000149011612,True,007,,2,True\n-3,1.0,False,NA,,,\n"
    )
    read = folder.read_table("t", text=["who"])
    assert read["n"].tolist() == [1, -3] and read["n"].dtype == np.int64
    assert read["f"].tolist() == [float(np.float32(0.1)), 1.0]
    assert read["ok"].dtype == bool and read["ok"].tolist() == [True, False]
    assert read["who"].tolist() == ["007", "NA"]
    assert read["gap"].tolist() == [None, None]
    np.testing.assert_array_equal(read["x"], [2.0, np.nan])
    assert read["y"].tolist() == [True, None]


def test_numbers_that_only_look_so_stay_text(folder):
    folder.append_rows("t", [{"client": "1_000"}, {"client": "2_000"}])
    assert folder.read_table("t")["client"].tolist() == ["1_000", "2_000"]
    folder.append_rows("big", [{"seed": 2**64 - 1}, {"seed": 2**70}])
    assert folder.read_table("big")["seed"].tolist() == [2**64 - 1, 2**70]


def test_a_frame_is_written_whole(folder):
    frame = pd.DataFrame(
        {"day": pd.to_datetime(["2024-01-01", None]), "who": ["a", None], 3: [1, 2]}, index=[5, 6]
    )
    folder.write_table("days", frame)
    assert (folder.path / "days.csv").read_text() == ("day,who,3\n2024-01-01 00:00:00,a,1\n,,2\n")
    folder.write_table("days", frame.iloc[:0])
    assert list(folder.read_table("days").columns) == ["day", "who", "3"]
    assert len(folder.read_table("days")) == 0


def test_header_is_written_once_also_after_reopening(folder):
    folder.append_rows("rounds", [])
    assert not (folder.path / "rounds.csv").exists()
    folder.append_rows("rounds", [{"round": 1, "mae": 2.0}])
    folder.append_rows("rounds", [{"mae": 3.0, "round": 2}])  # order of keys is free
    folder.write_config({})
    folder.close()
    with run_folder.open_folder(folder.path) as again:
        again.append_rows("rounds", [{"round": 3, "mae": 4.0}])
    assert (folder.path / "rounds.csv").read_text() == "round,mae\n1,2.0\n2,3.0\n3,4.0\n"


def test_other_columns_are_refused(folder):
    folder.append_rows("rounds", [{"round": 1, "mae": 2.0}])
    with pytest.raises(RunFolderError, match=r"none for \['mae'\], and unknown \['mse'\]"):
        folder.append_rows("rounds", [{"round": 2, "mae": 1.0}, {"round": 2, "mse": 1.0}])
    assert len(folder.read_table("rounds")) == 1


def test_a_missing_table_is_named(folder):
    with pytest.raises(RunFolderError, match=r"no table rounds.csv"):
        folder.read_table("rounds")


# After a kill.


@pytest.mark.parametrize("torn", ["3", "3,0.", '3,"a', '3,"a\nb', '3,"a\n'])
def test_a_torn_row_is_removed_and_the_rest_left_byte_for_byte(folder, torn):
    whole = 'round,who\n1,"a\n""b"\n2,\r\n'
    path = folder.path / "t.csv"
    path.write_bytes((whole + torn).encode())
    with pytest.raises(RunFolderError, match="torn row; call truncate_after"):
        folder.append_rows("t", [{"round": 3, "who": "c"}])
    assert folder.truncate_after("t", "round", 9) == 1
    assert path.read_bytes() == whole.encode()
    folder.append_rows("t", [{"round": 3, "who": "c"}])
    assert folder.read_table("t")["round"].tolist() == [1, 2, 3]


def test_rows_of_rounds_after_the_checkpoint_are_dropped(folder):
    rows = [{"round": r, "client": c, "mae": 0.1 * r} for r in (1, 2, 3) for c in "ab"]
    folder.append_rows("clients", rows)
    lines = (folder.path / "clients.csv").read_text().splitlines(keepends=True)
    with open(folder.path / "clients.csv", "a") as file:
        file.write("4,a,0")
    assert folder.truncate_after("clients", "round", 2) == 3
    assert (folder.path / "clients.csv").read_text() == "".join(lines[:5])
    folder.append_rows("clients", rows[4:])
    assert (folder.path / "clients.csv").read_text() == "".join(lines)


def test_a_table_without_a_whole_header_starts_again(folder):
    for content in ("", "round,m"):
        (folder.path / "t.csv").write_text(content)
        assert folder.truncate_after("t", "round", 2) == bool(content)
        folder.append_rows("t", [{"round": 1}])
        assert folder.read_table("t")["round"].tolist() == [1]
        (folder.path / "t.csv").unlink()
        folder._columns.clear()
    assert folder.truncate_after("t", "round", 2) == 0
    assert not (folder.path / "t.csv").exists()


def test_truncation_names_what_is_wrong(folder):
    folder.append_rows("t", [{"round": 1, "a": 1}])
    with pytest.raises(RunFolderError, match=r"no column 'step'; it has round, a"):
        folder.truncate_after("t", "step", 1)
    with open(folder.path / "t.csv", "a") as file:
        file.write("2\n")
    with pytest.raises(RunFolderError, match=r"t.csv row 2: expected 2 cells with a number"):
        folder.truncate_after("t", "round", 1)


def test_versions_name_what_makes_the_numbers():
    found = run_folder.versions()
    assert {"python", "platform", "jax", "jaxlib", "flax", "optax", "numpy"} <= set(found)
    assert found["numpy"] == np.__version__
    assert {"pandas", "orbax-checkpoint", "absl-py", "fedjax-hk"} <= set(found)
