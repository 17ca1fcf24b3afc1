"""``forward_tiled`` against the plain forward pass, which knows nothing of bands."""

import queue
import threading
import time
from functools import partial

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.helpers.changed_modules import CALLED, REFUSED, adapt, hook, put
from tests.helpers.oracles import peak_bytes
from tests.helpers.tiled import Array, Rows, draw_image, least_memory, make
from visionattn.models.attribution import find_attribution
from visionattn.models.large import band_plan as planning
from visionattn.models.large.band_plan import bands_of
from visionattn.models.large.forward_bands import check_tiled, forward_tiled
from visionattn.models.large.patched_image import PatchedImage
from visionattn.models.segmentation import Segmenter

GRIDS = [(13, 9), (1, 17), (21, 5), (17, 1), (9, 23), (4, 4)]
WINDOWS = dict(window_size=4)
CASES = {
    "flat, one class": dict(relative="flat", horizon=0, attention="taylorshift"),
    "axial, sum": dict(attention="taylorshift", relative="axial", normalization="sum"),
    "no position": dict(relative="none", feature_map="random", qk_norm=True, value_conv=3),
    "horizon 1": dict(horizon=1, normalization="sum", value_conv=5, output_gate=True),
    "far horizon": dict(horizon=24, depth=2, reg_tokens=3),
    "centred": dict(centre_keys=True, class_token=False, global_pool="avgmax"),
    "windows": dict(attention=["window", "kernelized", "window"], value_conv=3, **WINDOWS),
    "windows alone": dict(attention="window", relative="none", class_token=False, window_size=3),
    "plain bicubic": dict(pos_embed="learn", pos_antialias=False, global_pool="token"),
    "absolute": dict(pos_embed="learn", global_pool="token", no_embed_class=True, pre_norm=True),
    "avg": dict(global_pool="avg", fc_norm=False, scale_attn_norm=True, init_values=0.5),
    "map": dict(global_pool="map", depth=2),
    "joint, windows": dict(depth=2, horizon=9, attention=["taylorshift", "window"], **WINDOWS),
    "flat": dict(depth=2, horizon=9, relative="flat", pool_include_prefix=True),
}


def plain(model, image, want):
    """What the model gives for an image ``[h, w, C]``, padded as ``forward_tiled`` says."""
    x = torch.from_numpy(image).permute(2, 0, 1)[None]
    down, across = model.patch_embed.patch_size
    x = nn.functional.pad(x, (0, -x.shape[3] % across, 0, -x.shape[2] % down), mode="replicate")
    with torch.inference_mode():
        if want == "dense":
            taken = dict(indices=1, norm=True, intermediates_only=True)
            return model.forward_intermediates(x, **taken)[-1]
        return model.forward_head(model.forward_features(x), pre_logits=want == "pooled")


