"""The samples that the engine tests decode, and the comparison with the reference."""

import random
from collections.abc import Mapping

from placement.ids import SampleId
from placement.samples import Sample, Sampling
from tests.engine.local_group import Response


def workload() -> list[Sample]:
    """Twelve samples: greedy, temperature 1, and truncated; prompts of 5 to 60 tokens."""
    draw = random.Random(7)
    samples = []
    for i in range(12):
        sampling = (
            Sampling(max_tokens=24 + 2 * i, temperature=0.0, ignore_eos=True),
            Sampling(max_tokens=24 + 2 * i, temperature=1.0, ignore_eos=True),
            Sampling(max_tokens=24 + 2 * i, temperature=0.7, top_p=0.9, top_k=50, ignore_eos=True),
        )[i % 3]
        prompt = tuple(draw.randrange(1, 256) for _ in range(5 + 5 * i))
        samples.append(Sample(SampleId(f"sample-{i}"), prompt, sampling, seed=1000 + i))
    return samples


def assert_same(done: Mapping[SampleId, Response], reference: Mapping[SampleId, Response]) -> None:
    """Tokens and logprobs, bit for bit."""
    assert done
    for sample_id, response in done.items():
        expected = reference[sample_id]
        assert response.finish == expected.finish, (sample_id, response.error)
        assert response.token_ids == expected.token_ids, sample_id
        assert response.logprobs == expected.logprobs, sample_id
