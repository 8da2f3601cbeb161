"""Jobs of `lockstep train`: a config made into model, data, optimizers, loss and scores."""
