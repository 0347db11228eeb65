"""Draft records, step costs and budget policies of the simulator."""
