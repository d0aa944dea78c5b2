"""The records of `vllm_stand_in` have the fields of vLLM's own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import vllm.v1.worker.gpu.sample.logits_processor as second
import vllm_stand_in
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from adapters.vllm.processors import Processors


@pytest.mark.parametrize("name", ["LogitsContext", "LogitsProcRequestState"])
def test_records_have_the_same_fields(name: str) -> None:
    own, theirs = getattr(vllm_stand_in, name), getattr(second, name)
    assert is_dataclass(theirs)
    assert [each.name for each in fields(own)] == [each.name for each in fields(theirs)]


def test_parameters_have_the_same_defaults() -> None:
    theirs: Any = SamplingParams()
    for each in fields(vllm_stand_in.Params):
        own, default = getattr(vllm_stand_in.Params(), each.name), getattr(theirs, each.name)
        assert own == default or not (own or default), each.name  # an empty list for None


def test_one_class_has_both_interfaces() -> None:
    assert issubclass(Processors, LogitsProcessor)
    assert issubclass(Processors, second.LogitsProcessor)
    assert not getattr(Processors, "__abstractmethods__", None)
