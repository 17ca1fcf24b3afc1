"""Whole distillations: stages that follow each other, kills, several processes, and refusals."""

import json
import re
from dataclasses import replace

import pytest
import timm
import torch

import visionattn
from tests.helpers.distilled_runs import (
    NAME,
    config_of,
    images,
    on_quadrants,
    run,
    same_softmax,
    teacher_file,
)
from tests.helpers.geometry import square
from tests.helpers.resumed_runs import best_of
from tests.helpers.small_runs import SPEC, lines, same
from tests.helpers.tools import read_csv
from visionattn.cli.exit_codes import run_tool
from visionattn.data.batches import SampleKey, collate
from visionattn.data.data_config import DataConfig
from visionattn.models.weights import load_model
from visionattn.training.distil.distil_config import (
    StageConfig,
    parse_distil,
    stage_data,
)
from visionattn.training.distil.distillation import distil
from visionattn.training.distil.imitation import attention_losses, teacher_features
from visionattn.training.distil.student import images_of

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def quadrant_images():
    with on_quadrants() as patch:
        yield patch


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return teacher_file(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def whole(teacher, tmp_path_factory):
    """The folder of a distillation in all stages that nothing happens to."""
    output = tmp_path_factory.mktemp("whole")
    with on_quadrants():
        run(config_of(output, teacher, stages=["a", "b", "c"]))
    return output / "small"


def epochs(folder, key="val_loss"):
    return [line[key] for line in lines(folder) if line["kind"] == "epoch"]


def test_each_stage_begins_with_the_weights_of_the_one_before_and_makes_its_loss_less(
    whole, teacher
):
    vit, first = load_model(teacher).state_dict(), load_model(whole / "a" / "best.safetensors")
    weights = {name: value for name, value in first.state_dict().items() if ".attn." not in name}
    same(weights, {name: vit[name] for name in weights})
    for letter in ("a", "b"):
        start = next(line for line in lines(whole / letter) if line["kind"] == "train")["loss"]
        assert epochs(whole / letter)[-1] < start
    # Two stages at one size: the second one begins where the first has ended.
    moved = load_model(whole / "b" / "best.safetensors").blocks[0].mlp.fc1.weight
    assert not torch.equal(moved, vit["blocks.0.mlp.fc1.weight"])
    assert [line["images"] for line in lines(whole / "c") if line["kind"] == "test"] == [29]


def test_what_comes_of_it_has_the_head_and_the_classes_of_the_teacher(whole, teacher):
    model, vit = visionattn.load_model(whole / "c" / "best.safetensors"), load_model(teacher)
    assert model.data_spec == replace(SPEC, img_size=32)
    assert [block.attn.attention for block in model.blocks] == ["kernelized"] * 3
    torch.testing.assert_close(model.head.weight, vit.head.weight, rtol=0, atol=0)
    assert model(torch.zeros(1, 1, 20, 32)).shape == (1, 4)
    metadata, tensors = best_of(whole / "c")
    made = timm.create_model(
        metadata["model"], num_classes=4, in_chans=1, **json.loads(metadata["args"])
    )
    made.load_state_dict(tensors)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(attention=["taylorshift"]), "attention is now ['taylorshift'], was ['kernelized']"),
        (dict(softmax_blocks=[1]), "softmax_blocks is now [1], was []"),
        (dict(seed=1), "seed is now 1, was 0"),
        (dict(a=StageConfig(epochs=3, lr=3e-3)), "a.epochs is now 3, was 2"),
        (dict(a=StageConfig(epochs=2, lr=1e-3)), "a.lr is now 0.001"),
        (
            dict(c=StageConfig(epochs=1, lr=1e-3, img_size=32, teacher_size="tiled")),
            "c.teacher_size is now tiled, was same",
        ),
    ],
)
def test_other_options_do_not_go_on(whole, teacher, options, said):
    config = config_of(whole.parent, teacher, stages=["a", "b", "c"], resume=True)
    noted = (whole / "distil.yaml").read_bytes()
    with pytest.raises(ValueError, match=re.escape(said)):
        run(replace(config, **options))
    assert (whole / "distil.yaml").read_bytes() == noted


def test_what_was_killed_before_it_was_noted_begins_anew(teacher, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "run.lock").touch()
    (folder / ".distil.yaml.0123456789abcdef.visionattn.tmp").write_text("tea")
    config = config_of(tmp_path, teacher, stages=["a"])
    run(config)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "distil.yaml"]
    with pytest.raises(ValueError, match="small is not empty; --resume continues it"):
        run(config)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "last.pt").touch()
    with pytest.raises(ValueError, match="nothing to resume"):
        run(replace(config, run="other", resume=True))


def test_the_blocks_that_are_imitated_worst_stay_softmax(teacher, tmp_path):
    config = config_of(tmp_path, teacher, search_softmax_blocks=1)
    said = run(config)
    folder = tmp_path / "small"
    rows = read_csv(folder / "blocks.csv")
    student, own = load_model(folder / "a" / "best.safetensors"), load_model(teacher)
    splits, _ = images_of(DataConfig(img_size=16), 0, SPEC)
    keys = [SampleKey(i, 0, square(16)) for i in range(23)]
    batch, _ = collate([splits.validation[key] for key in keys])
    with torch.no_grad():
        inputs = SPEC.prepare(batch.images)
        total = attention_losses(student, same_softmax(own), inputs, None, range(3)).mean(0)
    assert [float(row["loss"]) for row in rows] == pytest.approx(total.tolist(), rel=1e-4)
    worst = int(total.argmax())
    assert [int(row["softmax"]) for row in rows] == [int(i == worst) for i in range(3)]
    assert sum("stays softmax" in line for line in said) == 1
    kinds = ["softmax" if i == worst else "kernelized" for i in range(3)]
    model = load_model(folder / "b" / "best.safetensors")
    assert [block.attn.attention for block in model.blocks] == kinds
    # It goes on with the blocks that the table names.
    said = run(replace(config, resume=True))
    assert said[-2:] == ["stage a is done", "stage b is done"]
    (folder / "blocks.csv").write_text("block,softmax\na,1\n")
    with pytest.raises(ValueError, match=r"blocks.csv is damaged \(.*got a\); delete it"):
        run(replace(config, resume=True))


