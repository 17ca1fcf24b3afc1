"""Files of weights are read by what they hold, whatever their first bytes and their names."""

import hashlib
import re
import struct
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save, save_file

from tests.helpers.small_runs import SPEC
from tests.training.test_checkpoint import small_model
from visionattn.model_config import ModelConfig
from visionattn.models.conversion import from_softmax
from visionattn.models.weights import (
    load_model,
    read_safetensors,
    read_state_dict,
    save_model,
)
from visionattn.training.checkpoint import (
    best_figures,
    started_model,
)
from visionattn.training.config import TrainConfig

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5)}
LIKE_A_PICKLE = 0x80
LIKE_A_ZIP = int.from_bytes(b"PK", "little")
NAMES = ("a.safetensors", "a.pt", "a")
ODD_LENGTHS = (LIKE_A_PICKLE, 0x280, 0x380, LIKE_A_ZIP, LIKE_A_ZIP + 0x10000)


def with_head_of(content: bytes, length: int) -> bytes:
    """A safetensors file with spaces behind its head, as the format allows, up to this length."""
    old = struct.unpack("<Q", content[:8])[0]
    assert length >= old
    return struct.pack("<Q", length) + content[8 : 8 + old].ljust(length) + content[8 + old :]


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], wanted[key]) for key in wanted
    )


def test_a_head_of_any_length_is_read_whatever_the_name(tmp_path):
    content = save(TENSORS, metadata={"who": "me"})
    first = struct.unpack("<Q", content[:8])[0]
    lengths = [*range(first, first + 256, 5), *(length for length in ODD_LENGTHS if length > first)]
    starts = set()
    for number, length in enumerate(lengths):
        path = tmp_path / NAMES[number % 3]
        path.write_bytes(with_head_of(content, length))
        starts.add(path.read_bytes()[:2])
        metadata, tensors = read_safetensors(path)
        assert metadata == {"who": "me"} and same(tensors, TENSORS), length
        assert same(read_state_dict(path), TENSORS), length
    assert b"PK" in starts and any(start[:1] == b"\x80" for start in starts)


def test_a_model_without_width_is_one_line(tmp_path):
    args = {"embed_dim": 0, "depth": 2}
    save_model(tmp_path / "best.safetensors", small_model(), "scaleformer_vit_t", args, SPEC)
    with pytest.raises(ValueError, match="cannot be built with these args: embed_dim=0, depth=2"):
        load_model(tmp_path / "best.safetensors")


def test_a_file_that_is_cut_off_or_holds_no_weights_is_not_called_a_pickle(tmp_path):
    path, content = tmp_path / "cut", with_head_of(save({"a": torch.zeros(9)}), LIKE_A_ZIP)
    lengths = (len(content) - 1, 8 + LIKE_A_ZIP, 100, 20, 2, 1, 0)
    for bad in (*(content[:kept] for kept in lengths), b"PK\x03\x04 no archive"):
        path.write_bytes(bad)
        for read in (read_safetensors, load_model, best_figures):
            with pytest.raises(ValueError, match=r"is truncated or not a safetensors file"):
                read(path)
        with pytest.raises(ValueError, match=r"is a truncated or damaged checkpoint") as error:
            read_state_dict(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, zipped", [("a.safetensors", True), ("a.pt", False), ("a", True)])
def test_a_pickle_is_read_whatever_its_name_and_explained_where_it_is_no_use(
    tmp_path, name, zipped
):
    path = tmp_path / name
    torch.save({"model": TENSORS}, path, _use_new_zipfile_serialization=zipped)
    assert same(read_state_dict(path), TENSORS)
    for read in (read_safetensors, load_model, best_figures):
        with pytest.raises(
            ValueError, match=r"expected a safetensors file, got a pickle of torch.save"
        ):
            read(path)


def test_what_wraps_a_model_is_taken_off_every_name(tmp_path):
    path = tmp_path / "a"
    for prefix in ("module._orig_mod.", "_orig_mod.module."):
        for write in (torch.save, save_file):
            write({prefix + key: value for key, value in TENSORS.items()}, path)
            assert same(read_state_dict(path), TENSORS)
    own = {"module.weight": torch.ones(1), "head.weight": torch.zeros(1)}
    path.write_bytes(save(own))
    assert same(read_state_dict(path), own)


def test_a_nested_entry_without_tensors_hides_no_weights(tmp_path):
    torch.save({"ema": {"decay": 0.9}, "model": {"state_dict": TENSORS}}, tmp_path / "a")
    assert same(read_state_dict(tmp_path / "a"), TENSORS)


OPENERS = {
    "timm": lambda path: timm.create_model(
        "converted_vit", pretrained=True, pretrained_cfg_overlay=dict(file=str(path))
    ),
    "load_model": load_model,
    "init_from": lambda path: started_model(
        TrainConfig(init_from=str(path)), ModelConfig("converted_vit"), replace(SPEC, in_chans=3)
    )[0],
}


@pytest.mark.parametrize("opener", OPENERS)
def test_a_float16_file_is_loaded_if_it_has_the_hash_in_its_name(tmp_path, opener):
    vit = timm.create_model("test_vit", num_classes=4)
    from_softmax(vit).save(tmp_path / "best.safetensors")
    metadata, whole = read_safetensors(tmp_path / "best.safetensors")
    wanted = {name: value.half() for name, value in whole.items()}
    path = tmp_path / "student.safetensors"
    save_file(wanted, path, metadata=metadata)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path = path.rename(tmp_path / f"student-{digest}.safetensors")
    found = OPENERS[opener](path).state_dict()
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value.float()) for name, value in wanted.items())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    other = hashlib.sha256(content).hexdigest()
    said = f"expected SHA-256 {digest}... by its name, got {other}...; download it again"
    with pytest.raises(ValueError, match=re.escape(said)):
        OPENERS[opener](path)
    load_model(path.rename(tmp_path / "student-20261129.safetensors"))  # a date is no hash
