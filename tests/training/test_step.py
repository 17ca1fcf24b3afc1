"""What one optimizer step does: gradient, schedule, average, mixing, and steps without a finite
loss.
"""

import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.small_runs import batch, small_config, small_trainer
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
    loss, norm, applied = parts.step([batch(8), batch(8, start=8), batch(5, start=16)])
    big_loss, big_norm, big_applied = whole.step([batch(21)])
    assert applied and big_applied
    assert loss == pytest.approx(big_loss, rel=1e-6) and norm == pytest.approx(big_norm, rel=1e-5)
    expected = gradients(whole)
    for name, value in gradients(parts).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_an_epoch_ends_with_a_step_on_its_last_incomplete_group(tmp_path):
    trainer = small_trainer(small_config(tmp_path, optim={"accumulate": 3}))
    groups, notes = [], Notes()
    real = trainer.step
    trainer.step = lambda group, *more: (
        groups.append([len(batch.labels) for batch in group]),
        real(group, *more),
    )[1]
    trainer.train_epoch(notes, Interruption())
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
    assert isinstance(optimizer, torch.optim.RAdam)
    before = model.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Without a gradient nothing but the decay acts, by the rate and not by moments.
    assert torch.allclose(model.weight, before * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "lamb", "radam"])
def test_positions_norms_and_biases_do_not_decay_and_lower_layers_learn_slower(tmp_path, name):
    config = small_config(tmp_path, optim={"name": name, "layer_decay": 0.5, "weight_decay": 0.3})
    trainer = small_trainer(config)
    names = {id(value): key for key, value in trainer.model.named_parameters()}
    decay, scale = {}, {}
    for group in trainer.optimizer.param_groups:
        for value in group["params"]:
            decay[names[id(value)]] = group["weight_decay"]
            scale[names[id(value)]] = group["lr_scale"]
    assert len(decay) == len(names)
    for key, value in trainer.model.named_parameters():
        exempt = (
            value.ndim == 1 or "relative" in key or "temperature" in key or key.endswith("_token")
        )
        assert decay[key] == (0 if exempt else 0.3), key
    assert (
        scale["patch_embed.proj.weight"]
        < scale["blocks.0.mlp.fc1.weight"]
        < scale["blocks.1.mlp.fc1.weight"]
        < 1
    )
    assert scale["head.weight"] == 1
    assert scale["blocks.0.mlp.fc1.weight"] == 0.5 * scale["blocks.1.mlp.fc1.weight"]
    assert type(make_optimizer(trainer.model, config.optim)).__name__.lower() == name


def test_the_average_moves_by_the_warmed_up_decay_after_each_step(tmp_path):
    trainer = small_trainer(small_config(tmp_path, optim={"ema_decay": 0.5}))
    expected = None
    for step in range(1, 6):
        trainer.step([batch(8)])
        trainer.position.step += 1
        current = trainer.model.head.weight.detach().clone()
        decay = 0 if step == 1 else min(0.5, 1 - (1 + (step - 1)) ** (-2 / 3))
        expected = current if expected is None else decay * expected + (1 - decay) * current
    torch.testing.assert_close(trainer.ema.module.head.weight, expected, rtol=1e-6, atol=1e-8)
    assert not torch.equal(expected, trainer.model.head.weight)
    assert trainer.evaluated is trainer.ema.module


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_in_a_batch_of_odd_length_the_last_image_stays_and_the_others_mix_in_pairs(mixup, cutmix):
    np.random.seed(3)
    mix = make_mixup(OptimConfig(mixup=mixup, cutmix=cutmix, label_smoothing=0.1), 7)
    images = torch.arange(5.0).view(5, 1, 1, 1).repeat(1, 2, 12, 10)
    labels = torch.tensor([0, 1, 2, 3, 6])
    mixed, targets = mix_batch(mix, images.clone(), labels)
    assert torch.equal(mixed[4], images[4])
    smooth = torch.full((7,), 0.1 / 7)
    last = smooth.clone()
    last[6] += 0.9
    torch.testing.assert_close(targets[4], last)
    share = (targets[0, 0] - 0.1 / 7).item() / 0.9
    assert 0.01 < share < 0.99 and torch.allclose(targets.sum(1), torch.ones(5))
    for i, partner in ((0, 3), (1, 2), (2, 1), (3, 0)):
        assert mixed[i].mean().item() == pytest.approx(share * i + (1 - share) * partner, abs=1e-5)
        assert targets[i, labels[partner]].item() == pytest.approx(
            0.9 * (1 - share) + 0.1 / 7, abs=1e-6
        )


