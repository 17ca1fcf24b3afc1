"""The parts of a distillation beside its losses: what is judged, which blocks stay softmax, whose
weights a stage begins with, and which options reach it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.distilled_runs import (
    BODY,
    NAME,
    config_of,
    on_quadrants,
    same_softmax,
    teacher_file,
    vit_of,
)
from tests.helpers.small_runs import SPEC, same
from visionattn.data.batches import Batch
from visionattn.data.data_config import DataConfig
from visionattn.models import from_softmax
from visionattn.training.distil.distil_config import StageConfig, stage_data, stage_run
from visionattn.training.distil.distillation import begin
from visionattn.training.distil.imitation import (
    Imitating,
    Imitation,
    block_losses,
    teacher_features,
)
from visionattn.training.distil.kept_tokens import KeptTokens
from visionattn.training.distil.student import carry, images_of, open_taught, prepare_student

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quadrant_images():
    with on_quadrants():
        yield


def pixels(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def beside_nothing(batch, height, width, side=16):
    """Images in the corner of larger ones, alone, and what they fill."""
    alone = pixels(batch, 1, height, width)
    padded = torch.full((batch, 1, side, side), 7.0)
    padded[:, :, :height, :width] = alone
    return padded, alone, torch.tensor([[height, width]] * batch)


# What is judged


@pytest.mark.parametrize("stage", ["a", "b"])
def test_a_batch_is_judged_by_the_sum_of_its_images_and_by_the_students_outputs(stage):
    """Absent patches have no part in it."""
    # Without a norm behind the mean, which would hide that absent patches, all zero, are counted.
    vit = vit_of(class_token=False, global_pool="avg", fc_norm=False)
    student, labels = from_softmax(vit).model.eval(), torch.zeros(3, dtype=torch.int64)
    objective = Imitating(same_softmax(vit), stage, "same", labelled=True)
    padded, alone, sizes = beside_nothing(3, 12, 8)
    with torch.no_grad():
        judged = objective.judge(student, padded, sizes, labels)
        filled = objective.judge(student, padded, None, labels)
        singly = [objective.judge(student, x[None], None, labels[:1]).loss for x in alone]
        torch.testing.assert_close(judged.logits, student(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(judged.loss, sum(singly), rtol=1e-3, atol=1e-6)
    assert (filled.loss - sum(singly)).abs() > 1e-3


def test_kept_tokens_are_computed_once_per_image_teacher_and_size(tmp_path):
    calls = []

    def kept_by(teacher, *options):
        def compute(images, sizes):
            calls.append(len(images))
            return teacher_features(teacher, images, sizes)

        return KeptTokens(str(tmp_path / "kept"), compute, teacher, *options)

    def computed(kept, images, sizes=None):
        calls.clear()
        found, wanted = kept(images, sizes), teacher_features(teacher, images, sizes)
        torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)
        return sum(calls)

    teacher = same_softmax(vit_of(class_token=False, global_pool="avg"))
    kept = kept_by(teacher, "same")
    padded, alone, sizes = beside_nothing(3, 12, 8)
    assert computed(kept, padded[:1], sizes[:1]) == 1
    assert [computed(kept, padded, sizes), computed(kept, padded, sizes)] == [2, 0]
    assert [computed(kept, padded), computed(kept, alone)] == [3, 3]
    again = kept_by(teacher, "same")
    assert computed(again, alone) == 0
    for file in (tmp_path / "kept").glob("*/*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    assert [computed(again, alone), computed(again, alone)] == [3, 0]
    # Other options, precisions and teachers have no kept tokens.
    assert computed(kept_by(teacher, "tiled"), alone) == 3
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        kept(alone, None)
    kept_by(same_softmax(vit_of(class_token=False, global_pool="avg", depth=1)))(alone, None)
    assert sum(calls) == 6


def test_a_step_takes_the_mean_of_images():
    vit = vit_of(img_size=8, class_token=False, global_pool="avg")
    teacher, student = same_softmax(vit), from_softmax(vit).model
    objective, x = Imitating(teacher, "b", "tiled", labelled=False), pixels(3, 1, 16, 16)
    losses = Imitation(student, teacher, "b", objective.features)(x)
    loss = objective.loss(objective.called(student)(x), torch.zeros(3))
    assert losses.shape == (3,) and loss.item() == pytest.approx(losses.mean().item(), rel=1e-5)


# Which blocks stay softmax


def test_blocks_are_measured_by_what_images_fill_and_over_all_processes():
    def losses(*batch, told=None):
        def summed(*own):
            sums.append(own)
            return own if told is None else [a + b for a, b in zip(told, own, strict=True)]

        processes = SimpleNamespace(together=lambda work: work(), sum=summed)
        return block_losses(student, teacher, [Batch(*batch)], SPEC, "none", processes)

    vit, sums = vit_of(class_token=False, global_pool="avg"), []
    student, teacher = from_softmax(vit).model, same_softmax(vit)
    padded, alone, sizes = beside_nothing(3, 12, 8)
    labels = torch.zeros(3, dtype=torch.int64)
    wanted = losses(alone, labels, None)
    assert losses(padded, labels, sizes) == pytest.approx(wanted, rel=1e-3)
    losses(alone[:2], labels[:2], None)
    both = losses(alone[2:], labels[2:], None, told=sums[-1])
    assert both == pytest.approx(wanted, rel=1e-5)


# Whose weights


def test_a_block_that_is_softmax_from_now_on_has_the_teachers_attention_again():
    def student_of(*blocks):
        return from_softmax(vit, softmax_blocks=blocks, relative="none", value_conv=None).model

    def taught(model):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        return model

    vit = vit_of()
    former, student = taught(student_of()), student_of(1)
    carry(former, student)
    teachers = {key: x for key, x in vit.state_dict().items() if key.startswith("blocks.1.attn.")}
    assert {"blocks.1.attn.qkv.weight", "blocks.1.attn.proj.bias"} <= teachers.keys()
    same(student.state_dict(), former.state_dict() | teachers)
    # A block that was softmax before has learned too.
    next_one = student_of(1)
    carry(taught(student), next_one)
    same(next_one.state_dict(), student.state_dict())


def test_random_weights_of_a_teacher_follow_the_seed(tmp_path):
    named = dict(teacher=NAME, args=BODY | {"in_chans": 1})
    config, weights = replace(config_of(tmp_path, tmp_path), **named), []
    for drawn, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(drawn)
        weights.append(open_taught(replace(config, seed=seed)).vit.patch_embed.proj.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


# Which images and options


@pytest.mark.parametrize(
    ("classes", "names", "labelled"),
    [
        (4, SPEC.class_names, True),
        (4, (), True),
        (4, ("up", "down", "left", "right"), False),
        (5, (), False),
        (0, (), False),
    ],
)
def test_images_have_the_values_that_the_teacher_expects_and_its_classes_if_any(
    classes, names, labelled
):
    teachers = replace(SPEC, mean=(0.7,), std=(0.4,), num_classes=classes, class_names=names)
    splits, found = images_of(DataConfig(img_size=16), 0, teachers)
    assert (splits.spec.mean, splits.spec.std, found) == ((0.7,), (0.4,), labelled)
    assert (splits.spec.num_classes, splits.spec.class_names) == (classes, names)


@pytest.mark.parametrize(
    ("letter", "checkpointing", "wanted"),
    [("c", True, (2, 5, 2e-3, "tiled")), ("b", False, (2, 8, 3e-3, "same"))],
)
def test_the_options_of_a_stage_reach_its_run_and_its_student(
    tmp_path, letter, checkpointing, wanted
):
    stage = StageConfig(2, 2e-3, 5, 32, "tiled")
    config = config_of(tmp_path, teacher_file(tmp_path), stages=["b", "c"], c=stage)
    config = replace(config, grad_checkpointing=checkpointing)
    taught = open_taught(config)
    data = stage_data(config, letter, taught.spec)
    run = stage_run(config, letter, data, {})
    made = prepare_student(config, taught, [], None, run, CPU, resumed=False, first=True)
    size = made.objective.features.keywords["teacher_size"]
    assert (run.epochs, run.batch_size, run.optim.lr, size) == wanted
    assert made.model.grad_checkpointing == checkpointing


def test_overwriting_deletes_what_says_what_there_was_first_and_all_of_it(tmp_path, monkeypatch):
    """Where it is killed, nothing goes on with the half that is left."""
    folder, said = tmp_path / "small", []
    (folder / "b").mkdir(parents=True)
    old = ["distil.yaml", "blocks.csv", ".blocks.csv.0123456789abcdef.visionattn.tmp"]
    for name in old:
        (folder / name).write_text("old")
    monkeypatch.setattr(
        "visionattn.training.distil.distillation.clear",
        lambda path: said.append((folder / "distil.yaml").exists()),
    )
    begin(config_of(tmp_path, tmp_path, overwrite=True), folder)
    assert said == [False] and not any((folder / name).exists() for name in old[1:])
    assert "overwrite: false" in (folder / "distil.yaml").read_text()
