"""A student's imitation of its teacher as what a training learns."""

from torch import Tensor, nn

from visionattn.models import VisionAttnTransformer
from visionattn.models.patches import call
from visionattn.training.config import OptimConfig
from visionattn.training.distil.imitation import Imitation, Stage, TeacherSize
from visionattn.training.objectives import Judged, Objective


class Imitating(Objective):
    """What the teacher computes.

    Args:
        teacher: on the device of the training, in eval mode.
        stage, teacher_size: as ``Imitation`` takes them.
        labelled: whether the images' labels are the outputs of the teacher's head, so that the
            student has an accuracy.
    """

    def __init__(
        self,
        teacher: VisionAttnTransformer,
        stage: Stage,
        teacher_size: TeacherSize,
        *,
        labelled: bool,
    ):
        super().__init__(OptimConfig())
        self.teacher = teacher.requires_grad_(False).eval()
        self.stage, self.teacher_size = stage, teacher_size
        self.labelled = labelled

    def called(self, model: nn.Module) -> Imitation:
        """Return the student beside its teacher."""
        assert isinstance(model, VisionAttnTransformer)
        return Imitation(model, self.teacher, self.stage, self.teacher_size)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of the losses of the images; labels have no part in it."""
        return outputs.mean()

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Return the loss of a batch, and the student's outputs where there are labels of these."""
        pair = self.called(model)
        sizes = None if sizes is None else sizes.to(inputs.device)
        if self.stage == "a":
            logits = call(model, inputs, sizes).float() if self.labelled else None
            return Judged(pair(inputs, sizes).sum(), logits)
        losses, tokens = pair.judge_features(inputs, sizes)
        logits = None
        if self.labelled:
            student = pair.student
            present = student.present_patches(inputs, sizes)
            logits = student.forward_head(tokens, present=present).float()
        return Judged(losses.sum(), logits)

    def rank(self, score: float, loss: float) -> tuple[float, ...]:
        """Return what is larger for better weights: the loss decides, as labels have no part."""
        return (-loss,)
