"""Images that are written value by value as what a training learns: the figure, and whole runs."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import visionattn
from tests.helpers.small_runs import lines, lines_of, small_config
from tests.helpers.tools import assert_one_error
from visionattn.command import main
from visionattn.data.batches import SampleKey
from visionattn.data.documents import draw_page
from visionattn.data.geometry import Geometry
from visionattn.data.splits import build_splits
from visionattn.data.synthetic_images import seen_as
from visionattn.model_config import ModelConfig
from visionattn.models.export import check_exportable
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import load_model
from visionattn.training import engine
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import evaluate
from visionattn.training.objectives import Likelihood
from visionattn.training.run_progress import report
from visionattn.training.share import ShareConfig, share
from visionattn.training.trainer import Trainer

CPU = torch.device("cpu")
REFUSED = "with classes or features, got pixel_decoder, which generates images"
DECODER = "--model.name pixel_decoder"
TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "rows": 1, "reach": 1}


def config_of(folder, *, model=None, data=None, **options):
    """A run on digits of 8 pixels, a tenth of them."""
    data = {"name": "digits", "task": "generate", "img_size": 8} | (data or {})
    config = small_config(folder, data=data, **{"epochs": 1, "batch_size": 64} | options)
    return replace(config, model=ModelConfig("pixel_decoder", TINY | (model or {})))


def bits_by_value(model, images, labels, counted) -> list[float]:
    """Bits per dimension of each image, from the probabilities of all levels of each value."""
    bits = -model.logits(images, labels).double().log_softmax(1) / math.log(2)
    own = bits.gather(1, images.long()[:, None])[:, 0]
    there = counted[:, None].expand_as(own).bool()
    return [values[kept].mean().item() for values, kept in zip(own, there, strict=True)]


@pytest.mark.parametrize("kind", ["plain", "conditioned", "counted"])
def test_the_figure_is_the_mean_of_bits_over_values_then_over_images(kind):
    torch.manual_seed(0)
    conditioned = {"num_classes": 5, "conditioned": True} if kind == "conditioned" else {}
    model = PixelDecoder(2, **TINY, levels=9, **conditioned).eval()
    images = torch.randint(0, 9, (3, 2, 4, 5), dtype=torch.uint8)
    labels, counted = torch.tensor([4, 0, 2]), torch.ones(3, 4, 5, dtype=torch.uint8)
    if kind == "counted":
        counted[:, 1:] = torch.rand(3, 3, 5) < 0.2
    targets = counted if kind == "counted" else labels
    wanted = bits_by_value(model, images, labels if conditioned else None, counted)
    objective = Likelihood(OptimConfig())
    found = objective.loss(objective.outputs(model, images, None, targets), targets)
    assert found.item() == pytest.approx(np.mean(wanted), rel=1e-5)
    judged = objective.judge(model, images, None, targets)
    assert judged.loss.item() == pytest.approx(sum(wanted), rel=1e-5) and judged.logits is None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    config = config_of(
        folder, epochs=2, batch_size=32, optim={"lr": 1e-2}, model={"conditioned": True}
    )
    stream = io.StringIO()
    result = engine.train(config, stream=stream)
    return folder, config, [*stream.getvalue().splitlines(), *report(config, result)]


def test_a_run_learns_and_says_bits_per_dimension(run):
    folder, config, said = run
    epochs = [line for line in lines(folder / "small") if line["kind"] == "epoch"]
    assert epochs[-1]["val_loss"] < epochs[0]["val_loss"] < 8
    assert epochs[-1]["val_accuracy"] is None and epochs[-1]["val_top5"] is None
    last = f"validation loss {epochs[-1]['val_loss']:.4f} bits/dim *"
    assert any(last in line for line in said)
    model = load_model(folder / "small" / "best.safetensors")
    assert isinstance(model, PixelDecoder) and model.conditioned and model.num_classes == 10
    assert model.data_spec.task == "generate" and model.data_spec.class_names[3] == "3"
    splits = build_splits(config.data, config.seed)
    batches = Trainer(config, splits, model, {}, CPU).batches_of(splits.test)
    found = evaluate(model, batches, model.data_spec, device=CPU)
    assert said[-1] == f"test loss {found.loss:.4f} bits/dim" and found.accuracy is None
    assert any(" generate " in line and "samples.png" in line for line in said)


def test_validate_gives_bits_per_dimension_at_other_sizes(run, capsys):
    folder, _, said = run
    command = f"validate --checkpoint {folder}/small/best.safetensors --img-size 8 10"
    assert main(command.split()) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert table[0] == ["size", "images", "bits/dim", "images/s"]
    assert table[1][:3] == ["8", "359", said[-1].split()[2]] and table[2][:2] == ["10", "359"]


def test_pieces_of_pages_come_from_pages_at_their_own_scale(tmp_path):
    config = config_of(tmp_path, data={"name": "documents", "img_size": [24, 40]}).data
    config = replace(config, args={"train_images": 7, "eval_images": 5})
    splits, others = build_splits(config, 3), build_splits(config, 4)
    seen = seen_as(splits.train, Geometry("crop", (24, 40)))
    assert seen == "crops of pages at their own scale, 24 x 40 px"
    key = SampleKey(2, 0, Geometry("crop", (24, 40)))
    made = [splits.train, others.train, splits.validation, splits.test]
    images = [dataset[key].pixels for dataset in made]
    images.append(splits.train[key._replace(epoch=1)].pixels)
    assert {(image.shape, image.dtype.name) for image in images} == {((24, 40, 1), "uint8")}
    assert len({image.tobytes() for image in images}) == len(images)
    assert np.array_equal(images[3], others.test[key].pixels)
    # The piece is part of the page that the same draws give, to the pixel.
    entropy = np.random.SeedSequence((3, 40, 0, 2))
    page = draw_page(np.random.Generator(np.random.SFC64(entropy)), 128, 128, None).image[..., 0]
    windows = np.lib.stride_tricks.sliding_window_view(page, (24, 40))
    assert (windows == images[0][..., 0]).all((2, 3)).sum() == 1


def write_pictures(folder, bands):
    """Images of several heights without classes; returns the options of their data."""
    draw = np.random.default_rng(0)
    (folder / "pictures").mkdir()
    for number in range(12):
        pixels = draw.integers(0, 256, (9 + number, 12, bands), np.uint8)
        Image.fromarray(pixels.squeeze()).save(folder / "pictures" / f"{number:02d}.png")
    return {"name": "folder", "root": str(folder / "pictures"), "img_size": 6, "fit": "crop"}


def test_a_folder_needs_no_classes_and_is_learnt_as_it_is(tmp_path):
    data = write_pictures(tmp_path, 3)
    config = config_of(tmp_path, data=data, batch_size=4)
    spec = build_splits(config.data, 0).spec
    assert (spec.num_classes, spec.in_chans, spec.mean) == (0, 3, ())
    assert "bits/dim *" in lines_of(config)[-1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # which range the values have
def test_an_image_of_more_than_8_bits_is_named_or_left_out(tmp_path):
    data = write_pictures(tmp_path, 1)
    deep = np.random.default_rng(0).integers(0, 2**12, (9, 12)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "pictures" / "deep.tif", deep)
    config = config_of(tmp_path, data=data | {"bands": [1]}, batch_size=4)
    said = "cannot read image .*deep.tif: it has more than 8 bits; convert it to 8 bits"
    with pytest.raises(ValueError, match=said):
        lines_of(config)
    config = replace(config, run="skips", data=replace(config.data, on_error="skip"))
    assert "bits/dim *" in lines_of(config)[-1]
    assert [row["left_out"] for row in lines(tmp_path / "skips") if row["kind"] == "epoch"] == [1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model.name scaleformer_vit_t",
            "which generates no images; pass --model.name pix",
        ),
        (f"{DECODER} --model.args.attention taylorshift", "has no causal form (its linear form"),
        (
            f"{DECODER} --data.task classification",
            "got pixel_decoder, which gives no classes; ",
        ),
        (f"{DECODER} --data.fit pad", "learns the values of whole images; remove data.fit pad"),
        (f"{DECODER} --optim.mixup 0.2", "remove optim.mixup"),
        (f"{DECODER} --data.name documents --data.fit native", "crops of documents at their own"),
        (
            f"{DECODER} --data.name documents --model.args.conditioned true",
            "conditioned needs classes",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, capsys, flags, said):
    command = f"train --data.task generate --data.img_size 8 --output {tmp_path}/out {flags}"
    assert main([*command.split(), f"--model.args={json.dumps(TINY)}"]) == 2
    assert_one_error(capsys, said)
    assert not (tmp_path / "out").exists()


def test_values_beyond_the_levels_end_a_run_in_one_line(tmp_path):
    config = config_of(tmp_path, model={"levels": 200})
    with pytest.raises(ValueError, match="0 to 199 for levels 200, got 255; pass a larger"):
        lines_of(config)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda best, picture: visionattn.predict(best, [picture]), REFUSED),
        (lambda best, picture: visionattn.extract_features(load_model(best), [picture]), REFUSED),
        (lambda best, picture: visionattn.look(best, picture), REFUSED),
        (lambda best, _: check_exportable(load_model(best)), REFUSED),
        (lambda best, _: share(ShareConfig(best, "shared")), "generates images, which timm and"),
    ],
)
def test_what_reads_images_refuses_a_model_that_writes_them(run, tmp_path, call, said):
    best, picture = str(run[0] / "small" / "best.safetensors"), str(tmp_path / "a.png")
    Image.new("L", (8, 8)).save(picture)
    with pytest.raises(ValueError, match=said):
        call(best, picture)
