"""Classes of pixels as what a training learns: the loss, the figures, and whole runs."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, confusion_matrix, jaccard_score

from tests.helpers.image_files import write_pair
from tests.helpers.resumed_runs import state_of, status_of
from tests.helpers.small_runs import MODEL, lines, lines_of, rows, same, small_config
from tests.helpers.tools import assert_one_error, load_tool, words
from visionattn.command import main
from visionattn.data.batches import Batch
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.pixel_classes import average_precisions_of
from visionattn.models.segmentation import IGNORED, Segmenter
from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.training.checkpoint import best_figures, started_model
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import Tally, evaluate
from visionattn.training.objectives import PixelClasses, score_counts

train_tool, validate_tool, predict_tool = map(load_tool, ("train", "validate", "predict"))
CLASSES = ("dark", "light", "red")
CPU = torch.device("cpu")
TINY = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "horizon": 1}


def write_folder(root, images=10, px=16):
    """Images of three values in blocks, with masks; a strip of each does not count."""
    rng = np.random.default_rng(0)
    for split, count in (("train", images), ("val", 5), ("test", 4)):
        for number in range(count):
            mask = rng.integers(0, 3, (px // 4, px // 4)).repeat(4, 0).repeat(4, 1).astype(np.uint8)
            image = np.array([[20, 20, 20], [230, 230, 230], [200, 10, 10]], np.uint8)[mask]
            mask[:, :1] = 255
            write_pair(root / split, number, image, mask)
    return root


def config_of(folder, **options):
    data = dict(name="folder", task="segmentation", root=str(folder / "data"), fit="crop")
    data |= dict(masks={"classes": list(CLASSES)}) | options.pop("data", {})
    options = dict(epochs=2, batch_size=4) | options
    return small_config(folder / "out", data=data, model=TINY | {"head_stride": 2}, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    write_folder(folder / "data")
    config = config_of(folder, epochs=12, optim={"lr": 1e-2, "warmup_epochs": 0.5})
    return folder, config, lines_of(config)


def by_pixels(logits: np.ndarray, mask: np.ndarray, smoothing: float = 0.0) -> float:
    """The loss of an image, pixel by pixel."""
    losses = []
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            if mask[i, j] != IGNORED:
                scores = logits[:, i, j]
                log_shares = scores - math.log(sum(math.exp(x) for x in scores))
                own = (1 - smoothing) * log_shares[mask[i, j]]
                losses.append(-own - smoothing * sum(log_shares) / len(scores))
    return sum(losses) / max(1, len(losses))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_pixels_that_count_then_over_images(smoothing):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 5, 6))
    masks = rng.integers(0, 4, (3, 5, 6)).astype(np.uint8)
    masks[0, :2], masks[2] = IGNORED, IGNORED
    wanted = [by_pixels(*pair, smoothing) for pair in zip(logits, masks, strict=True)]
    assert wanted[2] == 0
    objective = PixelClasses(OptimConfig(label_smoothing=smoothing))
    found = objective.loss(torch.from_numpy(logits), torch.from_numpy(masks))
    assert found.item() == pytest.approx(np.mean(wanted), rel=1e-9)


class Bright(torch.nn.Module):
    """Gives pixels the class of their brightness."""

    def forward(self, x):
        return torch.cat([-x, x, torch.full_like(x, -9.0)], 1)


@pytest.mark.parametrize("parts", [[6], [1, 2, 3]])
def test_an_evaluation_does_not_depend_on_its_batches(parts):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=generator, dtype=torch.uint8)
    masks = torch.randint(0, 2, (6, 8, 8), generator=generator, dtype=torch.uint8)
    masks[0] = IGNORED
    spec = DataSpec(1, 3, CLASSES, (0.5,), (1.0,), None, 8, task="segmentation")
    pairs, tally = zip(images.split(parts), masks.split(parts), strict=True), Tally()
    batches = [Batch(*pair) for pair in pairs]
    result = evaluate(Bright(), batches, spec, device=CPU, tally=tally)
    counted = masks.numpy() != IGNORED
    known, levels = masks.numpy()[counted], images[:, 0].numpy()[counted].astype(float)
    wanted = jaccard_score(known, levels >= 128, average=None)
    assert result.images == 6 and result.top5 is None
    assert result.accuracy == pytest.approx((known == (levels >= 128)).mean())
    assert result.ious == (pytest.approx(wanted[0]), pytest.approx(wanted[1]), None)
    assert result.score == result.mean_iou == pytest.approx(wanted.mean())
    confusion = confusion_matrix(known, levels >= 128, labels=range(3))
    np.testing.assert_array_equal(tally.confusion, confusion)
    # The scores are the brightness, in which gray levels are at least two bins apart.
    curves = [average_precision_score(known == i, sign * levels) for i, sign in ((0, -1), (1, 1))]
    assert result.average_precisions == (*(pytest.approx(each) for each in curves), None)
    logits = Bright()(spec.prepare(images)).numpy()
    losses = [by_pixels(*pair) for pair in zip(logits, masks.numpy(), strict=True)]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_average_precision_keeps_the_order_of_rare_scores_and_takes_any_logits():
    def found(logits):
        return average_precisions_of(score_counts(masks, logits).numpy())

    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(2, 30, 40, generator=generator) < 0.02).to(torch.uint8) * 2
    known = masks.flatten()
    logits = torch.randn(2, 3, 30, 40, generator=generator)
    logits[:, 2] += masks.float() * 1.5 - 10  # probabilities of 1e-6 to 1e-2
    wanted = average_precision_score(known == 2, logits.softmax(1)[:, 2].flatten().double())
    assert found(logits)[2] == pytest.approx(wanted, abs=2e-3) and 0.3 < wanted < 0.9
    assert math.isnan(found(logits)[1])
    # In float32, all probabilities of class 0 above log odds of 17 are 1.
    logits[:, 0] += 20
    odds = logits[:, 0] - logits[:, 1:].logsumexp(1)
    wanted = average_precision_score(known == 0, odds.flatten())
    assert found(logits)[0] == pytest.approx(wanted, abs=1e-4)
    # Where all scores are equal, precision is the share of the class.
    for level in (0.0, math.nan, math.inf):
        share = (masks == 2).double().mean()
        assert found(torch.full_like(logits, level))[2] == pytest.approx(share)


def test_a_run_learns_masks_and_says_how_well(run):
    folder, _, said = run
    out = folder / "out" / "small"
    assert any("  mean IoU " in line and line.count("%") == 1 for line in said)
    result = status_of(out)["result"]
    scores = [float(row["val_mean_iou"]) for row in rows(out)]
    assert result["validation_mean_iou"] == max(scores)
    assert result["test_mean_iou"] > 0.8
    [test] = [line for line in lines(out) if line["kind"] == "test"]
    assert test["mean_iou"] == result["test_mean_iou"] == pytest.approx(np.mean(test["ious"]))
    epochs = [line for line in lines(out) if line["kind"] == "epoch"]
    means = [np.mean(line["val_ious"]) for line in epochs]
    assert [line["val_mean_iou"] for line in epochs] == pytest.approx(means)
    best = max(epochs, key=lambda line: (line["val_mean_iou"], -line["val_loss"]))
    assert result["best_epoch"] == best["epoch"]
    assert best_figures(out / "best.safetensors").score == max(scores)
    model = load_model(out / "best.safetensors")
    assert isinstance(model, Segmenter) and model.data_spec.class_names == CLASSES
    assert model.stride == 2


def test_the_weights_of_a_run_give_masks_in_files(run, tmp_path):
    folder, *_ = run
    best = folder / "out/small/best.safetensors"
    flags = "--checkpoint {} --images {} --output {}"
    assert predict_tool(words(flags, best, folder / "data/test/images", tmp_path / "masks")) == 0
    pairs = []
    for path in (folder / "data/test/masks").iterdir():
        known, found = (np.asarray(Image.open(p)) for p in (path, tmp_path / "masks" / path.name))
        pairs.append((known[known != IGNORED], found[known != IGNORED]))
    known, found = map(np.concatenate, zip(*pairs, strict=True))
    mean_iou = status_of(folder / "out" / "small")["result"]["test_mean_iou"]
    assert jaccard_score(known, found, average="macro") == pytest.approx(mean_iou)


def test_weights_are_judged_at_several_sizes(run, tmp_path, capsys):
    best, kept = run[0] / "out/small/best.safetensors", tmp_path / "rows.json"
    flags = words("--checkpoint {} --img-size 16 32 --fit stretch --json {}", best, kept)
    assert validate_tool(flags) == 0
    printed = capsys.readouterr().out
    assert "size images mean IoU pixels images/s" in " ".join(printed.split())
    found = json.loads(kept.read_text())["rows"]
    assert [row["img_size"] for row in found] == [16, 32]
    for row in found:
        assert f"{100 * row['mean_iou']:.2f} %" in printed
        assert f"{100 * row['accuracy']:.2f} %" in printed
        for name, *pair in zip(CLASSES, row["ious"], row["average_precisions"], strict=True):
            cells = f"{name} {100 * pair[0]:.2f} % {100 * pair[1]:.2f} %"
            assert cells in " ".join(printed.split())
        assert row["mean_iou"] == pytest.approx(np.mean(row["ious"]))


def rewrite(root, values, dtype=np.uint8):
    """Give the classes of all masks other values."""
    for path in root.glob("*/masks/*.png"):
        mask = np.array(Image.open(path))
        Image.fromarray(np.array(values, dtype)[np.where(mask == 255, 0, mask)]).save(path)


@pytest.mark.filterwarnings("ignore:the masks of .* are black and white")
def test_black_and_white_masks_mean_the_same_to_all_that_read_them(tmp_path):
    rewrite(write_folder(tmp_path / "data"), (0, 255, 255))
    config = config_of(tmp_path, data={"masks": {}}, optim={"lr": 1e-2}, epochs=6)
    lines_of(config)
    out = tmp_path / "out" / "small"
    [test] = [line for line in lines(out) if line["kind"] == "test"]
    assert min(test["ious"]) > 0.3 and test["mean_iou"] < 1
    best, kept = tmp_path / "best.safetensors", tmp_path / "rows.json"
    shutil.copy(out / "best.safetensors", best)
    assert load_model(best).data_spec.colours == ((0, 0, 0), (255, 255, 255))
    # Elsewhere, without the run, whatever else is there.
    rewrite(write_folder(tmp_path / "other"), (0, 65535, 65535), np.uint16)
    judge = "--checkpoint {} --fit crop --split test --json {} --data.name folder --data.root {}"
    flags = words(judge, best, kept, tmp_path / "other")
    assert validate_tool([*flags, "--data.workers=0"]) == 0
    [row] = json.loads(kept.read_text())["rows"]
    assert row["ious"] == pytest.approx(test["ious"], abs=1e-6)
    # A state of a run for which 255 did not count is of other masks.
    state = state_of(out)
    torch.save(state | {"data": state["data"] | {"colours": None}}, out / "last.pt")
    with pytest.raises(ValueError, match="the mask values had other classes"):
        lines_of(replace(config, resume=True, epochs=7))


def test_a_body_starts_from_a_classification_and_the_head_is_new(tmp_path):
    spec = DataSpec(3, 4, (), (0.5,) * 3, (0.2,) * 3, None, 16)
    torch.manual_seed(3)
    body, args = build_model(ModelConfig("scaleformer_vit_t", MODEL | TINY), spec)
    save_model(tmp_path / "body.safetensors", body, "scaleformer_vit_t", args, spec)
    config = config_of(tmp_path, init_from=str(tmp_path / "body.safetensors"))
    spec = replace(spec, num_classes=3, task="segmentation")
    model, _, kept, said = started_model(config, config.model, spec)
    own = body.state_dict()
    found = model.backbone.state_dict()
    same(found, {name: own[name] for name in found})
    assert kept["head_stride"] == 2 and any("come from" in line for line in said)


WRONG = {
    "--optim.mixup 0.2": "need one class per image",
    "--model.args.head_blocks [7]": "head_blocks: expected blocks 0 to 1 of 2, got 7",
    "--data.root nowhere": "does not exist; expected images/* and masks/*",
    "--data.masks {classes:[dark,light,red,blue]}": "the 10 training masks have no "
    "pixel of class blue; add masks",
}


def test_wrong_options_are_one_line(run, capsys):
    config = run[0] / "out/small/config.yaml"
    for flags, line in WRONG.items():
        assert train_tool([*words("--config {} --run x", config), *flags.split()]) == 2
        assert_one_error(capsys, line)
    assert not (run[0] / "out" / "x").exists()


def test_what_is_for_classes_of_images_refuses_masks(run, tmp_path, capsys):
    best = str(run[0] / "out/small/best.safetensors")
    assert main(words("share {} --to {}/shared", best, tmp_path)) == 2
    assert_one_error(capsys, "gives classes of pixels")
    assert main(words("convert {} --output {}/c.safetensors", best, tmp_path)) == 2
    assert_one_error(capsys, "got a model with classes of pixels")
