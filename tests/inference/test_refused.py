"""What predict, features, look and generate refuse: one line, exit code 2, and nothing written."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import timm
from PIL import Image

from tests.helpers.inference_files import (
    ARGS,
    COLOUR,
    GREY,
    write_decoder,
    write_folder,
    write_image,
    write_segmenter,
    write_tiff,
    write_weights,
)
from tests.helpers.tools import written
from visionattn.command import main
from visionattn.models.registration import create
from visionattn.models.weights import save_model

MAX = ARGS | dict(global_pool="max", class_token=False)
TOP = ARGS | dict(head_top=1)
PLAIN = dict(patch_size=8, embed_dim=24, depth=2, num_heads=3, relative="none")
SOFTMAX = PLAIN | dict(attention="softmax")
FILES = "--images images --workers 0"
CANVAS = "--dense --probe --data canvas --img_size 48 --workers 0 --output out"
COMMANDS = {
    "predict": f"predict --checkpoint best.safetensors {FILES} --output out.csv {{}}",
    "native": f"predict --checkpoint native.safetensors {FILES} --output out.csv {{}}",
    "tiles": f"predict --checkpoint best.safetensors {FILES} --output out.csv --tiles 24 {{}}",
    "masks": f"predict --checkpoint painter.safetensors {FILES} {{}}",
    "features": f"features --checkpoint best.safetensors {FILES} --output out {{}}",
    "shard": f"features --checkpoint best.safetensors {FILES} --output out --shard {{}}",
    "drawn": f"features --checkpoint grey.safetensors {CANVAS} {{}}",
    "map": "features --checkpoint best.safetensors --images slide.tif --img_size native --dense "
    "--output map.npy {}",
    "look": "look max.safetensors a.png {} --output out",
    "look at": "look {} --output out",
    "generate": "generate --checkpoint decoder.safetensors {}",
    "untold": "generate --checkpoint untold.safetensors --output new.png {}",
}
REFUSED = [
    # Where results go.
    ("predict", "--output out.txt", "--output to end in .csv or .json"),
    ("predict", "--output no/out.csv", "no folder"),
    ("predict", "--output there.csv", "there.csv exists; pass --overwrite to replace it"),
    ("predict", "--output null --overwrite", "overwrite needs --output"),
    ("masks", "", "expected --output: a folder for a PNG of each mask"),
    ("masks", "--output out.csv", "expected a folder as --output for masks"),
    ("masks", "--output m.npy", "expected one image for --output"),
    ("masks", "--output there", "exists; pass --overwrite to replace it"),
    ("masks", "--output out --images a.png a.png", "expected each image once"),
    ("masks", "--output images --overwrite", "a result would replace the image images/0.png"),
    ("predict", "--save masks", "--save needs a segmentation model"),
    ("masks", "--output out --save boxes", "save"),
    (
        "masks",
        "--output m.npy --images a.png --save masks coco",
        "a folder as --output for --save masks",
    ),
    ("masks", "--output m.tif --images a.png --save geojson", ", got m.tif"),
    ("masks", "--output out --map_format tif", "map_format needs --save probabilities and a fold"),
    ("masks", "--output m.tif --images a.png --save probabilities --map_format tif", "map_format"),
    ("masks", "--output out --outline 1", "outline needs --save geojson or coco"),
    ("masks", "--output out --save coco --outline roof", "no class roof; the classes are 0, 1, 2"),
    ("masks", "--output out --save probabilities --map_format zarr", "a zarr array needs zarr"),
    ("features", "--output null", "expected --output: "),
    ("features", "--output full", "full holds other files (notes.txt)"),
    ("features", "--output full/notes.txt", "full/notes.txt is a file, so"),
    ("features", "--output foreign", "is not a feature file of this version"),
    ("map", "--images own.npy --overwrite --output own.npy", "own.npy would overwrite the image"),
    ("map", "--images slide.tif slide.tif", "expected one image for --output map.npy, got 2"),
    ("map", "--dense false", "add --dense, or pass a folder"),
    ("generate", "", "expected --output: a .png"),
    ("generate", "--output a.jpg", "expected --output to end in .png or .npy, or a f"),
    ("generate", "--output there.png", "there.png exists; pass --overwrite to replace it"),
    (
        "generate",
        "--output images --overwrite",
        "images has no generate.json, so --overwrite does not",
    ),
    # Options that are out of range, contradict each other or do nothing.
    ("predict", "--checkpoint null --model scaleformer_vit_t", "predictions need weights"),
    ("predict", "--top_k 0", "expected top_k from 1 to 4, the model's classes, got 0"),
    ("masks", "--output out --top-k 2", "top_k needs a model with classes"),
    ("features", "--data digits", "pass either --images or --data digits"),
    ("features", "--shard_mib 0", "shard_mib must be at least 1, got 0"),
    ("features", "--probe --dense", "remove --dense"),
    ("features", "--probe", "images has images outside of class folders"),
    ("shard", "0/4", "expected shard i/n with i from 1 to n"),
    ("shard", "1/10", "expected at most 2 parts for 2 images, got 10"),
    ("shard", "1/2 --probe", "probe needs the features of all images; run the command without"),
    ("shard", "1/2 --merge", "merge reads all settings from the parts in --output; remove "),
    ("shard", "1/2 --parts 3", "parts needs --engine ray"),
    ("shard", "1/2 --engine ray --address local", "engine ray divides the images itself; remove"),
    ("map", "--memory_gib 1e-6", "memory 0 MiB is below one band"),
    ("map", "--level 1", "expected a level from 0 to 0, got 1; sizes: 133 x 104 pixels"),
    ("map", "--batch_size 2", "batch_size has no effect on the map of one image"),
    ("map", "--checkpoint softmax.safetensors", "cannot be written band by band: "),
    ("predict", "--overlap 8", "overlap needs --tiles"),
    ("tiles", "--tiles 20", "expected tiles in whole 8-pixel patches, got 20 pixels; use 16"),
    ("tiles", "--overlap 4", "expected overlap in whole"),
    ("tiles", "--overlap 24", "overlap from 0 to below tile"),
    (
        "tiles",
        "--img-size 24",
        "expected tiles smaller than the images, which are resized to at most 24 x 24 px",
    ),
    ("tiles", "--img-size 16 32 --fit pad", "tiles must not contain"),
    ("tiles", "--batch-size auto", "expected a number as batch_size"),
    ("tiles", "--checkpoint painter.safetensors --output out --combine max", "combine"),
    # Sizes.
    ("native", "--fit pad", "fit pad needs img_size"),
    (
        "native",
        "--img_size 32 --max_patches 6",
        "img_size and max_patches both limit the image size",
    ),
    ("native", "--fit pad --max_patches 6", "max_patches needs fit native"),
    ("native", "--img_size native --max_patches 6", "img_size native conflicts with max_patches"),
    ("native", "--img_size native --fit pad", "img_size native conflicts with fit pad"),
    ("native", "--img_size [16]", "img_size: expected one number of pixels, or height and width"),
    ("native", "--img_size 4 24", "expected img_size at least a patch of 8 x 8 pixels, got 4 x 24"),
    ("native", "--fit pad --img_size 20 24", "20 x 24 pixels is not a whole number of 8-pixel"),
    ("native", "--fit whole", "fit must be one of native, pad, stretch, crop"),
    ("map", "--img_size 64", "slide.tif of 133 x 104 px would be preprocessed (center crop to 64"),
    # What no image has.
    ("native", "--bands 4 5 6", " expected band 6, the image has 3 bands"),
    ("native", "--page 3", " expected page 3, the image has 1 page"),
    ("native", "--value_range 5 5", "value_range must be two finite numbers, the lower one first"),
    ("native", "--images float.npy", "; pass --val"),
    (
        "native",
        "--images five.npy",
        "the image has 5 bands; choose bands, e.g.",
    ),
    ("native", "--images 0.zarr", "0.zarr: a zarr array needs zarr: pip install 'visionattn[arra"),
    ("native", "--images thin.png", "thin.png: image of 40 x 7"),
    # Probes of drawn images.
    (
        "drawn",
        "--data digits",
        "a dense probe needs masks, got digits; remove --dens",
    ),
    ("drawn", "--images .", "pass either --images or --data digits, canvas or documents"),
    ("drawn", "--data documents --data_args.distractors 3", "data_args has an unknown key"),
    ("drawn", "--probe false --dense false --data digits --data_args.eval_images 3", "data_args"),
    ("drawn", "--data_args.distractors -1", "data_args.distractors must be at least 0, got -1"),
    ("drawn", "--img_size 40", "canvas of 40 pixels is too small for its digits; use at least 48"),
    ("drawn", "--img_size native", "canvas needs a size in pixels; pass --img-size"),
    # Blocks of dense features.
    ("features", "--dense --blocks 2", "error: blocks: expected blocks 0 to 1 of 2, got 2"),
    # Attribution.
    ("look at", "max.safetensors torn.png", "torn.png: "),
    ("look", "--blocks 2", "expected blocks 0 to 1 of 2, got 2"),
    ("look", "--head 3", "expected head 0 to 2 of 3, got 3"),
    ("look", "b.png --queries 30,3 --img-size native", "b.png: expected a query within the part"),
    ("look", "--queries 9,2", "40 x 40 pixels from 0,8"),
    ("look", "--queries left", "expected queries class, top, or"),
    ("look", "--queries class", "has no class token"),
    ("look", "--target oak", "no class oak; the classes are ash, birch"),
    ("look", "--show winners --queries top", "queries needs --show rows"),
    ("look", "--show winners --blocks 0", "blocks needs --show rows"),
    ("look", "--show rows --features_block 0", "features_block needs --show features"),
    ("look at", "patches.safetensors a.png --blocks 0", "blocks needs --show rows"),
    ("look at", "patches.safetensors a.png --show rows", "a head on patches supports only --show"),
    ("look", "--images b.png", "expected images either first or with"),
    ("look at", "headless.safetensors a.png", "expected a model with classes, got"),
    ("look at", "plain.safetensors a.png --term place", "has no separate weights for content"),
    # Generation.
    ("generate", "--count 10001 --output new.png", "expected count at most 10,000 for a .png"),
    ("untold", "", "expected img_size, because the"),
    (
        "untold",
        "--complete tiny.png b.png",
        "got 24 x 24 px (b.png); complete images of one size",
    ),
    ("untold", "--checkpoint five.safetensors", "expected 1 or 3 channels for"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with weights and images of many kinds, and the bytes of all its files."""
    folder = tmp_path_factory.mktemp("refused")
    for name in ("there", "full", "foreign", "0.zarr"):
        (folder / name).mkdir()
    for name in ("there.csv", "there.png", "there/1.png", "full/notes.txt"):
        (folder / name).write_text("mine")
    weights = write_weights(folder / "best.safetensors").read_bytes()
    (folder / "foreign" / "features-00000.safetensors").write_bytes(weights)
    write_weights(folder / "native.safetensors", replace(COLOUR, fit="native", img_size=None))
    write_weights(folder / "grey.safetensors", GREY)
    write_weights(folder / "max.safetensors", args=MAX)
    write_weights(folder / "plain.safetensors", args=PLAIN | dict(global_pool="avg"))
    write_weights(folder / "softmax.safetensors", args=SOFTMAX)
    body, spec = timm.create_model("scaleformer_vit_t", num_classes=0, **MAX), COLOUR
    spec = replace(spec, num_classes=0, class_names=())
    save_model(folder / "headless.safetensors", body, "scaleformer_vit_t", MAX, spec)
    patches = create("scaleformer_vit_t", "classification", 4, 3, TOP)
    save_model(folder / "patches.safetensors", patches, "scaleformer_vit_t", TOP, COLOUR)
    write_segmenter(folder / "painter.safetensors")
    write_decoder(folder / "decoder.safetensors", conditioned=True)
    write_decoder(folder / "five.safetensors", 5)
    write_decoder(folder / "untold.safetensors", size=None, fit="native")
    write_folder(folder / "images", [(21, 35), (16, 24)])
    for name, shape in {"a": (40, 56), "b": (24, 24), "thin": (40, 7)}.items():
        write_image(folder / f"{name}.png", *shape, seed=1)
    Image.fromarray(np.zeros((6, 9), np.uint8)).save(folder / "tiny.png")
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:200])
    write_tiff(folder / "slide.tif", 133, 104)
    np.save(folder / "own.npy", np.zeros((40, 40, 3), np.uint8))
    np.save(folder / "float.npy", np.full((16, 24), 0.5, np.float32))
    np.save(folder / "five.npy", np.zeros((16, 24, 5), np.uint8))
    return folder, written(folder)


@pytest.mark.parametrize(("command", "more", "said"), REFUSED)
def test_one_line_with_code_2_and_nothing_written(files, capsys, monkeypatch, command, more, said):
    folder, before = files
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "zarr" else find(name)
    )
    monkeypatch.setattr("visionattn.cli.progress.SECONDS_PER_LINE", 3600)  # on a busy machine
    monkeypatch.chdir(folder)
    assert main(COMMANDS[command].format(more).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error
    assert written(folder) == before and not (folder / "out").exists()
