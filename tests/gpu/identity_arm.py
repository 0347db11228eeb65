"""One arm of the identity test, run as a child process: prompts in, tokens out."""

import argparse
import json
import time
from pathlib import Path

# What tests on the CPU and two ranks are made restless by, too.
RESTLESS = Path(__file__).resolve().parents[1] / "data" / "restless.json"


def _speculation(method: str, k: int) -> dict[str, object] | None:
    if method == "none":
        return None
    lengths = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {
        "method": method,
        "num_speculative_tokens": k,
        **(lengths if method == "ngram" else {}),
    }


def _make_restless() -> None:
    """Let drafting fall asleep at once, and wake at once, all the time."""
    from mrv2_spec import policy, step_costs

    restless = json.loads(RESTLESS.read_text())
    for name, value in restless["policy"].items():
        setattr(policy, name, value)
    dear = step_costs.CostCurve.of(restless["ms_by_rows"], 0)
    step_costs.CostCurve.of = lambda *_: dear  # type: ignore[method-assign]
    step_costs.CostCurve.guess = lambda *_: dear  # type: ignore[method-assign]


def main() -> None:
    """Generate greedily and write tokens, wall time and counters as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", choices=["none", "ngram", "suffix"], required=True)
    parser.add_argument("--k", type=int, default=0)
    parser.add_argument("--trim", choices=["on", "off", "restless"], default="on")
    parser.add_argument("--mode", choices=["graphs", "eager", "piecewise"])
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    if args.trim == "restless":
        _make_restless()
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    llm = LLM(
        model=args.model,
        max_model_len=2048,
        max_num_seqs=16,
        # Fixed: what is free changes while other arms start beside this one.
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.03,
        enforce_eager=args.mode == "eager",
        compilation_config=(
            {"cudagraph_mode": "PIECEWISE"} if args.mode == "piecewise" else {}
        ),
        enable_prefix_caching=False,
        speculative_config=_speculation(args.method, args.k),
        additional_config={
            "mrv2_spec": {
                "trim": args.trim != "off",
                "trim_explain": args.trim == "restless",
            }
        },
    )
    started = time.perf_counter()
    # Twice: the second time suffix decoding remembers every reply of the first.
    rounds = [
        llm.generate(
            [{"prompt_token_ids": prompt["prompt_token_ids"]} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        for _ in range(2)
    ]
    seconds = time.perf_counter() - started
    from dataclasses import asdict

    from mrv2_spec.integration import is_installed, read_counters

    totals = read_counters(llm) if is_installed() else None
    args.out.write_text(
        json.dumps(
            {
                "tokens": [
                    list(output.outputs[0].token_ids)
                    for outputs in rounds
                    for output in outputs
                ],
                "seconds": seconds,
                "counters": None if totals is None else asdict(totals),
            }
        )
    )


if __name__ == "__main__":
    main()
