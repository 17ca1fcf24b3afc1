"""Imports go one way, importing only defines, and the repository keeps its own rules."""

import ast
import contextlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "visionattn"
ORDER = (
    ("layout", "model_config"),
    "cli",
    "ops",
    "layers",
    "models",
    "data",
    ("inference", "training"),
    "lab",
)
ORDER += ("integrations", "command", "__main__")
"""Who may import whom: what stands left of it, and itself. Neither of a pair imports the other."""
RANKS = {
    part: i
    for i, parts in enumerate(ORDER)
    for part in ([parts] if isinstance(parts, str) else parts)
}
ROOMS = ("taylorshift", "kernelized", "position")
INNER = (("kernelized_eager",), ("taylorshift_eager",), ("kernels",))
"""Rooms of ``ops``: none imports the ``*_eager`` operators or the ``kernels`` of another."""
LANGUAGE = {"ops/gpu/triton_helpers.py", "ops/gpu/partial_sums.py"}
"""Outside of ``kernels``, what imports Triton."""
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


def part_of(path):
    """The part of the package that a file is in: a folder, or the file itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_part_has_a_place_in_the_order_and_imports_go_one_way():
    assert {part_of(path) for path in FILES} - {"__init__"} == set(RANKS)
    above = {
        (str(path.relative_to(PACKAGE)), names[0])
        for path in FILES
        if (part := part_of(path)) != "__init__"
        for names in imported_modules(path)
        if names[0] in RANKS and names[0] != part and RANKS[names[0]] >= RANKS[part]
    }
    assert above == set()


def test_files_import_each_other_in_no_circle():
    """Imports within functions and for type checkers count too; ``import visionattn`` does not, as
    every module has it before itself.
    """
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    known = set(names.values())

    def file_of(parts):
        prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        return next((prefix for prefix in prefixes if prefix in known), None)

    graph = {
        name: set(map(file_of, imported_modules(path))) - {name, None}
        for path, name in names.items()
    }
    TopologicalSorter(graph).prepare()  # its error names the circle


def run(code):
    """Exit code and both outputs of Python."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("started_quickly")
def test_training_and_inference_import_what_is_heavy_where_they_use_it():
    """These take seconds, and most runs use one of them or none."""
    heavy = ("albumentations", "jinja2", "pydantic", "matplotlib", "rich", "scipy", "sklearn")
    code = f"""
import sys
for name in {heavy} + ("tensorboard", "torch.utils.tensorboard"):
    sys.modules[name] = None
import visionattn.training.engine, visionattn.training.validate
import visionattn.inference.extraction, visionattn.inference.predict
import visionattn.cli.exit_codes, visionattn.cli.files, visionattn.cli.fresh_process
import visionattn.cli.parsing, visionattn.cli.progress, visionattn.cli.provenance
import visionattn.cli.tables
"""
    assert run(code) == (0, "", "")


@pytest.mark.usefixtures("started_quickly")
def test_predictions_import_neither_trainer_nor_bands():
    """What reads bands of large images and what trains is imported where it is used. The operations
    and models that ``import visionattn`` registers are most of the modules.
    """
    code = """
import sys
def loaded():
    return {name for name in sys.modules if name.startswith("visionattn")}
import visionattn
before = loaded()
import visionattn.inference.predict
unwanted = ("visionattn.training", "visionattn.models.large", "visionattn.data.large")
print(len(loaded() - before), *(name for name in loaded() if name.startswith(unwanted)))
"""
    count, *unwanted = run(code)[1].split()
    assert int(count) <= 32 and unwanted == []


WRITERS = r"\.write_text|\.write_bytes|\.touch|\.savefig|save_file|\.tofile|_dump_snapshot"
WRITERS += r"|torch\.save|os\.replace|os\.rename|mkstemp|NamedTemporaryFile|\bpng"
"""Calls that write or rename files, besides ``open`` to write and Pillow's ``save``."""
WITHIN = {"write_whole", "write", "_write", "png", "draw"}
"""``write_whole``, and functions that write to the place which it gives them."""
ELSEWHERE = {
    "cli/fresh_process.py": "/proc/self/oom_score_adj",
    "data/large/map_writing.py": "'rb+'",  # within a map that is not finished
    "lab/measure.py": "/proc/self/clear_refs",
    "training/distributed.py": "os.devnull",
    "training/run_folder.py": "'rb+'",  # within a file that is there, on a full disk
}
"""What is written without ``cli/files.py``."""


def calls(node, outer=()):
    """Every call below a node, with the names of the functions and calls that it stands in."""
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", None)
        if isinstance(child, ast.Call):
            yield ast.unparse(child), outer
            name = ast.unparse(child.func)
        yield from calls(child, (*outer, name) if name else outer)


