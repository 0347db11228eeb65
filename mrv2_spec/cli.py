"""The command ``mrv2-spec``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mrv2_spec import corpus_cli
from mrv2_spec.errors import UserError

app = typer.Typer(
    help="N-gram and suffix speculative decoding for vLLM's V2 model runner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(corpus_cli.app, name="corpus")


@app.command()
def demo(
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Your own prompts: text separated by blank lines, or a .jsonl file of "
            '{"prompt": "..."} lines.'
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 96,
    k: Annotated[int, typer.Option(min=1, help="Most drafts a step.")] = 5,
    model_dir: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint folder instead of SmolLM2-135M."),
    ] = None,
) -> None:
    """Run prompts on the CPU without and with n-gram speculation, and compare."""
    from mrv2_spec.demo.prompts import DEMO_PROMPTS, load_prompts
    from mrv2_spec.doctor import require_plugin

    try:
        prompts = DEMO_PROMPTS if prompt_file is None else load_prompts(prompt_file)
        require_plugin()
        from mrv2_spec.demo.show import demo as run_demo

        same = run_demo(Console(), prompts, model_dir, max_tokens, k)
    except UserError as error:
        raise _fail(str(error)) from error
    except ModuleNotFoundError as error:
        raise _fail(
            f"the demo needs {error.name}, which is not installed: run make setup in a "
            f"clone, or install mrv2-spec[cpu]"
        ) from error
    if not same:
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a vLLM started from this shell would use mrv2-spec, and if not, why.

    The exit code is 0 only if it would.
    """
    from mrv2_spec.doctor import diagnose, report_line, report_table

    findings = diagnose()
    off = [finding for finding in findings if not finding.ok]
    if as_json:
        report = {"active": not off, "findings": [f.as_dict() for f in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console(soft_wrap=True)
        Console().print(report_table(findings))
        for finding in off:
            console.print(f"[bold red]off:[/] {escape(report_line(finding))}")
        verdict = "would not" if off else "would"
        console.print(f"A run started from this shell {verdict} use mrv2-spec.")
    if off:
        raise typer.Exit(1)


@app.command()
def scorecard(
    source: Annotated[
        str,
        typer.Argument(
            help="A server, such as http://localhost:8000, or a saved scrape."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Only this served model.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only this engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell from a server's metrics how well speculation does."""
    from mrv2_spec.scorecard.score import score
    from mrv2_spec.scorecard.scrape import fetch, parse
    from mrv2_spec.scorecard.show import count_table, position_table, ratio_table

    try:
        card = score(parse(fetch(source)), model, engine)
    except UserError as error:
        raise _fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(card.as_dict(), indent=2, allow_nan=False))
        return
    console = Console()
    for table in (ratio_table(card), count_table(card), position_table(card)):
        console.print(table)
    Console(soft_wrap=True).print(card.verdict, highlight=False)


def _fail(message: str) -> typer.Exit:
    # One line whatever the width, so that it can be searched and piped.
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]error:[/] {escape(message)}", highlight=False
    )
    return typer.Exit(1)


if __name__ == "__main__":
    app()
