"""Loading of weights from another model into a model, as far as they fit."""

from pathlib import Path

from torch import nn

from visionattn.models.conversion import adapt_channels, filter_checkpoint
from visionattn.models.state_dicts import Placement, shape
from visionattn.models.weights import describe_misfit, read_state_dict, same_kind


def place_weights(model: nn.Module, name: str, path: str | Path) -> Placement:
    """Initialize a model from weights with another head, patch size, image size or number of
    channels, as far as they fit.

    The model's ``checkpoint_filter_fn`` renames and resamples. Tensors that still differ in shape
    keep the model's values.

    Args:
        model: changed in place.
        name: its timm name.
        path: weights of ours, or a state dict of a timm model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, would run code, or no tensor fits.
    """
    # The model's own filter renames and resamples; filters with another number of channels are
    # adapted afterwards.
    given = read_state_dict(path)
    filtered = filter_checkpoint(given, model, name)
    wanted = model.state_dict()
    for key, value in filtered.items():
        if key.endswith("patch_embed.proj.weight") and key in wanted and value.ndim == 4:
            channels = wanted[key].shape[1]
            if (
                value.shape[1] != channels
                and value.shape[0] == wanted[key].shape[0]
                and 3 in (value.shape[1], channels)
            ):
                filtered[key] = adapt_channels(value, channels)
    own = {value.data_ptr() for value in wanted.values()}
    filtered = {
        key: value for key, value in filtered.items() if value.data_ptr() not in own
    }  # fillers, not from the file
    # Tensors that still differ in shape keep the model's values, and are listed.
    fitting = {
        key: value
        for key, value in filtered.items()
        if key in wanted and value.shape == wanted[key].shape and same_kind(value, wanted[key])
    }
    taken = [key for key in wanted if key in fitting]
    if not any(fitting[key].ndim > 1 for key in taken):
        raise ValueError(
            f"no tensor of {path} fits the model {name}: {describe_misfit(filtered, wanted)}"
        )
    # For the list: tensors of the file that were used, under any name, and those resampled.
    origins = {id(value): key for key, value in given.items()}
    used = {origins.get(id(filtered[key]), key) for key in taken}
    resampled = [
        f"{key} {shape(given[key])} -> {shape(fitting[key])}"
        for key in taken
        if key in given and given[key].shape != fitting[key].shape
    ]
    model.load_state_dict(fitting, strict=False)
    new = [key for key in wanted if key not in fitting]
    return Placement(str(path), taken, resampled, new, [key for key in given if key not in used])
