"""What one optimizer step does: gradient, schedule, average, mixing, and steps without a finite
loss.
"""

import copy
import io
import math
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.small_runs import batch, same, small_config, small_trainer
from visionattn.cli.exit_codes import NonFinite
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.models import devices
from visionattn.training.config import OptimConfig
from visionattn.training.nonfinite_modules import first_non_finite
from visionattn.training.optimize import (
    make_criterion,
    make_mixup,
    make_optimizer,
    make_scheduler,
    mix_batch,
)
from visionattn.training.trainer import NON_FINITE_STEPS


class Notes:
    """Stands in for the record of a run: keeps what it is told."""

    def __init__(self):
        self.lines, self.steps, self.events = [], [], []

    def say(self, line):
        self.lines.append(line)

    def step(self, values):
        self.steps.append(values)

    def event(self, kind, values):
        self.events.append((kind, values))

    def begin(self, what, total, done, unit):
        return Progress(total, done, io.StringIO())


def gradients(trainer) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_gradients_are_those_of_one_big_batch_also_where_the_last_batch_is_smaller(
    tmp_path, accumulate
):
    config = small_config(tmp_path, optim={"clip_grad": None, "accumulate": accumulate})
    parts, whole = small_trainer(config), small_trainer(config)
    loss, norm, _ = parts.step([batch(8), batch(8, start=8), batch(5, start=16)])
    big_loss, big_norm, _ = whole.step([batch(21)])
    assert loss == pytest.approx(big_loss, rel=1e-6) and norm == pytest.approx(big_norm, rel=1e-5)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-5, atol=1e-7)


def test_an_epoch_ends_with_a_step_on_its_last_incomplete_group(tmp_path):
    trainer = small_trainer(small_config(tmp_path, optim={"accumulate": 3}))
    notes, step = Notes(), mock.Mock(wraps=trainer.step)
    trainer.step = step
    trainer.train_epoch(notes, Interruption())
    groups = [[len(batch.labels) for batch in call.args[0]] for call in step.call_args_list]
    assert groups == [[8, 8, 8], [8, 8, 8], [8, 5]]
    assert trainer.steps_per_epoch == trainer.position.step == 3 and trainer.position.images == 61
    assert [line["step"] for line in notes.steps] == [1, 2, 3]
    assert all(line["images_per_second"] > 0 for line in notes.steps)
    mean = np.average([line["loss"] for line in notes.steps], weights=[24, 24, 13])
    assert trainer.sums.means()["loss"] == pytest.approx(mean, rel=1e-6)


def test_the_gradient_is_clipped_to_its_largest_norm(tmp_path):
    trainer = small_trainer(small_config(tmp_path, optim={"clip_grad": 0.01}))
    _, norm, _ = trainer.step([batch(8)])
    after = math.sqrt(sum(float(value.square().sum()) for value in gradients(trainer).values()))
    assert norm > 0.02 and after == pytest.approx(0.01, rel=1e-3)


def rates_of(**options):
    """The rate before each of 24 updates and after them, in three epochs of 8 steps."""
    config = OptimConfig(lr=0.1, min_lr=0.01, **options)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make_scheduler(optimizer, config, epochs=3, steps_per_epoch=8)
    rates = [optimizer.param_groups[0]["lr"]]
    for step in range(1, 25):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


WARM_UP = [1e-6, 0.02500075, 0.0500005, 0.07500025]


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine_by_the_step():
    cosine = [0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi * i / 20)) for i in range(21)]
    assert rates_of(warmup_epochs=0.5) == pytest.approx([*WARM_UP, *cosine])


@pytest.mark.parametrize(("warmup_epochs", "first"), [(0.0, [0.1] * 4), (0.5, WARM_UP)])
def test_the_rate_falls_once_after_so_many_epochs(warmup_epochs, first):
    rates = rates_of(warmup_epochs=warmup_epochs, drop_epochs=1.5)
    # Twelve updates before it falls, those of the warm-up among them.
    assert rates == pytest.approx([*first, *[0.1] * 8, *[0.01] * 13])


def test_radam_decays_weights_apart_from_the_gradient():
    optim = {"name": "radam", "lr": 0.01, "weight_decay": 0.5, "warmup_epochs": 0}
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig(**optim))
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    # Without a gradient nothing but the decay acts, by the rate and not by moments.
    assert torch.allclose(model.weight, before * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "lamb", "radam"])
