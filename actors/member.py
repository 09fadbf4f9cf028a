"""One member of the elastic group: the decode loop in lockstep with its peers, and its part in
every change of membership.

Knows: when things happen on this worker and in which order. Leaves the engine to
``engines.vllm_engine``, groups to ``groups``, bytes to ``migration``, decisions to the
coordinator.

Threads: the decode thread alone touches the engine and the live groups; everything else
reaches it through jobs that run between two steps. Control calls (``prepare`` and the like)
run on their callers' threads, beside decoding.

The control word: before each step all members sum one small tensor, a column per rank:
has it unfinished samples, and to which generation is it asked to cross. All cross at the
first word in which all ask for the same one; nobody is told by the coordinator.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from actors.boundary_jobs import BoundaryJobs
from actors.engines.environment import set_environment
from actors.groups import (
    GenerationGroups,
    connect_store,
    enter_placeholder_world,
    form_generation,
    form_group,
    imagine_generation,
)
from actors.migration import GlooTransport, Transport, move_dense, move_experts
from actors.outbox import Outbox
from actors.protocol import (
    Broken,
    BuildReport,
    Evicted,
    FinalizeReport,
    LoadReport,
    PrepareReport,
    RolledBack,
    Switched,
    Tokens,
    WorkerReport,
    WorkerSpec,
)
from actors.sample_kv import KvBySample, SampleKv
from actors.step_record import StepRecord
from actors.weight_chunks import WeightChunk
from placement.errors import FlexFloorError, MembershipError, RequestError
from placement.ids import Generation, SampleId, WorkerId
from placement.membership import GroupChange, Placement
from placement.samples import FinishReason, Sample

if TYPE_CHECKING:  # vLLM is imported when a worker builds, after the environment is set
    from actors.engines.vllm_engine import Engine
    from actors.engines.vllm_private import Coordinators


class State(StrEnum):
    BUILT = "built"
    DECODING = "decoding"
    STANDBY = "standby"  # left the group, still holds its experts
    BROKEN = "broken"
    LEFT = "left"


@dataclass(slots=True)
class _Prepared:
    """A generation that is ready and not yet live.

    Attributes:
        groups: None for a leaver.
        held_before: experts held before room was made for new ones; None until then.
    """

    change: GroupChange
    groups: GenerationGroups | None = None
    transport: Transport | None = None
    held_before: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Undo:
    """What a return to the generation before needs, until ``finalize``."""

    prepared: _Prepared
    groups: GenerationGroups
    coordinators: "Coordinators"
    placement: Placement


@dataclass(slots=True)
class _Crossing:
    """Times of the crossing in progress, on the monotonic clock."""

    generation: Generation
    last_step_end_s: float
    commit_start_s: float
    commit_end_s: float


class Member:
    """See the module's text. All public methods are thread-safe."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._outbox = Outbox()
        self._jobs = BoundaryJobs()
        self._step_record = StepRecord()
        self._state = State.BUILT
        self._let_go_kv: dict[SampleId, SampleKv] = {}
        """Of samples that were cancelled to go on elsewhere, until it is fetched."""
        self._prepared: dict[Generation, _Prepared] = {}
        self._armed: Generation | None = None
        self._undo: _Undo | None = None
        self._crossing: _Crossing | None = None
        self._holding = False
        self._engine: Engine
        self._groups: GenerationGroups
        self._store: dist.TCPStore
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- life of a worker

    def build(self) -> BuildReport:
        """Host the engine, alone: founders and joiners alike meet their peers later.

        Raises:
            ModelRefusedError, ConfigError: the model, the mode or the memory does not work.
        """
        return self._jobs.do(self._build, timeout_s=None)

    def _build(self) -> BuildReport:
        started = time.perf_counter()
        spec = self._spec
        rank = spec.members.index(spec.worker_id)
        set_environment(rank, len(spec.members), spec.store_address)
        from actors.engines.vllm_engine import Engine  # noqa: PLC0415 - after the environment

        imported = time.perf_counter()
        self._store = connect_store(spec.store_address, spec.collective_timeout_s)
        enter_placeholder_world(spec.worker_id)
        self._groups = imagine_generation(spec.generation, spec.members, spec.worker_id)
        self._engine = Engine(spec, self._groups)
        return BuildReport(
            worker_id=spec.worker_id,
            facts=self._engine.facts,
            kv_capacity_tokens=self._engine.kv_capacity_tokens,
            phases_s={"import": imported - started, **self._engine.phases_s},
            exact_report=self._engine.exact_report,
            pid=os.getpid(),
        )

    def start(self) -> None:
        """Founders: meet the peers and enter the decode loop."""
        groups = self._form(self._spec.generation, self._spec.members)

        def enter() -> None:
            imagined = self._engine.enter(groups, self._engine.placement)
            imagined.dismantle()
            self._groups.retire()
            self._groups = groups
            self._set_state(State.DECODING)

        self._jobs.do(enter)

    def leave(self) -> None:
        """Close the groups and end the decode thread.

        The engine is left to the end of the process, which must follow: vLLM's shutdown collects
        garbage for most of a second, and somebody waits for the slot.
        """

        def close() -> None:
            if self._undo is not None and self._undo.prepared.transport is not None:
                self._undo.prepared.transport.close()
            self._groups.retire()
            self._jobs.close(f"worker {self._spec.worker_id} has left")
            self._set_state(State.LEFT)

        if self._state is not State.LEFT:
            self._jobs.do(close)

    # -------------------------------------------------------------------------- samples

    def submit(self, samples: list[Sample], kv: KvBySample | None = None) -> None:
        """``kv``: what has been computed elsewhere for some of them; see ``fetch_kv``."""

        def add_all() -> None:
            for sample in samples:
                try:
                    self._engine.add(sample, (kv or {}).get(sample.sample_id))
                except RequestError as error:
                    self._outbox.put(
                        Tokens(
                            sample.sample_id,
                            len(sample.generated_ids),
                            (),
                            (),
                            FinishReason.FAILED,
                            str(error),
                        )
                    )

        self._jobs.post(add_all)

    def cancel(self, sample_ids: list[SampleId], keep_kv: bool = False) -> None:
        """``keep_kv``: what was computed for them can be fetched, until the next call of this
        kind; the bound on what is kept is what one call names."""

        def evict_all() -> None:
            if keep_kv:
                self._let_go_kv.clear()
            running = set(self._engine.running_ids())
            for sample_id in sample_ids:
                if sample_id in running:
                    self._outbox.put(Evicted(sample_id, self._let_go(sample_id, keep_kv)))

        self._jobs.post(evict_all)

    def _let_go(self, sample_id: SampleId, keep_kv: bool) -> int:
        """Evict one, between two steps: its KV is read before anything else can be written
        there. Returns of how many tokens it can be fetched."""
        if not keep_kv:
            self._engine.evict(sample_id)
            return 0
        self._engine.hold(sample_id)
        kv = self._engine.export_kv(sample_id)
        if kv is None:
            return 0
        self._let_go_kv[sample_id] = kv
        return kv.num_tokens

    def fetch_kv(self, sample_ids: list[SampleId]) -> dict[SampleId, SampleKv]:
        """The KV of samples that were cancelled with ``keep_kv``, or went when this worker began
        to stand by. Each can be fetched once, until the worker leaves or returns to its group;
        those that cannot are left out.
        """
        found = {i: kv for i in sample_ids if (kv := self._let_go_kv.pop(i, None)) is not None}
        if len(found) == len(sample_ids):
            return found  # and no step was waited for

        def export_all() -> dict[SampleId, SampleKv]:
            exported = {sample_id: self._engine.export_kv(sample_id) for sample_id in sample_ids}
            return {sample_id: kv for sample_id, kv in exported.items() if kv is not None}

        return found | self._jobs.do(export_all)

    def collect(self, acknowledged: int, wait_s: float) -> WorkerReport:
        cursor, events = self._outbox.collect(acknowledged, wait_s)
        stats = self._step_record.take_stats(self._engine)
        return WorkerReport(self._spec.worker_id, cursor, events, stats)

    def hold(self) -> None:
        """Decode nothing until ``unhold``; returns when no step of this member's samples is under
        way. They stay where they are, with their KV.

        Peers may go on: their steps find this member as they find an idle one, and a change of
        membership crosses here as anywhere.
        """
        self._jobs.do(lambda: self._set_holding(True))

    def unhold(self) -> None:
        self._jobs.do(lambda: self._set_holding(False))

    def _set_holding(self, holding: bool) -> None:
        self._holding = holding

    # -------------------------------------------------------------------------- weights

    def load_weights(self, version: str, chunks: Iterable[WeightChunk]) -> LoadReport:
        """Replace weights, chunk by chunk, between the beats of a held member or before the
        start of a built one; then compute every unfinished sample anew.

        Raises:
            WeightUpdateError: a chunk could not be had or does not fit. The weights are then of
                several versions: load one of them in full before this member decodes on.
        """
        received = 0
        phases: dict[str, float] = {"fetch": 0.0, "load": 0.0}
        waiting = iter(chunks)
        while True:
            with _timed_more(phases, "fetch"):
                chunk = next(waiting, None)
            if chunk is None:
                break
            with _timed_more(phases, "load"):
                self._jobs.do(partial(self._engine.load_chunk, chunk))
            received += chunk.num_bytes
        with _timed(phases, "finish"):
            resubmitted = self._jobs.do(lambda: self._engine.finish_load(version))
        return LoadReport(self._spec.worker_id, version, received, resubmitted, phases)

    # ------------------------------------------------------------------- change of membership

    def prepare(self, change: GroupChange) -> PrepareReport:
        """Beside decoding: groups of the new generation, dense weights, experts.

        Raises:
            MembershipError: it failed; the live generation was not touched.
        """
        me = self._spec.worker_id
        joins = me in change.joiners
        if not joins and self._engine.weight_version != change.weight_version:
            raise MembershipError(
                f"worker {me} has weights of version {self._engine.weight_version}, and generation "
                f"{change.generation} is to have version {change.weight_version}"
            )
        phases: dict[str, float] = {}
        prepared = _Prepared(change)
        self._prepared[change.generation] = prepared
        received = 0
        try:
            with _timed(phases, "groups"):
                prepared.transport = self._form_transport(change)
                if me in change.new_members:
                    prepared.groups = self._form(change.generation, change.new_members)
            with _timed(phases, "room"):
                self._jobs.do(lambda: self._make_room(prepared))
            if prepared.transport is not None:
                with _timed(phases, "dense"):
                    received += move_dense(self._engine, prepared.transport, me, change)
                    if joins:
                        self._jobs.do(self._engine.repack_dense)
                with _timed(phases, "experts"):
                    received += move_experts(self._engine, prepared.transport, me, change.moves)
            if joins:
                self._engine.weight_version = change.weight_version
        except FlexFloorError:
            raise
        except RuntimeError as error:  # torch's collectives raise nothing more specific
            raise MembershipError(f"worker {me} could not prepare: {error}") from error
        return PrepareReport(
            me,
            tuple(change.experts_of(me)),
            received,
            phases,
            self._engine.kv_capacity_tokens,
        )

    def _form(self, generation: Generation, members: tuple[WorkerId, ...]) -> GenerationGroups:
        spec = self._spec
        return form_generation(
            generation,
            members,
            spec.worker_id,
            self._engine.device_backend,
            self._store.clone(),
            spec.collective_timeout_s,
        )

    def _form_transport(self, change: GroupChange) -> Transport | None:
        workers = {w for m in change.moves for w in (m.source, m.destination)}
        workers |= {w for pair in change.dense_sources for w in pair}
        me = self._spec.worker_id
        if me not in workers:
            return None
        name = f"g{change.generation}.transfer"
        members = tuple(sorted(workers))
        timeout_s = self._spec.collective_timeout_s
        if self._engine.device_backend == "nccl":
            from actors.nccl_transport import NcclTransport  # noqa: PLC0415 - needs a GPU

            return NcclTransport(name, members, me, self._store.clone(), timeout_s)
        return GlooTransport(form_group(name, members, me, "gloo", self._store.clone(), timeout_s))

    def _make_room(self, prepared: _Prepared) -> None:
        change, me = prepared.change, self._spec.worker_id
        if me in change.joiners:
            self._engine.forget_experts(())  # what it was built with is no expert of ours
        prepared.held_before = self._engine.held_experts
        if me in change.new_members:
            self._engine.make_room(change.experts_of(me))

    def discard(self, generation: Generation) -> None:
        """Give up a prepared generation."""
        prepared = self._prepared.pop(generation, None)
        if prepared is None:
            return
        if self._armed == generation:
            self._armed = None
        self._jobs.do(lambda: self._restore_experts(prepared))
        _close(prepared)

    def _restore_experts(self, prepared: _Prepared) -> None:
        """Drop what came for a generation that is given up; its KV comes back."""
        if prepared.held_before is not None:
            self._engine.forget_experts(prepared.held_before)

    def switch(self, generation: Generation) -> None:
        """Cross over at the first step boundary on which all agree. Returns at once."""
        prepared = self._prepared.get(generation)
        if prepared is None:
            raise MembershipError(f"generation {generation} is not prepared here")
        if self._spec.worker_id in prepared.change.joiners:
            self._jobs.post(lambda: self._cross(generation))
        else:
            self._armed = generation
            self._jobs.wake()

    def _cross(self, generation: Generation) -> None:
        """On the decode thread, at the agreed boundary."""
        self._armed = None
        prepared = self._prepared.pop(generation)
        start = time.monotonic()
        if prepared.groups is None:
            for sample_id in self._engine.running_ids():
                self._outbox.put(Evicted(sample_id, self._engine.hold(sample_id)))
            self._undo = _Undo(
                prepared,
                self._groups,
                self._engine.coordinators,
                self._engine.placement,
            )
            self._set_state(State.STANDBY)
            self._outbox.put(Switched(generation, 0.0, 0.0, {}))
            return
        change = prepared.change
        placement = Placement(change.new_members, change.owner_E)
        self._undo = _Undo(
            prepared, self._groups, self._engine.coordinators, self._engine.placement
        )
        self._engine.enter(prepared.groups, placement)
        self._groups = prepared.groups
        joins = self._spec.worker_id in change.joiners
        last_step_end_s = start if joins else self._step_record.last_end_s
        self._crossing = _Crossing(generation, last_step_end_s, start, time.monotonic())
        self._set_state(State.DECODING)

    def finalize(self, generation: Generation) -> FinalizeReport:
        """Drop what a rollback would need: old groups, experts handed over."""
        undo = self._undo
        if undo is None or undo.prepared.change.generation != generation:
            raise MembershipError(f"generation {generation} is not waiting to be finalized here")
        phases: dict[str, float] = {}

        def forget() -> None:
            self._undo = None
            self._engine.forget_experts(
                tuple(undo.prepared.change.experts_of(self._spec.worker_id))
            )

        with _timed(phases, "experts"):
            self._jobs.do(forget)
        with _timed(phases, "groups"):
            if undo.prepared.groups is not None:  # a leaver keeps its groups until it leaves
                undo.coordinators.dismantle()
                undo.groups.retire()
            if undo.prepared.transport is not None:
                undo.prepared.transport.close()
        return FinalizeReport(self._spec.worker_id, phases, self._engine.kv_capacity_tokens)

    def rollback(self, generation: Generation) -> None:
        """Return to the generation before, if this member has crossed and has not yet returned."""
        prepared = self._prepared.get(generation)
        if prepared is not None:
            self.discard(generation)
            return

        def go_back() -> None:
            if self._undo is not None and self._undo.prepared.change.generation == generation:
                self._go_back("the coordinator asked for it", resubmit=False)

        self._jobs.do(go_back)

    def _go_back(self, error: str, *, resubmit: bool) -> None:
        """On the decode thread: undo the crossing and decode on in the old generation.

        Closing the failed groups first lets peers that still wait in them fail at once.
        """
        undo = self._undo
        assert undo is not None
        self._undo = self._crossing = None
        failed = undo.prepared.groups
        if failed is not None:
            failed.retire()
            self._engine.go_back(undo.coordinators, undo.placement)
            self._groups = undo.groups
        if undo.prepared.transport is not None:
            undo.prepared.transport.close()
        self._engine.drop_held()
        resubmitted = self._engine.resubmit_all() if resubmit else 0
        self._restore_experts(undo.prepared)
        self._set_state(State.DECODING)
        generation = undo.prepared.change.generation
        self._outbox.put(RolledBack(generation, error, resubmitted))

    # --------------------------------------------------------------------------- decode loop

    def _run(self) -> None:
        while self._state is not State.LEFT:
            self._jobs.run()
            if self._state is not State.DECODING:
                self._jobs.wait(or_until=lambda: self._state in (State.DECODING, State.LEFT))
                continue
            in_step = False
            try:
                busy, agreed = self._exchange_control_word()
                if agreed is not None:
                    self._cross(agreed)
                elif busy or self._crossing is not None:
                    in_step = True
                    self._step()
                else:
                    self._step_record.idle_beat()
                    self._jobs.wait(
                        or_until=lambda: self._armed is not None, timeout_s=self._spec.idle_beat_s
                    )
            except Exception as error:  # noqa: BLE001 - whatever broke is reported and acted on
                self._recover(repr(error), in_step=in_step)

    def _recover(self, error: str, *, in_step: bool) -> None:
        """Back to the generation before where there is one, else the group is lost."""
        if self._undo is not None:
            try:
                self._go_back(error, resubmit=in_step)
            except Exception as second:  # noqa: BLE001 - reported below
                error = f"{error}; the way back failed: {second!r}"
            else:
                return
        self._set_state(State.BROKEN)
        self._outbox.put(Broken(error))

    def _exchange_control_word(self) -> tuple[bool, Generation | None]:
        """(somebody has unfinished samples, generation that all want to cross to)."""
        groups = self._groups
        size = len(groups.members)
        armed = self._armed
        busy = self._engine.has_unfinished() and not self._holding
        if size == 1:
            return busy, armed
        word = torch.zeros((2, size), dtype=torch.int32)
        rank = groups.members.index(self._spec.worker_id)
        word[0, rank] = int(busy)
        word[1, rank] = armed or 0
        dist.all_reduce(word, group=groups.host)
        wanted = set(word[1].tolist())
        agreed = Generation(wanted.pop()) if len(wanted) == 1 else Generation(0)
        return bool(word[0].any()), agreed or None

    def _step(self) -> None:
        start = time.monotonic()
        made = self._engine.step_idle() if self._holding else self._engine.step()
        end = time.monotonic()
        self._step_record.step(
            start,
            end,
            made_tokens=bool(made),
            unfinished=self._engine.has_unfinished() and not self._holding,
            prefilled_tokens=self._engine.prefilled_tokens,
        )
        for tokens in made:
            self._outbox.put(tokens)
        if self._crossing is not None:
            crossing, self._crossing = self._crossing, None
            self._outbox.put(
                Switched(
                    crossing.generation,
                    pause_s=start - crossing.last_step_end_s,
                    first_step_s=end - start,
                    phases_s={
                        "agree": crossing.commit_start_s - crossing.last_step_end_s,
                        "commit": crossing.commit_end_s - crossing.commit_start_s,
                        "meet": start - crossing.commit_end_s,
                    },
                )
            )

    def _set_state(self, state: State) -> None:
        self._state = state
        self._jobs.wake()


def _close(prepared: _Prepared) -> None:
    if prepared.transport is not None:
        prepared.transport.close()
    if prepared.groups is not None:
        prepared.groups.retire()


@contextmanager
def _timed_more(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a block to ``phases_s[name]``."""
    start = time.perf_counter()
    yield
    phases_s[name] += time.perf_counter() - start


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    """Puts the seconds of a block into ``phases_s[name]``."""
    start = time.perf_counter()
    yield
    phases_s[name] = time.perf_counter() - start
