"""A trainer's log probabilities are the rollouts', bit for bit, and its gradients are right."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from worker.engines.embedded import Engine
from worker.engines.embedded.sampling.truncation import Controls
from worker.engines.embedded.training import ExactLogprobs, Rollout
from worker.errors import InvalidRequest, StartupError
from worker.models.quantised import quantization_config
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = ("llama", "qwen3", "mistral", "gemma2")
ROLLOUTS = [Rollout([5, 300, 17], [42, 7, 255, 31]), Rollout([9], [120]), Rollout([5, 300, 17], [64, 3])]


def policy_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    maker: Any = AutoModelForCausalLM
    return maker.from_pretrained(path, dtype=dtype)


def save(policy: Any, origin: Path, path: Path) -> None:
    """A checkpoint of the policy, with the tokenizer of the one that it was loaded from."""
    shutil.copytree(origin, path, dirs_exist_ok=True)
    policy.save_pretrained(path)


def served(path: Path, dtype: str = "float32", **changes: Any) -> Engine:
    return Engine(path, dtype=dtype, numerics="exact", packed_copy="off", **({"kv_blocks": 256} | changes))


def sampled(engine: Engine, prompts: list[list[int]], **fields: Any) -> tuple[list[Rollout], list[list[float]]]:
    """Rollouts of an engine, and their log probabilities."""
    given = {"n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 5, "logprobs": 0, "include_stop_str_in_output": True}
    params = SamplingParams(**(given | fields))
    results = engine.generate(prompts, params, progress=False)
    found = [(result.prompt_token_ids, output) for result in results for output in result.outputs]
    logprobs = [[entries[0].logprob for entries in output.logprobs] for _, output in found]  # type: ignore[union-attr, index]
    return [Rollout(prompt, output.token_ids) for prompt, output in found], logprobs


@pytest.fixture(scope="module", params=TYPES)
def path(request: pytest.FixtureRequest, every_checkpoint: dict[str, Path]) -> Path:
    return every_checkpoint[request.param]


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return served(checkpoints["llama"], max_num_seqs=3, max_num_batched_tokens=7)


@pytest.fixture(scope="module")
def exact(checkpoints: dict[str, Path]) -> ExactLogprobs:
    return ExactLogprobs(policy_of(checkpoints["llama"]), checkpoints["llama"])


def test_equal_to_the_rollouts_after_each_step(path: Path, tmp_path: Path) -> None:
    """Of every network that is served, whose weights a worker reads from a checkpoint."""
    policy = policy_of(path)
    exact = ExactLogprobs(policy, path)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, fused=True)  # raises no counter of versions
    prompts, before = [[5, 30, 17] * 9, [9], [5, 30, 17] * 9 + [8]], None
    for step in range(2):
        save(policy, path, tmp_path / str(step))
        rollouts, logprobs = sampled(served(tmp_path / str(step), max_num_seqs=2, max_num_batched_tokens=9), prompts)
        found = exact(rollouts)
        assert [each.tolist() for each in found] == logprobs
        assert exact.values(rollouts) == logprobs
        assert logprobs != before
        before = logprobs
        optimizer.zero_grad()
        torch.autograd.backward(-torch.cat(found).mean())
        optimizer.step()


def test_equal_in_bfloat16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    policy = policy_of(checkpoints["llama"], torch.bfloat16)
    path = checkpoints["llama"]
    save(policy, path, tmp_path)
    rollouts, logprobs = sampled(served(tmp_path, "bfloat16"), [[5, 30, 17] * 9])
    assert [each.tolist() for each in ExactLogprobs(policy, path)(rollouts)] == logprobs


@settings(max_examples=examples(15))
@given(
    st.lists(st.lists(st.integers(5, 700), min_size=1, max_size=40), min_size=1, max_size=3),
    st.floats(0.3, 2.0),
    st.sampled_from([0, 5, 60]),
    st.sampled_from([0.4, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_equal_after_truncation(
    engine: Engine,
    exact: ExactLogprobs,
    prompts: list[list[int]],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    given: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rollouts, logprobs = sampled(engine, prompts, logprobs_mode="processed", **given)
    found = exact(rollouts, Controls(**given))
    assert [each.tolist() for each in found] == logprobs
    rollouts, logprobs = sampled(engine, prompts, logprobs_mode="raw", **given)
    assert exact.values(rollouts) == logprobs


def plain(policy: Any, rollouts: list[Rollout], never: list[int], temperature: float = 1.0) -> list[torch.Tensor]:
    """The log probabilities as a model in float64 computes them, one text at a time."""
    found = []
    for one in rollouts:
        text = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
        logits = policy(input_ids=text).logits[0, len(one.prompt_token_ids) - 1 : -1] / temperature
        logits = logits.index_fill(-1, torch.tensor(never, dtype=torch.long), -torch.inf)
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0])
    return found


def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
    weights = torch.linspace(-1.0, 2.0, sum(map(len, logprobs)), dtype=torch.float64)
    return (torch.cat(logprobs).double().exp() * weights).sum() - torch.cat(logprobs).double().mean()


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_gradients_are_those_of_float64(path: Path, temperature: float | None) -> None:
    policy = policy_of(path)
    exact = ExactLogprobs(policy, path)
    double = copy.deepcopy(policy).double()
    controls = None if temperature is None else Controls(temperature=temperature)
    never = [] if controls is None else list(exact._model.undecodable_ids)
    found, expected = loss(exact(ROLLOUTS, controls)), loss(plain(double, ROLLOUTS, never, temperature or 1.0))
    assert torch.allclose(found, expected, rtol=1e-4)
    torch.autograd.backward([found, expected])
    for one, other in zip(policy.parameters(), double.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-4 * other.grad.norm() + 1e-8


def test_gradients_are_the_slopes_of_the_values(checkpoints: dict[str, Path]) -> None:
    """The engine's own numbers rise and fall as torch's gradient says."""
    policy = policy_of(checkpoints["llama"])
    exact = ExactLogprobs(policy, checkpoints["llama"])
    torch.autograd.backward(torch.cat(exact(ROLLOUTS)).sum())
    torch.manual_seed(1)
    for parameter in list(policy.parameters())[:4]:
        direction = torch.randn_like(parameter)
        direction /= direction.norm()
        ends = []
        for step in (0.02, -0.04):  # to one side, then to the other
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
            ends.append(sum(map(sum, exact.values(ROLLOUTS))))
        with torch.no_grad():
            parameter.add_(direction, alpha=0.02)
        slope = float((parameter.grad * direction).sum())
        assert (ends[0] - ends[1]) / 0.04 == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_truncated_gradients_stay_among_the_kept(exact: ExactLogprobs) -> None:
    """With top-k 1 the only token is certain, and nothing can be learnt; another one has -inf."""
    (found,) = exact([Rollout([5, 300, 17], [42])], Controls(top_k=1))
    (raw,) = exact([Rollout([5, 300, 17], [42])])
    assert found.item() in (0.0, -torch.inf)
    assert -torch.inf < raw.item() < 0


REFUSED: dict[str, tuple[Rollout, str]] = {
    "no answer": (Rollout([5], []), r"rollouts\[0\].token_ids: must hold at least one token"),
    "no prompt": (Rollout([], [5]), r"rollouts\[0\].prompt_token_ids: must hold at least one token"),
    "another vocabulary": (Rollout([5], [99999]), r"rollouts\[0\]: must be token ids from 0 to"),
    "too long": (Rollout([5] * 2000, [5] * 49), r"rollouts\[0\]: must be shorter than the context"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_named(exact: ExactLogprobs, name: str) -> None:
    rollout, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        exact([rollout])


WRONG_CONTROLS: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"top_k": -1}, "at least 0, got -1"),
    "temperature": ({"temperature": -0.5}, "at least 0 and finite, got -0.5"),
    "top_p": ({"top_p": 1.5}, "at least 0 and at most 1, got 1.5"),
    "min_p": ({"min_p": float("nan")}, "at least 0 and at most 1, got nan"),
}


@pytest.mark.parametrize("name", WRONG_CONTROLS)
def test_controls_that_no_request_has_are_named(exact: ExactLogprobs, name: str) -> None:
    given, problem = WRONG_CONTROLS[name]
    with pytest.raises(InvalidRequest, match=f"^controls: {name} must be {problem}$"):
        exact.values(ROLLOUTS, Controls(**given))


def test_a_checkpoint_that_transformers_cannot_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """transformers loads it with random weights, and says so in a table alone."""
    policy = policy_of(checkpoints["llama"])
    shutil.copytree(checkpoints["llama"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = quantization_config("Q4_1, Q8_0")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"its weights are in a form of this worker's \(Q4_1, Q8_0\)"):
        ExactLogprobs(policy, tmp_path / "model")


class Adapted(torch.nn.Module):
    """A linear layer as peft's LoRA has it: its ``weight`` is that of the layer below it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x))
        return added


