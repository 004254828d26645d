"""schedule="ranks" on links with delay, loss, partitions and kills. ``python -m bench.bench_ranks [--json FILE] [--quick] [--calls N | --runs N]``

Each rank lives in a network namespace of its own. The namespaces are connected by TUN devices and a forwarder in this program, which delays, drops and
counts whole IP packets (``tc netem`` would do the same in the kernel, and many kernels lack it). The bundled models generate one text after the other,
greedy and sampled, and each text is compared with plain decoding. Needs root for ``ip netns`` and ``/dev/net/tun``: without, the program says why
and ends with status 0.

``--runs 200`` compares at least so many texts in all, evenly over the chains and over the links, one partition and one kill of each.

One core per rank is the least that asynchronous stages need: with fewer, the figures show the links' effect, not the gain of drafts.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import markdown_table, replace_table, save

CONDITIONS = {"0 ms": (0.0, 0.0), "1 ms": (1e-3, 0.0), "10 ms": (1e-2, 0.0), "50 ms": (5e-2, 0.0), "1 ms, 1 % loss": (1e-3, 0.01)}  # fmt: skip
"""One-way delay in seconds, and share of the packets that are lost."""

LIMIT_S = 60.0
"""A call that takes longer is a hang."""

PARTITION_S = 5.0

START_S = 180.0
"""Longest wait for a rank that starts, for the first time or again. It imports torch and transformers."""

NEW_TOKENS = 64
CHAINS = {2: ("medium",), 3: ("small", "medium")}
_PREFIX = "pipespec-bench"
_PORT = 29611


class Forwarder(threading.Thread):
    """Forwards IP packets between the namespaces. ``delay``, ``loss`` and ``cut`` may change at any time.

    Args:
        world: Number of ranks.
        seed: Of the losses.
    """

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(name="forwarder", daemon=True)
        self.delay = self.loss = 0.0
        self.cut: set[int] = set()
        self.bytes = 0
        self._random, self._over = random.Random(seed), False
        self._devices = [self._open(rank) for rank in range(world)]

    def _open(self, rank: int) -> int:
        space, device = f"{_PREFIX}-{rank}", f"psb{rank}"
        subprocess.run(["ip", "netns", "del", space], capture_output=True)
        _ip("netns", "add", space)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        tun_set_iff, tun, no_pi = 0x400454CA, 0x0001, 0x1000
        fcntl.ioctl(fd, tun_set_iff, struct.pack("16sH", device.encode(), tun | no_pi))
        _ip("link", "set", device, "netns", space)
        _ip("-n", space, "addr", "add", f"{address(rank)}/24", "dev", device)
        _ip("-n", space, "link", "set", device, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return fd

    def run(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._over:
            wait = max(0.0, due[0][0] - time.monotonic()) if due else 0.1
            for fd in select.select(self._devices, [], [], min(wait, 0.1))[0]:
                with suppress(BlockingIOError):
                    for _ in range(64):
                        packet = os.read(fd, 65536)
                        source, to = self._devices.index(fd), packet[19] - 1
                        if packet[0] >> 4 != 4 or not 0 <= to < len(self._devices) or {source, to} & self.cut:
                            continue
                        self.bytes += len(packet)
                        if self._random.random() >= self.loss:
                            count += 1
                            heapq.heappush(due, (time.monotonic() + self.delay, count, to, packet))
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, _, to, packet = heapq.heappop(due)
                with suppress(OSError):  # a full queue drops packets
                    os.write(self._devices[to], packet)

    def close(self) -> None:
        self._over = True
        self.join()
        for rank, fd in enumerate(self._devices):
            os.close(fd)
            subprocess.run(["ip", "netns", "del", f"{_PREFIX}-{rank}"], capture_output=True)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def missing() -> str | None:
    """Why the namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "it needs root for network namespaces"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        done = subprocess.run(["ip", "netns", "add", _PREFIX], capture_output=True, text=True)
    except FileNotFoundError:
        return "the program ip (iproute2) is not installed"
    subprocess.run(["ip", "netns", "del", _PREFIX], capture_output=True)
    return done.stderr.strip() or "ip netns failed" if done.returncode else None


