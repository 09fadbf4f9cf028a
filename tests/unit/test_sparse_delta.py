"""A delta makes the old weights the new ones, bit for bit, and takes little room; whatever is
wrong with one is said, not believed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import sparse_delta
from actors.control_api import SparseTensor
from placement.errors import RequestError

BF16 = torch.bfloat16


def _weights(seed: int, sizes: tuple[int, ...] = (40_000, 1000)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}.weight": torch.randn(size // 10, 10, generator=generator).to(BF16)
        for i, size in enumerate(sizes)
    }


def _changed(old: dict[str, torch.Tensor], share: float, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in old.items():
        flat = tensor.clone().view(-1)
        at = torch.randperm(flat.numel(), generator=generator)[: round(share * flat.numel())]
        flat[at] = (flat[at].float() * 1.01 + 1e-3).to(tensor.dtype)
        new[name] = flat.view(tensor.shape)
    return new


def _read(content: bytes, base: torch.Tensor) -> dict[str, SparseTensor] | RequestError:
    try:
        delta = sparse_delta.from_bytes(content)
        for name, changed in delta.items():
            sparse_delta.apply_to(base, name, changed)
    except RequestError as error:
        return error
    return delta


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@given(share=st.sampled_from([0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 1.0]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_old_weights_and_the_delta_are_the_new_weights_bit_for_bit(share: float, seed: int) -> None:
    old = _weights(seed)
    new = _changed(old, share, seed)
    delta = sparse_delta.from_bytes(sparse_delta.to_bytes(sparse_delta.make_delta(old, new)))
    for name, tensor in old.items():
        after = sparse_delta.apply_to(tensor, name, delta[name]) if name in delta else tensor
        assert _same_bits(after, new[name])


@pytest.mark.parametrize(
    ("share", "most"), [(0.0001, 0.0006), (0.001, 0.003), (0.01, 0.02), (0.1, 0.16)]
)
def test_a_delta_takes_little_more_than_its_values(share: float, most: float) -> None:
    old = _weights(0, (2_000_000,))
    content = sparse_delta.to_bytes(sparse_delta.make_delta(old, _changed(old, share)))
    assert len(content) / (2 * 2_000_000) < most


def test_bits_count_not_values() -> None:
    old = {"w": torch.tensor([0.0, float("nan"), 1.0], dtype=BF16)}
    new = {"w": torch.tensor([-0.0, float("nan"), 1.0], dtype=BF16)}
    assert sparse_delta.make_delta(old, new)["w"].indices.tolist() == [0]
    assert sparse_delta.make_delta(old, old) == {}


@given(indices=st.lists(st.integers(0, 10**9), min_size=1, max_size=50, unique=True).map(sorted))
def test_positions_however_far_apart_survive(indices: list[int]) -> None:
    changed = SparseTensor(torch.tensor(indices), torch.zeros(len(indices), dtype=BF16))
    again = sparse_delta.from_tensors(sparse_delta.to_tensors({"w": changed}))["w"]
    assert again.indices.tolist() == indices


def test_the_checksum_is_of_names_positions_and_values() -> None:
    old = _weights(0)
    delta = sparse_delta.make_delta(old, _changed(old, 0.01))
    known = sparse_delta.checksum(delta)
    assert sparse_delta.checksum(dict(reversed(delta.items()))) == known
    name = next(iter(delta))
    others = [
        {**delta, name: SparseTensor(delta[name].indices, delta[name].values * 2)},
        {**delta, name: SparseTensor(delta[name].indices + 1, delta[name].values)},
        {("x" + n if n == name else n): d for n, d in delta.items()},
        {n: d for n, d in delta.items() if n != name},
    ]
    assert len({known, *map(sparse_delta.checksum, others)}) == 5


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_delta_is_refused_or_is_another_one_by_its_checksum(data: st.DataObject) -> None:
    old = _weights(0, (2000,))
    delta = sparse_delta.make_delta(old, _changed(old, 0.05))
    content = bytearray(sparse_delta.to_bytes(delta))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    read = _read(bytes(content), old["layer.0.weight"])
    if isinstance(read, RequestError):
        assert read.field
        return
    header = sparse_delta.to_bytes(delta)[8:].split(b"}}")[0]
    damaged_header = bytes(content)[8:].split(b"}}")[0] != header
    assert damaged_header or sparse_delta.checksum(read) != sparse_delta.checksum(delta)


@given(content=st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_a_delta_or_a_clear_error(content: bytes) -> None:
    read = _read(content, torch.zeros(10, dtype=BF16))
    assert not isinstance(read, RequestError) or read.field


INT = torch.tensor([1, 5])
ONES = torch.ones(2, dtype=BF16)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (SparseTensor(torch.tensor([5, 1]), ONES), "do not ascend"),
        (SparseTensor(torch.tensor([1, 1]), ONES), "do not ascend"),
        (SparseTensor(torch.tensor([-1, 1]), ONES), "from -1 to 1; it has 10 elements"),
        (SparseTensor(torch.tensor([1, 10]), ONES), "from 1 to 10; it has 10 elements"),
        (SparseTensor(INT.int(), ONES), "send int64 indices"),
        (SparseTensor(INT, ONES.float()), "values of the tensor's type"),
        (SparseTensor(INT, ONES[:1]), "2 indices and 1 values"),
        (SparseTensor(INT.view(2, 1), ONES), "are no flat tensor"),
        (SparseTensor([1, 5], ONES), "are no flat tensor"),
    ],
)
def test_elements_that_do_not_fit_the_tensor_are_refused(changed: SparseTensor, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        sparse_delta.apply_to(torch.zeros(2, 5, dtype=BF16), "w", changed)
    assert refused.value.field == "w"


@pytest.mark.parametrize(
    ("tensors", "field", "says"),
    [
        ({"w": ONES}, "w", "not part of a delta"),
        ({"w:gaps": torch.tensor([0, 3], dtype=torch.uint8)}, "w:gaps", "comes without w:values"),
        ({"w:values": ONES}, "w:values", "not part of a delta"),
        ({"w:gaps": ONES, "w:values": ONES}, "w:gaps", "uint8, uint16 or uint32"),
        (
            {"w:gaps": torch.tensor([0, 255], dtype=torch.uint8), "w:values": ONES},
            "w:gaps",
            "ends in the middle of a gap",
        ),
    ],
)
def test_tensors_that_are_no_delta_are_refused(
    tensors: dict[str, torch.Tensor], field: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        sparse_delta.from_tensors(tensors)
    assert refused.value.field == field


def test_a_delta_of_other_shapes_is_not_made() -> None:
    with pytest.raises(RequestError, match="needs the same type and shape"):
        sparse_delta.make_delta({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
