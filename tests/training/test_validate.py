"""Which images ``validate`` judges, and what it says before it begins: memory, time, and what would
fit.
"""

import json
import re
from itertools import product

import numpy as np
import pytest
import timm

from tests.helpers.image_files import members_of, write_classes, write_tar
from tests.helpers.inference_files import write_image
from visionattn.command import run
from visionattn.models import cost
from visionattn.models.weights import DataSpec, save_model
from visionattn.training import validate

NAMES = ("bird", "cat", "dog 2")
SHAPES = [(24, 40), (40, 24), (32, 48), (56, 56), (24, 24), (56, 56), (16, 16)]
ARGS = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "relative": "none"}
SPEC = DataSpec(3, 2, ("dark", "light"), (0.5,) * 3, (0.25,) * 3, None, None, "native", 64)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Weights of a model that sees images whole, and images of many sizes."""
    folder = tmp_path_factory.mktemp("validate")
    model = timm.create_model("scaleformer_vit_t", num_classes=2, **ARGS)
    save_model(folder / "weights.safetensors", model, "scaleformer_vit_t", ARGS, SPEC)
    for split, (number, shape) in product(("train", "val"), enumerate(SHAPES)):
        path = folder / "pages" / split / SPEC.class_names[number % 2] / f"{number}.png"
        write_image(path, *shape, number)
    return folder


@pytest.fixture
def evaluate(given, capsys, monkeypatch):
    """Runs the command, for which no evaluation is too short for a word; returns its exit code,
    what it printed and its error.
    """
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)
    monkeypatch.setattr(validate, "FEW_PIXELS", 0)

    def evaluated(*flags):
        words = f"--checkpoint={given}/weights.safetensors --data.name=folder --split=val "
        words += f"--data.root={given}/pages --data.workers=0 --device=cpu"
        code = run("validate", [*words.split(), *flags])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    return evaluated


@pytest.fixture
def there(monkeypatch):
    """Sets the memory there is."""
    return lambda count: monkeypatch.setattr(cost, "memory_there_is", lambda *how: count)


def needed_for(monkeypatch, evaluate, *flags):
    """The bytes that a run expects."""
    seen, real = [], cost.ForwardMemory.bytes_of

    def bytes_of(memory, shape):
        seen.append(real(memory, shape))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(cost.ForwardMemory, "bytes_of", bytes_of)
        assert evaluate(*flags)[0] == 0
    return max(seen)


def test_a_line_says_sizes_patches_memory_and_seconds_before_the_table(evaluate):
    code, lines, _ = evaluate()
    assert code == 0 and lines[2].split()[:3] == ["size", "images", "accuracy"]
    pattern = (
        r"7 images of 16 x 16 to 56 x 56 px, 4 to 49 patches; peak memory: \d+ MiB estimated, "
        r"[\d.]+ [MG]iB available; estimated time: [\d.]+ s per image, [\d.]+ s in total"
    )
    assert re.fullmatch(pattern, lines[1]), lines[1]
    line = evaluate("--fit=stretch", "--img-size", "32", "48")[1][1]
    assert line.startswith("7 images at 2 sizes of 32 x 32 to 48 x 48 px, 16 to 36 patches; peak")


def test_seconds_are_those_of_computing_all_sizes(evaluate, monkeypatch):
    """A pixel takes a millisecond."""
    tried = []

    def forward_seconds(passes, shape, patch_px):
        tried.append((shape[1:], shape[0], patch_px))
        return shape[1] * shape[2] / 1000

    monkeypatch.setattr(cost.Passes, "forward_seconds", forward_seconds)
    seconds = 7 * (32 * 32 + 48 * 64) / 1000
    sizes = "[[32,32],[48,64]]"
    line = evaluate("--fit=stretch", f"--img-size={sizes}", "--batch-size=5")[1][1]
    assert line.endswith(f" {seconds / 14:.1f} s per image, {seconds:.0f} s in total")
    assert tried == [((48, 64), 5, (8, 8))]  # only the largest is timed


def test_what_does_not_fit_is_refused_with_what_would_and_writes_nothing(
    evaluate, there, monkeypatch
):
    flags = "--fit=stretch", "--img-size=64"
    needed = needed_for(monkeypatch, evaluate, *flags)
    there(int(needed / 1.5))
    code, lines, error = evaluate(*flags)
    assert code == 3 and lines == []
    found = re.fullmatch(
        r"error: 7 images of 64 x 64 pixels would need about \d+ MiB of memory, but \d+ "
        r"MiB are available; (--batch-size [24]) would fit; --batch-size auto uses the "
        r"largest batch that fits\n",
        error,
    )
    assert evaluate(*flags, *found[1].split())[0] == 0
    there(needed // 20)
    px = re.search(r"; --img-size (\d+) would fit\n", evaluate(*flags)[2])[1]
    assert evaluate("--fit=stretch", f"--img-size={px}", "--batch-size=1")[0] == 0


def test_auto_chooses_patches_for_images_of_their_own_sizes(evaluate, there, tmp_path):
    path = tmp_path / "rows.json"
    there(1 << 50)
    code, lines, _ = evaluate("--batch-size=auto", f"--json={path}")
    assert code == 0 and lines[1] == "batch_size auto: 4 images fit (56 x 56 pixels)"
    config = json.loads(path.read_text())["config"]
    assert (config["batch_size"], config["data"]["batch_patches"]) == (4, 4 * 49)


@pytest.fixture
def weights(tmp_path):
    """Weights of three classes, with the run that they are of."""
    spec = DataSpec(3, 3, NAMES, (0.5,) * 3, (0.25,) * 3, None, 16)
    model = timm.create_model("scaleformer_vit_t", num_classes=3, **ARGS)
    save_model(tmp_path / "best.safetensors", model, "scaleformer_vit_t", ARGS, spec)
    write_classes(tmp_path / "own/Train", dict.fromkeys(NAMES, 4))
    write_classes(tmp_path / "own/valid", dict.fromkeys(NAMES, 2))
    write_classes(tmp_path / "own/test", dict.fromkeys(NAMES, 1))
    data = f"{{name: folder, root: {tmp_path / 'own'}, workers: 0}}"
    (tmp_path / "config.yaml").write_text(f"data: {data}\n")
    return tmp_path / "best.safetensors"


def judged(weights, *flags):
    words = [f"--checkpoint={weights}", "--data.workers=0", "--device=cpu", *flags]
    found = validate.Validation(validate.parse_validate(words))
    return found.split, np.bincount(found.dataset.labels, minlength=3).tolist()


def test_of_the_folder_of_the_training_its_validation_images_are_judged(
    weights, tmp_path, monkeypatch
):
    (tmp_path / "link").symlink_to(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--data.root=own/../own/"], ["--data.root=link"], ["--split=val"]):
        assert judged(weights, *flags) == ("validation", [2, 2, 2])
    assert judged(weights, "--split=train") == ("train", [4, 4, 4])
    assert judged(weights, "--split=test") == ("test", [1, 1, 1])
    assert judged(weights, "--split=all") == ("all", [7, 7, 7])
    assert judged(weights, "--data.root=own/test") == ("all", [1, 1, 1])


def test_of_another_folder_all_images_are_judged_by_the_classes_of_the_weights(weights, tmp_path):
    root, strange = tmp_path / "other.tar", tmp_path / "strange.tar"
    write_tar(root, members_of({"cat": 5, "dog 2": 3}, "./Test/"))
    write_tar(strange, members_of({"cat": 2, "dog 10": 1}))
    flags = [f"--data.root={root}", "--img-size", "16", "24"]
    with pytest.warns(UserWarning, match=f"^{root} has no images of the classes bird$"):
        assert judged(weights, *flags) == ("all", [0, 5, 3])
    line = r"has no images for --split val; choose from test, all$"
    with pytest.raises(ValueError, match=line), pytest.warns(UserWarning, match="no images"):
        judged(weights, *flags, "--split=val")
    line = f"^classes of {strange} unknown to the model: dog 10; expected bird, cat, dog 2, got cat"
    with pytest.raises(ValueError, match=line):
        judged(weights, f"--data.root={strange}")


def test_images_that_are_judged_are_not_augmented(weights, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("workers: 0", "workers: 0, augment: three"))
    flags = [f"--checkpoint={weights}", "--split=train", "--device=cpu"]
    assert validate.Validation(validate.parse_validate(flags)).dataset.augment is None
