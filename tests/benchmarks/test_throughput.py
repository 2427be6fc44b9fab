"""How many jobs that do nothing a worker gets through, leased and otherwise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from harness.length import by_length

from benchmarks.findings import Figure, Findings
from benchmarks.processor_time import Calm
from benchmarks.settings import BenchmarkSettings
from benchmarks.throughput import KINDS, Bench, Round, disturbance, measure, ratios

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3000)]

_OF_PLAIN = 0.65
_OF_HANDWRITTEN = 0.95


def test_a_leased_task_costs_little_more_than_its_two_statements(
    bench_settings: BenchmarkSettings, findings: Findings, tmp_path: Path
) -> None:
    """Leased no-op tasks reach 0.65 of plain Celery's rate and 0.95 of a hand-written lease's."""
    bench = Bench(bench_settings, tmp_path, jobs=by_length(1500, 5000))
    print()
    try:
        rounds = measure(
            bench.run,
            least=by_length(3, 5),
            most=by_length(8, 15),
            calm=Calm(by_length(60, 900)),
            tell=_print_round,
        )
    finally:
        bench.close()
    findings.raw["throughput"] = [
        {kind: asdict(run) for kind, run in measured.items()} for measured in rounds
    ]
    findings.tables["Throughput"] = [_HEAD, *(_row(rounds, kind) for kind in KINDS)]
    disturbed = max(disturbance(each) for each in rounds)
    findings.add(Figure("processors that others used", disturbed, wanted="near 0"))
    of_plain = _compared(findings, rounds, "plain", _OF_PLAIN)
    of_handwritten = _compared(findings, rounds, "handwritten", _OF_HANDWRITTEN)
    told = f"others used up to {disturbed:.2f} processors meanwhile"
    assert of_plain >= _OF_PLAIN, told
    assert of_handwritten >= _OF_HANDWRITTEN, told


_HEAD = ["", "rounds × jobs", "jobs/s", "lowest – highest", "CPU ms/job: worker"]
_HEAD += ["PostgreSQL", "broker", "total"]


def _compared(findings: Findings, rounds: Sequence[Round], to: str, bound: float) -> float:
    found = ratios(rounds, "leased", to)
    median = statistics.median(found)
    name = f"rate of leased ÷ {to}"
    findings.add(Figure(name, median, "", min(found), max(found), f"≥ {bound}"))
    return median


def _row(rounds: Sequence[Round], kind: str) -> list[str]:
    runs = [each[kind] for each in rounds]
    rates = [run.rate for run in runs]
    costs = [
        statistics.median(run.milliseconds(of) or 0.0 for run in runs)
        for of in ("worker", "postgresql", "redis")
    ]
    return [
        kind,
        f"{len(runs)} × {runs[0].jobs:,}",
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f} – {max(rates):,.0f}",
        *(f"{cost:.2f}" for cost in costs),
        f"{sum(costs):.2f}",
    ]


def _print_round(number: int, measured: Round) -> None:
    rates = "  ".join(
        f"{kind} {run.rate:.0f}/s ({run.milliseconds('worker'):.2f}"
        f" + {run.milliseconds('postgresql') or 0:.2f} ms)"
        for kind, run in sorted(measured.items())
    )
    compared = [f"{ratios([measured], 'leased', to)[0]:.2f}" for to in ("plain", "handwritten")]
    others = f"others {disturbance(measured):.2f}"
    print(f"round {number}: {rates}  leased ÷ {' ÷ '.join(compared)}  {others}", flush=True)
