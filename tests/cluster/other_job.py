"""A second Ray job: a process of its own whose actors want one slot each.

It prints one JSON line when its actors wait, and one for each that runs, and ends when its
standard input is closed.
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

    borrowers = [Borrower.remote() for _ in range(int(sys.argv[2]))]
    waiting = [borrower.work.remote() for borrower in borrowers]
    say(json.dumps({"waiting": True}))
    while waiting:
        running, waiting = ray.wait(waiting, timeout=60)
        started_at, slot = ray.get(running[0], timeout=0)
        say(json.dumps({"started_at": started_at, "slot": slot}))
    sys.stdin.read()
    ray.shutdown()
