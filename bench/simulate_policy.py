"""Compare budget policies on recorded trajectories, under a step-time model.

    python bench/simulate_policy.py [--paper] [--rounds] [--linear] [--drafter D ...]
        [--policy P ...] [--workload W ...] [--requests N ...] [--k K ...] [--out DIR]

A number of requests run at a time, each finished one replaced by the next; with
`--rounds` they are those of the engine grid, which start together and are not replaced.
A step costs what `fit_step_cost.py` fitted to the engine grid, rows padded to captured
sizes; with `--linear` 4.6 ms + 0.0228 ms a row, an older fit to steps without graphs.
The policy `engine` is the plugin's own and believes what an engine measured at start.
Printed is the time per output token without speculation over that with it. `--paper`
sets the four simple policies beside figures that another simulation gave earlier.
A workload whose texts are missing or damaged is left out and named.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grid.record import COSTS
from harness import RESULTS, machine, save
from policies.base import Outcome, Policy, Step
from policies.confidence import Counted, match_key
from policies.cost import StepCost
from policies.curve import (
    Curve,
    Hazards,
    confidence_classes,
    run_classes,
)
from policies.drafts import DRAFTERS, MAX_N, Drafts, find, find_rounds
from policies.fitted import Fitted
from policies.paper import Fixed, Lag, Learned, Valid
from policies.workloads import FILES, WORKLOADS, engine_rounds, load

# Of the order in which texts arrive.
SEED = 1
LINEAR = StepCost()
FITTED = RESULTS / "step_cost.json"
MEASURED = RESULTS / COSTS
# Earlier figures: workload, requests, fixed 5, fixed 16, valid, learned, lag.
PAPER = (
    ("low", 1, 1.35, 1.30, 1.37, 1.38, 1.20),
    ("low", 16, 0.97, 0.61, 0.99, 1.19, 1.18),
    ("low", 64, 0.59, 0.27, 0.64, 1.09, 1.09),
    ("low", 256, 0.35, 0.13, 0.39, 1.01, 1.00),
    ("low-smollm2", 1, 1.90, 1.96, 2.07, 2.06, 1.90),
    ("low-smollm2", 64, 0.81, 0.41, 0.89, 1.29, 1.29),
    ("low-smollm2", 256, 0.50, 0.21, 0.54, 1.09, 1.09),
    ("high", 1, 4.45, 8.05, 8.19, 8.14, 6.94),
    ("high", 16, 3.37, 4.19, 4.81, 4.89, 4.80),
    ("high", 64, 2.11, 1.89, 2.36, 2.57, 2.55),
    ("high", 256, 1.24, 0.94, 1.18, 1.42, 1.42),
    ("agentic", 1, 1.45, 1.46, 1.55, 1.54, 1.34),
    ("agentic", 64, 0.65, 0.31, 0.82, 1.15, 1.14),
    ("agentic", 256, 0.40, 0.16, 0.52, 1.04, 1.04),
)


def _counted(k: int) -> Counted:
    return Counted(match_key, MAX_N + 1, k)


def _hazards(drafter: str, **settings: float) -> Hazards:
    ngram = drafter.startswith("ngram")
    return Hazards(run_classes if ngram else confidence_classes, **settings)


def _engine(drafter: str, k: int) -> Policy:
    # Here alone: it takes the plugin's drafting in, and with it vLLM.
    from policies.engine import COUNT_LIMIT, Engine, measured_costs

    try:
        costs, sizes = measured_costs(MEASURED, k)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"no costs of an engine: {error!r}") from None
    return Engine(_hazards(drafter, limit=COUNT_LIMIT), k, costs, sizes)


# By name: a policy for a drafter and k. The first four are those of the paper table.
POLICIES: dict[str, Callable[[str, int], Policy]] = {
    "fixed": lambda drafter, k: Fixed(),
    "valid": lambda drafter, k: Valid(),
    "learned": lambda drafter, k: Learned(_counted(k)),
    "lag": lambda drafter, k: Lag(_counted(k)),
    "exact": lambda drafter, k: Learned(_hazards(drafter)),
    "curve": lambda drafter, k: Curve(_hazards(drafter)),
    "engine": _engine,
}


@dataclass
class Point:
    """Totals of one simulated run.

    Attributes:
        requests: at a time.
        plain_ms: a token of each takes so long without speculation.
        turns: requests that a step brought tokens to, summed over the steps.
        waited_ms: what the steps took, each as often as requests waited for it.
    """

    requests: int
    plain_ms: float
    steps: int = 0
    turns: int = 0
    tokens: int = 0
    rows: int = 0
    verified: int = 0
    accepted: int = 0
    time_ms: float = 0.0
    waited_ms: float = 0.0

    @property
    def ratio(self) -> float:
        """Time per output token without speculation over that with it."""
        return self.plain_ms / (self.waited_ms / self.tokens)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a request a step."""
        return self.tokens / self.turns

    @property
    def rows_per_step(self) -> float:
        """Draft places of a request a step, fillers included."""
        return self.rows / self.turns