def test_a_policy_with_other_tensors_is_refused(path: Path) -> None:
    """The engine would compute without an adapter, and torch with it."""
    policy = policy_of(path)
    exact = ExactLogprobs(policy, path)
    attention = policy.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    message = r"^policy: tensor model\.layers\.1\.self_attn\.q_proj\.base_layer\.weight must be of shape none, as in "
    for ask in (lambda: exact(ROLLOUTS), lambda: exact.values(ROLLOUTS), lambda: ExactLogprobs(policy, path)):
        with pytest.raises(StartupError, match=message):
            ask()
    attention.q_proj = attention.q_proj.base_layer
    assert len(exact.values(ROLLOUTS)) == len(ROLLOUTS)
    for change in (8, -8):
        resized = policy_of(path)
        size = resized.config.vocab_size
        resized.resize_token_embeddings(size + change, mean_resizing=False)
        with pytest.raises(StartupError, match=rf"^policy: tensor lm_head\.weight must be of shape \[{size}, "):
            ExactLogprobs(resized, path)


def test_a_policy_may_have_a_value_head(checkpoints: dict[str, Path], exact: ExactLogprobs) -> None:
    """It is no part of what the engine computes; one within the model is."""
    policy = policy_of(checkpoints["llama"])
    policy.value_head = torch.nn.Linear(policy.config.hidden_size, 1)
    assert ExactLogprobs(policy, checkpoints["llama"]).values(ROLLOUTS) == exact.values(ROLLOUTS)
    policy.model.adapter = policy.value_head
    with pytest.raises(StartupError, match=r"^policy: tensor model\.adapter\.bias must be of shape none"):
        ExactLogprobs(policy, checkpoints["llama"])


