"""What the named augmentations are made of, and which values their parts may have.

``data_config.py`` has the parts as options, ``augment.py`` applies them. This module imports
neither albumentations nor pixels, so that what is wrong is said before anything is read.
"""

from dataclasses import asdict, replace
from math import isfinite

from visionattn.data.data_config import AugmentConfig

NOTHING = AugmentConfig(
    crop_scale=[1.0, 1.0],
    crop_ratio=[3 / 4, 4 / 3],
    flip_horizontal=0.0,
    flip_vertical=0.0,
    quarter_turns=0.0,
    turn=0.0,
    shift=0.0,
    scale=[1.0, 1.0],
    grey=0.0,
    solarise=0.0,
    blur=0.0,
    blur_sigma=[0.1, 2.0],
    colour=0.0,
    shadow=0.0,
    noise=0.0,
    erase=0.0,
)
"""The parts with which an image stays as it is, and how a crop and a blur are drawn in all
presets.
"""

PRESETS = {
    "none": NOTHING,
    "light": replace(NOTHING, turn=10.0, shift=0.06, scale=[0.88, 1.08]),
    "three": replace(
        NOTHING,
        crop_scale=[0.08, 1.0],
        flip_horizontal=0.5,
        grey=1 / 3,
        solarise=1 / 3,
        blur=1 / 3,
        colour=0.3,
    ),
    "rand": replace(NOTHING, crop_scale=[0.08, 1.0], flip_horizontal=0.5),
    "documents": replace(
        NOTHING, turn=2.0, shift=0.01, scale=[0.98, 1.02], colour=0.2, shadow=0.3, noise=0.04
    ),
    "aerial": replace(
        NOTHING, flip_horizontal=0.5, flip_vertical=0.5, quarter_turns=0.75, colour=0.2
    ),
}
"""The presets by name.

``three`` is the 3-Augment of Touvron et al. 2022 (DeiT III, section 3). ``rand``, after Cubuk et
al. 2020, has a further step that is no part: two of twelve changes of colour and shape.
``documents`` moves no pixel by more than 4.5 % of the longer side. ``aerial`` draws each of the
eight symmetries of a square equally often.
"""

_LIMITS = {"turn": 180.0}
"""The largest value of a number, where it is not 1; the least is 0."""
_PAIR_LIMITS = {"crop_scale": 1.0, "crop_ratio": None, "scale": None, "blur_sigma": None}
"""The largest value of a pair, where there is one; both are above 0."""
ALTERNATIVES = ("grey", "solarise", "blur")
"""Parts of which an image gets at most one."""


def check_parts(given: AugmentConfig) -> None:
    """Check each part that is given by itself.

    Raises:
        ValueError: a value is out of its range; one line.
    """
    for name, value in _set(given).items():
        if name in _PAIR_LIMITS:
            _check_pair(name, value, _PAIR_LIMITS[name])
            continue
        limit = _LIMITS.get(name, 1.0)
        if not 0 <= value <= limit:
            raise ValueError(f"data.aug.{name} must be in [0, {limit:g}], got {value}")


def _check_pair(name: str, value: list[float], limit: float | None) -> None:
    low, high = value if len(value) == 2 else (0.0, 0.0)
    if not (0 < low <= high and isfinite(high) and (limit is None or high <= limit)):
        wanted = f"in (0, {limit:g}]" if limit else "above 0"
        raise ValueError(
            f"data.aug.{name} must be two numbers {wanted}, the lower one first, got "
            f"{' '.join(map(str, value))}"
        )


def whole_parts(
    name: str, given: AugmentConfig, bands: int, smallest_crop: float | None = None
) -> AugmentConfig:
    """Return the parts of a preset with those that are given in their place.

    Args:
        name: a key of ``PRESETS``.
        given: parts; None stands for the preset's part.
        bands: channels of the images.
        smallest_crop: the lowest ``crop_scale`` of a preset that crops, instead of its own.

    Raises:
        ValueError: a value is out of its range, or a part cannot act; one line.
    """
    check_parts(given)
    preset = PRESETS[name]
    if smallest_crop is not None and preset.crop_scale != [1.0, 1.0]:
        preset = replace(preset, crop_scale=[smallest_crop, 1.0])
    parts = replace(preset, **_set(given))
    chances = [getattr(parts, each) for each in ALTERNATIVES]
    if sum(chances) > 1 + 1e-9:
        spelled = ", ".join(f"{chance:.3g}" for chance in chances)
        raise ValueError(
            "an image gets one of data.aug.grey, data.aug.solarise and data.aug.blur at most, "
            f"so they may add to 1; with augment {name} they are {spelled}"
        )
    _check_acts(name, given, parts, bands)
    return parts


def _check_acts(name: str, given: AugmentConfig, parts: AugmentConfig, bands: int) -> None:
    """Check that every part that is given changes something."""
    for key, what, acts, needed in (
        ("crop_ratio", "crop", parts.crop_scale != [1.0, 1.0], "crop_scale"),
        ("blur_sigma", "blur", parts.blur, "blur"),
    ):
        if getattr(given, key) is not None and not acts:
            raise ValueError(
                f"data.aug.{key} acts on a {what} alone, and augment {name} has none here; give "
                f"data.aug.{needed}, too, or leave it out"
            )
    if parts.grey and bands == 1:
        raise ValueError(
            f"images of one band are grey already, which augment {name} would make them; use "
            "data.aug.grey 0"
        )
    if name == "rand" and bands not in (1, 3):
        raise ValueError(
            f"augment rand changes the colours of images of 1 or 3 bands, these have {bands}; "
            f"choose {', '.join(other for other in PRESETS if other != 'rand')}"
        )


def _set(given: AugmentConfig) -> dict:
    return {name: value for name, value in asdict(given).items() if value is not None}
