"""Parameters of vLLM's methods that more than one hook goes around."""

EXECUTE_MODEL = (
    (
        "self",
        "scheduler_output",
        "intermediate_tensors",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "is_profile",
        "context_len",
        "valid_dummy_state_slots",
        "randomize_inputs",
    ),
)
UPDATE_FROM_OUTPUT = (("self", "scheduler_output", "model_runner_output"),)
