"""Jobs of `lockstep train`: model, data, optimizers, loss and scores of a config."""
