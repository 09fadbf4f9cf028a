"""One engine in a process of its own, driven directly: what a service is compared with.

The same ``Engine`` that a worker hosts, without a worker, a group or Ray around it. Its process
waits, and computes nothing, while others are measured.
"""

import multiprocessing
import statistics
from multiprocessing.connection import Connection
from time import perf_counter, process_time, thread_time
from types import TracebackType
from typing import Any, Self

from placement.ids import Generation, SampleId, WorkerId
from placement.samples import Sample, Sampling

CALL_LIMIT_S = 180.0


class EngineAlone:
    """Use as a context; ``decode`` blocks."""

    def __init__(
        self, model: str, kv_memory_bytes: int, prompts: list[list[int]], response_tokens: int
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        args = (theirs, model, kv_memory_bytes, prompts, response_tokens)
        self._process = multiprocessing.Process(target=_host, args=args, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()

    def decode(self) -> dict[str, float]:
        """Seconds and CPU seconds of the batch, and CPU ms of a step (see ``_Stopwatch``)."""
        self._pipe.send("decode")
        if not self._pipe.poll(CALL_LIMIT_S):
            raise TimeoutError(f"the engine has not decoded the batch within {CALL_LIMIT_S:g} s")
        measured: dict[str, float] = self._pipe.recv()
        return measured


def _host(
    pipe: Connection,
    model: str,
    kv_memory_bytes: int,
    prompts: list[list[int]],
    response_tokens: int,
) -> None:
    from actors.engines.environment import set_environment  # noqa: PLC0415 - before torch

    set_environment(0, 1, ("127.0.0.1", 1))
    from actors.engines.vllm_engine import Engine  # noqa: PLC0415 - after the environment
    from actors.groups import enter_placeholder_world, imagine_generation  # noqa: PLC0415
    from actors.protocol import WorkerSpec  # noqa: PLC0415

    me = WorkerId(0)
    enter_placeholder_world(me)
    spec = WorkerSpec(
        worker_id=me,
        members=(me,),
        generation=Generation(1),
        joiner=False,
        store_address=("127.0.0.1", 1),
        model=model,
        engine_args={"max_model_len": 512, "dtype": "bfloat16"},
        kv_memory_bytes=kv_memory_bytes,
        exact=False,
        max_samples=len(prompts),
    )
    engine = Engine(spec, imagine_generation(spec.generation, spec.members, me))
    watch = _Stopwatch(engine)
    sampling = Sampling(response_tokens, ignore_eos=True)
    while True:
        pipe.recv()
        samples = [
            Sample(SampleId(str(number)), tuple(prompt), sampling, seed=number)
            for number, prompt in enumerate(prompts)
        ]
        began, began_cpu_s = perf_counter(), process_time()
        for sample in samples:
            engine.add(sample)
        while engine.has_unfinished():
            watch.step()
        cpu_s = process_time() - began_cpu_s
        pipe.send({"seconds": perf_counter() - began, "cpu_s": cpu_s, **watch.medians_ms()})


class _Stopwatch:
    """Divides an engine's steps: the model's forward, vLLM's step around it, ours around that.

    In CPU time of the one thread that does all of it: other processes do not lengthen it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        hosted = engine._hosted
        self._forward_s = self._vllm_s = 0.0
        self._steps: list[tuple[float, float, float]] = []
        forward, step = hosted.runner.model.forward, hosted.core.step_fn

        def timed_forward(*args: Any, **kwargs: Any) -> Any:
            began = thread_time()
            result = forward(*args, **kwargs)
            self._forward_s += thread_time() - began
            return result

        def timed_step() -> Any:
            began = thread_time()
            result = step()
            self._vllm_s += thread_time() - began
            return result

        hosted.runner.model.forward = timed_forward
        hosted.core.step_fn = timed_step

    def step(self) -> None:
        self._forward_s = self._vllm_s = 0.0
        began = thread_time()
        self._engine.step()
        self._steps.append((thread_time() - began, self._vllm_s, self._forward_s))

    def medians_ms(self) -> dict[str, float]:
        """Of the steps since it was asked last."""
        steps, self._steps = self._steps, []
        return {
            "whole": 1000 * statistics.median(whole for whole, _, _ in steps),
            "ours": 1000 * statistics.median(whole - vllm for whole, vllm, _ in steps),
            "vllm_beside_forward": 1000 * statistics.median(v - f for _, v, f in steps),
            "forward": 1000 * statistics.median(forward for _, _, forward in steps),
        }
