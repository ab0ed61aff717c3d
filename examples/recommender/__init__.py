"""Parts of the training examples: models, losses, evaluation, baselines and checkpoints."""
