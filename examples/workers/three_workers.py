"""Start three workers on a PostgreSQL database, and kill one of them while all of them work.

`python three_workers.py postgresql://user:password@host/database`
"""

import asyncio
import signal
import sys
from pathlib import Path
from subprocess import Popen

from holdfast import Approve, Runtime, TurnResult

ORDERS = 12


def start_worker(store: str) -> Popen[bytes]:
    """Start a process that runs the agent of parcels.py. The workers share nothing but the database."""
    command = [sys.executable, "-m", "holdfast", "worker", "parcels:agent", "--store", store]
    return Popen(command, cwd=Path(__file__).parent)


async def count_held(rt: Runtime, *, workers: int, conversations: int) -> dict[int, int]:
    """Wait for so many workers with so many conversations; return how many each of them runs, by process id."""
    while True:
        held = {owner.pid: owner.holds for owner in await rt.owners() if owner.alive and "parcels" in owner.agents}
        if len(held) >= workers and sum(held.values()) >= conversations:
            return held
        await asyncio.sleep(0.05)


async def ship(rt: Runtime, order: int) -> TurnResult[None]:
    """Have an order shipped, whichever worker does it, and hand it over once it is packed."""
    result = await rt.run(f"Ship order {order}", agent="parcels", by="shop")
    print(result.text)
    for pending in result.pending:
        await rt.resolve(pending, Approve(), by="carrier")
    return await rt.wait(result.conversation)


async def main(store: str) -> None:
    workers = [start_worker(store) for _ in range(3)]
    try:
        async with Runtime(store=store) as rt:  # without an agent: it sends and decides, and runs nothing
            await count_held(rt, workers=3, conversations=0)
            print("workers:", *(worker.pid for worker in workers))
            shipping = asyncio.gather(*(ship(rt, order) for order in range(1, ORDERS + 1)))
            held = await count_held(rt, workers=3, conversations=ORDERS)
            victim = max(workers, key=lambda worker: held.get(worker.pid, 0))
            victim.kill()
            print(f"killed worker {victim.pid}, which ran {held[victim.pid]} of {sum(held.values())} conversations")
            results = await shipping
            print(f"{sum(result.reason == 'completed' for result in results)} of {ORDERS} orders are on their way")
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            worker.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python three_workers.py postgresql://user:password@host/database")
    given = sys.argv[1]
    # A dead worker is replaced when its lease ends: after 2 seconds here, 10 by default.
    asyncio.run(main(given if "holdfast_lease" in given else f"{given}{'&' if '?' in given else '?'}holdfast_lease=2"))
