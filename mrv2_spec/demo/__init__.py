"""The CPU demo: a small real model, four real prompts, without and with drafts."""
