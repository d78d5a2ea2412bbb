"""Wide tables: read back what was written, and name what cannot be read."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_hk.data import DataError, build_fleet, read_wide

DATA = Path(__file__).parents[2] / "shared" / "data"

GOOD = """date,a,b,c
2015-01-01,1,2,3
2015-01-02,4,,6
2015-01-03,7,8,9
"""


def write(folder, text, name="table.csv"):
    path = folder / name
    packed = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(text.encode()))
    return path


def message(path, **kwargs):
    """The text of the DataError that reading `path` raises."""
    with pytest.raises(DataError) as caught:
        read_wide(path, **kwargs)
    return str(caught.value)


def test_reads_a_small_table(tmp_path):
    path = write(tmp_path, GOOD)
    table = read_wide(path, unit="L")
    assert table.client_ids == ("a", "b", "c")
    assert table.unit == "L"
    assert table.planted is None and table.excluded == ()
    np.testing.assert_array_equal(table.values_tn, [[1, 2, 3], [4, np.nan, 6], [7, 8, 9]])
    assert table.values_tn.dtype == np.float64
    np.testing.assert_array_equal(
        table.times, np.array(["2015-01-01", "2015-01-02", "2015-01-03"], "datetime64[s]")
    )
    assert table.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "table.csv" in table.source and "3 of 3 clients" in table.source


cells = st.one_of(
    st.none(),
    st.integers(0, 10**6).map(float),
    st.floats(0, 1e12, allow_nan=False, allow_subnormal=False),
)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.text("abcXYZ09 _-é.", min_size=1, max_size=6), min_size=1, max_size=5).filter(
        lambda ids: len({i.strip() for i in ids}) == len(ids) and all(i.strip() for i in ids)
    ),
    num_rows=st.integers(2, 12),
    step=st.sampled_from(["D", "h", "30min", "7D"]),
    suffix=st.sampled_from([".csv", ".csv.gz", ".csv.xz"]),
    shuffled=st.booleans(),
    data=st.data(),
)
def test_reads_back_what_pandas_wrote(ids, num_rows, step, suffix, shuffled, data):
    row = st.lists(cells, min_size=len(ids), max_size=len(ids))
    rows = data.draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    times = pd.date_range("2016-02-28", periods=num_rows, freq=step)
    frame = pd.DataFrame(rows, index=times, columns=ids, dtype=float)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{suffix}"
        (frame.iloc[::-1] if shuffled else frame).to_csv(path, index_label="time")
        table = read_wide(path)
        assert table.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert table.client_ids == tuple(i.strip() for i in ids)
    assert ("sorted" in table.source) == shuffled
    # pandas' parser may be off in the last bit of a float64; the samples are float32.
    np.testing.assert_allclose(table.values_tn, frame.to_numpy(), rtol=1e-14)
    np.testing.assert_array_equal(table.times, times.to_numpy().astype("datetime64[s]"))


@pytest.mark.parametrize("text", [GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, GOOD + "\n\n"])
def test_line_ends_byte_order_mark_and_blank_lines_do_not_matter(tmp_path, text):
    table = read_wide(write(tmp_path, text))
    assert table.client_ids == ("a", "b", "c")
    assert table.values_tn.shape == (3, 3)


def test_spellings_of_missing(tmp_path):
    text = "date,a,b\n2015-01-01,NA, \n2015-01-02,1,2\n2015-01-03,nan,null\n"
    table = read_wide(write(tmp_path, text))
    np.testing.assert_array_equal(table.values_tn[:, 0], [np.nan, 1, np.nan])
    np.testing.assert_array_equal(table.values_tn[:, 1], [np.nan, 2, np.nan])


def test_times_with_a_zone_become_utc(tmp_path):
    text = "t,a\n2015-03-29T01:00+01:00,1\n2015-03-29T03:00+02:00,2\n2015-03-29T02:00Z,3\n"
    table = read_wide(write(tmp_path, text))
    expected = ["2015-03-29T00", "2015-03-29T01", "2015-03-29T02"]
    np.testing.assert_array_equal(table.times, np.array(expected, "datetime64[s]"))


def test_absent_days_become_missing_readings(tmp_path):
    text = "date,a\n2015-01-01,1\n2015-01-02,2\n2015-01-03,3\n2015-01-06,6\n2015-01-07,7\n"
    table = read_wide(write(tmp_path, text))
    assert len(table.times) == 7
    np.testing.assert_array_equal(table.values_tn[:, 0], [1, 2, 3, np.nan, np.nan, 6, 7])
    assert "2 absent times" in table.source


def test_local_midnights_in_utc_are_moved_to_the_grid(tmp_path):
    days = pd.date_range("2015-03-27", periods=6, freq="D", tz="Europe/Madrid")
    lines = [f"{d.isoformat()},{i}" for i, d in enumerate(days)]
    table = read_wide(write(tmp_path, "\n".join(["date,a", *lines])))
    np.testing.assert_array_equal(table.values_tn[:, 0], range(6))
    assert "moved by up to 3600 s" in table.source


# --- which clients ---------------------------------------------------------------------


def test_clients_from_a_list_and_files(tmp_path):
    path = write(tmp_path, GOOD)
    assert read_wide(path, clients="c, a").client_ids == ("c", "a")
    np.testing.assert_array_equal(read_wide(path, clients="c,a").values_tn[0], [3, 1])
    lines = write(tmp_path, "b\n\nc\n", "ids.txt")
    assert read_wide(path, clients=str(lines)).client_ids == ("b", "c")
    column = write(tmp_path, "size,client\n1,c\n2,b\n", "some.csv")
    assert read_wide(path, clients=str(column)).client_ids == ("c", "b")
    only = write(tmp_path, "client\nc\n", "only.csv")
    assert read_wide(path, clients=str(only)).client_ids == ("c",)


def test_recommended_rows_only_and_absent_ones_are_told(tmp_path):
    path = write(tmp_path, GOOD)
    described = write(tmp_path, "client,recommended\na,1\nb,0\nz,1\ny,0\n", "clients.csv")
    table = read_wide(path, clients=str(described))
    assert table.client_ids == ("a",)
    assert [e.client for e in table.excluded] == ["z"]
    assert "table.csv" in table.excluded[0].reason


@pytest.mark.parametrize(
    ("clients", "parts"),
    [
        ("a,k01", ["k01", "table.csv", "3 clients"]),
        ("A,b", ["'A'"]),
        ("a,b,a", ["a", "twice"]),
        (",", ["names no client"]),
        ("folder/clients", ["no file", "folder"]),
        ("nobody.csv", ["nobody.csv", "no file"]),
    ],
)
def test_bad_lists_of_clients(tmp_path, clients, parts):
    text = message(write(tmp_path, GOOD), clients=clients)
    assert all(part in text for part in parts), text


def test_unknown_client_gets_close_matches(tmp_path):
    path = write(tmp_path, "date,MAC000015,MAC000017\n2015-01-01,1,2\n2015-01-02,1,2\n")
    assert "did you mean MAC000015" in message(path, clients="MAC00015")


def test_a_list_longer_than_a_file_name_and_ids_with_slashes(tmp_path):
    ids = [f"site/{i:03d}" for i in range(200)]
    rows = [",".join([day, *("1" * 200)]) for day in ("2015-01-01", "2015-01-02")]
    path = write(tmp_path, "\n".join([",".join(["t", *ids]), *rows]))
    assert read_wide(path, clients=",".join(ids)).client_ids == tuple(ids)
    assert read_wide(path, clients="site/007").client_ids == ("site/007",)
    assert "site/7777" in message(path, clients=",".join([*ids, "site/7777"]))


def test_bad_files_of_clients(tmp_path):
    path = write(tmp_path, GOOD)
    assert "folder" in message(path, clients=str(tmp_path))
    nobody = write(tmp_path, "client,recommended\na,0\n", "none.csv")
    assert "none.csv names no client" in message(path, clients=str(nobody))
    (tmp_path / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    assert "UTF-8" in message(path, clients=str(tmp_path / "latin.txt"))
    ragged = write(tmp_path, "client,x\na,1\nb,2,3,4\n", "ragged.csv")
    assert "ragged.csv" in message(path, clients=str(ragged))


# --- files that cannot be read ---------------------------------------------------------


def test_missing_file_names_similar_ones(tmp_path):
    write(tmp_path, GOOD, "daily_litres.csv")
    text = message(tmp_path / "daily_liters.csv")
    assert "daily_liters.csv" in text and "Did you mean daily_litres.csv" in text
    assert "its folder" in message(tmp_path / "nowhere" / "x.csv")


def test_a_folder(tmp_path):
    write(tmp_path, GOOD)
    text = message(tmp_path)
    assert "is a folder" in text and "table.csv" in text


def test_broken_compression(tmp_path):
    for name, content in (("a.csv.gz", gzip.compress(GOOD.encode())[:-9]), ("a.csv.xz", b"no xz")):
        (tmp_path / name).write_bytes(content)
        text = message(tmp_path / name)
        assert name in text and "Fetch it again" in text


def test_no_text(tmp_path):
    (tmp_path / "t.csv").write_bytes(GOOD.encode() + b"2015-01-04,1,\xff,2\n")
    text = message(tmp_path / "t.csv")
    assert "row 5" in text and "0xff" in text and "UTF-8" in text
    (tmp_path / "t.csv").write_text(GOOD, encoding="utf-16")
    assert "UTF-16" in message(tmp_path / "t.csv")


def test_what_a_file_is_packed_in_is_seen_whatever_its_name(tmp_path):
    (tmp_path / "t.csv").write_bytes(lzma.compress(GOOD.encode()))
    assert read_wide(tmp_path / "t.csv").values_tn.shape == (3, 3)


BAD = {
    "empty": ("", ["table.csv", "empty"]),
    "blank": ("\n\n", ["row 1", "header is empty"]),
    "header only": ("date,a,b\n", ["no row of readings"]),
    "header without line end": ("date,a,b", ["no row of readings"]),
    "one row": ("date,a\n2015-01-01,1\n", ["one row", "row 2"]),
    "no header": ("2015-01-01,1,2\n2015-01-02,1,2\n", ["row 1", "2015-01-01", "header row"]),
    "other separator": ("date|a|b\n2015-01-01|1|2\n", ["row 1", "one column", "'|'"]),
    "client without name": ("date,a,,c\n2015-01-01,1,2,3\n", ["row 1", "column 3"]),
    "duplicate client": (
        "date,a,b,a\n2015-01-01,1,2,3\n2015-01-02,1,2,3\n",
        ["row 1", "'a'", "column 2", "column 4"],
    ),
    "duplicate date": (GOOD + "2015-01-02,1,1,1\n", ["rows 3 and 5", "2015-01-02", "twice"]),
    "no date": (GOOD.replace("2015-01-02", "x"), ["row 3", "'date'", "'x'", "ISO 8601"]),
    "no such day": (GOOD.replace("2015-01-02", "2015-02-30"), ["row 3", "'2015-02-30'"]),
    "day first": (GOOD.replace("2015-01-02", "02/01/2015"), ["row 3", "'02/01/2015'"]),
    "a number for a date": (GOOD.replace("2015-01-02", "20150102"), ["row 3", "'20150102'"]),
    "no time": (GOOD.replace("2015-01-02", ""), ["row 3", "empty"]),
    "no number": (
        GOOD.replace("4,,6", "4,off,6"),
        ["row 3", "column 3", "client 'b'", "'off'", "no number"],
    ),
    "decimal comma": (GOOD.replace("4,,6", '4,"1,5",6'), ["row 3", "client 'b'", "'1,5'"]),
    "a truth value": ("date,a\n2015-01-01,True\n2015-01-02,False\n", ["row 2", "'a'", "'True'"]),
    "infinite": (GOOD.replace("4,,6", "4,,inf"), ["row 3", "column 4", "client 'c'", "'inf'"]),
    "too large": (GOOD.replace("4,,6", "4,,1e300"), ["row 3", "client 'c'", "1e+300"]),
    "short row": (GOOD + "2015-01-04,1\n", ["row 5", "2 cells", "header has 4"]),
    "long row": (GOOD + "2015-01-04,1,2,3,4\n", ["row 5", "5 cells", "header has 4"]),
    "long first row": ("date,a\n2015-01-01,1,2\n", ["row 2", "3 cells"]),
    "long row with quotes": ('date,"a"\n2015-01-01,1\n2015-01-02,1,2\n', ["table.csv"]),
    "long rows with quotes": ('date,"a"\n2015-01-01,1,2\n2015-01-02,1,2\n', ["table.csv"]),
    "off the grid": (
        GOOD + "2015-01-04,1,1,1\n2015-01-05T12:00,1,1,1\n",
        ["row 6", "2015-01-05T12:00:00", "1 day"],
    ),
    "wrong century": (GOOD + "2915-01-04,1,1,1\n", ["row"]),
    "wrong decade": (
        GOOD + "2215-01-04,1,1,1\n",
        ["rows 4 and 5", "2215-01-04", "Correct the date"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_name_the_place(tmp_path, name):
    text, parts = BAD[name]
    found = message(write(tmp_path, text))
    assert "table.csv" in found
    assert all(part in found for part in parts), found


def test_row_numbers_count_blank_lines(tmp_path):
    text = GOOD.replace("2015-01-02,4,,6", "\n2015-01-02,4,off,6")
    assert "row 4" in message(write(tmp_path, text))


def test_bad_cells_of_clients_not_asked_for_do_not_matter(tmp_path):
    path = write(tmp_path, GOOD.replace("4,,6", "4,off,6"))
    assert read_wide(path, clients="a,c").client_ids == ("a", "c")


def test_a_negative_reading_leaves_the_client_out(tmp_path):
    table = read_wide(write(tmp_path, GOOD.replace("7,8,9", "7,-8.5,9")))
    assert table.client_ids == ("a", "c")
    (excluded,) = table.excluded
    assert excluded.client == "b"
    assert "row 4" in excluded.reason and "-8.5" in excluded.reason


def test_only_negative_clients(tmp_path):
    text = message(write(tmp_path, "date,a\n2015-01-01,-1\n2015-01-02,2\n"))
    assert "a: " in text and "row 2" in text and "-1" in text


# --- real meters -----------------------------------------------------------------------


def real(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the real meters are not beside the repository: no {name}")
    return path


def test_alicante_daily():
    path = real("alicante_swm/daily_litres.csv")
    table = read_wide(path, clients=str(real("alicante_swm/clients.csv")), unit="L")
    assert len(table.client_ids) == 103 and table.excluded == ()
    assert table.values_tn.shape == (868, 103)
    fleet = build_fleet(table)
    assert len(fleet.client_ids) == 103
    everyone = build_fleet(read_wide(path))
    assert len(everyone.client_ids) + len(everyone.excluded) == 147
    assert all("usable" in e.reason or "no reading" in e.reason for e in everyone.excluded)


def test_london_daily():
    path = real("london_lcl/daily_kwh.csv")
    table = read_wide(path, clients=str(real("london_lcl/clients.csv")), unit="kWh")
    assert table.values_tn.shape == (828, 80)
    fleet = build_fleet(table)
    assert len(fleet.client_ids) == 80
    assert fleet.train.mask.any(axis=1).all() and fleet.test.mask.any(axis=1).all()


def test_hourly_xz():
    table = read_wide(real("london_lcl/hourly_kwh.csv.xz"), clients="MAC000015,MAC000017")
    assert table.times[1] - table.times[0] == np.timedelta64(3600, "s")
    fleet = build_fleet(table)
    assert np.isfinite(fleet.naive["last_week"][fleet.test.mask]).mean() > 0.99
