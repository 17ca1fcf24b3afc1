"""What TensorBoard reads in the folder of a run."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util import tensor_util


class Events:
    """All events of a run, each kind by tag as pairs of a step and a value."""

    def __init__(self, folder: Path):
        read = EventAccumulator(str(folder), tensor_size_guidance=dict.fromkeys(KINDS, 0))
        read.Reload()
        self.steps, self.scalars, self.pictures, self.curves = {}, {}, {}, {}
        kinds = dict(zip(KINDS, (self.scalars, self.pictures, self.curves), strict=True))
        for tag in read.Tags()["tensors"]:
            if "hparams" in tag:  # has no step
                continue
            found = [(x.step, tensor_util.make_ndarray(x.tensor_proto)) for x in read.Tensors(tag)]
            kinds[read.SummaryMetadata(tag).plugin_data.plugin_name][tag] = found
            self.steps[tag] = [step for step, _ in found]
        self._metadata = read.SummaryMetadata

    def hparams(self) -> tuple[dict[str, object], list[str]]:
        """The configuration of the run, and the names of its final metrics."""
        session, experiment = (
            HParamsPluginData.FromString(self._metadata(f"_hparams_/{name}").plugin_data.content)
            for name in ("session_start_info", "experiment")
        )
        values = {
            key: getattr(value, value.WhichOneof("kind"))
            for key, value in session.session_start_info.hparams.items()
        }
        return values, [each.name.tag for each in experiment.experiment.metric_infos]


KINDS = ("scalars", "images", "pr_curves")
"""Scalars are arrays ``[]``, pictures those of ``decoded``, and curves float ``[6, 127]``: true and
false positives, true and false negatives, precision and recall at each threshold.
"""


def decoded(values: np.ndarray) -> np.ndarray:
    """The pixels of a picture of ``Events``, ``[H, W, 3]``."""
    return np.asarray(Image.open(io.BytesIO(values[2])))