def test_the_loss_is_the_cross_entropy_with_smoothing_or_with_shares_of_classes():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 6, 3, 3, 1])
    plain = make_criterion(OptimConfig())(logits, labels)
    torch.testing.assert_close(plain, -logits.log_softmax(1)[range(5), labels].mean())
    smooth = make_criterion(OptimConfig(label_smoothing=0.2))(logits, labels)
    torch.testing.assert_close(
        smooth, nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    )
    shares = torch.rand(5, 7).softmax(1)
    mixed = make_criterion(OptimConfig(cutmix=1.0))(logits, shares)
    torch.testing.assert_close(mixed, -(shares * logits.log_softmax(1)).sum(1).mean())


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_steps_follow_those_of_full_precision(tmp_path, amp, monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16_products", lambda: True)
    full = small_trainer(small_config(tmp_path, optim={"clip_grad": None}))
    low = small_trainer(small_config(tmp_path, optim={"clip_grad": None}, amp=amp))
    scaled = low.optimizer_step.scaler.is_enabled()
    low.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    loss, norm, _ = full.step([batch(8)])
    low_loss, low_norm, applied = low.step([batch(8)])
    assert applied and low_loss == pytest.approx(loss, rel=0.02)
    assert low_norm == pytest.approx(norm, rel=0.05)
    assert low.model.head.weight.dtype == torch.float32
    assert low.optimizer_step.scaler.is_enabled() == (amp == "fp16")


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


def spoil(trainer, name: str, value: float) -> None:
    with torch.no_grad():
        trainer.model.get_parameter(name).fill_(value)


def test_a_single_step_without_a_finite_loss_changes_nothing_and_is_counted(tmp_path):
    trainer, notes = small_trainer(small_config(tmp_path, optim={"ema_decay": 0.9})), Notes()
    for _ in range(3):
        trainer.step([batch(8)])
        trainer.position.step += 1
    real = trainer.optimizer_step.criterion
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    average = {key: value.clone() for key, value in trainer.ema.module.state_dict().items()}
    trainer.optimizer_step.criterion = lambda logits, targets: real(logits, targets) * math.nan
    loss, _, applied = trainer.step([batch(8)])
    trainer.count_skipped(loss, [batch(8)], notes)
    assert not applied and math.isnan(loss) and trainer.position.skipped == 1
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[key]) and torch.equal(
            trainer.ema.module.state_dict()[key], average[key]
        ), key
    assert any(not torch.equal(before[key], average[key]) for key in before)
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
    spoil(trainer, name, value)
    with pytest.raises(NonFinite) as error:
        trainer.train_epoch(notes, Interruption())
    assert (
        str(error.value)
        == f"the loss was not finite 3 steps in a row, last at step 3; first at fault: {fault}"
    )
    assert trainer.position.skipped == 3 and len(notes.lines) == 3


def test_the_search_for_the_fault_sees_the_batches_as_the_step_mixed_them(tmp_path):
    """Of two batches, the second in an epoch that has done three; what happens in between draws
    numbers too.
    """
    trainer = small_trainer(small_config(tmp_path, optim={"mixup": 0.4}))
    trainer.position.batch, seen = 3, []
    trainer.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    group = [batch(8), batch(8, start=8)]
    trainer.step(group)
    np.random.rand(5), torch.rand(5)
    trainer.at_fault(group)
    assert len(seen) == 4 and torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], trainer.spec.prepare(group[0][0]))


def test_a_gradient_alone_that_is_not_finite_also_ends_the_run_and_is_named(tmp_path):
    trainer = small_trainer(small_config(tmp_path))
    trainer.model.blocks[1].mlp.fc2.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(
        NonFinite,
        match="the gradient was not finite 3 steps .* the gradient of blocks.1.mlp.fc2.weight",
    ):
        trainer.train_epoch(Notes(), Interruption())


def test_a_scaled_gradient_that_overflows_lowers_the_scale_and_is_no_fault(tmp_path):
    trainer = small_trainer(small_config(tmp_path, amp="fp16"))
    trainer.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    notes = Notes()
    trainer.train_epoch(notes, Interruption())
    assert NON_FINITE_STEPS < trainer.position.skipped < 8
    assert trainer.optimizer_step.scaler.get_scale() == 2.0 ** (20 - trainer.position.skipped)
    assert not notes.lines


def test_the_first_fault_in_the_order_of_the_forward_pass_is_named_not_that_of_registration():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.Linear(3, 2), nn.Linear(5, 3)

        def forward(self, x):
            return {"out": (self.second(self.first(x)),)}

    model = Backwards()
    assert first_non_finite(model, lambda: model(torch.ones(1, 5))) is None
    with torch.no_grad():
        model.second.bias[1] = math.nan
        model.first.weight[2, 4] = -math.inf
    assert first_non_finite(model, lambda: model(torch.ones(1, 5))) == "the parameter first.weight"
    assert (
        first_non_finite(model, lambda: model(torch.full((1, 5), math.nan)))
        == "the input of the model"
    )
    assert not model._forward_hooks and not model.first._forward_pre_hooks
