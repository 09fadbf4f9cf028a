"""A second Ray job: a process of its own whose actor wants one slot.

It prints one JSON line when its actor waits, and one when it runs, and ends when its standard
input is closed.
"""

import json
import sys
import time

import ray


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)

    @ray.remote(num_gpus=1)
    class Borrower:
        def work(self) -> tuple[float, str]:
            slot = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
            return time.time(), slot

    borrower = Borrower.remote()
    running = borrower.work.remote()
    say(json.dumps({"waiting": True}))
    started_at, slot = ray.get(running, timeout=60)
    say(json.dumps({"started_at": started_at, "slot": slot}))
    sys.stdin.read()
    ray.shutdown()
