"""Which runs were evaluated on the same images: only among these can one be the best. Nothing else
of a page decides that.
"""

import os.path
from collections.abc import Hashable, Sequence
from dataclasses import asdict, fields

from visionattn.cli.untrusted import checked
from visionattn.data.data_checks import resolved
from visionattn.data.data_config import DataConfig
from visionattn.lab.report.runs import Run, Values, flatten, number

OF_TRAINING = ("augment", "aug", "img_size_choices", "batch_patches", "args.train_images")
OF_TRAINING += ("mean", "std", "workers", "download")
"""Options of data that change neither which images are evaluated nor at which size: they act on
training, on the numbers that a model sees in place of grey levels, or on loading.
"""


def data_of(run: Run) -> Values | None:
    """Return the options that say on which images a run is evaluated, and at which size: those of
    the data, with defaults and those that its name decides, and the seed, which divides them. None
    where the run does not say which data it has.
    """
    given = run.setting("data")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    options = {field.name for field in fields(DataConfig)}
    try:
        known = {key: value for key, value in given.items() if key in options}
        whole = asdict(resolved(checked(DataConfig, known, "data")))
    except ValueError:  # of another version, say
        whole = asdict(DataConfig()) | given
    kept = {
        key: value
        for key, value in flatten(given | whole).items()
        if not {key, key.partition(".")[0]} & set(OF_TRAINING)
    }
    if isinstance(kept.get("root"), str):
        kept["root"] = os.path.normpath(kept["root"])
    return kept | {"seed": run.config.get("seed", 0)}


def same_data(run: Run, *, test: bool = False) -> Hashable | None:
    """Return what is equal for runs that were evaluated on the same images; None where nobody
    knows.

    Args:
        run: the run.
        test: whether its test images are meant, of which it says how many they were.
    """
    data = data_of(run)
    if data is None:
        return None
    images = number(run.result.get("test_images")) if test else None
    return tuple((key, repr(value)) for key, value in sorted(data.items())), images


def best_of(values: Sequence[float | None], keys: Sequence[Hashable | None]) -> list[bool]:
    """Tell which values are the largest of several of the same key; with the key None none is."""
    marks = []
    for value, key in zip(values, keys, strict=True):
        others = [x for x, k in zip(values, keys, strict=True) if x is not None and k == key]
        several = key is not None and value is not None and len(others) > 1
        marks.append(several and value == max(others))
    return marks


def data_words(runs: Sequence[Run]) -> list[str]:
    """Say for each run on which images it was evaluated, as far as runs differ in that: nothing
    where all are the same.
    """
    found = [data_of(run) for run in runs]
    known = [each for each in found if each is not None]
    if len({same_data(run) for run in runs}) < 2:
        return [""] * len(runs)
    names = dict.fromkeys(key for each in known for key in each)
    differ = [key for key in names if len({repr(each.get(key)) for each in known}) > 1]
    return [
        "unknown"
        if each is None
        else ", ".join(
            [str(each["name"])]
            + [
                f"{key} {each[key]}"
                for key in differ
                if key != "name" and each.get(key) is not None
            ]
        )
        for each in found
    ]