class Simulation:
    """Runs steps of the requests that it is given, and sums them up.

    Args:
        drafts: records of one drafter.
        policy: chooses what is verified; fresh, or with what it has learned.
        requests: how many at a time.
        k: drafts a request at most.
        cost: time of a step.
    """

    def __init__(
        self, drafts: Drafts, policy: Policy, requests: int, k: int, cost: StepCost
    ) -> None:
        self.drafts, self.policy, self.k, self.cost = drafts.limited(k), policy, k, cost
        self.point = Point(requests, cost(requests, 0))

    def step(self, now: np.ndarray, position: np.ndarray, fresh: np.ndarray) -> None:
        """Run a step of some requests, and move their positions on.

        Args:
            now: [requests] trajectories.
            position: [requests] output tokens that each has; changed.
            fresh: [requests] bool, a new request has this slot.
        """
        drafts, point = self.drafts, self.point
        at = drafts.first[now] + position
        step = Step(drafts, at, drafts.num[at], fresh, self.k, self.cost)
        widths, fillers = self.policy.choose(step)
        right = drafts.right[at]
        accepted = np.minimum(right, widths)
        emitted = np.minimum(accepted + 1, drafts.length[now] - position)
        self.policy.learn(step, Outcome(widths, right, emitted))
        places = int(widths.sum()) + fillers
        time_ms = self.cost(len(now), places)
        point.steps += 1
        point.turns += len(now)
        point.tokens += int(emitted.sum())
        point.rows += places
        point.verified += int(widths.sum())
        point.accepted += int(accepted.sum())
        point.time_ms += time_ms
        point.waited_ms += time_ms * len(now)
        position += emitted


def simulate(
    drafts: Drafts,
    policy: Policy,
    requests: int,
    k: int,
    cost: StepCost,
    min_steps: int = 300,
    min_tokens: int = 20000,
    order: np.ndarray | None = None,
) -> Point:
    """Run `requests` at a time, each finished one replaced by the next trajectory.

    The first five arguments are those of `Simulation`.

    Args:
        min_steps: steps at least.
        min_tokens: output tokens at least.
        order: trajectories in the order they arrive, cycled; shuffled by default.
    """
    if order is None:
        order = np.random.default_rng(SEED).permutation(len(drafts.first))
    order = order[drafts.length[order] > 1]
    following = requests
    now = order[np.arange(requests) % len(order)]
    position = np.ones(requests, np.int64)
    fresh = np.ones(requests, bool)
    run = Simulation(drafts, policy, requests, k, cost)
    while run.point.steps < min_steps or run.point.tokens < min_tokens:
        run.step(now, position, fresh)
        fresh = position >= drafts.length[now]
        for slot in np.flatnonzero(fresh):
            now[slot] = order[following % len(order)]
            following += 1
            position[slot] = 1
    return run.point


def simulate_rounds(
    drafts: Drafts,
    policy: Policy,
    rounds: Sequence[np.ndarray],
    k: int,
    cost: StepCost,
) -> Point:
    """Run rounds of trajectories that start together; none is replaced.

    Where all have the same length, the ratio is that of the mean time per token over
    the requests, as the engine grid's is.
    """
    run = Simulation(drafts, policy, max(map(len, rounds)), k, cost)
    for one in rounds:
        now, position = one, np.ones(len(one), np.int64)
        while len(now):
            run.step(now, position, position == 1)
            left = position < drafts.length[now]
            now, position = now[left], position[left]
    return run.point


# Suffix memory counts as warm once it holds this many replies.
WARM = 30


def run(
    workload: str, drafter: str, policy: str, requests: int, k: int, cost: StepCost
) -> Point:
    """Simulate one point from its names."""
    drafts = find(workload, drafter)
    order = np.random.default_rng(SEED).permutation(len(drafts.first))
    if "memory" in drafter and len(order) > 2 * WARM:
        order = order[order >= WARM]
    tokens = max(20000, 40 * requests)
    made = POLICIES[policy](drafter, k)
    return simulate(drafts, made, requests, k, cost, 300, tokens, order)


