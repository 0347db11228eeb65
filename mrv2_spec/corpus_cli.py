"""The commands ``mrv2-spec corpus``: make memory files and look into them."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mrv2_spec.config import Settings
from mrv2_spec.corpus.build import Advance, build_memory
from mrv2_spec.corpus.documents import Documents
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.corpus.jsonl import describe_broken
from mrv2_spec.corpus.memory_file import (
    VERSION,
    check_writable,
    read_memory,
    write_memory,
)

app = typer.Typer(
    help="Make and inspect memory files for suffix decoding.", no_args_is_help=True
)


@app.command()
def build(
    texts: Annotated[
        Path,
        typer.Argument(
            help='JSON lines, oldest response first: {"text": "..."} or '
            '{"token_ids": [1, 2]}.'
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="Folder of the model that will load the memory.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The memory file.")],
    namespace: Annotated[
        str | None,
        typer.Option(help="Only requests that give this mrv2_spec_namespace read it."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Only requests of this LoRA adapter read it.")
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option(help="Keep the other lines where some are broken.")
    ] = False,
) -> None:
    """Turn texts or token ids into a memory file, which memory_file loads."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        check_writable(output)
        with _progress(texts, console) as advance:
            built = build_memory(
                texts,
                tokenizer,
                namespace=namespace,
                adapter=adapter,
                skip_broken=skip_broken,
                advance=advance,
            )
        nbytes = write_memory(output, built.memory)
    except CorpusError as error:
        raise _fail(console, error) from error
    if built.broken:
        console.print(
            f"[bold yellow]skipped:[/] {escape(describe_broken(built.broken))}",
            highlight=False,
        )
    documents = built.memory.documents
    typer.echo(
        f"{output}: {documents.num_documents} responses, {documents.num_tokens} "
        f"tokens, {nbytes} bytes"
    )
    needed = documents.page_tokens()
    if needed > Settings().corpus_tokens:
        typer.echo(
            f"To load all of it, set mrv2_spec.corpus_tokens to at least {needed}; the "
            f"default of {Settings().corpus_tokens} keeps the newest that fit."
        )


@app.command()
def info(
    file: Annotated[Path, typer.Argument(help="A memory file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a memory file and tell what it holds."""
    try:
        memory = read_memory(file)
    except CorpusError as error:
        raise _fail(Console(stderr=True, soft_wrap=True), error) from error
    documents = memory.documents
    report: dict[str, Any] = {
        "file": str(file),
        "version": VERSION,
        "bytes": file.stat().st_size,
        "tokenizer": memory.tokenizer,
        "responses": documents.num_documents,
        "tokens": documents.num_tokens,
        "shortest": int(documents.lengths.min()),
        "longest": int(documents.lengths.max()),
        "corpus_tokens_needed": documents.page_tokens(),
    }
    spaces = _namespaces(documents)
    if as_json:
        typer.echo(json.dumps({**report, "namespaces": spaces}, indent=2))
        return
    for name, value in report.items():
        typer.echo(f"{name.replace('_', ' '):<22}{value}")
    table = Table("adapter", "cache salt", "name", "responses", "tokens")
    for space in spaces:
        table.add_row(
            escape(space["adapter"] or "-"),
            "secret" if space["salted"] else "-",
            escape(space["name"] or "-"),
            str(space["responses"]),
            str(space["tokens"]),
        )
    Console().print(table)


def _namespaces(documents: Documents) -> list[dict[str, Any]]:
    responses: Counter[int] = Counter(documents.namespaces.tolist())
    tokens: Counter[int] = Counter()
    for number, length in zip(
        documents.namespaces.tolist(), documents.lengths.tolist(), strict=True
    ):
        tokens[number] += length
    return [
        {
            "adapter": name.adapter,
            "salted": name.salt_digest is not None,
            "name": name.name,
            "responses": responses[number],
            "tokens": tokens[number],
        }
        for number, name in enumerate(documents.names)
    ]


@contextmanager
def _progress(source: Path, console: Console) -> Iterator[Advance]:
    try:
        size = source.stat().st_size
    except OSError:
        size = 0  # said when it is read
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # Gone when done, and never in a log: an error is then the only line.
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("reading", total=size or None)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, completed=size)


def _fail(console: Console, error: CorpusError) -> typer.Exit:
    console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
    return typer.Exit(1)