class Ranks:
    """The processes of one chain."""

    def __init__(self, drafts: Sequence[str]) -> None:
        self.drafts, self.world = drafts, len(drafts) + 1
        self.processes = [self.start(rank) for rank in range(self.world)]

    def start(self, rank: int) -> subprocess.Popen:
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(self.world), "MASTER_ADDR": address(0), "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": f"psb{rank}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", f"{_PREFIX}-{rank}", sys.executable, "-m", "bench.bench_ranks", "--rank"]
        return subprocess.Popen(
            [*command, *self.drafts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def restart(self, rank: int) -> None:
        self.processes[rank].wait()
        self.processes[rank] = self.start(rank)

    def answer(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The next line of rank 0. Raises ``TimeoutError`` for a hang."""
        out = self.processes[0].stdout
        assert out is not None
        if not select.select([out], [], [], limit_s)[0]:
            raise TimeoutError
        line = out.readline()
        if not line:
            raise RuntimeError("rank 0 has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def call(self, number: int) -> None:
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.write(f"{number}\n")
        stdin.flush()

    def close(self) -> dict[int, int | None]:
        """Exit status per rank; None: it had to be killed."""
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.close()
        found: dict[int, int | None] = {}
        for rank, process in enumerate(self.processes):
            try:
                found[rank] = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                found[rank] = None
        return found


def rank_process(drafts: Sequence[str]) -> None:
    """A rank. Rank 0 generates the text of each number that it reads, and writes what came out."""
    import torch
    from transformers import AutoTokenizer

    from pipespec import Pipeline
    from pipespec.demo import family_path, prompts

    torch.set_num_threads(1)
    target = family_path("target")
    with Pipeline(target, [family_path(name) for name in drafts], schedule="ranks", dtype="float32") as pipe:
        if not pipe.is_controller:
            pipe.serve()
            return
        tokenizer = AutoTokenizer.from_pretrained(target)
        inputs = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts(8)]
        plain = Pipeline(pipe.target, schedule="plain")

        def options(number: int) -> dict[str, Any]:
            sampling = {"do_sample": True, "seed": number} if number % 2 else {"do_sample": False}
            return {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, **sampling}

        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            number = int(line)
            ids = inputs[number // 2 % len(inputs)]
            expected = plain.generate(ids, **options(number))
            assert plain.report is not None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                same = torch.equal(pipe.generate(ids, **options(number)), expected)
            report = pipe.report
            assert report is not None
            said = {
                "same": same,
                "tokens": report.tokens,
                "seconds": report.seconds,
                "plain_seconds": plain.report.seconds,
                "drafted": report.stages[-1].drafted,
                "accepted": report.stages[-1].accepted,
                "warnings": [str(w.message) for w in caught],
                "decisions": report.decisions,
            }
            print(json.dumps(said), flush=True)


def summary(chain: int, name: str, calls: Sequence[dict[str, Any]], hangs: int, sent: int) -> dict[str, Any]:
    tokens, drafted = sum(c["tokens"] for c in calls), sum(c["drafted"] for c in calls)
    seconds = sum(c["seconds"] for c in calls)
    return {
        "models": chain,
        "link": name,
        "calls": len(calls) + hangs,
        "equal": sum(c["same"] for c in calls),
        "hangs": hangs,
        "tokens_per_s": tokens / seconds if seconds else None,
        "plain_tokens_per_s": tokens / sum(c["plain_seconds"] for c in calls) if calls else None,
        "acceptance_rate": sum(c["accepted"] for c in calls) / drafted if drafted else None,
        "accepted_per_token": sum(c["accepted"] for c in calls) / tokens if tokens else None,
        "bytes_per_token": sent / tokens if tokens else None,
        "warnings": sum(len(c["warnings"]) for c in calls),
        "taken_back": sum("is back after" in d for c in calls for d in c["decisions"] or ()),
        "longest_call_s": max((c["seconds"] for c in calls), default=None),
    }


class Amount(NamedTuple):
    """How much is measured of each chain.

    Attributes:
        calls: On each link.
        partitions: Number of them.
        kills: Number of them.
        broken: Fewest calls with a partition, and with a kill.
    """

    calls: int
    partitions: int
    kills: int
    broken: int = 1

    @classmethod
    def of_runs(cls, runs: int) -> Amount:
        """At least ``runs`` calls in all, as many for each row of the table."""
        each = -(-runs // (len(CHAINS) * (len(CONDITIONS) + 2)))
        return cls(each, 1, 1, each)


def measure(chain: int, amount: Amount, seed: int) -> list[dict[str, Any]]:
    """Rows of a chain: each link, partitions, kills."""
    rows: list[dict[str, Any]] = []
    forwarder = Forwarder(chain, seed)
    forwarder.start()
    ranks = Ranks(CHAINS[chain])
    number = 0

    def run(
        count: int, strike: Any = None, seconds: float = 0.0, until_back: bool = False
    ) -> tuple[list[dict[str, Any]], int, int]:
        nonlocal number
        done: list[dict[str, Any]] = []
        before, hangs = forwarder.bytes, 0
        end = time.monotonic() + seconds

        def is_back() -> bool:
            return any("is back after" in d for call in done for d in call["decisions"] or ())

        def is_over() -> bool:
            return len(done) >= count and ((until_back and is_back()) or time.monotonic() > end)

        while not is_over():
            ranks.call(number)
            number += 1
            if strike is not None:
                strike(len(done))
            try:
                done.append(ranks.answer())
            except TimeoutError:
                hangs += 1
                break
        return done, hangs, forwarder.bytes - before

    try:
        ranks.answer(START_S)
        for name, (delay, loss) in CONDITIONS.items():
            forwarder.delay, forwarder.loss = delay, loss
            run(2)
            rows.append(summary(chain, name, *run(amount.calls)))
            print(rows[-1], flush=True)
        forwarder.delay, forwarder.loss = 1e-3, 0.0
        for i in range(amount.partitions):
            # Calls run through the cut and 8 s beyond it.
            victim = chain - 1 - i % (chain - 1)
            forwarder.cut = {victim}
            heal = threading.Timer(PARTITION_S, forwarder.cut.clear)
            heal.start()
            cut = run(amount.broken, seconds=PARTITION_S + 8.0)
            rows.append(summary(chain, f"1 ms, rank {victim} cut off for 5 s", *cut))
            heal.join()
            print(rows[-1], flush=True)
        for i in range(amount.kills):
            victim, dice = chain - 1 - i % (chain - 1), random.Random(seed + i)

            def kill(done: int, victim: int = victim, dice: random.Random = dice) -> None:
                if done == 1:
                    time.sleep(dice.uniform(0, 0.2))
                    _kill_rank(ranks, victim)

            lost = run(3, kill)
            ranks.restart(victim)
            done, hangs, sent = run(max(1, amount.broken - 3), seconds=START_S, until_back=True)
            rows.append(
                summary(
                    chain,
                    f"1 ms, rank {victim} killed and started again",
                    lost[0] + done,
                    lost[1] + hangs,
                    lost[2] + sent,
                )
            )
            print(rows[-1], flush=True)
    finally:
        ended = ranks.close()
        forwarder.close()
        print(f"exit status by rank: {ended}", flush=True)
    rows.append({"models": chain, "ended": ended})
    return rows


def table(results: Sequence[dict[str, Any]]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            f"{row['models']} models, {row['link']}",
            f"{row['equal']} of {row['calls']}",
            str(row["hangs"]),
            number(row["tokens_per_s"], ".0f"),
            number(row["plain_tokens_per_s"], ".0f"),
            number(row["acceptance_rate"], ".2f"),
            number(row["accepted_per_token"], ".2f"),
            number(row["bytes_per_token"], ".0f"),
            f"{row['warnings']} / {row['taken_back']}",
        ]
        for row in results
        if "link" in row
    ]
    header = ["link, one-way delay", "equal texts", "hangs", "tokens/s", "plain", "acceptance rate", "accepted per token", "bytes per token", "lost / back"]  # fmt: skip
    return markdown_table(header, rows)


def _kill_rank(ranks: Ranks, rank: int) -> None:
    """``ip netns exec`` replaces itself by the program, so the process is the rank."""
    ranks.processes[rank].send_signal(signal.SIGKILL)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, help="write the figures here, after each chain")
    options.add_argument("--docs", type=Path, help="write the table into this page, between its marks")
    options.add_argument("--quick", action="store_true", help="few calls; the figures mean little")
    options.add_argument("--calls", type=int, help="per chain and link")
    options.add_argument("--partitions", type=int, help="per chain")
    options.add_argument("--kills", type=int, help="per chain")
    options.add_argument("--runs", type=int, help="texts in all, in place of --calls, --partitions and --kills")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    given = options.parse_args()
    each = (given.calls, given.partitions, given.kills)
    if given.runs is not None and (given.runs < 1 or given.quick or any(n is not None for n in each)):
        options.error("--runs takes a number above 0, and no --quick, --calls, --partitions or --kills beside it")
    if given.rank:
        rank_process(given.rank)
        return 0
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    from pipespec.bench.machine import provenance

    usual = (2, 1, 1) if given.quick else (20, 2, 2)
    amount = Amount(*(n if n is not None else m for n, m in zip(each, usual, strict=True)))
    if given.runs is not None:
        amount = Amount.of_runs(given.runs)
    began = time.monotonic()
    record: dict[str, Any] = {"machine": provenance(threads=1), "new_tokens": NEW_TOKENS, "results": []}
    for chain in CHAINS:
        record["results"] += measure(chain, amount, given.seed)
        record["seconds"] = time.monotonic() - began
        save(given.json, record)
    if given.docs:
        replace_table(given.docs, table(record["results"]), "ranks")
    links = [row for row in record["results"] if "link" in row]
    equal, hangs, texts = (sum(row[name] for row in links) for name in ("equal", "hangs", "calls"))
    print(f"{equal} of {texts} texts equal, {hangs} hangs, in {record['seconds']:.0f} s")
    bad = [row for row in record["results"] if row.get("hangs") or row.get("equal") != row.get("calls")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
