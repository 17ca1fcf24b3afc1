"""Evaluation on several processes: each image counts exactly once, and nobody waits for others'
batches.
"""

import json

import pytest
import torch
from torch import nn

from tests.helpers.geometry import square
from tests.helpers.several_processes import run_processes
from tests.helpers.small_runs import MODEL, SPEC, quadrants
from visionattn.data.batches import Batch, SampleKey, collate
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.training.distributed import joined
from visionattn.training.evaluate import evaluate

CPU = torch.device("cpu")


def images_of(indices) -> list[Batch]:
    """Batches of four of the 23 validation images."""
    dataset = quadrants().validation
    samples = [dataset[SampleKey(index, 0, square(16))] for index in indices]
    return [collate(samples[i : i + 4])[0] for i in range(0, len(samples), 4)]


def small_model() -> nn.Module:
    torch.manual_seed(1)
    model = build_model(ModelConfig("scaleformer_vit_t", MODEL), SPEC)[0]
    with torch.no_grad():
        model.head.weight.normal_(std=0.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(2, 23), (3, 23), (5, 3)])
def test_every_image_counts_once_on_any_number_of_processes(tmp_path, size, count):
    """Five processes leave two of them without one of three images."""
    model = small_model()
    parts = images_of(range(count))
    images, labels = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    logits = model.eval()(SPEC.prepare(images)).double()
    loss = nn.functional.cross_entropy(logits, labels).item()
    hits = (logits.argmax(1) == labels).sum().item()
    model.train()

    def work(rank):
        with joined() as processes:
            result = evaluate(
                model, images_of(range(rank, count, size)), SPEC, device=CPU, processes=processes
            )
            assert model.training
            print(
                json.dumps(
                    [result.images, result.accuracy, result.loss, result.images_per_second > 0]
                )
            )

    for each in run_processes(size, work, tmp_path):
        seen, accuracy, mean, fast = json.loads(each.out)
        assert (seen, accuracy, fast) == (count, hits / count, True)
        assert mean == pytest.approx(loss, abs=1e-6)
