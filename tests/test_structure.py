"""Imports go one way, importing only defines, and the repository keeps its own rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RANKS = {"layout": 0, "ops": 1, "layers": 2, "models": 3}
RANKS |= {
    "training": 4,
    "measure": 4,
    "calibrate": 4,
    "fresh_process": 4,
    "visualize": 4,
    "benchmark": 5,
}
RANKS |= {"sweep": 5, "profiling": 5, "inference": 5, "report": 5}
FILES = sorted((ROOT / "visionattn").rglob("*.py"))


def imported_parts(path):
    """Subpackages of visionattn that the file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "visionattn" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = path.relative_to(ROOT / "visionattn").parts[0].removesuffix(".py")
    if part == "__init__":
        return
    above = {name for name in imported_parts(path) if name in RANKS and RANKS[name] > RANKS[part]}
    assert above == set()


def test_operations_know_neither_timm_nor_the_reference():
    for path in (ROOT / "visionattn" / "ops").rglob("*.py"):
        text = path.read_text()
        assert "import timm" not in text and "from timm" not in text
        assert path.name == "reference.py" or "ops.reference" not in text


def test_package_imports_without_what_only_training_and_kernels_need():
    """A machine for inference has torch, timm and safetensors; nothing there fetches anything or
    prints.
    """
    code = (
        "import sys\n"
        "for name in ('albumentations', 'cv2', 'jsonargparse', 'tensorboard', 'sklearn', 'rich', "
        "'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "import visionattn, visionattn.ops, visionattn.layers, visionattn.models, timm\n"
        "timm.create_model('scaleformer_vit_t', depth=1)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
