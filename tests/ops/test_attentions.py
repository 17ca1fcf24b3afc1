"""The table of attentions says what the operations and their definitions can do."""

from inspect import signature

import pytest

from visionattn.ops import OPERATIONS, reference
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
    assert name in ROWS
