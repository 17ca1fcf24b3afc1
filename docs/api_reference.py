"""Write the API reference: one HTML page per public module, from its docstrings.

``make docs`` runs this. The pages need no network. Nothing but the listed modules is imported.

    python docs/api_reference.py build/api
"""

import sys
from importlib import import_module
from pathlib import Path

from pdoc import doc, render

PAGES = {
    "visionattn": "",
    "visionattn.layout": "Grid TokenLayout",
    "visionattn.ops": "",
    "visionattn.layers": "",
    "visionattn.models": "VisionAttnTransformer PixelDecoder Converted from_softmax",
    "visionattn.models.bag": "BagEncoder",
    "visionattn.models.segmentation": "Segmenter classes_of probabilities_of",
    "visionattn.models.pyramid": "SimplePyramid PyramidTransformer",
    "visionattn.models.shipped": "FILES",
    "visionattn.models.weights": "DataSpec load_model save_model",
    "visionattn.models.attribution": "Attribution",
    "visionattn.models.large.row_parallel": "RowParallel parallelize",
    "visionattn.models.large.source_sink": "PartSource Sink",
    "visionattn.data.large": "",
    "visionattn.data.formats": "ReadOptions Georeference",
    "visionattn.data.data_config": "DataConfig",
    "visionattn.model_config": "ModelConfig",
    "visionattn.training.config": "TrainConfig OptimConfig LossConfig ValidateConfig",
    "visionattn.training.run_progress": "Result",
    "visionattn.inference.image_attribution": "ClassAttribution TokenWeights",
    "visionattn.inference.inference_options": "OpenOptions InferenceOptions DenseOptions "
    "PredictOptions",
    "visionattn.inference.feature_options": "ExtractOptions",
    "visionattn.inference.look_options": "LookOptions",
    "visionattn.inference.generate_options": "GenerateOptions",
    "visionattn.inference.shards": "Shard read_features",
    "visionattn.integrations.ray": "Stage Decode Embed",
    "visionattn.cli.tables": "read_rows",
    "visionattn.cli.exit_codes": "Stopped NonFinite OutOfMemory DoesNotFit Failed",
}
"""Public modules with their public names; an empty text: the names in ``__all__``."""


def write_pages(folder: Path) -> list[Path]:
    """Write the pages of ``PAGES`` and the search index, and return the paths of the pages."""
    render.configure(docformat="google", include_undocumented=False, show_source=False)
    modules = {name: documented(name, names.split()) for name, names in PAGES.items()}
    root = modules["visionattn"]
    root.docstring += "\n\n" + "\n".join(map(entry, list(modules.values())[1:]))
    pages = []
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render.html_module(module, modules), encoding="utf-8")
        pages.append(page)
    (folder / "index.html").write_text(render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(render.search_index(modules), encoding="utf-8")
    return pages


def documented(name: str, names: list[str]) -> doc.Module:
    """Import a module with its public names, also those that it imports on first use."""
    module = import_module(name)
    module.__all__ = names or module.__all__
    for member in module.__all__:
        getattr(module, member)
    page = doc.Module(module)
    for each in page.flattened_own_members:
        for member in each.own_members if isinstance(each, doc.Class) else ():
            member.docstring = own_docstring(member, each)
    return page


def own_docstring(member: doc.Doc, owner: doc.Class) -> str:
    """Return the docstring of a class member; empty, which hides the member, if it only repeats
    the docstring of a base class of another library, or a text that Python generates.
    """
    text = member.docstring
    if text.startswith("Alias for field number"):
        return ""
    if text.startswith("Create new instance of"):
        return "The fields, in order."
    if isinstance(member, doc.Function) and not member.obj.__doc__:
        return "See above." if member.name == "__init__" and "Args:" in owner.docstring else ""
    return text


def entry(module: doc.Module) -> str:
    """Return a line of the list of pages: a link and the first sentence of the docstring."""
    first = " ".join(module.docstring.split("\n\n")[0].split())
    link = module.fullname.replace(".", "/") + ".html"
    return f"- [`{module.fullname}`]({link}): {first}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(f"{len(write_pages(folder))} pages; open {folder / 'index.html'}")
