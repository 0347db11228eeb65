"""A Triton backend entry named ``cpu`` that compiles nothing.

vLLM switches Triton off on a CPU host unless a backend of that name exists. This one
only says so: kernels run there through Triton's own interpreter
(``TRITON_INTERPRET=1``), and the driver is never active, so that a GPU host keeps
exactly one active driver.
"""
