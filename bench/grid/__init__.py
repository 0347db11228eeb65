"""The parts of the engine grid: arms, workloads, forcing, engines, and the record.

``engine_grid.py`` (the command) uses ``plan`` and ``orchestrate``; those start one
``serve`` process an arm, which uses ``engine`` and ``measure``. ``force``,
``force_v1``, ``oracle`` and ``worker`` run inside vLLM's engine process.
"""
