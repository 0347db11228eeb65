"""Print the demo: progress while it runs, then texts and tables."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mrv2_spec.counters import Totals
from mrv2_spec.demo import compare as runs
from mrv2_spec.demo import smollm2
from mrv2_spec.demo.job import Job, Result
from mrv2_spec.demo.prompts import Prompt

Run = Callable[[Job, runs.OnTokens], Result]


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Show bars with the time left; on a dumb terminal only their last state."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def demo(
    console: Console,
    prompts: tuple[Prompt, ...],
    model: Path | None,
    max_tokens: int,
    num_speculative_tokens: int,
) -> bool:
    """Run and print the whole demo.

    Args:
        console: where to print.
        prompts: what to ask.
        model: a checkpoint folder; None for the packaged SmolLM2.
        max_tokens: longest reply.
        num_speculative_tokens: most drafts a request and step.

    Returns:
        Whether all token ids were identical without and with speculation.

    Raises:
        UserError: something the user can put right.
    """
    with progress_bars(console) as progress:
        if model is None:
            model = _ensure_model(progress)
        tokenizer = runs.load_tokenizer(model)
        job = runs.make_job(
            model, tokenizer, prompts, max_tokens, num_speculative_tokens
        )
        plain = _run(progress, "without speculation", runs.run_plain, job)
        drafted = _run(progress, "with speculation", runs.run_drafted, job)
    comparison = runs.Comparison(plain, drafted)
    _print_texts(console, prompts, tokenizer, comparison)
    console.print(prompt_table(prompts, comparison))
    console.print(total_table(comparison))
    same = all(comparison.identical())
    console.print(
        "All token ids are identical without and with speculation."
        if same
        else "[bold red]The token ids differ: please report this.[/]"
    )
    return same


def _ensure_model(progress: Progress) -> Path:
    task = progress.add_task("preparing the model (once)", total=None, visible=False)

    def advance(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total, visible=True)

    return smollm2.ensure_model(advance)


def _run(progress: Progress, name: str, run: Run, job: Job) -> Result:
    most = job.max_tokens * len(job.prompt_token_ids)
    task = progress.add_task(f"{name}: loading", total=None)

    def on_tokens(tokens: int) -> None:
        if tokens == 0:  # loaded: time what comes now
            progress.reset(task, total=most, description=name)
        progress.update(task, completed=tokens)

    result = run(job, on_tokens)
    # Replies may end early.
    tokens = sum(map(len, result.output_token_ids))
    progress.update(task, completed=tokens, total=tokens)
    return result


def _print_texts(
    console: Console,
    prompts: tuple[Prompt, ...],
    tokenizer: Any,
    comparison: runs.Comparison,
) -> None:
    outputs = zip(
        prompts,
        comparison.plain.output_token_ids,
        comparison.drafted.output_token_ids,
        strict=True,
    )
    for prompt, plain, drafted in outputs:
        console.print(_panel(prompt.name, prompt.text, "cyan"))
        text = tokenizer.decode(plain, skip_special_tokens=True)
        if plain == drafted:
            console.print(_panel("reply, identical in both runs", text, "green"))
        else:
            console.print(_panel("reply without speculation", text, "red"))
            text = tokenizer.decode(drafted, skip_special_tokens=True)
            console.print(_panel("reply with speculation", text, "red"))


def _panel(title: str, text: str, colour: str) -> Panel:
    return Panel(escape(text), title=title, title_align="left", border_style=colour)


def prompt_table(prompts: tuple[Prompt, ...], comparison: runs.Comparison) -> Table:
    """Return a row for each prompt: tokens, steps and whether both runs agree.

    A step is one pass of the model over a request; its prefill is the first.
    """
    table = Table(title="Prompts", title_justify="left")
    table.add_column("prompt")
    for name in ("tokens", "steps without", "steps with", "tokens a step"):
        table.add_column(name, justify="right")
    table.add_column("identical")
    plain, drafted = comparison.plain, comparison.drafted
    for row, (prompt, same) in enumerate(
        zip(prompts, comparison.identical(), strict=True)
    ):
        tokens = len(drafted.output_token_ids[row])
        table.add_row(
            escape(prompt.name),
            str(tokens),
            str(plain.steps[row]),
            str(drafted.steps[row]),
            f"{tokens / drafted.steps[row]:.2f}",
            "yes" if same else "NO",
        )
    return table


def total_table(comparison: runs.Comparison) -> Table:
    """Return what became of the drafts, and the wall time of both runs."""
    assert comparison.drafted.counters is not None
    totals = Totals(**comparison.drafted.counters)
    # All requests have ended, so what is still in flight will not be verified either.
    trimmed = totals.proposed - totals.verified - totals.invalid
    rows = (
        ("rounds", totals.rounds, "decode steps of a request"),
        ("real drafts", totals.proposed, "tokens proposed"),
        ("verified", totals.verified, "of these, checked by the model"),
        ("accepted", totals.accepted, "of these, kept"),
        ("trimmed", trimmed, "real drafts not checked"),
        ("fillers", totals.fillers, "places checked without a real draft"),
        ("coverage", f"{totals.coverage:.3f}", "rounds with a real draft"),
        (
            "mean acceptance length",
            f"{totals.mean_acceptance_length:.3f}",
            "tokens a round",
        ),
        ("seconds without", f"{comparison.plain.seconds:.1f}", "speculation off"),
        ("seconds with", f"{comparison.drafted.seconds:.1f}", "speculation on"),
    )
    table = Table(title="All prompts together", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("meaning")
    for name, value, meaning in rows:
        table.add_row(name, str(value), meaning)
    return table
