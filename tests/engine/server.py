"""vLLM's server, in which some grammars cannot be compiled: ``python server.py ...``.

Takes the server's own arguments.
"""

import runpy

# Beside this file: it runs as a script.
from faults import compile_no_poison
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

# Not only in the first process: a spawned one runs this file up to here as well.
XgrammarBackend.compile_grammar = compile_no_poison(  # type: ignore[method-assign]
    XgrammarBackend.compile_grammar
)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
