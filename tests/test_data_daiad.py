"""Raw meters: the clock, the register and the format, and what of it cannot be read."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_data import longest_rising_length, register_at

from fedjax_hk.data import DataError, build_fleet, read
from fedjax_hk.data.meters import daiad_rows, registers
from fedjax_hk.data.meters.clock import DAY, HOUR, clock

DATA = Path(__file__).parents[2] / "shared" / "data" / "alicante_swm"
HEADER = "user key;datetime;meter reading;diff"
MADRID = ZoneInfo("Europe/Madrid")


def seconds(text: str) -> int:
    return int(np.datetime64(text, "s").astype(np.int64))


# --- the clock -------------------------------------------------------------------------


@given(
    zone=st.sampled_from(["Europe/Madrid", "Australia/Sydney", "America/New_York", "Asia/Tokyo"]),
    instant=st.integers(seconds("2000-01-01"), seconds("2037-01-01")),
)
def test_clock_equals_the_zones_of_python(zone, instant):
    local = datetime.datetime.fromtimestamp(instant, ZoneInfo(zone))
    wall = np.array([int(local.replace(tzinfo=datetime.UTC, fold=0).timestamp())])
    assert clock(zone).to_local(np.array([instant])) == wall
    assert clock(zone).to_utc(wall, bool(local.fold)) == instant
    other = local.replace(fold=1 - local.fold)
    assert clock(zone).is_repeated(wall) == (other.utcoffset() != local.utcoffset())


@pytest.mark.parametrize(
    ("zone", "skipped", "utc"),
    [
        ("Europe/Madrid", "2015-03-29T02:30", "2015-03-29T01:30"),
        ("Australia/Lord_Howe", "2016-10-02T02:10", "2016-10-01T15:40"),  # half an hour
        ("America/Sao_Paulo", "2016-10-16T00:00", "2016-10-16T03:00"),  # a midnight
        ("Pacific/Apia", "2011-12-30T12:00", "2011-12-30T22:00"),  # a day
    ],
)
def test_what_the_clock_skips_is_read_with_the_offset_before(zone, skipped, utc):
    wall = datetime.datetime.fromisoformat(skipped).replace(tzinfo=ZoneInfo(zone), fold=0)
    assert wall.timestamp() == seconds(utc)  # as Python's zones do
    local = np.array([seconds(skipped), seconds("2016-06-01")])
    found = clock(zone).to_utc(local)
    assert found[0] == seconds(utc) and clock(zone).to_local(found)[1] == local[1]
    assert not clock(zone).is_repeated(local).any()


def test_days_have_23_24_and_25_hours():
    first, last = seconds("2016-10-29T00:00"), seconds("2016-11-01T00:00")
    edge_t, name_t = clock("Europe/Madrid").edges("daily", first, last)
    assert (np.diff(edge_t) / HOUR).tolist() == [24, 25, 24, 24]
    assert name_t.astype("datetime64[s]").astype("datetime64[D]").astype(str).tolist() == [
        "2016-10-29",
        "2016-10-30",
        "2016-10-31",
        "2016-11-01",
    ]


def test_weeks_begin_on_monday():
    _, name_t = clock("").edges("weekly", seconds("2015-01-01"), seconds("2015-01-20"))
    assert [str(d) for d in name_t.astype("datetime64[s]").astype("datetime64[D]")] == [
        "2014-12-29",
        "2015-01-05",
        "2015-01-12",
        "2015-01-19",
    ]


# --- the register ----------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), max_size=40))
def test_longest_rising_part(values):
    values_r = np.array(values, float)
    keep_r = registers.longest_rising(values_r)
    assert (np.diff(values_r[keep_r]) >= 0).all()
    assert keep_r.sum() == longest_rising_length(values)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_cleaning_believes_the_longest_rising_part(values):
    values_r = np.array(values, float)
    rising_r, keep_r = registers.clean(values_r)
    assert (np.diff(rising_r[keep_r]) >= 0).all()
    assert ((values_r - rising_r)[keep_r] <= 0).all()
    assert ((rising_r - values_r)[keep_r] <= 10).all()
    assert (keep_r & (rising_r == values_r)).sum() >= longest_rising_length(values)


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([100, 110, 12398, 12408, 130, 140], [100, 110, None, None, 130, 140]),  # up and back
        ([100, 108, 110, 104, 120], [100, 108, 110, 110, 120]),  # backflow
        ([100, 110, 50, 120], [100, 110, None, 120]),
        ([100, 248620, 110, 248630, 120, 130], [100, None, 110, None, 120, 130]),  # interleaved
    ],
)
def test_glitches(readings, expected):
    rising_r, keep_r = registers.clean(np.array(readings, float))
    found = [x if keep else None for x, keep in zip(rising_r, keep_r, strict=True)]
    assert found == expected


@given(
    steps=st.lists(st.integers(1, 9 * HOUR), min_size=1, max_size=60),
    used=st.lists(st.integers(0, 500), min_size=60, max_size=60),
)
def test_totals_equal_loops_and_keep_the_volume(steps, used):
    time_r = np.cumsum([0, *steps])
    register_r = 1000.0 + np.cumsum([0, *used[: len(steps)]])
    edge_t = np.arange(0, time_r[-1] + DAY + 1, DAY) - HOUR
    found_t, filled_t = registers.totals(time_r, register_r, edge_t, 6 * HOUR)
    for widest, result_t in ((6 * HOUR, found_t), (math.inf, filled_t)):
        at = [register_at(time_r, register_r, t, widest) for t in edge_t]
        np.testing.assert_allclose(result_t, np.diff(at), atol=1e-5)
    # What a gap holds is counted once.
    at = [register_at(time_r, register_r, t, math.inf) for t in edge_t]
    known = [x for x in at if not math.isnan(x)]
    assert np.nansum(filled_t) == pytest.approx(known[-1] - known[0] if known else 0, abs=1e-4)


# --- the format ------------------------------------------------------------------------


def local_rows(key, first, num_hours, register, minute=20, zone=MADRID):
    """`(key, wall clock, register)` every hour of real time, oldest first."""
    start = datetime.datetime.fromisoformat(first).replace(tzinfo=zone, minute=minute)
    instants = [start.timestamp() + i * HOUR for i in range(num_hours)]
    times = [datetime.datetime.fromtimestamp(t, zone) for t in instants]
    return [f"{key};{t:%d/%m/%Y %H:%M:%S};{register(i)};0" for i, t in enumerate(times)]


def write(folder, rows, name="meters.csv", header=HEADER, end="\n"):
    path = folder / name
    path.write_bytes("".join(line + end for line in [header, *rows]).encode())
    return path


def hourly_register(i):
    return 5000 + 3 * i + (i % 7)


def test_both_row_orders_and_all_headers_give_the_same(tmp_path):
    """The last Sunday of October is inside: file order tells its repeated hour apart."""
    rows = local_rows("a", "2016-10-16", 24 * 23, hourly_register)
    rows += local_rows("b", "2016-10-16", 24 * 23, lambda i: 10 * i, minute=55)
    expected = None
    for name, text, header, end in (
        ("old.csv", rows, HEADER, "\n"),
        ("new.csv", rows[::-1], "user.key;datetime;meter.reading;diff", "\n"),
        ("v.csv", rows, "V1;V2;V3;V4", "\r\n"),
        ("bom.csv", rows, "\ufeff" + HEADER, "\n"),
        ("blank.csv", ["", *rows, "", ""], HEADER, "\n"),
    ):
        path = write(tmp_path, text, name, header, end)
        for resample in ("daily", "hourly", "weekly"):
            table = read(path, resample=resample)
            order = np.argsort(table.client_ids)
            found = table.times, table.values_tn[:, order]
            expected = expected or {}
            for a, b in zip(expected.setdefault(resample, found), found, strict=True):
                np.testing.assert_array_equal(a, b)
    headerless = tmp_path / "headerless.csv"
    headerless.write_text("\n".join(rows))
    np.testing.assert_array_equal(read(headerless).values_tn, expected["daily"][1])
    assert read(headerless).unit == "L" and read(headerless, unit="gal").unit == "gal"
    # 25 hours of 10 L on the 30th, 24 on the days around it.
    times, values_tn = expected["daily"]
    at = {str(t)[:10]: v for t, v in zip(times, values_tn[:, 1], strict=True)}
    assert [at[f"2016-10-{d}"] for d in (29, 30, 31)] == [240, 250, 240]
    assert np.diff(expected["hourly"][0]).astype(int).tolist() == [HOUR] * (
        len(expected["hourly"][0]) - 1
    )
    assert np.nanmax(expected["hourly"][1][:, 1]) == pytest.approx(
        10
    )  # nothing is doubled in that hour


def test_a_gap_loses_and_doubles_nothing(tmp_path):
    rows = local_rows("a", "2016-05-01", 24 * 8, lambda i: 100 + 2 * i)
    # Within a day a gap costs nothing; over a midnight, the two days around it.
    path = write(tmp_path, rows[:30] + rows[40:92] + rows[112:])
    table = read(path)
    used = table.values_tn[:, 0]
    assert table.times[0] == np.datetime64("2016-05-02")
    np.testing.assert_allclose(used, [48, 48, np.nan, np.nan, 48, 48], atol=1e-5)
    np.testing.assert_allclose(table.filled_tn[:, 0], 48, atol=1e-5)


def test_garbage_differences_and_scientific_registers(tmp_path):
    rows = local_rows("a", "2016-05-01", 24 * 4, lambda i: 699990 + 2 * i)
    rows = [r.replace(";700000;", ";7e+05;") for r in rows]
    expected = read(write(tmp_path, rows, "good.csv")).values_tn
    rows[30] = rows[30].rsplit(";", 1)[0] + ";1061158910"
    rows[31] = rows[31].rsplit(";", 1)[0] + ";"
    np.testing.assert_array_equal(read(write(tmp_path, rows)).values_tn, expected)


def test_minute_meters_decimal_commas_and_unsorted_rows(tmp_path):
    start = datetime.datetime(2017, 1, 1)
    rows = [
        f"a;{start + datetime.timedelta(minutes=i):%d/%m/%Y %H:%M:%S};{0.5 * i:.1f};0"
        for i in range(3 * 24 * 60)
    ]
    expected = read(write(tmp_path, rows, "dots.csv")).values_tn
    np.testing.assert_allclose(expected, 720)
    rng = np.random.default_rng(0)
    mixed = [rows[i].replace(".", ",") for i in rng.permutation(len(rows))]
    np.testing.assert_array_equal(read(write(tmp_path, mixed)).values_tn, expected)


def test_blocks_and_files_do_not_matter(tmp_path, monkeypatch):
    rows = local_rows("a", "2016-10-24", 24 * 14, hourly_register)
    rows += local_rows("bé", "2016-10-25", 24 * 12, lambda i: 10 * i, minute=55)
    path = write(tmp_path, rows)
    expected = read(path)
    monkeypatch.setattr(daiad_rows, "_BLOCK", 7000)
    np.testing.assert_array_equal(read(path).values_tn, expected.values_tn)
    assert read(path).client_ids == ("a", "bé")
    # Two files of the same meters, with some rows in both.
    parts = [write(tmp_path, rows[:200], "one.csv"), write(tmp_path, rows[150:], "two.csv")]
    table = read(",".join(map(str, parts)))
    np.testing.assert_array_equal(table.values_tn, expected.values_tn)
    assert "50 exact repeats dropped" in table.source
    assert read(parts, clients="bé").client_ids == ("bé",)


def test_a_meter_that_stands_still_in_the_test_span_is_kept(tmp_path):
    rows = local_rows("a", "2016-01-01", 24 * 80, lambda i: 4 * min(i, 24 * 60))
    rows += local_rows("b", "2016-01-01", 24 * 80, lambda i: 4 * i + i % 5)
    rows += local_rows("still", "2016-01-01", 24 * 80, lambda i: 7)
    table = read(write(tmp_path, rows))
    assert "still (0) never change" in table.source
    fleet = build_fleet(table)
    assert fleet.client_ids == ("a", "b", "still")
    test = fleet.test
    np.testing.assert_array_equal((test.targets * test.scale + test.shift)[[0, 2]], 0)
    assert np.isfinite(test.inputs).all()


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("a;31/02/2016 10:00:00;5;0", ["row 4", "column 2", "meter a", "31/02/2016", "no time"]),
        ("a;01/02/2016 25:00:00;5;0", ["row 4", "column 2", "meter a", "25:00:00"]),
        ("a;2016-02-01 10:00:00;5;0", ["row 4", "column 2", "meter a", "31/01/2016 13:05:00"]),
        ("a;01/02/1970 10:00:00;5;0", ["row 4", "column 2", "meter a", "1970", "year"]),
        ("a;01/02/2016 10:00:00;x;0", ["row 4", "column 3", "meter a", "'x'", "no number"]),
        ("a;01/02/2016 10:00:00;1,5,0;0", ["row 4", "column 3", "'1,5,0'"]),
        ("a;01/02/2016 10:00:00;5", ["row 4", "3 cells"]),
        ("a;01/02/2016 10:00:00;5;0;1", ["row 4", "5 cells"]),
        (";01/02/2016 10:00:00;5;0", ["row 4", "column 1", "no name"]),
        ("a;01/02/2096 10:00:00;900;0", ["meter a", "2096", "Correct the date"]),
    ],
)
def test_bad_rows_name_the_place(tmp_path, row, parts):
    rows = local_rows("a", "2016-01-01", 24 * 5, lambda i: i)
    path = write(tmp_path, [*rows[:2], row, *rows[2:]])
    with pytest.raises(DataError) as caught:
        read(path)
    assert all(part in str(caught.value) for part in ["meters.csv", *parts]), str(caught.value)


def test_header_only_and_bad_encoding(tmp_path):
    with pytest.raises(DataError, match="no row of readings"):
        read(write(tmp_path, []))
    path = tmp_path / "latin.csv"
    path.write_bytes((HEADER + "\ncaf\xe9;01/02/2016 10:00:00;5;0\n").encode("latin-1"))
    with pytest.raises(DataError, match="row 2: no UTF-8"):
        read(path)


def test_negative_and_short_meters_are_left_out_with_the_reason(tmp_path):
    rows = local_rows("good", "2016-01-01", 24 * 5, lambda i: i)
    rows += local_rows("bad", "2016-01-01", 24 * 5, lambda i: i - 3)
    rows += local_rows("one", "2016-01-01", 1, lambda i: i)
    table = read(write(tmp_path, rows))
    assert table.client_ids == ("good",)
    bad, one = table.excluded
    assert bad.client == "bad" and "row 122 has -3 (3 such readings)" in bad.reason
    assert one == ("one", "1 readings; two are needed")
    with pytest.raises(DataError, match=r"no meter can be used\.\n  bad: "):
        read(write(tmp_path, rows), clients="bad")


# --- real meters -----------------------------------------------------------------------


def real(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the real meters are not beside the repository: no {name}")
    return path


def test_samples_agree_with_the_table():
    clients = pd.read_csv(real("clients.csv"))
    daily = pd.read_csv(real("daily_litres.csv"), index_col=0, parse_dates=True)
    name_of = dict(zip(clients["user_key"], clients["client"], strict=True))
    twin = clients.dropna(subset=["duplicate_of"])
    name_of.update(zip(twin["user_key"], twin["duplicate_of"], strict=True))
    for sample in ("raw/sample_1K.csv", "raw/sample_trialA.csv"):
        table = read(real(sample))
        given = daily[[name_of[key] for key in table.client_ids]].loc[table.times].to_numpy()
        assert len(table.times) == 12 or len(table.times) == 14 or len(table.times) == 13
        np.testing.assert_allclose(table.values_tn, given, atol=0.1)


@pytest.mark.slow
def test_raw_files_agree_with_the_table_and_hold_23_meters_twice():
    names = ("swm_trialA_1K_subset78", "swm_trialA", "swm_trialA_extended")
    table = read([real(f"raw/{name}.csv.xz") for name in names], cache=False)
    clients = pd.read_csv(real("clients.csv"))
    twins = {e.client for e in table.excluded if "same meter" in e.reason}
    assert twins == set(clients["user_key"][clients["duplicate_of"].notna()])
    kept = clients[clients["duplicate_of"].isna()]
    daily = pd.read_csv(real("daily_litres.csv"), index_col=0, parse_dates=True)
    found = pd.DataFrame(table.values_tn, table.times, table.client_ids)
    ours = found[kept["user_key"]].reindex(daily.index).to_numpy()
    given = daily[kept["client"]].to_numpy()
    either = np.isfinite(ours) | np.isfinite(given)
    agree = np.abs(ours - given) <= 0.1 + 1e-9
    assert agree[either].mean() >= 0.999
    # k32 has a reading at the very midnight that its first day begins with.
    assert {(str(daily.index[t].date()), kept["client"].iloc[i]) for t, i in
            np.argwhere(either & ~agree)} == {("2017-01-12", "k32")}  # fmt: skip
