"""Export of models to ONNX, to a program of ``torch.export``, or to a package compiled by
AOTInductor; and ``visionattn export``.

Each file is tested against its model before it gets its final name.
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visionattn.cli.files import check_free, first_line, write_whole
from visionattn.cli.interruption import undone_at_end
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.tables import sized
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.conversion import check_name, created, is_file, name_of
from visionattn.models.patches import in_eval
from visionattn.models.registration import check_reads
from visionattn.models.weights import DataSpec, check_finite, load_model

Format = Literal["onnx", "torch", "compiled"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2", "compiled": ".pt2"}
NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "compiled": ()}
"""Packages that a format needs for writing and checking, in addition to torch."""
SHAPE = "[B, C, H, W] of whole patches, two or more along each side"
EXAMPLE = "checkpoints/digits/best.safetensors --format torch --output digits.pt2 --overwrite"
INPUT, DESCRIPTION = "images", "visionattn.json"
MOST_DIFFERENCE = 1e-4
"""Maximum difference of an output from the model's, relative to the largest output (at least 1)."""
ROUNDINGS = 8
"""The same in rounding steps of the model's dtype, for float16 and bfloat16."""
MOST_PATCHES = 1 << 15
"""Maximum number of patches along a side, and of images, for an exported file."""
LEAST_SIDE = 2
"""Minimum number of patches along a side: programs of ``torch.export`` refuse one."""
USUAL_SIDE = 14
"""Patches along a side of the first test image, if the model has more."""
UNEXPORTABLE = (RuntimeError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
UNEXPORTABLE += (NotImplementedError, ArithmeticError, ImportError)
"""Exceptions of exporters for models that they do not support, or without a compiler."""


@dataclass(frozen=True)
class Trial:
    """One comparison of the exported file with the model."""

    batch: int
    height: int
    """Height in pixels, like the width."""
    width: int
    difference: float
    """Largest difference of an output from the model's."""


class PreparedModel(nn.Module):
    """A model that accepts the values of image files and normalizes them with its ``DataSpec``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor):
        """Map ``[B, C, H_px, W_px]``, the input of ``DataSpec.prepare``, to the model's output."""
        return self.model(self.model.data_spec.prepare(images).to(_dtype(self.model)))


def check_exportable(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be exported, with a way out."""
    check_reads(model)
    inner = _body(model)
    if not isinstance(inner, VisionAttnTransformer):
        raise ValueError(
            f"expected a model of visionattn, got {name_of(model)}; export timm models with "
            "torch.onnx.export or torch.export"
        )
    if inner.patch_embed.strict_img_size:
        raise ValueError(
            f"expected a model for any image size, got {name_of(model)} for "
            f"{' x '.join(map(str, inner.patch_embed.img_size))} px only; build it without "
            "dynamic_img_size=False"
        )


def export(
    model: nn.Module,
    path: str | Path,
    format: str,
    *,
    prepare: bool = False,
    notes: dict[str, str] | None = None,
) -> list[Trial]:
    """Write a model to a file, after comparing its outputs with the model's for images of three
    sizes, one of them not square.

    The file is written completely or not at all.

    Args:
        model: one of ours, or timm's wrapper of its features, on the CPU. It runs in eval mode.
        path: the file; its folder exists.
        format: "onnx"; "torch", a program that ``torch.export.load`` reads wherever torch is
            installed; "compiled", a package of AOTInductor for CPUs like this one, which needs a
            C++ compiler.
        prepare: the input is the values of image files, as for ``DataSpec.prepare``; False: it is
            the model's normalized input, in its dtype.
        notes: further metadata.

    Returns:
        The results of the comparisons.

    Raises:
        ValueError: a model that cannot be exported, a missing package or compiler, or outputs that
            differ by more than 1e-4 (8e-3 in float16, 6e-2 in bfloat16). One line; nothing is
            written.
        OSError: the file cannot be written.
    """
    check_exportable(model)
    missing = [name for name in NEEDS[format] if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"format {format} needs {' and '.join(missing)}; pip install 'visionattn[export]'"
        )
    spec = getattr(model, "data_spec", None)
    if prepare and spec is None:
        raise ValueError(
            f"prepare needs the mean and std of {name_of(model)}, which are unknown; pass weights "
            "of visionattn train, or remove prepare"
        )
    write = {"onnx": _write_onnx, "torch": _write_program, "compiled": _write_compiled}[format]
    with (
        in_eval(model),
        TemporaryDirectory() as folder,
        undone_at_end(partial(rmtree, folder)),
    ):
        whole = (PreparedModel(model) if prepare else model).eval()
        built = Path(folder) / f"model{SUFFIXES[format]}"
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                program = _program(whole, model, prepare)
                write(program, built, _description(model, spec, prepare) | (notes or {}))
        except UNEXPORTABLE as error:
            raise ValueError(
                f"{name_of(model)} cannot be exported as {format}: {first_line(error)}"
            ) from error
        trials = list(_trials(whole, model, prepare, runner(built, format)))
        write_whole(path, lambda temporary: shutil.copyfile(built, temporary))
    return trials


def _body(model: nn.Module) -> Any:
    """Return the transformer inside a model: in a wrapper of features, or below a segmentation
    head.
    """
    parts = (getattr(model, name, None) for name in ("model", "backbone"))
    return next((part for part in parts if isinstance(part, VisionAttnTransformer)), model)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's input."""
    return _body(model).patch_embed.proj.weight.dtype


def _program(whole: nn.Module, model: nn.Module, prepare: bool) -> torch.export.ExportedProgram:
    """Trace a model, with this package's operators replaced by plain operations."""
    rows, columns = _body(model).patch_embed.patch_size
    least = {"batch": 1, "rows": LEAST_SIDE, "columns": LEAST_SIDE}
    batch, height, width = (
        torch.export.Dim(name, min=n, max=MOST_PATCHES) for name, n in least.items()
    )
    sizes = {0: batch, 2: rows * height, 3: columns * width}
    images = _images(model, prepare, 2, 13 * rows, 11 * columns)
    with torch.no_grad():
        return torch.export.export(whole, (images,), dynamic_shapes=(sizes,)).run_decompositions()


def _images(model: nn.Module, prepare: bool, batch: int, height: int, width: int) -> Tensor:
    """Return test images in the format of an exported file's input."""
    generator = torch.Generator().manual_seed(height * width)
    spec: DataSpec | None = getattr(model, "data_spec", None)
    one_hot = spec is not None and spec.encoding == "grey_one_hot"
    channels = 1 if one_hot and prepare else _body(model).patch_embed.proj.in_channels
    size = (batch, channels, height, width)
    if prepare and spec is not None and spec.value_range is not None:
        return torch.rand(size, generator=generator)
    if prepare:
        return torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return torch.randn(size, generator=generator).to(_dtype(model))


def _description(model: nn.Module, spec: DataSpec | None, prepare: bool) -> dict[str, str]:
    """Return the metadata of a file as text, the only type in ONNX."""
    body = _body(model)
    said = {
        "visionattn.model": name_of(body),
        "visionattn.prepared": json.dumps(prepare),
        "visionattn.patch_px": json.dumps(list(body.patch_embed.patch_size)),
    }
    if spec is not None:
        said["visionattn.data"] = json.dumps(spec.stored())
        said["class_names"] = json.dumps(list(spec.class_names))
    return said


def _write_onnx(program: torch.export.ExportedProgram, path: Path, said: dict[str, str]) -> None:
    names = [f"output_{i}" for i in range(len(program.graph_signature.user_outputs))]
    made = torch.onnx.export(
        program,
        input_names=[INPUT],
        output_names=names if len(names) > 1 else ["output"],
        dynamic_shapes=({0: "batch", 2: "height", 3: "width"},),
        dynamo=True,
        verbose=False,
    )
    made.model.metadata_props.update(said)
    made.save(path, external_data=False)


def _write_program(program: torch.export.ExportedProgram, path: Path, said: dict[str, str]) -> None:
    torch.export.save(program, path, extra_files={DESCRIPTION: json.dumps(said)})


def _write_compiled(
    program: torch.export.ExportedProgram, path: Path, said: dict[str, str]
) -> None:
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs={"aot_inductor.metadata": said}
    )


def runner(path: Path, format: str) -> Callable[[Tensor], list[Tensor]]:
    """Load a file as users would, and return a function that runs it on images
    ``[B, C, H_px, W_px]``, with torch's number of threads.
    """
    if format == "onnx":
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import (
            Fail,
            InvalidArgument,
            RuntimeException,
        )

        how = onnxruntime.SessionOptions()
        how.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, how, providers=["CPUExecutionProvider"])

        def run_session(x: Tensor) -> list[Tensor]:
            try:
                return [torch.from_numpy(y) for y in session.run(None, {INPUT: x.numpy()})]
            except (Fail, InvalidArgument, RuntimeException) as error:
                raise RuntimeError(first_line(error)) from error

        return run_session
    if format == "torch":
        run = torch.export.load(path).module()
    else:
        run = torch._inductor.aoti_load_package(str(path))
    return lambda x: _listed(run(x))


