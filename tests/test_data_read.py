"""The way in: formats told apart, several files, coarser steps, who is left out, the cache."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedjax_hk.data import DataError, Table, build_fleet, choose_clients, read
from fedjax_hk.data.meters import cache
from fedjax_hk.data.meters.reading import FORMATS, RESAMPLES
from fedjax_hk.data.windows import GAPS
from fedjax_hk.settings import config

DATA = Path(__file__).parents[2] / "shared" / "data"


def zipped(content: bytes, name="inside.csv") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, content)
    return stream.getvalue()


PACK = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zip": zipped}


def write(folder, text, name="table.csv"):
    path = Path(folder) / name
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(PACK.get(path.suffix, bytes)(content))
    return path


def message(path, **kwargs):
    with pytest.raises(DataError) as caught:
        read(path, **kwargs)
    return str(caught.value)


def daily(values, start="2015-01-01", name="date"):
    """A wide table as text, from columns of values by client."""
    frame = pd.DataFrame(values, pd.date_range(start, periods=len(next(iter(values.values())))))
    return frame.to_csv(index_label=name)


def test_flags_offer_what_the_readers_know():
    offered = {name: config.SETTINGS[name].choices for name in ("data_format", "resample", "gaps")}
    assert offered["data_format"] == FORMATS
    assert ("", *offered["resample"]) == RESAMPLES
    assert offered["gaps"] == GAPS


# --- tables of all kinds -----------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data())
def test_long_tables_of_every_kind_are_read_back(data):
    draw = data.draw
    num_clients, num_times = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    step = draw(st.sampled_from(["D", "h", "15min", "7D"]))
    times = pd.date_range("2016-02-27", periods=num_times, freq=step)
    ids = draw(
        st.lists(
            st.text("abcXYZ _-é.", min_size=1, max_size=6).map(lambda s: "m" + s.strip()),
            min_size=num_clients, max_size=num_clients, unique=True,
        )
    )  # fmt: skip
    reading = st.one_of(st.none(), st.integers(0, 10**6).map(float), st.floats(0, 1e9, width=32))
    row = st.lists(reading, min_size=num_clients, max_size=num_clients)
    frame = pd.DataFrame(
        draw(st.lists(row, min_size=num_times, max_size=num_times)), times, ids, dtype=float
    )
    frame.iloc[:2] = frame.iloc[:2].fillna(1.0)
    rows = frame.melt(ignore_index=False, var_name="client", value_name="value")
    # A missing reading may be a row without a value, or no row.
    rows = rows if draw(st.booleans()) else rows.dropna()
    names = draw(
        st.sampled_from(
            [["client", "time", "value"], ["LCLid", "tstp", "KWH/hh (per half hour) "],
             ["user key", "DateTime", "reading"], ["who", "when", "much"]]
        )
    )  # fmt: skip
    rows = rows.reset_index(names="time")[["client", "time", "value"]].set_axis(names, axis=1)
    distances = [d for _, own in rows.groupby(names[0]) for d in np.diff(own[names[1]])]
    assume(sorted(distances)[(len(distances) - 1) // 2] == times[1] - times[0])  # it is the step
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(len(rows))
    rows = rows.iloc[order]
    packing = draw(st.sampled_from(["", ".gz", ".xz", ".bz2", ".zip"]))
    with tempfile.TemporaryDirectory() as folder:
        if draw(st.booleans()):
            stream = io.BytesIO()
            rows.to_parquet(stream, index=False)
            path = write(folder, stream.getvalue(), f"t.parquet{packing}")
        else:
            separator, decimal = draw(st.sampled_from([(",", "."), (";", ","), (";", ".")]))
            text = rows.to_csv(index=False, sep=separator, decimal=decimal)
            if draw(st.booleans()):
                text = "\ufeff" + text.replace("\n", "\r\n")
            path = write(folder, text, f"t.csv{packing}")
        table = read(path)
    order = [table.client_ids.index(c) for c in ids if c in table.client_ids]
    known = frame.loc[:, [c for c in ids if c in table.client_ids]]
    known = known.loc[table.times[0] : table.times[-1]]
    assert set(table.client_ids) == set(rows[names[0]])
    np.testing.assert_allclose(table.values_tn[:, order], known.to_numpy(), rtol=1e-7)


@settings(max_examples=20)
@given(
    values=st.lists(
        st.tuples(st.floats(0, 1e6, width=32), st.integers(0, 999)), min_size=2, max_size=20
    ),
    suffix=st.sampled_from([".csv", ".csv.zip", ".parquet"]),
    decimal=st.sampled_from([".", ","]),
)
def test_wide_tables_of_every_kind_are_read_back(values, suffix, decimal):
    times = pd.date_range("2016-01-01", periods=len(values), freq="h")
    frame = pd.DataFrame(values, times, ["a", "b"], dtype=float)
    with tempfile.TemporaryDirectory() as folder:
        if suffix == ".parquet":
            frame.to_parquet(Path(folder) / "t.parquet")
            table = read(Path(folder) / "t.parquet")
        else:
            text = frame.to_csv(sep=";", decimal=decimal, index_label="hour")
            table = read(write(folder, text, f"t{suffix}"))
    np.testing.assert_allclose(table.values_tn, frame.to_numpy(), rtol=1e-7)
    np.testing.assert_array_equal(table.times, times.to_numpy().astype("datetime64[s]"))


def test_time_first_long_tables_and_the_format_flag(tmp_path):
    text = "stamp,where,much\n2016-01-01,h1,1\n2016-01-02,h1,2\n2016-01-01,h2,3\n2016-01-02,h2,4\n"
    assert read(write(tmp_path, text)).client_ids == ("h1", "h2")
    assert "there twice" in message(write(tmp_path, text), data_format="wide")
    wide = write(tmp_path, daily({"a": [1, 2], "b": [3, 4]}))
    assert "no columns for client, time and value" in message(wide, data_format="long")
    assert "has another format" in message(wide, data_format="daiad")
    with pytest.raises(ValueError, match="data_format"):
        read(wide, data_format="excel")


def test_clients_that_read_at_their_own_minute_share_a_grid(tmp_path):
    rows = ["client,time,value"]
    for client, minute in (("a", 0), ("b", 30), ("c", 50)):
        rows += [f"{client},2016-01-01T{hour:02}:{minute:02},{hour}" for hour in range(5)]
    table = read(write(tmp_path, "\n".join(rows)))
    np.testing.assert_array_equal(table.values_tn[:5, :2], np.arange(5)[:, None] * [1, 1])
    assert np.isfinite(table.values_tn).sum() == 15


LONG = """client,time,value
a,2016-01-01,1
a,2016-01-02,2
a,2016-01-03,3
b,2016-01-01,4
b,2016-01-02,5
b,2016-01-03,6
"""

BAD_LONG = {
    "no date": (LONG.replace("b,2016-01-02", "b,02/01/2016"), ["row 6", "'time'", "02/01/2016"]),
    "empty date": (LONG.replace("b,2016-01-02", "b,"), ["row 6", "'time'", "empty"]),
    "no number": (
        LONG.replace("-02,5", "-02,off"),
        ["row 6", "column 3", "client 'b'", "'off'", "no number"],
    ),
    "decimal comma": (LONG.replace("-02,5", '-02,"1,5"'), ["row 6", "client 'b'", "'1,5'"]),
    "too large": (LONG.replace("-02,5", "-02,1e99"), ["row 6", "client 'b'", "beyond"]),
    "no client": (LONG.replace("b,2016-01-02", ",2016-01-02"), ["row 6", "'client'", "no name"]),
    "short row": (LONG + "a,2016-01-04\n", ["row 8", "2 cells"]),
    "no header": (LONG.split("\n", 1)[1], ["row 1", "2016-01-01", "client, time, value"]),
    "one row each": ("client,time,value\na,2016-01-01,1\nb,2016-01-02,2\n", ["no client has two"]),
    "wrong decade": (
        LONG + "a,2515-01-04,1\n",
        ["rows", "and 8", "2515-01-04", "Correct the date"],
    ),
    "header only": ("client,time,value\n", ["no row of readings"]),
    "empty": ("", ["empty"]),
    "all negative": (
        LONG.replace(",1\na", ",-1\na").replace(",4", ",-4"),
        ["no client can be used", "a: ", "row 2 has -1", "b: ", "row 5 has -4"],
    ),
}


@pytest.mark.parametrize("name", BAD_LONG)
def test_bad_long_tables_name_the_place(tmp_path, name):
    text, parts = BAD_LONG[name]
    found = message(write(tmp_path, text))
    assert all(part in found for part in ["table.csv", *parts]), found


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("c,2016-01-01,1\nc,2016-01-02,-2\n", "row 9 has -2.0"),
        ("c,2016-01-01,1\nc,2016-01-01,2\n", "rows 8 and 9: 2016-01-01T00:00:00 has the readings"),
        ("c,2016-01-01,1\nc,2016-01-02T12:00,2\n", "row 9: 2016-01-02T12:00:00 does not lie on"),
    ],
)
def test_a_bad_client_of_a_long_table_is_left_out(tmp_path, extra, reason):
    table = read(write(tmp_path, LONG + extra))
    assert table.client_ids == ("a", "b")
    (excluded,) = table.excluded
    assert excluded.client == "c" and reason in excluded.reason


def test_exact_repeats_and_unsorted_rows_are_mended(tmp_path):
    header, *rows = LONG.strip().split("\n")
    table = read(write(tmp_path, "\n".join([header, *rows[::-1], rows[0]])))
    assert table.client_ids == ("b", "a")
    np.testing.assert_array_equal(table.values_tn, [[4, 1], [5, 2], [6, 3]])
    assert "1 exact repeats dropped" in table.source and "sorted" in table.source


def test_zips_hold_one_table(tmp_path):
    for names, said in ((["a.csv", "b.csv"], "2 tables (a.csv, b.csv)"), ([], "no table")):
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
            for name in [*names, "readme.md", "licence.md"]:
                archive.writestr(name, LONG)
        assert said in message(tmp_path / "t.zip")
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("folder/a.csv", LONG)
        archive.writestr("readme.md", "text")
        archive.writestr("__MACOSX/a.csv", "x")
    assert read(tmp_path / "t.zip").client_ids == ("a", "b")
    (tmp_path / "t.zip").write_bytes(zipped(LONG.encode())[:-30])
    assert "no whole .zip file" in message(tmp_path / "t.zip")


def test_broken_parquet_and_unreadable_files(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    assert "no whole Parquet file" in message(tmp_path / "t.parquet")
    path = write(tmp_path, LONG)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "table.csv cannot be read: Permission denied" in message(path)


def test_parquet_needs_its_package(tmp_path, monkeypatch):
    pd.DataFrame({"client": ["a", "a"]}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert "pip install 'fedjax-hk[parquet]'" in message(tmp_path / "t.parquet")


def test_a_format_is_a_class_with_client_ids_and_to_table(tmp_path, monkeypatch):
    class Doubling:
        def __init__(self):
            self.client_ids = ["a", "b", "c"]

        def to_table(self, wanted, resample, zone):
            assert (resample, zone) == ("daily", "Europe/Madrid")
            times = np.datetime64("2016-01-01", "s") + np.arange(2) * np.timedelta64(86400, "s")
            values_tn = np.array([[1.0, 2, 3], [2, 4, 6]])
            columns = [self.client_ids.index(client) for client in wanted]
            return Table(times, tuple(wanted), values_tn[:, columns], "L", "doubling", "")

    parsed = lambda files, data_format: ([Doubling()], ["double"])  # noqa: E731
    monkeypatch.setattr("fedjax_hk.data.meters.reading._parsed", parsed)
    path = write(tmp_path, "whatever")
    table = read(path, clients="c,a", resample="daily", timezone="Europe/Madrid")
    assert table.client_ids == ("c", "a") and table.unit == "L"
    np.testing.assert_array_equal(table.values_tn, [[3, 1], [6, 2]])
    said = "table.csv: 2 steps of 1 day from 2016-01-01 to 2016-01-02, 2 of 3 clients; doubling"
    assert table.source == said


# --- several files, coarser steps ----------------------------------------------------------


def test_files_with_commas_between_are_joined(tmp_path):
    one = write(tmp_path, daily({"a": [1.0, 2, 3], "b": [4, 5, 6]}), "one.csv")
    two = write(tmp_path, LONG.replace("2016-01", "2015-01").replace("b,", "c,"), "two.csv")
    more = write(tmp_path, daily({"a": [7.0, 8]}, "2015-01-05"), "more.csv")
    table = read(f"{one}, {two},{more}")
    assert table.client_ids == ("a", "b", "c")
    nan = np.nan
    np.testing.assert_array_equal(
        table.values_tn.T,
        [[1, 2, 3, nan, 7, 8], [4, 5, 6, nan, nan, nan], [4, 5, 6, nan, nan, nan]],
    )
    assert table.fingerprint != read([one, two]).fingerprint != read(one).fingerprint
    assert read([one, more], clients="b").client_ids == ("b",)
    assert "named twice" in message(f"{one},{one}")
    assert "nowhere.csv" in message(f"{one},nowhere.csv")
    assert "No file" in message(",")
    differs = write(tmp_path, daily({"a": [9.0, 2], "d": [1, 1]}), "differs.csv")
    table = read([one, differs])
    assert table.client_ids == ("b", "d")
    assert "differs.csv has 9 and another file 1" in table.excluded[0].reason
    hourly = write(tmp_path, "time,z\n2015-01-01T00:00,1\n2015-01-01T01:00,2\n", "hourly.csv")
    assert "no common grid" in message([one, hourly])


def test_sums_by_calendar(tmp_path):
    times = pd.date_range("2016-10-28", periods=24 * 6, freq="h")
    frame = pd.DataFrame({"a": np.ones(len(times)), "b": 2.0}, times)
    frame.iloc[30, 1] = np.nan
    path = write(tmp_path, frame.to_csv(index_label="time"))
    plain = read(path, resample="daily")
    np.testing.assert_array_equal(plain.values_tn[:, 0], 24)
    np.testing.assert_array_equal(np.isnan(plain.values_tn[:, 1]), [0, 1, 0, 0, 0, 0])
    # In Madrid two hours of the first day were before these, and the 30th has 25 hours.
    local = read(path, resample="daily", timezone="Europe/Madrid")
    assert [str(t)[5:10] for t in local.times] == ["10-29", "10-30", "10-31", "11-01", "11-02"]
    np.testing.assert_array_equal(local.values_tn[:, 0], [24, 25, 24, 24, 24][:5])
    assert "no such zone" in message(path, resample="daily", timezone="Europe/Madird")
    days = write(tmp_path, daily({"a": np.ones(30)}), "days.csv")
    weekly = read(days, resample="weekly", timezone="Europe/Madrid")
    np.testing.assert_array_equal(weekly.values_tn[:, 0], 7)
    assert str(weekly.times[0])[:10] == "2015-01-05"
    assert "do not add up" in message(days, resample="hourly")
    np.testing.assert_array_equal(read(days, resample="daily").values_tn, read(days).values_tn)
    assert "no two whole periods" in message(
        write(tmp_path, daily({"a": np.ones(9)}), "few.csv"), resample="weekly"
    )


# --- who is left out -----------------------------------------------------------------------


def test_the_same_meter_twice_is_found_and_the_longer_kept(tmp_path):
    rng = np.random.default_rng(0)
    use = rng.integers(1, 200, (60, 3)).astype(float)
    part = use[:, 0].copy()
    part[:25] = np.nan
    part[40] += 1  # one reading apart: an edge of a gap
    columns = {"part": part, "a": use[:, 0], "b": use[:, 1], "idle": 0.0, "idle2": 0.0}
    table = read(write(tmp_path, daily(columns)))
    assert table.client_ids == ("a", "b", "idle", "idle2")
    (twin,) = table.excluded
    assert twin.client == "part"
    assert (
        "the same meter as a, which is kept (60 readings against 35): 34 of the 35" in twin.reason
    )


def make_table(columns, start="2015-01-01", num_excluded=0):
    values_tn = np.stack([np.asarray(c, float) for c in columns.values()], axis=1)
    times = np.datetime64(start, "s") + np.arange(len(values_tn)) * np.timedelta64(1, "D")
    return Table(times.astype("datetime64[s]"), tuple(columns), values_tn, "L", "here", "f")


def test_activity_and_history(tmp_path):
    nan = np.nan
    table = make_table(
        {
            "low": [1, 1, 1, 1],
            "high": [9, nan, 9, 9],
            "short": [nan, nan, 10, 10],
            "none": [nan] * 4,
        }
    )
    assert choose_clients(table).client_ids == table.client_ids
    chosen = choose_clients(table, active_factor=1.2, min_days=3)
    assert chosen.client_ids == ("high",)
    np.testing.assert_array_equal(chosen.values_tn[:, 0], [9, nan, 9, 9])
    reasons = {e.client: e.reason for e in chosen.excluded}
    assert "mean use 1 L a step is below 1.2 times the fleet's 6.667" in reasons["low"]
    assert "2 days of data, fewer than 3" in reasons["short"]
    assert "0 days of data, fewer than 3" in reasons["none"]
    assert "3 of 4 clients use 1.2 times" in chosen.source
    with pytest.raises(DataError, match="leave none of the 4 clients"):
        choose_clients(table, active_factor=9, min_days=1)


def test_counts_of_the_full_set_are_compared_with_the_papers():
    use = np.ones(1099)
    use[:188] = 10.0
    columns = {f"m{i}": np.full(730, u) for i, u in enumerate(use)}
    for i in range(4):
        columns[f"m{i}"][:9] = np.nan
    found = choose_clients(make_table(columns), 1.6, 730)
    assert len(found.client_ids) == 184
    assert "184 used; as here" in found.source
    del columns["m1098"]
    assert "here 1098, 188 and 184" in choose_clients(make_table(columns), 1.6, 730).source
    assert "this file has 1098" in choose_clients(make_table(columns)).source
    assert "paper" not in choose_clients(make_table({"a": [1, 2]}), 0.5).source


def test_bad_fleets(tmp_path):
    short = write(tmp_path, daily({"a": np.arange(10.0), "b": np.arange(10.0) + 1}))
    with pytest.raises(DataError, match="No client has enough readings for look-back 12"):
        build_fleet(read(short))
    long = {"long": np.arange(60.0), "same": np.ones(60), "short": [*range(14), *[np.nan] * 46]}
    table = read(write(tmp_path, daily(long)))
    assert "the readings of same (1) never change" in table.source
    fleet = build_fleet(table)
    assert fleet.client_ids == ("long", "same")
    assert fleet.excluded[0].client == "short" and "14 readings" in fleet.excluded[0].reason


# --- the cache -----------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file whose table is kept, and the folder that it is kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fedjax_hk.data.meters.reading._WORTH_KEEPING", 0)
    text = daily({"a": [1.0, np.nan, 3], "b": [4, 5, -6], "c": [7, 7, 8]})
    return write(tmp_path, text), tmp_path / "cache" / "fedjax_hk"


def same(one: Table, two: Table) -> None:
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b) if isinstance(a, np.ndarray) else None
        assert isinstance(a, np.ndarray) or a == b


def test_a_kept_table_is_the_same_and_is_used(kept, monkeypatch):
    path, folder = kept
    first = read(path, unit="L")
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("fedjax_hk.data.meters.reading._read", None)  # nothing is parsed again
    same(read(path, unit="L"), first)
    moved = path.rename(folder / path.name)
    same(read(moved, unit="L"), first)


def test_other_content_or_arguments_are_read_anew(kept):
    path, folder = kept
    first = read(path)
    assert read(path, unit="kWh").unit == "kWh"
    assert read(path, clients="a").client_ids == ("a",)
    path.write_text(path.read_text().replace("7", "9"))
    assert read(path).values_tn[0, 1] == 9 and first.values_tn[0, 1] == 7
    assert len(list(folder.iterdir())) == 4
    listed = path.parent / "ids.txt"
    for name in ("a", "c"):
        listed.write_text(name)
        assert read(path, clients=str(listed)).client_ids == (name,)


def test_a_damaged_table_is_made_again(kept):
    path, folder = kept
    first = read(path)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for content in (b"", b"no archive", whole[:-20], whole[: len(whole) // 2]):
        file.write_bytes(content)
        same(read(path), first)
        assert file.read_bytes() == whole


def test_the_cache_may_be_off_or_impossible(kept, monkeypatch):
    path, folder = kept
    first = read(path, cache=False)
    assert not folder.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    same(read(path), first)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.folder() == Path.home() / ".cache" / "fedjax_hk"


def test_old_tables_make_room(kept, monkeypatch):
    path, folder = kept
    monkeypatch.setattr(cache, "_KEPT", 2)
    for unit in "abc":
        read(path, unit=unit)
    assert len(list(folder.iterdir())) == 2


# --- real meters ---------------------------------------------------------------------------


def test_london_hours_as_long_parquet(tmp_path):
    path = DATA / "london_lcl" / "hourly_kwh.csv.xz"
    if not path.exists():
        pytest.skip("the real meters are not beside the repository: no london_lcl")
    wide = read(path, clients="MAC000015,MAC000017", resample="daily", cache=False)
    table = pd.read_csv(path, usecols=["hour", "MAC000015", "MAC000017"])
    rows = table.melt(id_vars="hour", var_name="LCLid", value_name="KWH").dropna()
    rows.to_parquet(tmp_path / "long.parquet")
    long = read(tmp_path / "long.parquet", resample="daily")
    np.testing.assert_allclose(long.values_tn, wide.values_tn[-len(long.times) :], rtol=1e-12)
