"""Classes of samples: errors against loops, networks against Flax, and runs to the end."""

import dataclasses
import io
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_hk import data, models
from fedjax_hk import main as main_lib
from fedjax_hk.models import classifiers
from fedjax_hk.report import partition_files, plots, summary
from fedjax_hk.round.training import make_trainer
from fedjax_hk.rules import RULES
from fedjax_hk.run import loop
from fedjax_hk.run import prepare as prepare_lib
from fedjax_hk.settings.config import Config, ConfigError
from fedjax_hk.store import records, run_folder
from fedjax_hk.tasks import CLASSIFICATION
from fedjax_hk.tasks import class_errors as class_errors_lib
from fedjax_hk.types import Samples

CLASSES = 4
LOSS = CLASSIFICATION.judge.losses["cross_entropy"]
class_errors = jax.jit(class_errors_lib.class_errors)


def random_samples(seed, num=5, width=9):
    rng = np.random.default_rng(seed)
    mask = rng.random((num, width)) < 0.7
    mask[0] = False
    targets = np.where(mask, rng.integers(0, CLASSES, (num, width)), 0).astype(np.int32)
    logits = rng.standard_normal((num, width, CLASSES)).astype(np.float32)
    logits[~mask] = np.nan
    return logits, Samples(None, targets, mask)


def errors_by_loops(logits, targets):
    """Mean loss, accuracy and balanced accuracy of one client's samples, in float64."""
    loss, right = 0.0, []
    for scores, label in zip(np.asarray(logits, np.float64), targets, strict=True):
        loss += math.log(sum(math.exp(score) for score in scores)) - scores[label]
        right.append(max(range(CLASSES), key=lambda c: scores[c]) == label)
    recalls = []
    for label in sorted(set(targets)):
        own = [hit for hit, target in zip(right, targets, strict=True) if target == label]
        recalls.append(sum(own) / len(own))
    return loss / len(targets), sum(right) / len(targets), sum(recalls) / len(recalls)


@pytest.mark.parametrize("seed", range(3))
def test_class_errors_equal_loops(seed):
    logits, samples = random_samples(seed)
    found = class_errors(logits, samples)
    for row in range(1, len(logits)):
        mask = samples.mask[row]
        expected = errors_by_loops(logits[row][mask], samples.targets[row][mask].tolist())
        for name, value in zip(found._fields, (*expected, mask.sum()), strict=True):
            np.testing.assert_allclose(getattr(found, name)[row], value, 2e-6, err_msg=name)
    assert found.num_samples[0] == 0
    assert all(np.isnan(x[0]) for x in found[:3])


