"""Programs per second of the sandbox: 1,000 programs of 20 ms, as a reward of two processes runs them.

    python -m benchmarks.code_sandbox --json FILE

Each program has one test and uses the processor for 20 ms, measured in the program itself. Ideal is the time of the
programs alone, divided by the usable cores; the target is a share of it. Start-up of the servers is not counted.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.common import Check, Measurement, at_least, main
from roll.sandbox.client import Job, Limits, Sandbox, available_isolation

PROGRAMS = 1000
PROGRAM_S = 0.02
SERVERS = 2
WARM_UP = 10

CODE = f"""
import time
end = time.process_time() + {PROGRAM_S}
count = 0
while time.process_time() < end:
    count += 1
print(input())
"""


async def run(isolation: str, programs: int) -> dict[str, float]:
    """Seconds of all programs on SERVERS servers."""
    sandboxes = [Sandbox(isolation) for _ in range(SERVERS)]  # type: ignore[arg-type]
    numbers = iter(range(programs))

    async def work(sandbox: Sandbox, own: object) -> None:
        for number in own:  # type: ignore[attr-defined]
            results = await sandbox.run(Job(CODE, "stdio", inputs=[f"{number}\n"]), Limits())
            if results != [{"state": "ended", "text": f"{number}\n"}]:
                raise AssertionError(f"program {number}: {results}")

    try:
        await asyncio.gather(*(work(sandbox, range(WARM_UP)) for sandbox in sandboxes))
        start = time.perf_counter()
        await asyncio.gather(*(work(sandbox, numbers) for sandbox in sandboxes))
        seconds = time.perf_counter() - start
    finally:
        for sandbox in sandboxes:
            sandbox.close()
    return {"seconds": seconds}


def measure() -> Measurement:
    """The share of the ideal speed with the isolation of this machine, and without namespaces."""
    isolation, reason = available_isolation()
    ideal = PROGRAMS * PROGRAM_S / SERVERS
    runs = {kind: asyncio.run(run(kind, PROGRAMS)) for kind in dict.fromkeys((isolation, "processes"))}
    checks: list[Check] = [
        at_least(f"code_sandbox: share of ideal speed, {isolation}", ideal / runs[isolation]["seconds"], 0.7)
    ]
    return {"programs": PROGRAMS, "program_seconds": PROGRAM_S, "reason": reason, "runs": runs}, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")
