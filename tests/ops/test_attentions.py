"""The table of attentions says what the operations and their definitions can do."""

from inspect import signature

import pytest
import torch

from visionattn import ops
from visionattn.ops import OPERATIONS, form_choice, reference
from visionattn.ops.attention_rows import ROWS
from visionattn.ops.attentions import ATTENTIONS, FORMS


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_says_what_the_operation_and_its_definition_take(name):
    kind, takes = ATTENTIONS[name], signature(OPERATIONS[name]).parameters
    assert OPERATIONS[name].__name__ == f"{kind.name}_attention" and kind.name == name
    for option in ("causal", "temperature", "feature_map", "impl"):
        assert getattr(kind, option) == (option in takes), option
    assert bool(kind.forms) == ("form" in takes) and set(kind.forms) <= set(FORMS)
    assert {"relative", "key_mask", "value_drop"} <= set(takes)
    defined = signature(getattr(reference, f"{name}_attention")).parameters
    for option in ("causal", "temperature", "feature_map"):
        assert getattr(kind, option) <= (option in defined), option


def test_what_has_forms_has_a_choice_states_have_a_kind_and_all_have_rows():
    for operation in ("taylorshift", "kernelized", "kernelized causal"):
        assert form_choice.choose_form(operation, 77, 77, 16, 24) in FORMS
    k = torch.ones(1, 1, 3, 4)
    for name in (name for name, kind in ATTENTIONS.items() if kind.states):
        assert ops.attend(k, ops.summarize(k, k, name)).values.shape == k.shape
    assert set(ROWS) == set(ATTENTIONS)
