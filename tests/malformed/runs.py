"""Files that are cut off or overwritten."""

from collections.abc import Iterator

from tests.malformed.mutations import (
    BYTES,
    both,
    replace_by_folder,
    rewrite,
)
from tests.malformed.runner import Case
from tests.malformed.valid import (
    CONVERT,
    DISTIL,
    EXTRACT,
    GENERATE,
    GO_ON,
    PREDICT,
    PREDICT_MASKS,
    RESUME,
    SEGMENTED,
    SHARE,
    START,
    START_MASKS,
    TEACHER,
    VALIDATE,
    WRITER,
)

READERS = {
    "run/best.safetensors": (PREDICT, VALIDATE, EXTRACT, START, SHARE),
    "weights.pth": (
        ("train", "--config", "train.yaml", "--run", "out", "--init_from", "weights.pth"),
        ("features", "--model", "taylorshift_vit_t", "--checkpoint", "weights.pth")
        + ("--images", "images", "--output", "out", "--workers", "0"),
    ),
    "train.yaml": (("train", "--config", "train.yaml", "--run", "out"),),
    "base.yaml": (("sweep", "--base", "base.yaml", "--heads", "2", "--output", "out"),),
    "photos/train/masks/1.png": (START_MASKS,),
    SEGMENTED: (PREDICT_MASKS,),
    WRITER: (GENERATE,),
    TEACHER: (CONVERT, DISTIL),
    "student/distil.yaml": (GO_ON,),
    "student/b/best.safetensors": (GO_ON,),
    "run/config.yaml": (VALIDATE, SHARE),
    "run/status.json": (SHARE,),
    "profile/memory.csv": (("report", "profile/memory.csv", "--output", "page.html"),),
}
HARMLESS = {
    ("photos/train/masks/1.png", "less one byte"),
    ("train.yaml", "less one byte"),
    ("base.yaml", "less one byte"),
    ("run/config.yaml", "less one byte"),
    ("profile/memory.csv", "less one byte"),
    ("profile/memory.csv", "half"),
    ("run/status.json", "less one byte"),
    ("student/distil.yaml", "less one byte"),
    # The middle of such a file holds numbers, and other numbers are weights too.
    *((name, "middle off") for name in READERS if name.endswith(".safetensors")),
}


def cases() -> Iterator[Case]:
    """Return cases of files that are cut off, overwritten, or other files altogether."""
    for kind, change in BYTES.items():
        alone = both(rewrite("run/last.pt", change), lambda f: (f / "run/previous.pt").unlink())
        yield Case(f"bytes run/last.pt {kind}", RESUME, alone)
    for name, readers in READERS.items():
        for kind, change in BYTES.items():
            if (name, kind) in HARMLESS or (name.endswith("yaml") and kind in ("half", "empty")):
                continue
            for number, reader in enumerate(readers):
                told = dict(writes=kept(name))
                yield Case(f"bytes {name} {kind} {number}", reader, rewrite(name, change), **told)
        for number, reader in enumerate(readers):
            change, told = replace_by_folder(name), dict(writes=kept(name))
            yield Case(f"bytes {name} is a folder {number}", reader, change, **told)


def kept(name: str) -> tuple[str, ...]:
    """Return the files that a distillation writes anew before it goes on."""
    return ("student/distil.yaml",) if name.startswith("student") else ()
