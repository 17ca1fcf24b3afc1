"""Classes of pixels as what a training learns: the loss, the figures, and whole runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, jaccard_score

from tests.helpers.small_runs import MODEL, lines, lines_of, rows, small_config
from tests.helpers.tools import assert_one_error, load_tool, words
from visionattn.data.batches import Batch
from visionattn.data.splits import build_splits
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.pixel_classes import average_precisions_of
from visionattn.models.segmentation import IGNORED, Segmenter
from visionattn.models.weights import DataSpec, load_model, read_metadata, save_model
from visionattn.training.checkpoint import best_figures, started_model
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import evaluate
from visionattn.training.objectives import PixelClasses, score_counts

train_tool, validate_tool, predict_tool = map(load_tool, ("train", "validate", "predict"))
CLASSES = ("dark", "light", "red")
CPU = torch.device("cpu")
TINY = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "horizon": 1}


def write_folder(root, images=10, px=16, spoil=None):
    """Images of three values in blocks, with masks; a strip of each does not count."""
    rng = np.random.default_rng(0)
    for split, count in (("train", images), ("val", 5), ("test", 4)):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            mask = rng.integers(0, 3, (px // 4, px // 4)).repeat(4, 0).repeat(4, 1).astype(np.uint8)
            image = np.array([[20, 20, 20], [230, 230, 230], [200, 10, 10]], np.uint8)[mask]
            mask[:, :1] = 255
            Image.fromarray(image).save(root / split / "images" / f"{number}.png")
            Image.fromarray(mask).save(root / split / "masks" / f"{number}.png")
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
    pairs = zip(images.split(parts), masks.split(parts), strict=True)
    result = evaluate(Bright(), [Batch(*pair) for pair in pairs], spec, device=CPU)
    light, counted = images[:, 0].numpy() >= 128, masks.numpy() != IGNORED
    right = (light == masks.numpy()) & counted
    wanted = jaccard_score(masks.numpy()[counted], light[counted], average=None)
    assert result.images == 6 and result.top5 is None
    assert result.accuracy == pytest.approx(right.sum() / counted.sum())
    assert result.ious[2] is None and result.ious[:2] == pytest.approx(wanted)
    assert result.score == result.mean_iou == pytest.approx(wanted.mean())
    # The scores are the brightness, in which gray levels are at least two bins apart.
    known, levels = masks.numpy()[counted], images[:, 0].numpy()[counted].astype(float)
    curves = [average_precision_score(known == i, sign * levels) for i, sign in ((0, -1), (1, 1))]
    assert result.average_precisions[2] is None
    assert result.average_precisions[:2] == pytest.approx(curves, rel=1e-12)
    logits = Bright()(spec.prepare(images)).numpy()
    losses = [by_pixels(*pair) for pair in zip(logits, masks.numpy(), strict=True)]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_average_precision_keeps_the_order_of_rare_scores_and_takes_any_logits():
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(2, 30, 40, generator=generator) < 0.02).to(torch.uint8) * 2
    logits = torch.randn(2, 3, 30, 40, generator=generator)
    logits[:, 2] += masks.float() * 1.5 - 10  # probabilities of 1e-6 to 1e-2
    wanted = average_precision_score(
        masks.flatten() == 2, logits.softmax(1)[:, 2].flatten().double()
    )
    found = average_precisions_of(score_counts(masks, logits).numpy())
    assert found[2] == pytest.approx(wanted, abs=2e-3) and 0.3 < wanted < 0.9
    assert math.isnan(found[1])
    # In float32, all probabilities of class 0 above log odds of 17 are 1.
    logits[:, 0] += 20
    wanted = average_precision_score(
        masks.flatten() == 0, (logits[:, 0] - logits[:, 1:].logsumexp(1)).flatten()
    )
    found = average_precisions_of(score_counts(masks, logits).numpy())
    assert found[0] == pytest.approx(wanted, abs=1e-4)
    # All scores are equal: precision is the share of the class.
    for same in (torch.zeros_like(logits), torch.full_like(logits, math.nan), logits * math.inf):
        counts = score_counts(masks, same)
        assert counts.sum((1, 2)).tolist() == [masks.numel()] * 3
    counts = score_counts(masks, torch.full_like(logits, math.nan))
    assert counts[:, :, 0].sum() == counts.sum()  # the lowest score
    assert average_precisions_of(counts.numpy())[2] == pytest.approx((masks == 2).double().mean())


def test_a_run_learns_masks_and_says_how_well(run):
    folder, config, said = run
    out = folder / "out" / "small"
    assert any("  mean IoU " in line and line.count("%") == 1 for line in said)
    result = json.loads((out / "status.json").read_text())["result"]
    scores = [float(row["val_mean_iou"]) for row in rows(out)]
    assert result["validation_mean_iou"] == max(scores)
    assert result["test_mean_iou"] > 0.8
    losses = [float(row["val_loss"]) for row in rows(out)]
    best = max(range(len(scores)), key=lambda i: (scores[i], -losses[i]))
    assert result["best_epoch"] == 1 + best
    [test] = [line for line in lines(out) if line["kind"] == "test"]
    assert test["mean_iou"] == result["test_mean_iou"] == pytest.approx(np.mean(test["ious"]))
    epochs = [line for line in lines(out) if line["kind"] == "epoch"]
    for line in epochs:
        assert line["val_mean_iou"] == pytest.approx(np.mean(line["val_ious"]))
        assert len(line["val_ious"]) == len(CLASSES)
    assert best_figures(out / "best.safetensors").score == max(scores)
    model = load_model(out / "best.safetensors")
    assert isinstance(model, Segmenter) and model.data_spec.class_names == CLASSES
    assert model.stride == 2


def test_weights_are_judged_at_several_sizes(run, tmp_path, capsys):
    folder, *_ = run
    best, kept = folder / "out/small/best.safetensors", tmp_path / "rows.json"
    code = validate_tool(
        ["--checkpoint", str(best), "--img-size", "16", "32", "--json", str(kept), "--fit"]
        + ["stretch"]
    )
    printed = capsys.readouterr().out.splitlines()
    headings = [line.split() for line in printed]
    assert (
        code == 0 and headings.count(["size", "images", "mean", "IoU", "pixels", "images/s"]) == 1
    )
    found = json.loads(kept.read_text())["rows"]
    assert [row["img_size"] for row in found] == [16, 32]
    for row, line, *classes in zip(
        found, *(printed[i - 10 :: 5][:2] for i in range(5)), strict=True
    ):
        assert f"{100 * row['mean_iou']:.2f} %" in line
        assert f"{100 * row['accuracy']:.2f} %" in line
        assert classes[0].split() == ["IoU", "AP"]
        for name, cells, *pair in zip(
            CLASSES, classes[1:], row["ious"], row["average_precisions"], strict=True
        ):
            assert cells.split() == [name, *f"{100 * pair[0]:.2f} % {100 * pair[1]:.2f} %".split()]
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
    best = tmp_path / "best.safetensors"
    best.write_bytes((out / "best.safetensors").read_bytes())
    assert load_model(best).data_spec.colours == ((0, 0, 0), (255, 255, 255))
    # Elsewhere, without the run, whatever else is there.
    rewrite(write_folder(tmp_path / "other"), (0, 65535, 65535), np.uint16)
    given = ["--data.name", "folder", "--data.root", str(tmp_path / "other"), "--data.workers", "0"]
    judge = [
        "--checkpoint",
        str(best),
        "--fit",
        "crop",
        "--split",
        "test",
        *given,
        "--json",
        str(tmp_path / "rows"),
    ]
    assert validate_tool(judge) == 0
    [row] = json.loads((tmp_path / "rows").read_text())["rows"]
    assert row["ious"] == pytest.approx(test["ious"], abs=1e-6)
    # A state of a run for which 255 did not count is of other masks.
    state = torch.load(out / "last.pt", weights_only=True)
    torch.save(state | {"data": state["data"] | {"colours": None}}, out / "last.pt")
    with pytest.raises(ValueError, match="the mask values had other classes"):
        lines_of(replace(config, resume=True, epochs=7))


def test_a_body_starts_from_a_classification_and_the_head_is_new(tmp_path):
    spec = DataSpec(3, 4, (), (0.5,) * 3, (0.2,) * 3, None, 16)
    torch.manual_seed(3)
    body, args = build_model(ModelConfig("scaleformer_vit_t", MODEL | TINY), spec)
    save_model(tmp_path / "body.safetensors", body, "scaleformer_vit_t", args, spec)
    write_folder(tmp_path / "data")
    config = config_of(tmp_path, init_from=str(tmp_path / "body.safetensors"))
    splits = build_splits(config.data, 0)
    model, chosen, kept, said = started_model(config, config.model, splits.spec)
    own = body.state_dict()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, own[name]), name
    assert chosen.args["head_stride"] == 2 and kept["head_stride"] == 2
    assert any("come from" in line for line in said)


WRONG = {
    "--optim.mixup 0.2": "need one class per image",
    "--model.args.head_blocks [7]": "head_blocks: expected blocks 0 to 1 of 2, got 7",
    "--data.root nowhere": "does not exist; expected images/* and masks/*",
    "--data.masks {classes:[dark,light,red,blue]}": "the 10 training masks have no "
    "pixel of class blue; add masks",
}


def test_wrong_options_are_one_line(run, capsys):
    folder, *_ = run
    for flags, line in WRONG.items():
        given = ["--config", str(folder / "out/small/config.yaml"), "--run", "x", *flags.split()]
        assert train_tool(given) == 2
        assert_one_error(capsys, line)
    assert not (folder / "out" / "x").exists()


def test_what_is_for_classes_of_images_refuses_masks(run, tmp_path, capsys):
    best = str(run[0] / "out/small/best.safetensors")
    share, convert = load_tool("share"), load_tool("convert")
    assert share([best, "--to", str(tmp_path / "shared")]) == 2
    assert_one_error(capsys, "gives classes of pixels")
    assert convert([best, "--output", str(tmp_path / "c.safetensors")]) == 2
    assert_one_error(capsys, "got a model with classes of pixels")
    assert read_metadata(best)["model"] == "scaleformer_vit_t" and not list(tmp_path.iterdir())


def test_the_configuration_for_own_masks_trains_on_crops_and_predicts(tmp_path):
    root, masks = write_folder(tmp_path / "data", images=2, px=40), tmp_path / "masks"
    (root / "classes.yaml").write_text("classes: [dark, light, red]\n")
    flags = words("--config finetune_segmentation --data.root {} --output {}", root, tmp_path)
    small = "--epochs 1 --data.crops 2 --data.crop 32 --data.workers 0 --model.args.depth 1"
    assert train_tool([*flags, *words(small)]) == 0
    checkpoint = tmp_path / "finetune_segmentation" / "best.safetensors"
    flags = words("--checkpoint {} --images {} --output {}", checkpoint, root / "test", masks)
    assert predict_tool(flags) == 0
    with Image.open(masks / "images" / "0.png") as mask:
        assert mask.size == (40, 40) and mask.getextrema()[1] < len(CLASSES)
