"""A pause, and the gate at which requests wait while those that have run finish."""

from __future__ import annotations

from engine_doubles import ScriptedModel, request, stepper

from worker.engines.embedded.step import Stepper
from worker.sampling import SamplingParams

LENGTH = 6


def come(driver: Stepper, model: ScriptedModel, names: str) -> None:
    for name in names:
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        driver.add(request(model, name, [7, ord(name) % 80], params))


def state(driver: Stepper) -> tuple[float | None, bool, int]:
    return driver.wait_s, driver.is_drained, driver.num_waiting


def test_a_pause_computes_nothing_and_wakes_nobody() -> None:
    model = ScriptedModel()
    driver = stepper(model)
    come(driver, model, "a")
    driver.step()
    driver.is_paused = True
    assert (driver.wait_s, driver.step(), len(model.plans)) == (None, [], 1)
    driver.open_gate()
    assert driver.wait_s == 0
    assert [output.request_id for output in driver.step()] == ["a"]


def test_a_shut_gate_lets_what_has_run_finish_alone() -> None:
    """Also what a pause has kept, and what was preempted; the others come in their order."""
    model = ScriptedModel()
    driver = stepper(model, max_num_seqs=2)
    come(driver, model, "abc")
    driver.step()
    driver.scheduler.queues.preempt(driver.scheduler.queues.running[1])
    driver.is_paused = True
    driver.shut_gate()
    come(driver, model, "de")
    assert state(driver) == (0, False, 4)
    outputs = []
    while driver.wait_s is not None:
        outputs += driver.step()
    assert {output.request_id for output in outputs if output.finish_reason == "length"} == {"a", "b"}
    assert {output.request_id for output in outputs} == {"a", "b"}
    assert state(driver) == (None, True, 3)
    driver.open_gate()
    assert [one.id for one in driver.scheduler.queues.waiting] == ["c", "d", "e"]
    assert state(driver) == (0, False, 3)