def test_students_share_a_stage_a(whole, teacher, tmp_path):
    """The second run does what stage b of the whole one does; another student is refused."""
    shared = dict(stages=["b"], init_from=str(whole / "a" / "best.safetensors"))
    run(config_of(tmp_path, teacher, **shared))
    same(best_of(tmp_path / "small" / "b"), best_of(whole / "b"))
    config = config_of(tmp_path / "other", teacher, **shared, options={"relative": "none"})
    with pytest.raises(ValueError, match="weights of the earlier student do not fit: 3 unexpected"):
        run(config)
    with pytest.raises(ValueError, match="weights of the earlier student do not fit"):
        run(replace(config, init_from=str(teacher)))


def test_with_kept_tokens_the_teacher_runs_in_the_first_epoch_only(
    whole, teacher, tmp_path, quadrant_images
):
    computed = []

    def counted(model, images, sizes, teacher_size):
        computed.append(len(images))
        return teacher_features(model, images, sizes, teacher_size)

    quadrant_images.setattr("visionattn.training.distil.imitation.teacher_features", counted)
    shared = dict(stages=["b"], init_from=str(whole / "a" / "best.safetensors"))
    kept = tmp_path / "kept"
    run(config_of(tmp_path, teacher, **shared, teacher_cache=str(kept)))
    assert len(epochs(tmp_path / "small" / "b")) == 2
    # One batch of the estimate is not kept; images are computed one at a time.
    assert computed == [8] + [1] * len(list(kept.glob("*/*.npy"))) != [8]
    assert epochs(tmp_path / "small" / "b") == pytest.approx(epochs(whole / "b"), rel=1e-2)


def test_images_without_classes_have_no_accuracy(teacher, tmp_path, quadrant_images):
    def unlabelled(config, seed, *, labelled=True):
        splits = images(config, seed)
        return replace(splits, spec=replace(splits.spec, num_classes=0, class_names=()))

    quadrant_images.setattr("visionattn.training.distil.student.build_splits", unlabelled)
    said = run(config_of(tmp_path, teacher))
    folder = tmp_path / "small" / "b"
    assert epochs(folder, "val_accuracy") == [None, None]
    assert not any("accuracy" in line for line in said)
    assert load_model(folder / "best.safetensors").data_spec.num_classes == 4


def test_images_are_seen_as_the_teacher_was_trained_to_unless_said_otherwise(teacher):
    config = parse_distil(["--teacher", str(teacher), "--c.img_size", "64", "--stages", "b", "c"])
    seen = replace(SPEC, img_size=None, fit="native", max_patches=40)
    found = [stage_data(config, "b", seen), stage_data(config, "c", seen)]
    config.data.img_size = 48
    found.append(stage_data(config, "b", seen))
    assert [(data.fit, data.img_size, data.max_patches) for data in found] == [
        ("native", None, 40),
        ("native", 64, None),
        (None, 48, None),
    ]


REFUSED = {
    "no ViT": (["--teacher", "resnet18"], "resnet18 cannot be converted"),
    "other channels": (
        ["--teacher", NAME, "--args.depth", "1"],
        "expected images with 3 channels, as the teacher's",
    ),
    "no such block": (["--softmax_blocks", "7"], "expected blocks 0 to 2 of 3, got 7"),
    "not in tiles": (
        ["--stages", "c", "--c.teacher_size", "tiled", "--c.img_size", "40"],
        "stage c: teacher_size tiled needs a multiple of",
    ),
    "no patches": (["--stages", "a", "--a.img_size", "30"], "stage a: image of 30 x 30 pixels"),
    "no stage": (["--stages", "b", "a"], "expected stages from a, b and c"),
    "tokens": (["--options.patch_size", "8"], "options.patch_size would change the tokens"),
    "none": (["--search_softmax_blocks", "0"], "must be at least 1, got 0"),
    "both": (["--search_softmax_blocks", "1", "--softmax_blocks", "1"], "remove softmax_blocks"),
    "windows": (["--search_softmax_blocks", "1", "--attention", "window"], "pass softmax_blocks"),
    "values": (["--data.mean", "0.5"], "data.mean is set by the teacher"),
    "changing pixels": (
        ["--teacher_cache", "kept", "--data.augment", "light"],
        "teacher_cache needs the same pixels in each epoch",
    ),
    "no student": (["--init-from", "none.safetensors"], "none.safetensors"),
    "learning rate": (["--b.lr", "0"], "stage b: optim.lr must be above 0"),
    "idle stage": (["--stages", "a", "--c.epochs", "-1"], "c.epochs must be above 0, got -1"),
}


@pytest.mark.parametrize(("flags", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_nothing_is_written(teacher, tmp_path, flags, said, capsys):
    own = [] if "--teacher" in flags else ["--teacher", str(teacher)]
    words = [*own, "--data.workers", "0", "--output", str(tmp_path / "out"), *flags]
    assert run_tool(lambda: distil(parse_distil(words))) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: "), error
    assert not (tmp_path / "out").exists()