def _listed(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def trial_sizes(model: nn.Module) -> list[tuple[int, int, int]]:
    """Return batch, height and width in pixels of the test images.

    They are the model's own size, limited to 14 patches along a side, and two others.
    """
    embed = _body(model).patch_embed
    rows, columns = (max(LEAST_SIDE, min(n, USUAL_SIDE)) for n in embed.grid_size)
    broad = (9, 4) if (rows, columns) == (4, 9) else (4, 9)
    grids = ((1, rows, columns), (2, rows + 3, max(LEAST_SIDE, columns - 1)), (1, *broad))
    return [(b, h * embed.patch_size[0], w * embed.patch_size[1]) for b, h, w in grids]


@torch.inference_mode()
def _trials(
    whole: nn.Module,
    model: nn.Module,
    prepare: bool,
    run: Callable[[Tensor], list[Tensor]],
) -> Iterator[Trial]:
    """Run the file and the model on images of several sizes.

    Raises:
        ValueError: they differ.
    """
    for size in trial_sizes(model):
        images = _images(model, prepare, *size)
        wanted = _listed(whole(images))
        try:
            found = run(images)
        except UNEXPORTABLE as error:
            said = f"{_tried(size)}: the exported file does not run ({first_line(error)})"
            raise ValueError(said) from error
        shapes = [[list(y.shape) for y in of] for of in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{_tried(size)}: expected outputs {shapes[1]}, as the model's, got {shapes[0]}"
            )
        pairs = list(zip(found, wanted, strict=True))
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        most = max(MOST_DIFFERENCE, ROUNDINGS * torch.finfo(_dtype(model)).eps)
        most *= max(1.0, *(float(b.abs().max()) for _, b in pairs))
        if not difference <= most:
            raise ValueError(
                f"{_tried(size)}: expected a difference from the model of at most {most:.1e}, got "
                f"{difference:.1e}"
            )
        yield Trial(*size, difference)


def _tried(size: tuple[int, int, int]) -> str:
    return f"images of {size[1]} x {size[2]} px, {size[0]} at a time"


# ``visionattn export``; a docstring under each field is its help text


@dataclass
class ExportOptions:
    """Options of an export for other runtimes."""

    model: str | None = None
    """Model to export: the ``best.safetensors`` of a run, another file that
    ``visionattn.load_model`` reads, or a timm name of a model of this package. It may be the first
    word, without ``--model``.
    """
    pretrained: bool = False
    """Use pretrained weights of the name; otherwise weights are random."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a model given by name, e.g. ``{num_classes: 10}``."""
    format: Format = "onnx"
    """File format: ``onnx`` for ONNX Runtime and others; ``torch``, a program for
    ``torch.export.load``; ``compiled``, a package compiled by AOTInductor for CPUs like this one.
    """
    prepare: bool = False
    """Include preprocessing: the exported model accepts values of image files and normalizes them.
    Otherwise it accepts normalized float32.
    """
    output: str | None = None
    """File to write, ending in .onnx or .pt2."""
    overwrite: bool = False
    """Replace an existing file."""
    seed: int = 0
    """Seed of random weights."""


def export_model(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Export as the flags of ``visionattn export`` say, and report the written file.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong, or the model is missing, not ours or not
            exportable; one line.
    """
    options = parse(
        ExportOptions,
        with_first(argv, "model"),
        command="export",
        description="Write a model as ONNX, as a torch.export program or as a compiled package, "
        "after checking its outputs against the model at three sizes. The first word may be the "
        "model, without its flag.",
        example=EXAMPLE,
    )
    if options.model is None or options.output is None:
        raise ValueError(
            "expected a model, e.g. scaleformer_vit_s or a file of weights, and --output FILE"
        )
    output, suffix = Path(options.output), SUFFIXES[options.format]
    if output.suffix != suffix:
        raise ValueError(
            f"expected an --output that ends in {suffix} for format {options.format}, got {output}"
        )
    check_free(output, options.overwrite)
    if output.exists() and output.resolve() == Path(options.model).resolve():
        raise ValueError(f"{output} is the model's own file; pass another --output")
    model = _opened(options.model, options)
    begun = time.perf_counter()
    trials = export(model, output, options.format, prepare=options.prepare)
    seconds = time.perf_counter() - begun
    for trial in trials:
        size = f"{trial.batch} x {trial.height} x {trial.width} px"
        say(f"{size}: largest difference from the model {trial.difference:.1e}")
    say(f"{output}: {sized(output.stat().st_size)}, format {options.format}, {seconds:.0f} s")
    if options.prepare:
        kind = "uint8" if model.data_spec.value_range is None else "float32 in [0, 1]"
        say(f"input: {kind} {SHAPE}; the file normalizes it")
    else:
        say(f"input: normalized float32 {SHAPE}")


def _opened(source: str, options: ExportOptions) -> nn.Module:
    """Return the model named by the options, checked."""
    if not is_file(source):
        check_name(source)
        torch.manual_seed(options.seed)
        return created(source, options.pretrained, options.args)
    if options.pretrained or options.args:
        raise ValueError(
            f"pretrained and args need a model name, got the file {source}; remove them"
        )
    model = load_model(source)
    check_finite(model.state_dict(), source)
    return model
