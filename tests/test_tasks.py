"""What every task has to keep, whatever it learns."""

import jax.numpy as jnp
import numpy as np
import pytest
from made_run import classes_of, fleet_of, outputs_of

from fedjax_hk.settings.choices import LOSS
from fedjax_hk.settings.config import TASK_OF
from fedjax_hk.tasks import TASKS

FLEETS = {"forecast": fleet_of, "classification": classes_of}


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


def test_settings_name_the_tasks_and_their_losses(name):
    assert set(TASK_OF.values()) == set(TASKS) == {loss.task for loss in LOSS.values()}
    of_task = [loss for loss, choice in LOSS.items() if choice.task == name]
    assert of_task == list(TASKS[name].judge.losses)


def test_one_loss_a_sample_of_outputs_of_its_shape(name):
    fleet, judge = FLEETS[name](), TASKS[name].judge
    targets = fleet.train.targets[0, :3]
    outputs = jnp.zeros((3, *judge.output_shape(fleet)), jnp.float32)
    for loss in judge.losses.values():
        assert loss(targets, outputs, 0.5).shape == (3,)


def test_what_is_read_is_there(name):
    """The headline and what tables keep are errors; the curves' lines are columns of a round."""
    fleet, (judge, tables, headline, words) = FLEETS[name](), TASKS[name]
    outputs_nw = outputs_of(fleet, 0.1, np.random.default_rng(0))
    assert outputs_nw.shape == (*fleet.test.mask.shape, *judge.output_shape(fleet))
    errors = judge.errors(outputs_nw, fleet.test)
    assert errors._fields[-1] == f"num_{words.samples_noun}"
    assert headline.column == tables.kept[0] and set(tables.kept) <= set(errors._fields)
    assert judge.dead(outputs_nw, fleet.test.mask).shape == (len(fleet.client_ids),)
    naive = judge.naive_errors(fleet)
    assert list(naive) == list(words.naive_names)
    assert all(one._fields == errors._fields for one in naive.values())
    columns = tables.columns(errors)
    assert {headline.column, "unscored_clients"} <= set(columns)
    lines = {column for curve in words.curves for column in curve.lines.values()}
    assert lines <= {*columns, "train_loss"}
    traits = tables.traits_of(fleet)
    assert {one.column for one in words.traits} <= {*traits, f"train_{words.samples_noun}"}
    assert len(tables.outputs(outputs_nw, fleet)) == fleet.test.mask.sum()


def test_better_is_less_after_the_sign(name):
    headline = TASKS[name].headline
    better, worse = (0.9, 0.1) if headline.higher_is_better else (0.1, 0.9)
    assert headline.sign * better < headline.sign * worse
    assert headline.spread([better, worse])["worst_tenth"] == worse
    assert headline.axis("L").startswith(headline.short)
