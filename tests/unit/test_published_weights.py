"""The keeper holds what was committed, whole and bit for bit, whichever way it came; what is wrong
with an update is said before anything is touched."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from actors import sparse_delta
from actors.control_api import (
    DiskWeights,
    GroupWeights,
    ObjectWeights,
    SparseTensor,
    WeightsGroup,
    WeightUpdate,
)
from actors.published_weights import PublishedWeights
from actors.weights_group import TrainerGroups
from placement.errors import RequestError, UnavailableError, UnknownIdError
from tests.unit import trainer
from tests.unit.list_shelf import ListShelf

Tensors = dict[str, torch.Tensor]
CHUNK_BYTES = 2000


def _tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed.weight": torch.randn(30, 10, generator=generator).bfloat16(),
        "norm.weight": torch.randn(7, generator=generator),
    }
    for expert in range(3):
        for part in ("gate", "down"):
            name = f"layers.0.mlp.experts.{expert}.{part}.weight"
            tensors[name] = torch.randn(20, 10, generator=generator).bfloat16()
    return tensors


GROUPS = TrainerGroups(timeout_s=15.0)
OLD, NEW = _tensors(0), _tensors(1)
EXPERT = "layers.0.mlp.experts.1.gate.weight"


def _write(directory: Path, tensors: Tensors) -> str:
    directory.mkdir()
    names = sorted(tensors)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in part}, directory / f"{number}.safetensors")
    return str(directory)


@pytest.fixture
def keeper(tmp_path: Path) -> PublishedWeights:
    return _keeper(_write(tmp_path / "checkpoint", OLD))


def _keeper(checkpoint: str) -> PublishedWeights:
    return PublishedWeights(checkpoint, ListShelf(), lambda ref: ref, GROUPS, CHUNK_BYTES)


def _held(keeper: PublishedWeights) -> Tensors:
    return _in(keeper.kept().chunks)


def _in(chunks: tuple[Any, ...]) -> Tensors:
    return {name: tensor for chunk in chunks for name, tensor in chunk.tensors()}


def _same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a
    )


def _commit(keeper: PublishedWeights, update: WeightUpdate, current: str = "0") -> None:
    keeper.stage(update, current)
    keeper.commit(update.version)


def _objects(*objects: Any, version: str = "1", base: str | None = None) -> WeightUpdate:
    return WeightUpdate(ObjectWeights(objects), version, base)


def test_nothing_is_held_for_the_checkpoint_and_all_of_what_was_committed(
    keeper: PublishedWeights, tmp_path: Path
) -> None:
    assert (keeper.kept().version, keeper.kept().num_bytes) == ("0", 0)
    path = _write(tmp_path / "new", NEW)
    staged = keeper.stage(WeightUpdate(DiskWeights(path), "1"), "0")
    assert keeper.kept().version == "0"
    assert _same(_in(staged.chunks), NEW)
    assert staged.previous is not None
    assert _same(_in(staged.previous), OLD)
    kept = keeper.commit("1")
    assert (kept.version, kept.num_bytes) == ("1", sum(t.nbytes for t in NEW.values()))
    assert _same(_held(keeper), NEW)


def test_an_update_of_one_tensor_keeps_all_others_and_brings_whole_experts(
    keeper: PublishedWeights,
) -> None:
    staged = keeper.stage(_objects({EXPERT: NEW[EXPERT]}), "0")
    brought = _in(staged.chunks)
    assert EXPERT.replace("gate", "down") in brought
    assert "embed.weight" not in brought
    assert staged.received_bytes == NEW[EXPERT].nbytes
    keeper.commit("1")
    assert _same(_held(keeper), {**OLD, EXPERT: NEW[EXPERT]})


@pytest.mark.parametrize("form", ["objects", "bytes", "file", "directory"])
def test_a_delta_makes_the_next_version_whichever_way_it_comes(
    keeper: PublishedWeights, tmp_path: Path, form: str
) -> None:
    _commit(keeper, _objects(NEW, version="1"))
    after = {name: t.clone() for name, t in NEW.items()}
    after["embed.weight"][3, 4] = 7.0
    after[EXPERT].view(-1)[::50] += 1
    delta = sparse_delta.make_delta(NEW, after)
    directory = tmp_path / "delta"
    directory.mkdir()
    file = directory / "delta.safetensors"
    file.write_bytes(sparse_delta.to_bytes(delta))
    source: DiskWeights | ObjectWeights = {
        "objects": ObjectWeights(
            (
                {n: d for n, d in delta.items() if n == EXPERT},
                {n: d for n, d in delta.items() if n != EXPERT},
            )
        ),
        "bytes": ObjectWeights((sparse_delta.to_bytes(delta),)),
        "file": DiskWeights(str(file)),
        "directory": DiskWeights(str(directory)),
    }[form]
    update = WeightUpdate(source, "2", "1", sparse_delta.checksum(delta))
    staged = keeper.stage(update, "1")
    assert staged.received_bytes < sum(t.nbytes for t in NEW.values()) / 4
    keeper.commit("2")
    assert _same(_held(keeper), after)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _announced(tensors: Tensors) -> GroupWeights:
    ordered = sorted(tensors.items())
    return GroupWeights(
        "weights",
        tuple(name for name, _ in ordered),
        tuple(str(t.dtype).removeprefix("torch.") for _, t in ordered),
        tuple(tuple(t.shape) for _, t in ordered),
    )


@pytest.mark.parametrize("as_delta", [False, True])
def test_a_trainer_in_another_process_broadcasts_whole_tensors_or_a_delta(
    keeper: PublishedWeights, tmp_path: Path, port: int, as_delta: bool
) -> None:
    sent = sparse_delta.to_tensors(sparse_delta.make_delta(OLD, NEW)) if as_delta else NEW
    save_file(sent, tmp_path / "sent.safetensors")
    with trainer.broadcasting(port, tmp_path / "sent.safetensors"):
        GROUPS.join(trainer.group_at(port))
        update = WeightUpdate(_announced(sent), "1", "0" if as_delta else None)
        _commit(keeper, update)
    assert _same(_held(keeper), NEW)
    GROUPS.leave("weights")
    with pytest.raises(UnknownIdError, match="there is no group 'weights'; there are none"):
        GROUPS.leave("weights")


def test_a_trainer_that_dies_while_it_broadcasts_costs_the_update_alone(
    keeper: PublishedWeights, tmp_path: Path, port: int
) -> None:
    save_file(NEW, tmp_path / "sent.safetensors")
    with trainer.broadcasting(port, tmp_path / "sent.safetensors", die_after=2):
        GROUPS.join(trainer.group_at(port))
        with pytest.raises(RequestError, match=r"broke off.*init it again") as refused:
            keeper.stage(WeightUpdate(_announced(NEW), "1"), "0")
    assert refused.value.field == "source.group"
    _commit(keeper, _objects(NEW))
    assert _same(_held(keeper), NEW)


def test_a_trainer_that_does_not_come_is_waited_for_within_the_bound(port: int) -> None:
    with pytest.raises(RequestError, match=r"did not meet at tcp://127.0.0.1:.* within 1 s"):
        TrainerGroups(timeout_s=1.0).join(trainer.group_at(port))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"backend": "mpi"}, "backend"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"world_size": 1}, "world_size"),
        ({"port": 0}, "port"),
        ({"name": ""}, "name"),
        ({"host": ""}, "host"),
        pytest.param(
            {"backend": "nccl"},
            "backend",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused_at_once(wrong: dict[str, Any], field: str) -> None:
    right = {"name": "g", "host": "127.0.0.1", "port": 29500, "rank_offset": 1, "world_size": 2}
    with pytest.raises(RequestError) as refused:
        GROUPS.join(WeightsGroup(**{"backend": "gloo", **right, **wrong}))
    assert refused.value.field == field


SPARSE = SparseTensor(torch.tensor([1]), torch.ones(1, dtype=torch.bfloat16))


def _bad_updates() -> Iterator[Any]:
    def case(name: str, update: WeightUpdate, field: str, says: str) -> Any:
        return pytest.param(update, field, says, id=name)

    whole = _objects
    yield case("unknown", whole({"x": OLD[EXPERT]}), "source.objects", "x is not a tensor of the")
    yield case(
        "shape",
        whole({EXPERT: OLD[EXPERT][:3]}),
        "source.objects",
        r"is bfloat16 \(3, 10\); the checkpoint has bfloat16 \(20, 10\)",
    )
    yield case("dtype", whole({EXPERT: OLD[EXPERT].float()}), "source.objects", "is float32")
    yield case("kind", whole({EXPERT: [1, 2]}), "source.objects[0]", "is a list")
    yield case("no mapping", whole(7), "source.objects[0]", "is a int; send a mapping")
    yield case("damaged", whole(save(NEW)[:-9]), "source.objects[0]", "no safetensors file")
    yield case("twice", whole(NEW, {EXPERT: NEW[EXPERT]}), "source.objects[1]", "comes twice")
    yield case("nothing", whole({}), "source", "holds no tensor")
    yield case(
        "no such path", WeightUpdate(DiskWeights("/no/where"), "1"), "source.path", "there is no"
    )
    yield case("no group", WeightUpdate(_announced(NEW), "1"), "source.group", "there is no group")
    yield case(
        "unequal lists",
        WeightUpdate(GroupWeights("weights", ("a", "b"), ("bfloat16",), ((1,),)), "1"),
        "source.names",
        "2 names, 1 dtypes and 1 shapes",
    )
    yield case(
        "announced shape",
        WeightUpdate(GroupWeights("weights", (EXPERT,), ("bfloat16",), ((2,),)), "1"),
        "source.names[0]",
        "the checkpoint has",
    )
    yield case(
        "announced gaps",
        WeightUpdate(GroupWeights("w", (f"{EXPERT}:gaps",), ("uint8",), ((10**12,),)), "1", "0"),
        "source.names[0]",
        "with up to 201 elements",
    )
    yield case("delta of x", whole({"x": SPARSE}, base="0"), "source", "x is not a tensor of the")
    yield case(
        "delta values",
        whole({"norm.weight": SPARSE}, base="0"),
        "norm.weight",
        "values of the tensor's type",
    )
    yield case(
        "checksum",
        WeightUpdate(ObjectWeights(({EXPERT: SPARSE},)), "1", "0", "abc"),
        "checksum",
        "is abc, and what came has",
    )


@pytest.mark.parametrize(("update", "field", "says"), list(_bad_updates()))
def test_whatever_is_wrong_is_named_and_nothing_is_staged(
    keeper: PublishedWeights, update: WeightUpdate, field: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        keeper.stage(update, "0")
    assert refused.value.field == field
    with pytest.raises(UnavailableError, match="not staged"):
        keeper.commit("1")
    assert keeper.kept().version == "0"


def test_a_file_that_is_cut_off_is_refused(keeper: PublishedWeights, tmp_path: Path) -> None:
    path = Path(_write(tmp_path / "new", NEW))
    whole = (path / "1.safetensors").read_bytes()
    (path / "1.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=r"1.safetensors is no safetensors file"):
        keeper.stage(WeightUpdate(DiskWeights(str(path)), "1"), "0")
    (path / "0.safetensors").unlink()
    (path / "1.safetensors").unlink()
    with pytest.raises(RequestError, match=r"holds no \*.safetensors file"):
        keeper.stage(WeightUpdate(DiskWeights(str(path)), "1"), "0")


def test_a_keeper_that_knows_nothing_of_the_current_version_takes_all_or_nothing(
    keeper: PublishedWeights,
) -> None:
    for update in (
        _objects({EXPERT: NEW[EXPERT]}, version="6"),
        _objects({EXPERT: SPARSE}, version="6", base="5"),
    ):
        with pytest.raises(RequestError, match="full copy of version 5 was lost"):
            keeper.stage(update, "5")
    staged = keeper.stage(_objects(NEW, version="6"), "5")
    assert staged.previous is None
    keeper.commit("6")
    assert _same(_held(keeper), NEW)


def test_a_version_that_lies_on_disk_is_read_again_and_recognised(
    keeper: PublishedWeights, tmp_path: Path
) -> None:
    path = _write(tmp_path / "new", NEW)
    digest = keeper.stage(WeightUpdate(DiskWeights(path), "1"), "0").source_digest
    another = _keeper(str(tmp_path / "checkpoint"))
    assert another.restore(path, "1", digest).version == "1"
    assert _same(_held(another), NEW)
    save_file(_tensors(3), Path(path) / "0.safetensors")
    (Path(path) / "1.safetensors").unlink()
    with pytest.raises(RequestError, match="which was read from there, had"):
        another.restore(path, "1", digest)
    assert _same(_held(another), NEW)


def test_a_part_that_came_from_disk_cannot_be_read_again_as_the_whole(
    keeper: PublishedWeights, tmp_path: Path
) -> None:
    path = _write(tmp_path / "part", {n: NEW[n] for n in list(NEW)[:4]})
    assert keeper.stage(WeightUpdate(DiskWeights(path), "1"), "0").source_digest == ""


def _part(tensors: Any, version: str = "1", **place: Any) -> WeightUpdate:
    return WeightUpdate(ObjectWeights((tensors,)), version, **place)


def test_parts_are_kept_and_staged_together_with_the_last_one(keeper: PublishedWeights) -> None:
    names = sorted(NEW)
    keeper.stage(_part({}, "begin", last=False), "0")
    for name in names[:-1]:
        kept = keeper.stage(_part({name: NEW[name]}, first=False, last=False), "0")
        assert kept.received_bytes == NEW[name].nbytes
    changed = sparse_delta.make_delta(NEW, {**NEW, names[0]: OLD[names[0]]})
    keeper.stage(_part(changed, first=False, last=False, base_version="0"), "0")
    with pytest.raises(RequestError, match="x is not a tensor"):
        keeper.stage(_part({"x": NEW[names[0]]}, first=False), "0")
    keeper.stage(_part({names[-1]: NEW[names[-1]]}, "7", first=False), "0")
    assert keeper.commit("7").version == "7"
    assert _same(_held(keeper), {**NEW, names[0]: OLD[names[0]]})


def test_a_first_part_drops_those_of_an_earlier_update(keeper: PublishedWeights) -> None:
    keeper.stage(_part({"norm.weight": NEW["norm.weight"]}, last=False), "0")
    _commit(keeper, _part({EXPERT: NEW[EXPERT]}))
    assert _same(_held(keeper), {**OLD, EXPERT: NEW[EXPERT]})


def test_a_later_part_without_a_first_one_is_refused(keeper: PublishedWeights) -> None:
    with pytest.raises(RequestError, match="begin with a first one") as refused:
        keeper.stage(_part({EXPERT: NEW[EXPERT]}, first=False), "0")
    assert refused.value.field == "first"
    keeper.stage(_part({}, last=False), "0")
    with pytest.raises(RequestError, match="holds no tensor"):
        keeper.stage(_part({}, first=False), "0")