def test_positions_norms_and_biases_do_not_decay_and_lower_layers_learn_slower(tmp_path, name):
    config = small_config(tmp_path, optim={"name": name, "layer_decay": 0.5, "weight_decay": 0.3})
    trainer = small_trainer(config)
    groups = {
        id(value): group for group in trainer.optimizer.param_groups for value in group["params"]
    }
    parameters = dict(trainer.model.named_parameters())
    decay = {key: groups[id(value)]["weight_decay"] for key, value in parameters.items()}
    scale = {key: groups[id(value)]["lr_scale"] for key, value in parameters.items()}
    for key, value in parameters.items():
        position = "relative" in key or "temperature" in key or key.endswith("_token")
        assert decay[key] == (0 if position or value.ndim == 1 else 0.3), key
    blocks = [scale[f"blocks.{i}.mlp.fc1.weight"] for i in (0, 1)]
    assert scale["patch_embed.proj.weight"] < blocks[0] == 0.5 * blocks[1]
    assert blocks[1] < scale["head.weight"] == 1
    assert type(trainer.optimizer).__name__.lower() == name


def test_the_average_moves_by_the_warmed_up_decay_after_each_step(tmp_path):
    trainer, expected = small_trainer(small_config(tmp_path, optim={"ema_decay": 0.5})), 0
    for step in range(1, 6):
        trainer.step([batch(8)])
        trainer.position.step += 1
        decay = 0 if step == 1 else min(0.5, 1 - step ** (-2 / 3))
        expected = decay * expected + (1 - decay) * trainer.model.head.weight.detach()
    torch.testing.assert_close(trainer.ema.module.head.weight, expected, rtol=1e-6, atol=1e-8)
    assert trainer.evaluated is trainer.ema.module


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_in_a_batch_of_odd_length_the_last_image_stays_and_the_others_mix_in_pairs(mixup, cutmix):
    np.random.seed(3)
    mix = make_mixup(OptimConfig(mixup=mixup, cutmix=cutmix, label_smoothing=0.1), 7)
    images = torch.arange(5.0).view(5, 1, 1, 1).repeat(1, 2, 12, 10)
    labels = torch.tensor([0, 1, 2, 3, 6])
    mixed, targets = mix_batch(mix, images.clone(), labels)
    own = 0.9 * torch.nn.functional.one_hot(labels, 7) + 0.1 / 7
    assert torch.equal(mixed[4], images[4])
    torch.testing.assert_close(targets[4], own[4])
    share = (targets[0, 0] - 0.1 / 7).item() / 0.9
    assert 0.01 < share < 0.99
    for i, partner in ((0, 3), (1, 2), (2, 1), (3, 0)):
        assert mixed[i].mean().item() == pytest.approx(share * i + (1 - share) * partner, abs=1e-5)
        torch.testing.assert_close(targets[i], share * own[i] + (1 - share) * own[partner])


def test_the_loss_is_the_cross_entropy_with_smoothing_or_with_shares_of_classes():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels, shares = torch.tensor([0, 6, 3, 3, 1]), torch.rand(5, 7).softmax(1)
    smooth = 0.8 * torch.nn.functional.one_hot(labels, 7) + 0.2 / 7
    for options, targets, wanted in (
        ({}, labels, torch.nn.functional.one_hot(labels, 7)),
        ({"label_smoothing": 0.2}, labels, smooth),
        ({"cutmix": 1.0}, shares, shares),
    ):
        found = make_criterion(OptimConfig(**options))(logits, targets)
        torch.testing.assert_close(found, -(wanted * logits.log_softmax(1)).sum(1).mean())


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_steps_follow_those_of_full_precision(tmp_path, amp, monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16_products", lambda: True)
    full = small_trainer(small_config(tmp_path, optim={"clip_grad": None}))
    low = small_trainer(small_config(tmp_path, optim={"clip_grad": None}, amp=amp))
    assert low.optimizer_step.scaler.is_enabled() == (amp == "fp16")
    low.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=amp == "fp16")
    loss, norm, _ = full.step([batch(8)])
    low_loss, low_norm, applied = low.step([batch(8)])
    assert applied and low_loss == pytest.approx(loss, rel=0.02)
    assert low_norm == pytest.approx(norm, rel=0.05)
    assert low.model.head.weight.dtype == torch.float32


