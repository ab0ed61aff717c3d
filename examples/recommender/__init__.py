"""What the training examples share: models, losses, evaluation, baselines and checkpoints."""
