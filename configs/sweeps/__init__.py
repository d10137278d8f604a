"""One file per sweep: CONFIG, METRIC and GOAL, and `sweep(arg)` yielding the fields that each run overrides."""