def test_amp_auto_trains_in_what_the_processor_multiplies_fast(tmp_path, monkeypatch):
    def trainer(amp, has_units):
        monkeypatch.setattr(devices, "has_bfloat16_products", lambda: has_units)
        return small_trainer(small_config(tmp_path, amp=amp))

    losses = {}
    for has_units, amp in ((True, "bf16"), (False, "none")):
        auto, chosen = trainer("auto", has_units), trainer(amp, has_units)
        losses[amp], _, _ = auto.step([batch(8)])
        assert chosen.step([batch(8)])[0] == losses[amp]
        assert ("in bf16" in auto.describe()[0]) == has_units
    assert losses["bf16"] != losses["none"]
    with pytest.warns(UserWarning, match="no bf16 units, so bf16 is slow; use --amp auto"):
        trainer("bf16", False)


def test_a_single_step_without_a_finite_loss_changes_nothing_and_is_counted(tmp_path):
    trainer, notes = small_trainer(small_config(tmp_path, optim={"ema_decay": 0.9})), Notes()
    for _ in range(3):
        trainer.step([batch(8)])
        trainer.position.step += 1
    real, models = trainer.optimizer_step.criterion, (trainer.model, trainer.ema.module)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    trainer.optimizer_step.criterion = lambda logits, targets: real(logits, targets) * math.nan
    loss, _, applied = trainer.step([batch(8)])
    trainer.count_skipped(loss, [batch(8)], notes)
    assert not applied and math.isnan(loss) and trainer.position.skipped == 1
    same([model.state_dict() for model in models], before)
    assert notes.events[0][0] == "skipped" and notes.events[0][1]["loss"] == "nan"
    trainer.optimizer_step.criterion = real
    assert trainer.step([batch(8)])[2]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("patch_embed.proj.bias", math.nan, "the parameter patch_embed.proj.bias"),
        ("blocks.1.attn.qkv.weight", math.inf, "the parameter blocks.1.attn.qkv.weight"),
        ("blocks.0.mlp.fc1.weight", 3e38, "the output of blocks.0.mlp.fc1 (Linear)"),
        ("head.weight", math.nan, "the parameter head.weight"),
    ],
)
def test_three_steps_in_a_row_without_a_finite_loss_end_the_run_and_name_the_first_module(
    tmp_path, name, value, fault
):
    trainer, notes = small_trainer(small_config(tmp_path)), Notes()
    with torch.no_grad():
        trainer.model.head.bias.fill_(math.nan)
        trainer.model.get_parameter(name).fill_(value)
    line = "^the loss was not finite 3 steps in a row, last at step 3; first at fault: "
    with pytest.raises(NonFinite, match=line + re.escape(fault)):
        trainer.train_epoch(notes, Interruption())
    assert trainer.position.skipped == 3 and len(notes.lines) == 3


def test_an_input_that_is_not_finite_is_the_first_fault():
    model, images = nn.Linear(5, 3), torch.ones(1, 5)
    assert first_non_finite(model, lambda: model(images)) is None
    fault = first_non_finite(model, lambda: model(images * math.nan))
    assert fault == "the input of the model" and not model._forward_hooks


def test_a_gradient_alone_that_is_not_finite_also_ends_the_run_and_is_named(tmp_path):
    trainer = small_trainer(small_config(tmp_path))
    trainer.model.blocks[1].mlp.fc2.weight.register_hook(lambda gradient: gradient * math.nan)
    line = "the gradient was not finite 3 steps .* the gradient of blocks.1.mlp.fc2.weight"
    with pytest.raises(NonFinite, match=line):
        trainer.train_epoch(Notes(), Interruption())


def test_a_scaled_gradient_that_overflows_lowers_the_scale_and_is_no_fault(tmp_path):
    trainer = small_trainer(small_config(tmp_path, amp="fp16"))
    trainer.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    notes = Notes()
    trainer.train_epoch(notes, Interruption())
    assert NON_FINITE_STEPS < trainer.position.skipped < 8
    assert trainer.optimizer_step.scaler.get_scale() == 2.0 ** (20 - trainer.position.skipped)
    assert not notes.lines
