"""The other job of the demo: a Ray driver of its own that wants every slot it can get.

It stands for the reward model or reference policy that shares a cluster with rollouts. It knows
nothing of the service: each of its actors asks Ray for one slot and waits until there is one.

It tells the demo one JSON line per event on its standard output: ``waiting``, ``borrowed``,
``worked`` (first piece of work done) and ``returned``. It ends, and returns everything, when its
standard input ends or says "stop", at the latest after ``--limit-s``: a demo that dies takes
the borrower with it.
"""

import argparse
import json
import os
import sys
import threading
import time
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import RayActorError

CHUNK_SIZE = 256
"""Side of the matrices of one piece of work: about a millisecond, so that the other job is seen
to work without taking the cores from the workers it shares them with."""

PACE_S = 0.25
"""One piece of work per slot in this time; also how soon a grant or the end is noticed."""

RETURN_TIMEOUT_S = 15.0


class Scorer:
    """Holds one slot and scores what it is given."""

    def __init__(self) -> None:
        self._started_at = time.time()
        noise = np.random.default_rng(0)
        self._weight = noise.standard_normal((CHUNK_SIZE, CHUNK_SIZE), dtype=np.float32)

    def where(self) -> dict[str, Any]:
        """Node, slot and process, and when the first line of this actor ran."""
        context = ray.get_runtime_context()
        slots = [f"{kind}:{i}" for kind, ids in context.get_accelerator_ids().items() for i in ids]
        return {
            "node_id": context.get_node_id(),
            "slot": slots[0] if slots else "",
            "pid": os.getpid(),
            "started_at": self._started_at,
        }

    def score(self) -> tuple[float, float]:
        """(a score, wall clock after it)."""
        return float(np.tanh(self._weight @ self._weight).mean()), time.time()

    def leave(self) -> None:
        """End this actor."""
        ray.actor.exit_actor()


def tell(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Borrower:
    """The pending and the granted actors of this job."""

    def __init__(self, slots: int) -> None:
        actor = ray.remote(num_gpus=1, num_cpus=0, max_restarts=0)(Scorer)
        self._pending = {a.where.remote(): a for a in (actor.remote() for _ in range(slots))}
        self._working: dict[Any, str] = {}
        self._places: dict[str, dict[str, Any]] = {}
        self._chunks: dict[str, int] = {}
        tell("waiting", slots=slots)

    def work_once(self) -> None:
        """Notice grants, then let every granted actor do one piece of work."""
        waiting = list(self._pending)
        granted = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        for reference in granted:
            actor = self._pending.pop(reference)
            place = cast("dict[str, Any]", ray.get(reference))
            self._working[actor] = place["slot"]
            self._places[place["slot"]] = place
            self._chunks[place["slot"]] = 0
            tell("borrowed", **place)
        pieces = {actor: actor.score.remote() for actor in self._working}
        for actor, piece in pieces.items():
            _, done_at = ray.get(piece, timeout=RETURN_TIMEOUT_S)
            slot = self._working[actor]
            self._chunks[slot] += 1
            if self._chunks[slot] == 1:
                tell("worked", slot=slot, first_chunk_at=done_at)

    def return_all(self) -> None:
        """End all actors, pending ones too; a slot counts as returned when its actor has left."""
        for actor in self._pending.values():
            ray.kill(actor)
        leaving = {actor: actor.leave.remote() for actor in self._working}
        for actor, left in leaving.items():
            try:
                ray.get(left, timeout=RETURN_TIMEOUT_S)
            except RayActorError:  # how Ray answers a call that ended its actor
                slot = self._working[actor]
                tell("returned", slot=slot, returned_at=time.time(), chunks=self._chunks[slot])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="of the Ray cluster")
    parser.add_argument("--slots", type=int, required=True, help="how many to ask for")
    parser.add_argument("--limit-s", type=float, default=600, help="longest life of this job")
    arguments = parser.parse_args()

    stop = threading.Event()

    def listen() -> None:
        sys.stdin.readline()  # "stop", or the end of the demo's process
        stop.set()

    ray.init(address=arguments.address, namespace="borrower", log_to_driver=False)
    threading.Thread(target=listen, name="listen", daemon=True).start()
    deadline = time.monotonic() + arguments.limit_s
    borrower = Borrower(arguments.slots)
    try:
        while not stop.wait(PACE_S) and time.monotonic() < deadline:
            borrower.work_once()
    finally:
        borrower.return_all()
        ray.shutdown()


if __name__ == "__main__":
    main()
