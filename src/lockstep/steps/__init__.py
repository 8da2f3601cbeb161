"""The training loop: what is prepared, how a step goes, evaluation, saving."""
