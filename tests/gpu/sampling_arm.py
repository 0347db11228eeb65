"""One arm of the sampling test, run as a child process: requests in, counts out."""

import argparse
import json
from collections import Counter
from pathlib import Path


def main() -> None:
    """Sample the same prompts over and over and count what each position said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    job = json.loads(args.job.read_text())

    from vllm import LLM, SamplingParams

    from mrv2_spec.integration import is_installed, read_counters

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=job["batch"],
        block_size=32,
        enforce_eager=True,
        disable_log_stats=True,
        **job["engine"],
    )
    params = [
        SamplingParams(
            temperature=job["temperature"],
            max_tokens=job["num_tokens"],
            ignore_eos=True,
            detokenize=False,
            seed=seed if job["seeded"] else None,
            **{
                name: {int(token): bias for token, bias in value.items()}
                if name == "logit_bias"
                else value
                for name, value in job["sampling"].items()
            },
        )
        for seed in range(job["number"])
    ]
    prompt = {"prompt_token_ids": job["prompt"]}
    outputs = llm.generate([prompt] * job["number"], params, use_tqdm=False)
    counts = Counter(tuple(one.outputs[0].token_ids) for one in outputs)
    totals = read_counters(llm) if is_installed() else None
    result = {
        "texts": [[list(text), number] for text, number in counts.items()],
        "verified": totals.verified if totals else 0,
        "accepted": totals.accepted if totals else 0,
        "rounds": totals.rounds if totals else 0,
    }
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