def run_rounds(
    workload: str, drafter: str, policy: str, requests: int, k: int, cost: StepCost
) -> Point:
    """Simulate one point of the engine grid from its names.

    The grid runs the same rounds several times in an engine that learns on: the policy
    sees them once before what is counted.
    """
    rounds, num_warm = engine_rounds(workload, requests)
    drafts = find_rounds(rounds, f"{workload}-c{requests}", drafter)
    ends = np.cumsum([len(one) for one in rounds])
    counted = np.split(np.arange(ends[-1]), ends[:-1])[num_warm:]
    made = POLICIES[policy](drafter, k)
    simulate_rounds(drafts, made, counted, k, cost)
    return simulate_rounds(drafts, made, counted, k, cost)


def left_out(workloads: Iterable[str], rounds: bool) -> dict[str, str]:
    """Return why workloads are left out, and name them.

    Raises:
        SystemExit: there is no other workload.
    """
    names = list(dict.fromkeys(workloads))
    found = {}
    for name in names:
        try:
            engine_rounds(name, 1) if rounds else load(name)
        except SystemExit as error:
            found[name] = str(error)
        except (EOFError, OSError, ValueError, zlib.error) as error:
            file = FILES.get(name, "its file")
            found[name] = f"{file} is cut short or damaged: {error}"
        if name in found:
            print(f"left out {name}: {found[name]}", flush=True)
    if len(found) == len(names):
        raise SystemExit("no workload to simulate")
    return found


def fitted_costs() -> Fitted:
    """Return the fitted step times.

    Raises:
        SystemExit: they are not there, or not whole.
    """
    try:
        return Fitted.of_json(json.loads(FITTED.read_text()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{FITTED.name} cannot be read: {error!r}") from None


def paper(absent: Iterable[str]) -> list[dict[str, object]]:
    """Print the simple policies beside the earlier figures; return both.

    Args:
        absent: workloads that are left out.
    """
    arms = (("fixed", 5), ("fixed", 16), ("valid", 16), ("learned", 16), ("lag", 16))
    print(f"{'workload':16}{'c':>4}" + "".join(f"{p} {k}".rjust(14) for p, k in arms))
    rows = []
    for workload, requests, *earlier in PAPER:
        if workload in absent:
            continue
        found = [
            run(workload, "ngram-earliest", policy, requests, k, LINEAR).ratio
            for policy, k in arms
        ]
        cells = [f"{a:8.2f} ({b:.2f})" for a, b in zip(found, earlier, strict=True)]
        print(f"{workload:16}{requests:4}" + "".join(c.rjust(14) for c in cells))
        rows.append(
            {
                "workload": workload,
                "requests": requests,
                "ratios": found,
                "earlier": earlier,
            }
        )
    return rows


def main() -> None:
    """Simulate and write ``simulate_policy.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--drafter", nargs="*", choices=DRAFTERS, default=DRAFTERS[1:4])
    parser.add_argument(
        "--policy", nargs="*", choices=POLICIES, default=["fixed", "exact", "curve"]
    )
    parser.add_argument(
        "--workload",
        nargs="*",
        choices=WORKLOADS,
        default=["low", "low-smollm2", "mid", "high", "agentic"],
    )
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--k", nargs="*", type=int, default=[5, 16])
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.paper:
        absent = left_out((row[0] for row in PAPER), rounds=False)
        rows = paper(absent)
        record = {**machine(args.commit), "left_out": absent, "rows": rows}
        print("saved", save("simulate_paper", record, args.out))
        return
    fitted = None if args.linear else fitted_costs()
    absent = left_out(args.workload, args.rounds)
    take = run_rounds if args.rounds else run
    points = []
    print(f"{'drafter, policy, k':34}workload      c={args.requests}")
    for drafter in args.drafter:
        for policy in args.policy:
            for k in args.k:
                for workload in args.workload:
                    if workload in absent:
                        continue
                    cost = fitted.cost(workload) if fitted else LINEAR
                    cells = []
                    for requests in args.requests:
                        point = take(workload, drafter, policy, requests, k, cost)
                        cells.append(f"{point.ratio:7.2f}")
                        points.append(
                            {
                                "drafter": drafter,
                                "policy": policy,
                                "k": k,
                                "workload": workload,
                                "ratio": point.ratio,
                                **asdict(point),
                            }
                        )
                    name = f"{drafter} {policy} {k}"
                    print(f"{name:34}{workload:14}" + "".join(cells), flush=True)
    record = {
        **machine(args.commit),
        "seed": SEED,
        "cost": "fitted" if fitted else "linear",
        "rounds": args.rounds,
        "left_out": absent,
        "points": points,
    }
    print("saved", save("simulate_policy", record, args.out))


if __name__ == "__main__":
    main()
