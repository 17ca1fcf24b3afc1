"""Imports go one way, importing only defines, and the repository keeps its own rules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "visionattn"
ORDER = ("layout", "cli", "ops", "layers", "models", "data", "training", ("inference", "lab"))
"""Who may import whom: what stands left of it, and itself. Neither of a pair imports the other."""
RANKS = {
    part: i
    for i, parts in enumerate(ORDER)
    for part in ([parts] if isinstance(parts, str) else parts)
}
ROOMS = ("taylorshift", "kernelized", "position")
"""Of ``ops``: none imports the ``eager`` operators or the ``kernels`` of another."""
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(path):
    """Modules of visionattn that the file imports anywhere, also inside functions, as tuples."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] == "visionattn" and len(parts) > 1:
                yield parts[1:]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    above = {
        names[0]
        for names in imported_modules(path)
        if names[0] in RANKS and names[0] != part and RANKS[names[0]] >= RANKS[part]
    }
    assert above == set()


def test_every_part_has_a_place_in_the_order():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts - {"__init__"} == set(RANKS)


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
