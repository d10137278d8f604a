"""Training: phases, losses, step, loop, checkpoints and handover."""