@pytest.mark.parametrize("name", CASES)
def test_bands_give_what_the_whole_image_gives(name, monkeypatch):
    model, case = make(**CASES[name]), list(CASES).index(name)
    single = make(**CASES[name]).float()
    # timm resamples absolute positions in float32.
    double_tolerance = 2e-6 if "pos_embed" in CASES[name] else 1e-12
    for number in range(2):
        height, width = GRIDS[(case + 2 * number) % 6]
        # Not a whole number of patches, where there are several; bands down to one row.
        less = [number * (side > 1) for side in (height, width)]
        image = draw_image(4 * height - less[0], 4 * width - less[1], seed=number)
        monkeypatch.setattr(planning, "BAND_TOKENS", width * (1, 3, 7)[(case + number) % 3])
        runs = [(model, image, double_tolerance)]
        runs += [(single, image.astype(np.float32), 1e-5)] * (number == 0)
        for of, pixels, tolerance in runs:
            for want in ("logits", "pooled", "dense")[number % 2 :]:
                found, expected = (
                    forward_tiled(of, Array(pixels), want=want),
                    plain(of, pixels, want),
                )
                assert found.shape == expected.shape
                assert (found - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("head", [{}, dict(head_blocks=[0, -1], head_stride=2)])
def test_classes_of_pixels(head, monkeypatch):
    model = Segmenter(make(num_classes=0, attention="taylorshift"), 5, **head).double().eval()
    nn.init.normal_(model.head.weight)
    image = draw_image(4 * 13 - 3, 4 * 9 - 2)
    x = torch.from_numpy(image).permute(2, 0, 1)[None]
    x = nn.functional.pad(x, (0, 2, 0, 3), mode="replicate")
    expected = model.masks(x)[:, : image.shape[0], : image.shape[1]]
    assert len(expected.unique()) > 2
    for rows in (1, 3, 50):
        monkeypatch.setattr(planning, "BAND_TOKENS", 9 * rows)
        found = forward_tiled(model, Array(image), want="masks")
        assert found.dtype == torch.uint8 and torch.equal(found, expected)
    sink = Rows()
    assert forward_tiled(model, Array(image), sink, want="masks") is None
    assert torch.equal(torch.from_numpy(sink.map), expected)
    image[-1, -1] = np.nan  # a pixel without finite logits has no class
    assert (forward_tiled(model, Array(image), want="masks") == 255).any()


@pytest.mark.parametrize("pool, with_prefix, target", [("avgmax", True, None), ("token", False, 2)])
def test_evidence(pool, with_prefix, target, monkeypatch):
    model = make(global_pool=pool, pool_include_prefix=with_prefix)
    image = draw_image(60, 44)
    monkeypatch.setattr(planning, "BAND_TOKENS", 50)
    found = forward_tiled(model, Array(image), want="evidence", target=target)
    x = torch.from_numpy(image).permute(2, 0, 1)[None]
    expected = find_attribution(model, x, target=target, gradient=False)
    assert (found.target, found.how) == (expected.target, expected.how)
    assert found.margin == pytest.approx(expected.margin, rel=1e-9)
    torch.testing.assert_close(found.logits, expected.logits)
    for name in ("patches", "channels"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    if pool == "token":
        assert found.rest is None
    else:
        assert found.rest == pytest.approx(expected.rest, abs=1e-9)


def test_the_file_is_read_once_and_in_order(monkeypatch):
    model, read = make(), []
    monkeypatch.setattr(planning, "BAND_TOKENS", 33)
    source = Array(draw_image(50, 43))
    reading = source.read
    source.read = lambda rows, columns: read.append((rows, columns)) or reading(rows, columns)
    forward_tiled(model, source)
    assert [columns for _, columns in read] == [slice(0, 43)] * len(read)
    assert [rows.start for rows, _ in read] == [0, *(rows.stop for rows, _ in read[:-1])]
    assert read[-1][0].stop == 50 and len(read) > 3


def test_whole_numbers_are_fractions_unless_prepared():
    model, image = make(), np.arange(40 * 40 * 3, dtype=np.uint16).reshape(40, 40, 3)
    expected = plain(model, image / 65535, "logits")
    torch.testing.assert_close(forward_tiled(model, Array(image)), expected, rtol=1e-5, atol=1e-5)
    twice = forward_tiled(
        model,
        Array(image),
        prepare=lambda pixels: torch.from_numpy(pixels / 32767.5).permute(2, 0, 1)[None],
    )
    torch.testing.assert_close(twice, plain(model, image / 32767.5, "logits"))


def test_the_model_stays_as_it_is():
    model = make(drop_path_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5, patch_drop_rate=0.5)
    image = draw_image(40, 40)
    expected = plain(model, image, "logits")
    model.train()
    torch.testing.assert_close(forward_tiled(model, Array(image)), expected)
    assert model.training and all(block.training for block in model.blocks)


def test_tokens_in_files_are_the_same(tmp_path):
    model, image, said = make(**CASES["windows"]), draw_image(160, 90), []
    options = dict(want="dense", memory=least_memory(model, 160, 90))
    work = tmp_path / "work"
    found = forward_tiled(model, Array(image), work=work, say=said.append, **options)
    assert "tokens in files" in said[0] and not work.exists()
    assert torch.equal(found, forward_tiled(model, Array(image), **options))
    torch.testing.assert_close(found, plain(model, image, "dense"))


@pytest.mark.parametrize(
    "args", [dict(horizon=9), dict(attention=["window", "taylorshift"], relative="axial")]
)
def test_a_pass_stays_within_its_bound_of_memory(args):
    model, image = make(**dict(embed_dim=64, depth=2) | args).float(), draw_image(128, 128)
    least, source = least_memory(model, 128, 128), Array(image.astype(np.float32))
    for memory in (least, 3 * least):
        run = partial(forward_tiled, model, source, Rows(), want="dense", memory=memory)
        assert peak_bytes(run) <= memory + planning.WORKING_BYTES


REFUSALS = [
    (dict(attention="softmax"), {}, "got softmax over all tokens in block 0"),
    (dict(softmax_blocks=[-1]), {}, "got softmax over all tokens in block 2"),
    (dict(feature_map="softmax"), {}, "keys depend on each other"),
    (dict(global_pool=""), {}, "expected global_pool"),
    (dict(global_pool="prr"), {}, "cannot be computed in bands"),
    (dict(dynamic_img_size=False, img_size=32), {}, "dynamic_img_size=False fixes"),
    (
        {},
        dict(want="rows"),
        "expected one of logits, pooled, dense, masks, probabilities, evidence",
    ),
    ({}, dict(want="masks"), "has no classes of pixels"),
    ({}, dict(want="evidence", target=9), "expected class 0 to 4, got 9"),
    ({}, dict(target=2), "target needs want 'evidence', got 'logits'; remove it"),
    ({}, dict(sink=Rows(), want="pooled"), "a sink needs a map, got want 'pooled'; remove it"),
    ({}, dict(memory=1000), "below one band"),
    ({}, dict(source=Array(draw_image(40, 40)[..., :1])), "channels, as the model's, got 1"),
    ({}, dict(source=Array(draw_image(3, 40))), "3 x 40 pixels is smaller than a patch"),
]


def test_what_cannot_be_computed_is_said_in_one_line():
    for args, change, message in REFUSALS:
        given = dict(source=Array(draw_image(40, 40))) | change
        with pytest.raises(ValueError, match=message) as error:
            forward_tiled(make(**args), **given)
        assert "\n" not in str(error.value)


OTHERS = [
    (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=1),
        "logits",
        "expected a VisionAttnTransformer .*; cut the image into tiles",
    ),
    (lambda: Segmenter(make(num_classes=0), 3), "logits", "has classes of pixels"),
    (
        lambda: Segmenter(make(num_classes=0), 5, head_hidden=8),
        "masks",
        "^expected a linear head, got one with a hidden layer; c",
    ),
    (
        lambda: torch.ao.quantization.quantize_dynamic(make().float(), {nn.Linear}),
        "logits",
        r"^blocks\.0 has a module whose output for a token dep",
    ),
]


@pytest.mark.filterwarnings("ignore")
def test_models_that_bands_cannot_compute_say_why():
    for build, want, message in OTHERS:
        with pytest.raises(ValueError, match=message):
            check_tiled(build(), want)


def test_a_head_with_a_hidden_layer_gives_feature_maps():
    model, image = Segmenter(make(num_classes=0), 5, head_hidden=8), draw_image(40, 36)
    found = forward_tiled(model, Array(image), want="dense")
    torch.testing.assert_close(found, plain(model.backbone.eval(), image, "dense"))


def test_changed_modules_are_called_and_changes_that_would_be_left_out_are_refused(monkeypatch):
    image = draw_image(60, 44)
    monkeypatch.setattr(planning, "BAND_TOKENS", 40)
    for name, change in CALLED.items():
        model = make()
        before = plain(model, image, "logits")
        change(model)
        found, expected = forward_tiled(model, Array(image)), plain(model, image, "logits")
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max(), name
        assert (before - expected).abs().max() > 1e-6 * expected.abs().max(), name
    for change, message in REFUSED.values():
        model = make()
        change(model)
        with pytest.raises(ValueError, match=f"{message}[^\n]*; cut the image into tiles instead$"):
            forward_tiled(model, Array(draw_image(40, 40)))


BY_BLOCK = "^head .*, which bands would bypass: with 2 head_blocks, its weights are applied"
BESIDE = "^norm, head or pooling has a module whose output for a token depends on others"


@pytest.mark.parametrize(
    "change, one, several",
    [
        (adapt("head"), None, BY_BLOCK),
        (hook("head", lambda out: out.roll(1, 1)), None, BY_BLOCK),
        (put("head", lambda old: nn.Sequential(old, nn.Tanh())), None, BY_BLOCK),
        (lambda model: parametrizations.weight_norm(model.head), None, None),
        (put("head", lambda old: nn.Conv2d(old.in_channels, 5, 3, 1, 1).double()), BESIDE, BESIDE),
    ],
    ids=["LoRA", "hook", "more layers", "parametrized", "pixels beside"],
)
def test_a_changed_head_of_pixels_is_called_or_refused(change, one, several, monkeypatch):
    image = draw_image(60, 44)
    monkeypatch.setattr(planning, "BAND_TOKENS", 40)
    for blocks, message in (([-1], one), ([0, -1], several)):
        model = Segmenter(make(num_classes=0), 5, head_blocks=blocks).double().eval()
        nn.init.normal_(model.head.weight)
        change(model)
        if message is None:
            expected = model.masks(torch.from_numpy(image).permute(2, 0, 1)[None])
            assert torch.equal(forward_tiled(model, Array(image), want="masks"), expected)
        else:
            with pytest.raises(ValueError, match=message):
                forward_tiled(model, Array(image), want="masks")


def test_one_band_is_read_ahead_in_another_thread_and_none_beyond_it():
    source, begun = Array(draw_image(24, 8)), queue.SimpleQueue()

    def read(rows, columns):
        begun.put((rows.start, threading.current_thread() is threading.main_thread()))
        if rows.start == 20:
            raise OSError("rows cannot be read")
        return source.pixels[rows, columns]

    source.read = read
    bands = PatchedImage(make(), source, None).bands(bands_of(6, 1))
    next(bands)
    assert begun.get(timeout=20) == (0, False)
    for row in (4, 8, 12, 16):
        assert begun.get(timeout=20) == (row, False)
        time.sleep(0.005)
        assert begun.empty()
        next(bands)
    with pytest.raises(OSError, match="rows cannot be read"):  # in the turn of its band
        next(bands)