def test_padding_has_no_influence_on_class_errors():
    logits, samples = random_samples(0)
    wide = Samples(None, *(np.pad(x, ((0, 0), (0, 5))) for x in samples[1:3]))
    padded = np.pad(logits, ((0, 0), (0, 5), (0, 0)), constant_values=np.inf)
    for one, other in zip(class_errors(logits, samples), class_errors(padded, wide), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_outputs_that_are_not_finite_have_no_accuracy():
    logits, samples = random_samples(1)
    place = int(np.argmax(samples.mask[2]))
    for bad in (np.nan, np.inf, -np.inf):
        logits[2, place, 1] = bad
        found = class_errors(logits, samples)
        assert all(np.isnan(x[2]) for x in found[:3])
        assert np.isfinite(found.accuracy[1])
    with pytest.raises(ValueError, match=r"Expected logits of shape \[N, W, C\]"):
        class_errors_lib.class_errors(logits[:, :8], samples)


@given(seed=st.integers(0, 1000))
def test_cross_entropy_is_optax_and_float64(seed):
    rng = np.random.default_rng(seed)
    logits = (10 * rng.standard_normal((6, CLASSES))).astype(np.float32)
    labels = rng.integers(0, CLASSES, 6)
    found = LOSS(labels, logits, 0.5)
    one_hot = jnp.asarray(np.eye(CLASSES, dtype=np.float32)[labels])
    expected = optax.losses.softmax_cross_entropy(logits, one_hot)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    exact = logits.astype(np.float64)
    exact = np.log(np.exp(exact).sum(axis=1)) - exact[np.arange(6), labels]
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def test_constant_outputs_are_a_dead_network():
    outputs = np.ones((4, 3, 2), np.float32)
    outputs[1, 2, 0] = 2
    mask = np.array([[True] * 3, [True] * 3, [False, False, True], [False] * 3])
    np.testing.assert_array_equal(
        class_errors_lib.constant_clients(outputs, mask), [True, False, False, False]
    )
    mask[1, 2] = False  # the one that differs is padding
    outputs[0, 0, 1] = np.nan
    np.testing.assert_array_equal(
        class_errors_lib.constant_clients(outputs, mask)[:2], [False, True]
    )


# Networks


IMAGES = np.random.default_rng(0).integers(0, 256, (3, 9, 8, 2)).astype(np.uint8)


class FlaxCNN(nn.Module):
    """The same network of Flax's own layers."""

    channels: tuple[int, ...]
    dense_units: int

    @nn.compact
    def __call__(self, x):
        for index, channels in enumerate(self.channels):
            x = nn.relu(nn.Conv(channels, (3, 3), name=f"conv_{index}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(self.dense_units, name="dense")(x.reshape(len(x), -1)))
        return nn.Dense(5, name="output")(x)


@pytest.mark.parametrize("name", ["cnn", pytest.param("cnn_large", marks=pytest.mark.slow)])
def test_cnn_equals_that_of_flax(name):
    model = classifiers.classifier(IMAGES, 5, name)
    params = jax.jit(model.init)(jax.random.key(0))
    found = jax.jit(lambda x: model.apply(params, x, None))(IMAGES)
    reference = FlaxCNN(*classifiers.CNN_CHANNELS[name])
    expected = jax.jit(reference.apply)(
        {"params": model.restore(params)}, IMAGES.astype(np.float32) / 255
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_which_network_is_the_default():
    first = lambda shape: classifiers.classifier(np.zeros((2, *shape)), 3).leaves[0][0]  # noqa: E731
    assert first((8, 8, 1)).startswith("conv_0")
    assert first((3, 8, 1)).startswith("dense_0")
    assert first((64,)).startswith("dense_0")
    with pytest.raises(ValueError, match=r"--model=cnn: .*shape \(64,\); use --model=mlp"):
        classifiers.classifier(np.zeros((2, 64)), 3, "cnn")


def test_bytes_reach_users_modules_as_floats():
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("unused", nn.initializers.zeros, ())
            return jnp.stack([x.mean(axis=(1, 2, 3)), x.max(axis=(1, 2, 3))], axis=1)

    model = models.from_flax(Mean(), IMAGES, (2,))
    found = model.apply(model.init(jax.random.key(0)), IMAGES, None)
    floats = IMAGES / 255
    np.testing.assert_allclose(found[:, 0], floats.mean(axis=(1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(found[:, 1], floats.max(axis=(1, 2, 3)), rtol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(3,\) an input, shape \(3, 3\), got \(3, 2\)"):
        models.from_flax(Mean(), IMAGES, (3,))


class Softmax(nn.Module):
    """Logistic regression."""

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(CLASSES)(inputs.reshape(inputs.shape[0], -1))


def test_gradient_of_a_client_is_that_of_softmax_regression():
    """Mean over its samples of (p - one-hot) x^T; padding adds nothing."""
    rng = np.random.default_rng(3)
    inputs = np.zeros((7, 3), np.float32)
    inputs[:5], labels = rng.standard_normal((5, 3)), np.array([0, 3, 3, 1, 2, 0, 0], np.int32)
    model = models.from_flax(Softmax(), inputs[:2], (CLASSES,))
    trainer = make_trainer(model, loss=LOSS, batch_size=2)
    params = model.init(jax.random.key(0))
    layer = {k: np.asarray(v, np.float64) for k, v in model.restore(params)["Dense_0"].items()}
    scores = inputs[:5] @ layer["kernel"] + layer["bias"]
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    residual = (shares - np.eye(CLASSES)[labels[:5]]) / 5
    samples = Samples(inputs, labels, np.arange(7) < 5)
    loss, grad = trainer.gradient(params, samples)
    found = model.restore(grad)["Dense_0"]
    np.testing.assert_allclose(found["kernel"], inputs[:5].T @ residual, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["bias"], residual.sum(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, -np.log(shares[np.arange(5), labels[:5]]).mean(), 1e-5)


# Whole runs, of a small softmax regression on two colors of noise, that need no package.


def made_up(num=90, num_test=45, seed=0) -> data.Labelled:
    """Classes that differ in which quarter of the image is bright."""
    rng = np.random.default_rng(seed)

    def part(size):
        labels = np.arange(size) % CLASSES
        images = rng.integers(0, 60, (size, 4, 4, 1))
        for image, label in zip(images, labels, strict=True):
            image[2 * (label // 2) :][:2, 2 * (label % 2) :][:, :2] += 150
        return images.astype(np.uint8), labels

    x, y = part(num)
    x_test, y_test = part(num_test)
    return data.Labelled(x, y, x_test, y_test, tuple("abcd"), "made up", "0" * 64)


CONFIG = Config(
    samples="npz", agg="hk_cosine", opinion="update", tau=0.5, rounds=2, devices=1, epochs=1,
    learning_rate=0.05, batch_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def fleet():
    partition = data.Partition(num_clients=6, alpha=0.3, min_samples=3)
    return data.partition_samples(made_up(), partition)


@pytest.fixture(scope="module")
def prepared(fleet):
    model = models.from_flax(Softmax(), fleet.train.inputs[0, :2], (CLASSES,))
    return prepare_lib.prepare(CONFIG, fleet, model)


@pytest.fixture(scope="module")
def ran(prepared, tmp_path_factory):
    stream = io.StringIO()
    with run_folder.create_folder(str(tmp_path_factory.mktemp("runs") / "run")) as folder:
        folder.write_config({})
        partition_files.write(folder, prepared.fleet)
        outcome = loop.simulate(prepared, folder, stream=stream)
    return folder.path, outcome, stream.getvalue()


def test_tables_of_a_run(ran, fleet):
    _, outcome, _ = ran
    row = outcome.rounds.iloc[-1]
    assert not {"mae", "mae_units", "mse"} & set(outcome.rounds.columns)
    clients = outcome.clients
    assert clients["test_samples"].tolist() == fleet.test.mask.sum(axis=1).tolist()
    assert clients["train_samples"].sum() == 90
    scored = clients["test_samples"] > 0
    assert row["accuracy"] == pytest.approx(clients["accuracy"].mean())
    assert row["accuracy_worst_tenth"] == pytest.approx(clients["accuracy"].min())
    right = (clients["accuracy"] * clients["test_samples"])[scored].sum()
    assert row["pooled_accuracy"] == pytest.approx(right / 45)
    assert row["unscored_clients"] == (~scored).sum()
    counts = data.label_counts(fleet.test, CLASSES)
    held = data.label_counts(fleet.train, CLASSES).argmax(axis=1)
    for client in np.flatnonzero(scored):
        expected = counts[client, held[client]] / counts[client].sum()
        assert clients["majority_class_accuracy"][client] == pytest.approx(expected)


def test_words_of_a_run(ran, fleet):
    path, outcome, said = ran
    assert "accuracy " in said and "(worst tenth " in said
    text = outcome.text
    assert (path / "summary.txt").read_text() == text + "\n"
    assert "6 clients judged on their own test samples:" in text
    assert "the client's commonest training class" in text
    assert "points of accuracy" in text and "better for " in text
    for wrong in ("MAE", "forecast", "readings", "nan"):
        assert wrong not in text
    words = summary.describe_fleet(fleet)
    assert "test samples each" in words and "each class by Dirichlet(0.3)" in words


def test_classes_are_learned(prepared):
    state = prepared.state
    for round_number in range(1, 13):
        state, info, _ = prepare_lib.step(prepared, state, round_number)
    assert np.nanmean(info.errors.accuracy) > 0.9  # one guess in four by chance
    assert np.isfinite(np.asarray(info.errors.loss)).any()


def test_a_run_goes_on_to_the_same_bits(ran, prepared, tmp_path):
    _, whole, _ = ran
    one = prepared._replace(config=dataclasses.replace(CONFIG, rounds=1))
    with run_folder.create_folder(str(tmp_path / "run")) as folder:
        folder.write_config({})
        loop.simulate(one, folder, stream=io.StringIO())
    with run_folder.open_folder(tmp_path / "run") as folder:
        outcome = loop.simulate(prepared, folder, resume=True, stream=io.StringIO())
    pd.testing.assert_frame_equal(outcome.clients, whole.clients)
    pd.testing.assert_frame_equal(
        outcome.rounds.drop(columns="seconds"), whole.rounds.drop(columns="seconds")
    )
    np.testing.assert_array_equal(outcome.state.params, whole.state.params)


def test_partition_is_kept(ran, fleet):
    path, *_ = ran
    table = pd.read_csv(path / "partition.csv", index_col="client")
    np.testing.assert_array_equal(table, data.label_counts(fleet.train, CLASSES))
    assert table.columns.tolist() == ["class_a", "class_b", "class_c", "class_d"]
    with np.load(path / "partition.npz") as kept:
        owners = kept["train"], kept["test"]
        assert str(kept["sha256"]) == data.partition_digest(owners)
    for one, other in zip(owners, fleet.owners, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (path / "pictures" / "partition.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (path / "pictures" / "partition.svg").read_text()


def test_picture_says_how_many_and_thins_names():
    figure = plots.label_counts(np.array([[3, 0], [1, 12]]), ("c0", "c1"), ("cat", "dog"))
    axes = figure.axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "12", "3"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]
    assert figure.axes[1].get_ylabel() == "training samples"
    many = plots.label_counts(np.ones((500, 30), int), *(
        tuple(f"{letter}{k}" for k in range(num)) for letter, num in (("c", 500), ("k", 30))
    ))  # fmt: skip
    assert len(many.axes[0].get_yticks()) <= 40
    assert not many.axes[0].texts


def test_troubles_are_said():
    clients = pd.DataFrame({"client": list("abcd"), "accuracy": [np.nan, np.nan, 0.5, 0.5]})
    clients = clients.assign(test_samples=[0, 3, 3, 3], dead=[False, False, True, True])
    said = " ".join(CLASSIFICATION.words.troubles(clients))
    assert "without a test sample, left out of the means: 1, such as a." in said
    assert "not finite, left out of the means: 1, such as b." in said
    assert "2 clients get one output for all" in said
    assert CLASSIFICATION.words.troubles(clients[3:].assign(dead=False)) == []


def test_nobody_can_be_scored():
    nothing = np.full(3, np.nan)
    row = CLASSIFICATION.tables.columns(
        class_errors_lib.ClassErrors(nothing, nothing, nothing, np.zeros(3, int))
    )
    assert math.isnan(row["pooled_accuracy"]) and row["unscored_clients"] == 3


def test_models_and_settings_that_do_not_fit(fleet):
    forecaster = models.from_flax(
        nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(1)]),
        fleet.train.inputs[0, :2],
    )
    with pytest.raises(ValueError, match=r"outputs of shape \(\d+, 4\).*output_shape=\(4,\)"):
        prepare_lib.prepare(CONFIG, fleet, forecaster)
    with pytest.raises(
        ConfigError, match=r"--samples=readings: the fleet is one of classification"
    ):
        prepare_lib.prepare(Config(), fleet)


def test_the_round_is_compiled_once(prepared):
    assert prepared.compilations == 1


def test_rows_of_a_round(prepared):
    _, info, _ = prepare_lib.step(prepared, prepared.state, 1)
    info = jax.tree.map(np.asarray, info)
    row = records.round_row(1, info, prepared.fleet, 0.0)
    assert all(isinstance(value, int | float | str) for value in row.values())


# The command


def run_main(*flags: str) -> int:
    return main_lib.main(["main", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--samples=npz", "--data=FILE.npz is missing"),
        ("--samples=leaf", "--data=FOLDER is missing"),
        ("--samples=npz --data=none.npz", "--data=none.npz: there is no such file"),
        ("--samples=digits --num_clients=200 --alpha_dirichlet=0.01", "need 2000 training samples"),
        (
            "--samples=digits --num_clients=200 --alpha_dirichlet=0.01 --min_samples=1",
            "Raise --alpha_dirichlet=0.01",
        ),
        ("--samples=digits --clients_per_round=21", "--clients_per_round=21: the fleet has 20"),
    ],
)
def test_command_refuses_in_words(flags, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_main(*flags.split()) == 2
    err = capfd.readouterr().err
    assert said in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("agg", [agg for agg in RULES if agg != "oracle"])
def test_every_rule_learns_with_a_cnn(agg, fleet):
    config = Config(samples="npz", agg=agg, devices=1, epochs=2, learning_rate=0.01)
    prepared = prepare_lib.prepare(config, fleet)
    assert prepared.model.leaves[0][0].startswith("conv_0")
    state = prepared.state
    for round_number in range(1, 6):
        state, info, _ = prepare_lib.step(prepared, state, round_number)
    assert np.isfinite(np.asarray(info.loss_s)).all()
    assert np.nanmean(info.errors.accuracy) > 0.4  # one guess in four by chance
    np.testing.assert_allclose(np.asarray(info.weights_s).sum(), 1, rtol=1e-5)


@pytest.mark.slow
def test_command_on_digits(capfd, tmp_path):
    flags = ["--samples=digits", "--alpha_dirichlet=0.1", "--devices=1", "--agg=fedavg"]
    flags += ["--num_clients=4", "--epochs=1", f"--output={tmp_path / 'run'}"]
    assert run_main(*flags, "--rounds=2") == 0
    out = capfd.readouterr().out
    assert "digits of scikit-learn, 10 classes, dealt out to 4 clients" in out
    assert "accuracy %" in out
    assert run_main(f"--resume={tmp_path / 'run'}", "--rounds=3") == 0
    assert len(pd.read_csv(tmp_path / "run" / "rounds.csv")) == 3
