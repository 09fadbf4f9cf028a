"""How a group comes to be: taken over from an earlier coordinator, or begun from disk."""

from collections.abc import Callable

from actors.concurrently import all_of
from actors.crew import Crew
from actors.ports import GroupRecord, WorkerFactory
from actors.roster import Worker
from actors.served_weights import ServedWeights
from placement.errors import ConfigError, LeaseTimeoutError, WorkerLostError
from placement.experts import initial_owners
from placement.ids import Generation, WorkerId

_MEMORY = "group.kv_memory_bytes"
"""The setting that an engine names if its experts leave no room for KV."""


async def found_group(crew: Crew, weights: ServedWeights, say: Callable[[str], None]) -> None:
    """Lease, spawn, build and start a group of up to ``group.max_workers``.

    It starts with the leases that came early; the others join later. If those turn out to be too
    few to hold the model, it waits for more and begins again. Nothing is leased after a failure.

    Raises:
        LeaseTimeoutError: capacity did not arrive.
        ModelRefusedError, ConfigError: the engine cannot serve this.
        WorkerLostError: a founder ended.
        WeightUpdateError: a founder could not load the weights that are served.
        UnavailableError: the store cannot be reached, or these weights are lost.
    """
    await crew.store.renew()  # the last group may have been lost with its store
    await weights.ensure_kept()
    enough, founded = crew.least_width, False
    while not founded:
        workers = await _lease(crew, enough, say)
        founded = await _build_and_start(crew, weights, workers, say)
        enough = max(crew.least_width, len(workers) + 1)


async def _lease(crew: Crew, enough: int, say: Callable[[str], None]) -> list[Worker]:
    """Raises: LeaseTimeoutError."""
    settings = crew.settings
    wanted = settings.group.max_workers
    said = "nothing was said about why"

    def note(text: str) -> None:
        nonlocal said
        said = text
        say(text)

    say(f"waiting for leases of {settings.lease.resources} for {enough} to {wanted} workers")
    workers = await crew.acquire(wanted, enough, note)
    if not workers:
        raise LeaseTimeoutError(
            f"fewer than {enough} of {wanted} leases of {settings.lease.resources} were granted "
            f"within {settings.lease.acquire_timeout_s} s ({said}); free capacity, lower "
            "group.max_workers or raise the bound",
            field="lease.acquire_timeout_s",
        )
    return workers


async def _build_and_start(
    crew: Crew, weights: ServedWeights, workers: list[Worker], say: Callable[[str], None]
) -> bool:
    """False: so few workers cannot hold the model, but more could; these have been ended."""
    roster = crew.roster
    try:
        generation = roster.new_generation()
        members = tuple(worker.worker_id for worker in workers)
        await crew.store.record(_empty_record(crew, in_change=members))
        say(f"building {len(members)} workers")
        try:
            await crew.build(workers, members, generation, joiner=False)
        except ConfigError as error:
            if error.field != _MEMORY or len(workers) == crew.settings.group.max_workers:
                raise
            await crew.kill(workers)
            return False
        build = workers[0].build
        assert build is not None
        crew.learn(build.facts)
        if len(workers) < crew.least_width:
            await crew.kill(workers)
            return False
        await weights.load_onto(workers)
        await all_of(worker.live.start() for worker in workers)
        roster.found(members, generation, initial_owners(build.facts.num_experts, members))
        roster.expect_steps_from_zero(members)
        await crew.store.record(roster.record())
    except BaseException:  # also when cancelled: whatever happened, nothing stays leased
        roster.disband()
        await crew.kill(workers)
        raise
    return True


async def attach_group(crew: Crew, weights: ServedWeights, factory: WorkerFactory) -> bool:
    """Take over the group that an earlier coordinator recorded.

    A group of which anything is missing, or that was in the middle of a change of its membership
    or its weights, is ended. Returns whether there is a group now.
    """
    record = await crew.store.load()
    await weights.take_over(record)
    if record is None:
        await crew.sweep()
        return False
    crew.roster.next_worker_id = record.next_worker_id
    crew.roster.next_generation = record.next_generation
    crew.roster.pause_mode, crew.roster.asleep = record.pause_mode, record.asleep
    if record.facts is not None:
        crew.learn(record.facts)
    in_between = record.in_change or record.next_weights is not None
    attached = not in_between and await _take_over(crew, factory, record)
    if not attached:
        for worker_id in dict.fromkeys(record.members + record.in_change):
            await _end_by_id(factory, worker_id)
        await crew.sweep()
        await crew.store.record(_empty_record(crew))
    return attached


async def _take_over(crew: Crew, factory: WorkerFactory, record: GroupRecord) -> bool:
    lease_of = {lease.name: lease for lease in await crew.existing_leases()}
    ports = await all_of(factory.attach(worker_id) for worker_id in record.members)
    leases_there = all(name in lease_of for name in record.lease_names)
    if not record.members or None in ports or not leases_there:
        return False
    for worker_id, name, port, build in zip(
        record.members, record.lease_names, ports, record.build_reports, strict=True
    ):
        worker = crew.enlist(lease_of[name], worker_id)
        worker.port = port
        worker.built(build)
    crew.learn(record.build_reports[0].facts)
    crew.roster.found(record.members, record.generation, record.owner_E)
    return True


async def _end_by_id(factory: WorkerFactory, worker_id: WorkerId) -> None:
    port = await factory.attach(worker_id)
    if port is None:
        return
    try:
        await port.kill()
    except WorkerLostError:
        return  # it has gone before us


def _empty_record(crew: Crew, in_change: tuple[WorkerId, ...] = ()) -> GroupRecord:
    """There is no group; ids go on where they were."""
    return GroupRecord(
        next_worker_id=crew.roster.next_worker_id,
        next_generation=crew.roster.next_generation,
        generation=Generation(0),
        members=(),
        owner_E=(),
        lease_names=(),
        build_reports=(),
        in_change=in_change,
        pause_mode=crew.roster.pause_mode,
        asleep=crew.roster.asleep,
        facts=crew.roster.facts,
        weights=crew.roster.weights,
    )
