"""Tensor types and tagged tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from adapters.pipe import LogitsPipe, Softmax, TaggedTensor, TensorType, TopP


def test_tensor_types() -> None:
    assert [(kind.name, kind.value) for kind in TensorType] == [("LOGITS", 1), ("PROBS", 2), ("INDICES", 3)]
    assert str(TensorType.LOGITS) == "LOGITS"
    assert repr(TensorType.LOGITS) == "TensorType.LOGITS"


def test_a_tagged_tensor_shows_its_tensor() -> None:
    tagged = TaggedTensor.probs(torch.zeros(2, 3))
    assert tagged.type is TensorType.PROBS
    assert (tagged.shape, tagged.size(), tagged.size(1)) == ((2, 3), (2, 3), 3)
    assert (tagged.dtype, tagged.device) == (torch.float32, torch.device("cpu"))
    expected = "TaggedTensor(type=PROBS, shape=torch.Size([2, 3]), dtype=torch.float32, device=cpu)"
    assert repr(tagged) == expected
    assert TaggedTensor.indices(torch.zeros(2)).type is TensorType.INDICES
    with pytest.raises(dataclasses.FrozenInstanceError):
        tagged.type = TensorType.LOGITS  # type: ignore[misc]


def test_equality() -> None:
    ones = torch.ones(2, 3)
    assert TaggedTensor.logits(ones) == TaggedTensor.logits(ones.clone())
    assert hash(TaggedTensor.logits(ones)) == hash(TaggedTensor.logits(ones.clone()))
    assert TaggedTensor.logits(ones) != TaggedTensor.probs(ones)
    assert TaggedTensor.logits(ones) != TaggedTensor.logits(ones * 2)
    assert TaggedTensor.logits(ones) != TaggedTensor.logits(ones.double())
    assert TaggedTensor.logits(ones) != ones.shape


def test_functions_of_torch_take_it_anywhere() -> None:
    x = torch.randn(2, 3)
    tagged = TaggedTensor.logits(x)
    for result in (torch.softmax(tagged, dim=-1), torch.softmax(input=tagged, dim=-1)):  # type: ignore[arg-type]
        assert type(result) is torch.Tensor
        assert torch.equal(result, x.softmax(-1))
    assert torch.equal(torch.cat([tagged, x, tagged]), torch.cat([x, x, x]))  # type: ignore[list-item]
    assert torch.equal(torch.add(x, tagged), x + x)  # type: ignore[call-overload]


def test_a_pipe_takes_plain_or_tagged_and_returns_plain_tensors() -> None:
    x = torch.randn(2, 3)
    pipe = LogitsPipe([Softmax()])
    assert torch.equal(pipe(x), pipe(TaggedTensor.logits(x)))
    assert type(pipe(TaggedTensor.logits(x))) is torch.Tensor
    assert LogitsPipe([TopP(top_p=1.0)])(TaggedTensor.probs(torch.ones(1, 2))).tolist() == [[0.5, 0.5]]
