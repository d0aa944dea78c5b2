"""Every decoder that transformers' own code can compute, by that code or by native kernels alone:
logits and greedy answers are transformers', and how a request ran changes no bit.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_shapes import KINDS, SHAPES, settings, write
from model_runs import last_logits

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.batch_packing import Batch
from worker.engines.embedded.model.decoder import DecoderNetwork
from worker.engines.embedded.model.transformers_network import TransformersNetwork
from worker.engines.embedded.offline import Engine
from worker.engines.embedded.plan import Plan, Request
from worker.models.model_table import TABLE
from worker.sampling import SamplingParams

LENGTHS = (1, 5, 33, 61)
NEW_TOKENS = 16
IN_CI = {("gpt_oss", 0), ("deepseek_v3", 1), ("gpt2", 1), ("glm4", 1), ("diffllama", 0)}
"""Sinks, windows and experts; MLA; LayerNorm and learned positions; partial RoPE and four norms;
two calls of attention in a layer.
"""

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    pytest.param(kind, shape, marks=() if (kind, shape) in IN_CI else pytest.mark.campaign)
    for kind, shape in product(KINDS, range(len(SHAPES)))
]


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, 300) for _ in range(length)] for length in LENGTHS]


def answers_of(network: Any) -> list[list[int]]:
    found = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        named = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "eos_token_id": None}
        with torch.inference_mode():
            answer = network.generate(tokens, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **named)
        found.append(answer[0, len(prompt) :].tolist())
    return found


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", 32)  # so that prompts take several, and preempt each other


def run(path: Path, **changes: Any) -> list[Any]:
    """Answers with all their log probabilities, once with an empty cache and once more."""
    settings = {"device": "cpu", "dtype": "float32", "numerics": "exact"}
    engine = Engine(model_path=path, **(settings | changes))
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    results = [engine.generate(prompts(), params) for _ in range(2)]
    assert [each.token_ids for each in results[0]] == [each.token_ids for each in results[1]]
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results[0] + results[1]]


def loaded(path: Path, **changes: Any) -> HfModel:
    settings = {"device": "cpu", "dtype": "float32", "numerics": "exact"}
    model = load_model(EmbeddedConfig(model_path=path, **(settings | changes)))
    model.allocate_kv(8, 32)
    return model


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_it_is_computed_as_transformers_does(kind: str, shape: int, tmp_path: Path) -> None:
    network = write(tmp_path, kind, shape)
    ids = torch.randint(300, (1, 90), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = network(ids, use_cache=False).logits[0]
    model = loaded(tmp_path)
    batch = Batch()
    batch.append([2, 0, 3], 0, ids[0].tolist(), 32)
    with torch.inference_mode():
        found = model._network.logits(model._hidden(batch, model.kv_store))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    answers = answers_of(network)
    assert any(len(set(answer)) > 3 for answer in answers), "a network this dull would prove nothing"
    assert [tokens for tokens, *_ in run(tmp_path, max_num_seqs=1)[: len(LENGTHS)]] == answers


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.native
def test_how_it_ran_changes_no_bit(kind: str, shape: int, tmp_path: Path) -> None:
    """Alone, in a batch, in chunks, preempted, from the prefix cache, behind a KV transfer."""
    write(tmp_path, kind, shape)
    check_bits(tmp_path, dtype="float32")
    model = loaded(tmp_path, kernels="torch")
    assert torch.equal(last_logits(model, (0, 7, 40, 41, 90))[-1:], last_logits(model))
    assert torch.equal(*decoded_with_the_kv_of(model, loaded(tmp_path, kernels="torch")))
    torch.testing.assert_close(*decoded_with_the_kv_of(loaded(tmp_path), model), atol=2e-4, rtol=2e-4)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.native
def test_how_it_ran_changes_no_bit_in_bfloat16(kind: str, shape: int, tmp_path: Path) -> None:
    """With AMX where the processor has it."""
    write(tmp_path, kind, shape)
    check_bits(tmp_path, dtype="bfloat16")


def check_bits(path: Path, dtype: str) -> None:
    alone = run(path, dtype=dtype, max_num_seqs=1)
    assert run(path, dtype=dtype, max_num_seqs=4, max_num_batched_tokens=7) == alone
    small = {"max_num_batched_tokens": 48, "context_length": 96, "kv_blocks": 6}
    assert run(path, dtype=dtype, max_num_seqs=4, **small) == alone
    for quantization in ("auto", "int8", "int4"):
        model = loaded(path, dtype=dtype, quantization=quantization)
        whole = last_logits(model)
        assert torch.equal(last_logits(model, (0, 7, 40, 41, 90))[-1:], whole), quantization


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_who_is_read_changes_no_bit(kind: str, shape: int, kernels: str, tmp_path: Path) -> None:
    """Two prompts and a decoding row between them, of whose tokens all, some or none are read."""
    write(tmp_path, kind, shape)
    model = loaded(tmp_path, kernels=kernels)
    ids = torch.randint(300, (100,), generator=torch.Generator().manual_seed(6)).tolist()

    def computed(read: list[int] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        batch = Batch(read_rows=read)
        batch.append([2, 0], 0, ids[:40], 32)
        batch.append([3], 0, ids[40:41], 32)
        batch.append([1, 4], 0, ids[41:], 32)
        with torch.inference_mode():
            hidden = model._hidden(batch, model.kv_store)[: len(ids)]
        return hidden.clone(), [tensor.clone() for tensor in model.kv_store.tensors]

    whole, kept = computed(None)
    for read in ([], [99], [0, 40, 41, 99], [*range(30, 80)], [*range(100)]):
        for tensor in model.kv_store.tensors:
            tensor.zero_()
        found, written = computed(read)
        assert torch.equal(found[read], whole[read])
        assert found.isfinite().all()
        assert all(map(torch.equal, written, kept))


def decoded_with_the_kv_of(prefill: HfModel, decode: HfModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the token behind `last_logits`' prompt, where it was computed and elsewhere."""
    for ours, theirs in zip(decode.kv_store.tensors, prefill.kv_store.tensors, strict=True):
        ours.copy_(theirs)
    tokens = [*torch.randint(300, (90,), generator=torch.Generator().manual_seed(5)).tolist(), 7]
    request = Request("", 0, SamplingParams(), tokens, len(tokens), 999, frozenset(), 0, pages=[2, 0, 3])
    found = [model.forward(Plan((request,), (), (request,))).clone() for model in (prefill, decode)]
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "has"), [("gpt2", True), ("gpt_neox", True), ("glm4", False), ("helium", False)])
@pytest.mark.native
def test_whose_layer_norm_it_is(kind: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sums are in another order in another version; of wide rows the bits were others with
    2.6 than with 2.13.
    """
    write(tmp_path, kind, 0)
    made_by = {}
    for version in ("2.6.0+cu124", "2.13.0+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        made_by[version] = loaded(tmp_path).made_by
        assert made_by[version].endswith(f"LayerNorm of torch {version.split('+')[0]}") == has
    assert len(set(made_by.values())) == 1 + has
    assert loaded(tmp_path, numerics="fast").made_by == "fast"


@pytest.mark.parametrize(("kind", "shape"), [case for case in CASES if case.values[1] == 0])
def test_the_table_names_what_its_attention_has(kind: str, shape: int, tmp_path: Path) -> None:
    write(tmp_path, kind, shape)
    network = loaded(tmp_path, kernels="torch")._network
    assert isinstance(network, TransformersNetwork)
    found = {
        "sliding window": network.has_windows,
        "sinks": any(call.has_sinks for call in network.calls),
        "MLA": any(call.key_dim != call.value_dim for call in network.calls),
    }
    features = TABLE[kind].features
    for feature, has in found.items():
        assert (feature in features) >= has, feature  # a window may be of another shape than this one
    assert ("softcap" in features) == any(call.softcap is not None for call in network.calls)
    native = loaded(tmp_path)
    assert settings(kind, shape)["max_position_embeddings"] == native.context_length
    assert isinstance(native._network, DecoderNetwork) == (TABLE[kind].network == "native")
    if isinstance(native._network, DecoderNetwork):
        assert native._network.calls == network.calls