def is_written(text):
    """Whether a call writes or renames a file; streams in memory have that name."""
    opened = re.match(r"open\(.*, '[^']*[wax+]", text)
    saved = re.match(r"[\w.]+\.save\(", text) and "format=" in text
    return (opened or saved or re.match(rf"[\w.()]*({WRITERS})\(", text)) and "stream" not in text


def test_files_are_written_through_one_check():
    """``visionattn.cli.files`` refuses what is no regular file and keeps files whole."""
    found = [
        f"{name}: {text}"
        for path in FILES
        if (name := str(path.relative_to(PACKAGE))) != "cli/files.py"
        for text, outer in calls(ast.parse(path.read_text()))
        if is_written(text) and not WITHIN & set(outer)
        if ELSEWHERE.get(name, "nowhere") not in text
    ]
    assert found == []


IN_OPS = [path for path in FILES if path.relative_to(PACKAGE).parts[0] == "ops"]


def test_rooms_of_operations_leave_the_operators_and_kernels_of_others_alone():
    entered = {
        (str(path.relative_to(PACKAGE)), names[1])
        for path in IN_OPS
        for names in imported_modules(path)
        if names[0] == "ops" and set(names[1:2]) <= set(ROOMS) and names[2:3] in INNER
        if (room := path.relative_to(PACKAGE).parts[1]) in ROOMS and names[1] != room
    }
    assert entered == set()


def test_kernels_alone_import_triton():
    """What imports no Triton imports what does within functions alone."""
    language = {f"visionattn.{name[:-3].replace('/', '.')}" for name in LANGUAGE}
    without = {"visionattn.ops.position.kernels.grid_classes"}
    for path in IN_OPS:
        name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
        if "kernels" in path.parts or name in LANGUAGE:
            continue
        anywhere = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} - without
        wrong = {module for module in anywhere if module.split(".")[0] == "triton"}
        wrong |= {module for module in at_once if "kernels" in module.split(".")}
        assert not wrong | (language & at_once), name


def test_operations_know_neither_timm_nor_the_reference():
    for path in (ROOT / "visionattn" / "ops").rglob("*.py"):
        text = path.read_text()
        assert "import timm" not in text and "from timm" not in text
        assert path.name == "reference.py" or "ops.reference" not in text


MODELS_NEED = ("torch", "torchvision", "timm", "numpy", "safetensors")
"""Distributions that importing the package and making a model needs; torchvision is timm's."""


def installed_for(names):
    """Distributions of those names and, of those that are installed here, all that they need."""
    found, open_ = set(), {re.sub("[-_.]+", "-", name).lower() for name in names}
    while open_:
        name = open_.pop()
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            needs = [line for line in requires(name) or () if "extra ==" not in line]
            words = (re.match(r"[\w.-]+", line)[0] for line in needs)
            open_ |= {re.sub("[-_.]+", "-", word).lower() for word in words} - found
    return found


def modules_only_others_need():
    """Names under which what is installed for the other dependencies alone is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]]
    others = installed_for(names) - installed_for(MODELS_NEED)
    return sorted(
        module
        for module, distributions in packages_distributions().items()
        if {re.sub("[-_.]+", "-", name).lower() for name in distributions} <= others
    )


def test_models_need_torch_timm_numpy_and_safetensors_alone():
    """A machine for inference has no more; nothing there fetches anything or prints."""
    blocked = modules_only_others_need()
    assert {"albumentations", "cv2", "pydantic", "tensorboard", "sklearn"} <= set(blocked)
    assert {"rich", "matplotlib", "scipy", "einops"} <= set(blocked)
    code = f"""
import sys
for name in {[*blocked, "jinja2", "pandas", "triton"]}:
    sys.modules[name] = None
import timm, torch
import visionattn, visionattn.ops, visionattn.layers, visionattn.models
for family in ("scaleformer_vit", "taylorshift_vit", "taylorshift_abs_vit"):
    model = timm.create_model(family + "_t", embed_dim=24, depth=1, num_heads=3)
    assert model(torch.randn(1, 3, 32, 48)).shape == (1, 1000)
for family in ("scaleformer_vit", "taylorshift_vit"):
    model = timm.create_model(family + "_pixel", embed_dim=24, num_heads=3)
    assert model(torch.randn(1, 256, 32, 32)).shape == (1, 10)
"""
    assert run(code) == (0, "", "")


def test_modules_and_classes_have_unique_names():
    """One name stands for one thing, so that a search finds it."""
    modules = [path.stem for path in FILES if path.stem not in ("__init__", "__main__")]
    classes = [
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    twice = [name for names in (modules, classes) for name in names if names.count(name) > 1]
    assert twice == []