def test_an_interrupted_call_is_made_again(exact: ExactLogprobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was interrupted: while weights are packed, or in a step."""
    expected = exact.values(ROLLOUTS)
    for owner, name in (exact._model, "settled"), (exact._stepper, "step"):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                exact.values(ROLLOUTS)
        assert exact.values(ROLLOUTS) == expected


def test_requests_of_an_interrupted_call_are_given_up(checkpoints: dict[str, Path]) -> None:
    """They were computed again in the next call, which took their errors for its own."""
    exact = ExactLogprobs(
        policy_of(checkpoints["llama"]), checkpoints["llama"], max_num_seqs=2, max_num_batched_tokens=16
    )
    rollouts = [Rollout([5, 300, 17] * 5, [42, 7, 255, 31] * 4), Rollout([9], [120])]
    expected, forward = exact.values(rollouts), exact._model.forward
    for number in range(1, 4):
        calls = 0

        def interrupted(plan: Any, number: int = number) -> torch.Tensor:
            nonlocal calls
            logits, calls = forward(plan), calls + 1
            if calls == number:
                raise KeyboardInterrupt
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact._model, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                exact.values(rollouts)
            calls = 10
            assert exact.values(rollouts) == expected


def test_a_compiled_policy_has_the_same_numbers(checkpoints: dict[str, Path], exact: ExactLogprobs) -> None:
    compiled: Any = torch.compile(policy_of(checkpoints["llama"]), backend="eager")
    compiled.model.layers[0] = torch.compile(compiled.model.layers[0], backend="eager")
    assert ExactLogprobs(compiled, checkpoints["llama"]).values(ROLLOUTS) == exact.values(ROLLOUTS)


def test_a_full_context_is_scored(exact: ExactLogprobs) -> None:
    (found,) = exact.values([Rollout([5] * 2047, [6])])
    assert len(found) == 1


def test_weights_that_are_not_finite_are_an_error(checkpoints: dict[str, Path]) -> None:
    """Of one call: with the weights of before it computes again."""
    policy = policy_of(checkpoints["llama"])
    exact = ExactLogprobs(policy, checkpoints["llama"])
    expected, norm = exact.values(ROLLOUTS), policy.model.layers[0].input_layernorm.weight
    before = norm.detach().clone()
    norm.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"rollouts\[\d\]: .*NaN"):
        exact(ROLLOUTS)
    norm.data.copy_(before)
    assert exact.values(ROLLOUTS) == expected
