"""Parts of a training step: precision, optimizers, schedules, losses, gradients."""
